// Trying a prompt: exact, then approximate, and where the two answers differ.

const KINDS = ["exact", "approximate"];
const LENGTHS = [2000, 8000, 24000, 48000, 96000, 192000, 384000];  // tokens of demonstrations
const mine = "dashboard-" + Math.random().toString(36).slice(2, 10);
let tries = 0;

function offerLengths(longest) {
  const fit = LENGTHS.filter(length => length + 1000 < longest);
  const options = fit.map(length => new Option(`story of ${number.format(length)} tokens`, length));
  $("length").append(...options);
}

// Whose pass keys are hidden. The bundled pair was trained to answer the question in these words.
const NAMES = ["Alice", "Margaret", "Edward", "Charles", "Helen", "George", "Robert", "Eleanor"];
const isKey = i => `The pass key of ${NAMES[i]} is`;
const keyOf = i => (10007 + 7919 * (i + 3) ** 2) % 90000 + 10000;

async function demonstration(tokens) {  // a story of that many tokens, with pass keys in it
  const story = await (await ask("dashboard/story")).text(), answer = await ask("tokenize", post({model, prompt: story}));
  const copies = tokens / (await answer.json()).count, text = story.repeat(Math.ceil(copies)).slice(0, copies * story.length);
  const paragraphs = text.split("\n\n");
  NAMES.forEach((_, i) => paragraphs.splice((i + .5) / NAMES.length * paragraphs.length, 0, `${isKey(i)} ${keyOf(i)}. Remember it.`));
  const question = $("as").value === "chat" ? "List all pass keys that the text tells, one a line, and then retell the story." :
    `What is the pass key of ${NAMES[0]}? ${isKey(0)} ${keyOf(0)}.\n\nWhat is the pass key of ${NAMES[1]}? ${isKey(1)}`;
  return [...paragraphs, question].join("\n\n");
}

const post = body => ({method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});

async function run(kind, prompt) {  // the text and the figures of an answer
  const chat = $("as").value === "chat", begun = now();
  const body = {model, max_tokens: Number($("most").value), temperature: Number($("heat").value), seed: 0, stream: true, exactness: kind,
    request_id: `${mine}-${kind}-${++tries}`, stream_options: {include_usage: true}, ...(chat ? {messages: [{role: "user", content: prompt}]} : {prompt})};
  let text = "", usage = null, speculation = null;
  const pieces = [];  // when each came, and the characters until then
  $("f-" + kind).textContent = "reading the prompt";
  const answer = await ask(chat ? "v1/chat/completions" : "v1/completions", post(body));
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0], piece = choice?.text ?? choice?.delta?.content ?? "";
    if (piece) {
      text += piece;
      pieces.push([now() - begun, text.length]);
      $("a-" + kind).textContent = text;
      $("f-" + kind).textContent = `first token after ${inTime(pieces[0][0]).join(" ")}`;
    }
    usage = event.usage || usage; speculation = event.speculation || speculation;
  }
  return {text, usage, speculation, seconds: now() - begun, first: pieces[0]?.[0] ?? null, rate: rateOf(pieces, usage?.completion_tokens || 0)};
}

// Tokens a second of the second half: before it a draft may still be reading the prompt.
function rateOf(pieces, tokens) {
  if (pieces.length < 3) return null;
  const [end, whole] = pieces.at(-1), [middle, before] = pieces.find(([, characters]) => characters >= whole / 2);
  return end > middle ? tokens * (whole - before) / whole / (end - middle) : null;
}

function describe({usage, speculation, seconds, first, rate}) {
  const parts = [];
  if (usage) parts.push(`${plural(usage.prompt_tokens, "prompt token")}, ${number.format(usage.prompt_tokens_details?.cached_tokens || 0)} found in the KV`, `${plural(usage.completion_tokens, "token")} in ${digits(seconds, 2)} s`);
  if (first !== null) parts.push(`first after ${inTime(first).join(" ")}`);
  if (rate) parts.push(`${digits(rate, 1)} tokens a second in the second half`);
  if (speculation) {
    const rounds = Math.max(1, speculation.rounds), host = speculation.kv_fetched_fraction;
    parts.push(speculation.rounds ? `${digits(speculation.accepted / rounds, 2)} of ${digits(speculation.drafted / rounds, 1)} proposed tokens accepted a round` : "nothing was proposed");
    parts.push(`${percent(speculation.kv_read_fraction)} of the KV read${host ? `, ${percent(host)} of that from the host` : ""}`);
  }
  return parts.join(" · ");
}

