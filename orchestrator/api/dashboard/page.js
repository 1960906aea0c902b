// The stream of events, the key, and when things are drawn. The other scripts come before this one.

let model = "", roundFields = [], sampleFields = [], buckets = 8, samples = [], status = null, clock = 0;
let minutes = 15;
const now = () => performance.now() / 1000;

// The key stays in this tab. Without one the server is asked all the same: it may need none.
let key = sessionStorage.getItem("specahead key") || "";
const headers = () => key ? {Authorization: "Bearer " + key} : {};

async function ask(path, options = {}) {
  const answer = await fetch(path, {...options, headers: {...headers(), ...options.headers}});
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    const error = new Error(body.error?.message || `${answer.status} ${answer.statusText}`);
    error.status = answer.status;
    throw error;
  }
  return answer;
}

async function* events(answer) {  // the data of server-sent events
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts)
      for (const line of part.split("\n"))
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

function take(event) {
  if (event.type === "hello") {
    if (!model) offerLengths(event.longest);
    model = event.model;
    roundFields = event.round_fields; sampleFields = event.sample_fields; buckets = event.buckets; samples = [];
    $("models").textContent = event.draft === "none" ? event.model : `${event.model}, drafted by ${event.draft.split("/").pop()}`;
  } else if (event.type === "status") {
    status = event; clock = event.time;
    for (const values of event.samples) {  // the first may be a newer version of the last one
      const sample = Object.fromEntries(sampleFields.map((name, i) => [name, values[i]]));
      if (samples.at(-1)?.time === sample.time) samples.pop();
      samples.push(sample);
    }
    while (samples[0]?.time < clock - 3600) samples.shift();
  } else if (event.type === "snapshot") {
    takeSnapshot(event.sessions);
  } else if (event.type === "rounds") {
    event.opened.forEach(openSession);
    event.rounds.forEach(addRound);
    event.ended.forEach(endSession);
  }
  draw();
}

// The stream: kept while someone looks.

let stream = null, hiddenSince = 0;

function say(state, text) {
  $("state").dataset.state = state;
  if ($("state").textContent !== text) $("state").textContent = text;
}

async function follow() {
  for (let pause = 500;; pause = Math.min(5000, 2 * pause)) {
    while (document.hidden && hiddenSince && Date.now() - hiddenSince > 30000) await new Promise(r => setTimeout(r, 500));
    stream = new AbortController();
    try {
      const answer = await ask("dashboard/events", {signal: stream.signal});
      $("door").hidden = true; $("main").hidden = false; $("leave").hidden = !key;
      say("live", "live");
      pause = 500;
      for await (const event of events(answer)) take(event);
      say("lost", "the server has ended the stream; trying again");
    } catch (error) {
      if (error.status === 401) {
        const wrong = key !== "";
        forget();
        if (wrong) $("why").textContent = error.message;
        say("lost", "no key");
        return;
      }
      if (error.name !== "AbortError") say("lost", error.status ? error.message : "the server does not answer; trying again");
    }
    await new Promise(r => setTimeout(r, pause));
  }
}

function forget() {
  key = "";
  sessionStorage.removeItem("specahead key");
  sessions.clear(); drawn.clear(); samples = []; status = null;
  $("sessions").replaceChildren(); $("models").textContent = ""; $("verdict").textContent = "";
  for (const kind of KINDS) { $("a-" + kind).textContent = ""; $("f-" + kind).textContent = ""; }
  $("main").hidden = true; $("leave").hidden = true; $("door").hidden = false;
  $("key").focus();
}

$("enter").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  sessionStorage.setItem("specahead key", key);
  say("", "connecting");
  follow();
});
$("leave").addEventListener("click", () => { sessionStorage.removeItem("specahead key"); location.reload(); });
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  draw();
});
function choose(chosen) {
  minutes = chosen;
  for (const button of $("spans").children) button.setAttribute("aria-pressed", Number(button.dataset.minutes) === minutes);
  draw();
}
$("spans").addEventListener("click", event => { if (event.target.dataset.minutes) choose(Number(event.target.dataset.minutes)); });
document.addEventListener("visibilitychange", () => {
  hiddenSince = document.hidden ? Date.now() : 0;
  if (document.hidden) setTimeout(() => { if (document.hidden) stream?.abort(); }, 31000);
});

// Drawing, four times a second at most.

let due = false;
function draw() {
  if (due || !clock) return;
  due = true;
  setTimeout(() => requestAnimationFrame(() => { due = false; drawCharts(); drawSessions(); }), 250);
}

choose(minutes);
new ResizeObserver(draw).observe(document.body);
follow();
