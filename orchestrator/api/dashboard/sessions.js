// Sessions: a row each, whose canvas has a column a round.

const STRIP = 40, KEPT = 30;  // rounds of a strip; ended sessions
const sessions = new Map(), drawn = new Map();  // by number: what is known, and the rows
const WORDS = {stop: "ended", length: "ended at its limit", abort: "aborted", unknown: "ended"};
const WHO = ["nobody", "the text", "the target", "the draft"];

function openSession(told) {
  const nothing = {tokens: 0, cached_tokens: 0, rounds: 0, drafted: 0, accepted: 0, kv_read: 0, kv_total: 0, kv_fetched: 0, first_seconds: 0, ended: null, seconds: 0};
  const session = {...nothing, ...told, strip: []};
  sessions.set(told.session, session);
  for (const values of told.latest || []) addColumn(session, readRound(values));
}
const readRound = values => Object.fromEntries(roundFields.map((name, i) => [name, values[i]]));
function addColumn(session, round) {
  session.strip.push(round);
  if (session.strip.length > STRIP) session.strip.shift();
}
function addRound(values) {
  const round = readRound(values), session = sessions.get(round.session);
  if (!session) return;
  addColumn(session, round);
  session.rounds += round.drafted > 0;
  for (const name of ["tokens", "drafted", "accepted", "kv_read", "kv_total", "kv_fetched"]) session[name] += round[name];
}
function endSession(sums) {
  if (sessions.has(sums.session)) Object.assign(sessions.get(sums.session), sums);
  const over = [...sessions.values()].filter(session => session.ended !== null);
  for (const session of over.slice(0, Math.max(0, over.length - KEPT))) dropSession(session.session);
}
function dropSession(name) {
  sessions.delete(name); drawn.get(name)?.row.remove(); drawn.delete(name);
}
function takeSnapshot(told) {  // strips go on where they were
  const here = new Set(told.map(each => each.session));
  for (const session of [...sessions.values()]) if (!here.has(session.session)) dropSession(session.session);
  told.forEach(openSession);
}

function sessionRow(session) {
  const row = document.createElement("tr");
  const names = ["", "Prompt", "In the KV", "First token", "Tokens", "Who proposes", "γ", "Accepted", "KV read", ""];
  const cells = names.map(name => { const cell = row.insertCell(); cell.dataset.name = name; return cell; });
  const strip = document.createElement("canvas");
  cells[0].textContent = `${session.session} ${session.exactness}`;
  if (session.request) row.title = session.request;
  strip.className = "rounds";
  strip.setAttribute("role", "img");
  cells[9].append(strip);
  cells[1].textContent = number.format(session.prompt_tokens);
  $("sessions").prepend(row);
  return {row, cells, strip};
}

function drawSessions() {
  const open = [...sessions.values()].filter(session => session.ended === null).length;
  $("count").textContent = sessions.size ? `${open} running, ${sessions.size - open} ended` : "";
  $("idle").hidden = sessions.size > 0;
  for (const session of [...sessions.values()].sort((a, b) => a.session - b.session)) {
    if (!drawn.has(session.session)) drawn.set(session.session, sessionRow(session));
    const known = drawn.get(session.session), {row, cells, strip} = known, begun = session.tokens > 0;
    row.className = session.ended === null ? "" : "over";
    cells[2].textContent = begun ? percent(session.cached_tokens / Math.max(1, session.prompt_tokens)) : "–";
    cells[3].textContent = session.first_seconds ? inTime(session.first_seconds).join(" ") : "–";
    cells[4].textContent = number.format(session.tokens);
    const who = new Set(session.strip.filter(round => round.drafted).map(round => WHO[round.proposer]));
    cells[5].textContent = [...who].join(", ") || (begun ? WHO[0] : "–");
    cells[6].textContent = session.rounds ? digits(session.drafted / session.rounds, 1) : "–";
    cells[7].textContent = session.rounds ? digits(session.accepted / session.rounds, 2) : "–";
    const host = session.kv_fetched ? `, ${percent(session.kv_fetched / session.kv_total)} from the host` : "";
    cells[8].textContent = session.kv_total ? percent(session.kv_read / session.kv_total) + host : "–";
    if (session.ended !== null) row.title = [session.request, `${WORDS[session.ended] || session.ended} after ${inTime(session.seconds).join(" ")}`].filter(Boolean).join(": ");
    const shown = [session.tokens, session.strip.length, session.ended, css("--blue"), devicePixelRatio].join();
    if (known.shown !== shown) drawStrip(strip, session);
    known.shown = shown;
  }
}

function canvasOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
  const paint = canvas.getContext("2d");
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  return paint;
}

function drawStrip(canvas, session) {
  const paint = canvasOf(canvas, 200, 36), colors = COLORS.map(css), red = css("--red"), host = css("--host"), line = css("--line");
  const deepest = Math.max(4, ...session.strip.map(round => round.drafted)), cell = 24 / (deepest + 1), gap = cell > 4 ? 1 : 0;
  session.strip.forEach(({drafted, accepted, tokens, proposer, kv_read, kv_total, kv_fetched}, i) => {
    const x = 5 * i;
    for (let j = 0; j < drafted; j++) {
      const y = 25 - cell * (j + 2) + gap;
      if (j < accepted) { paint.fillStyle = colors[proposer]; paint.fillRect(x, y, 4, cell - gap); }
      else { paint.strokeStyle = red; paint.strokeRect(x + .5, y + .5, 3, Math.max(.5, cell - gap - 1)); }
    }
    if (tokens > accepted) { paint.fillStyle = colors[0]; paint.fillRect(x, 25 - cell + gap, 4, cell - gap); }
    if (!kv_total) return;
    paint.fillStyle = line; paint.fillRect(x, 28, 4, 8);
    const high = 8 * kv_read / kv_total, far = 8 * kv_fetched / kv_total;
    paint.fillStyle = colors[3]; paint.fillRect(x, 36 - high, 4, high - far);
    paint.fillStyle = host; paint.fillRect(x, 36 - far, 4, far);
  });
  const drafted = sum(session.strip, round => round.drafted), accepted = sum(session.strip, round => round.accepted);
  canvas.setAttribute("aria-label", `last ${session.strip.length} rounds: ${accepted} of ${drafted} proposed tokens accepted`);
}