function compare(a, b) {  // which words of two lists are in their longest common subsequence
  const n = a.length, m = b.length, wide = m + 1, best = new Uint16Array((n + 1) * wide);
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      best[i * wide + j] = a[i] === b[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
  const same = [new Set(), new Set()];
  for (let i = 0, j = 0; i < n && j < m;)
    if (a[i] === b[j]) { same[0].add(i++); same[1].add(j++); }
    else if (best[(i + 1) * wide + j] >= best[i * wide + j + 1]) i++;
    else j++;
  return same;
}

const MOST_WORDS = 3000;  // compared
function showDifferences(texts) {  // marks them; the words of both that are not the same
  const words = texts.map(text => text.match(/\s*\S+/g)?.slice(0, MOST_WORDS) || []), same = compare(...words);
  KINDS.forEach((kind, k) => {
    const parts = words[k].map((word, i) => same[k].has(i) ? word : Object.assign(document.createElement("mark"), {textContent: word, title: "only in this answer"}));
    $("a-" + kind).replaceChildren(...parts, texts[k].slice(words[k].join("").length));
  });
  let equal = 0;
  while (equal < words[0].length && words[0][equal] === words[1][equal]) equal++;
  return {equal, differing: Math.max(words[0].length, words[1].length) - same[0].size};
}

function judge([exact, approximate], {equal, differing}) {
  const said = [], times = exact.rate && approximate.rate ? approximate.rate / exact.rate : null, read = approximate.speculation?.kv_read_fraction ?? 1;
  const pace = times === null ? "" : ` (${digits(approximate.rate, 1)} against ${digits(exact.rate, 1)} tokens a second in the second half)`;
  const all = read > .995, proposed = approximate.speculation?.rounds > 0;
  const why = !all ? `it read ${percent(read)} of the KV` : !proposed ? "nobody proposed tokens, so that nobody announced which KV to read, and it read all" :
    "it read all of the KV too: up to 1,024 tokens are read whole, and so are longer texts where that is expected to be as fast";
  if (times !== null) said.push(times > 1.05 ? `approximate was ${digits(times, 2)} times as fast as exact${pace}: ${why}.` :
    `approximate was ${times < .95 ? "slower" : "about as fast"}${pace}; ${why}. ${all ? "" : "Reading the KV is not what takes the time here, as on CPUs and over short prompts."}`);
  said.push(differing ? `The answers are the same for ${plural(equal, "word")}; ${plural(differing, "word")} differ and are marked.` : "The answers are the same.");
  return said.join(" ");
}

$("length").addEventListener("change", async () => {
  const tokens = Number($("length").value);
  if (!tokens) return;
  try { $("prompt").value = await demonstration(tokens); } catch (error) { $("verdict").textContent = error.message; }
});
$("as").addEventListener("change", () => $("length").dispatchEvent(new Event("change")));
$("prompt").addEventListener("input", () => { $("length").value = "0"; });

$("ask").addEventListener("submit", async event => {
  event.preventDefault();
  $("run").disabled = true;
  $("verdict").textContent = "";
  for (const kind of KINDS) { $("a-" + kind).textContent = $("f-" + kind).textContent = ""; $("a-" + kind).className = "answer"; }
  const prompt = $("prompt").value, answers = [];
  for (const kind of KINDS)
    try {
      answers.push(await run(kind, prompt));
      $("f-" + kind).textContent = describe(answers.at(-1));
    } catch (error) {
      $("a-" + kind).className = "answer error";
      $("a-" + kind).textContent = error.message;
      $("f-" + kind).textContent = "";
    }
  if (answers.length === 2) $("verdict").textContent = judge(answers, showDifferences(answers.map(answer => answer.text)));
  $("run").disabled = false;
});
