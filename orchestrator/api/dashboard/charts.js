"use strict";
const $ = id => document.getElementById(id);

// Tiles, reasons and charts, all of sums over the samples of a span.

const POINTS = 60;  // of a chart
const number = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const digits = (value, most = 1) => value.toLocaleString("en", {maximumFractionDigits: most, minimumFractionDigits: most});
const percent = share => share === null ? "–" : digits(100 * share, share && share < .1 ? 1 : 0) + " %";
const sum = (list, of = item => item) => list.reduce((total, item) => total + of(item), 0);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plural = (count, one) => `${number.format(count)} ${one}${count === 1 ? "" : "s"}`;

function merge(parts) {  // the sums of samples
  const total = {running: 0, tokens: 0, rounds_by_proposer: [0, 0, 0, 0], drafted: 0, accepted: 0, accepted_at: [], kv_read: 0, kv_total: 0,
    kv_fetched: 0, prompt_tokens: 0, cached_tokens: 0, first: {}, between: {}, turn: {}};
  for (const part of parts)
    for (const [name, before] of Object.entries(total))
      if (name === "running") total.running = Math.max(before, part.running);
      else if (typeof before === "number") total[name] += part[name];
      else for (const [key, count] of Object.entries(part[name])) before[key] = (before[key] || 0) + count;
  total.proposals = sum(total.rounds_by_proposer.slice(1));
  return total;
}
const countOf = counts => sum(Object.values(counts));
function quantile(counts, share) {  // seconds; null for none
  let left = share * countOf(counts);
  const keys = Object.keys(counts).map(Number).sort((a, b) => a - b);
  for (const key of keys) if ((left -= counts[key]) <= 0) return 2 ** (key / buckets);
  return null;
}

const inTime = value => value === null ? ["–", ""] : value < 1 ? [digits(1000 * value, value < .1 ? 1 : 0), "ms"] : [digits(value, 2), "s"];
function figure(id, text, unit, sub) {
  const small = document.createElement("small");
  small.textContent = unit;
  $(id).replaceChildren(text, small);
  $(id + "-sub").textContent = sub;
}
function latency(id, counts) {
  const count = countOf(counts), text = count ? `95 % within ${inTime(quantile(counts, .95)).join(" ")}` : "none in this time";
  figure(id, ...inTime(quantile(counts, .5)), text);
}

function drawTiles(all, points, step) {
  const began = samples.length ? Math.max(clock - POINTS * step, samples[0].time) : clock;
  const rates = points.map(point => point.tokens / step), last = merge(samples.filter(s => s.time > clock - 15));
  figure("t-rate", digits(last.tokens / 15, 1), "", `${digits(all.tokens / Math.max(15, clock - began), 1)} mean · ${number.format(Math.max(...rates))} at best`);
  latency("t-first", all.first);
  latency("t-turn", all.turn);
  figure("t-accept", all.drafted ? percent(all.accepted / all.drafted) : "–", "", all.proposals ? `${digits(all.accepted / all.proposals, 2)} of ${digits(all.drafted / all.proposals, 2)} a round` : "nothing was proposed");
  figure("t-read", all.kv_total ? percent(all.kv_read / all.kv_total) : "–", "", all.kv_fetched ? `${percent(all.kv_fetched / all.kv_read)} of it from the host` : all.kv_total ? "none of it from the host" : "no rounds in this time");
  if (!status) return;
  const room = status.kv_pages ? `${percent(status.kv_held / status.kv_pages)} of the KV room held` : "";
  figure("t-running", number.format(status.running), `running, ${number.format(status.waiting)} waiting`, status.target ? status.draft ? room : "no draft is attached" : "the target is lost");
}

function drawReasons(all) {
  const said = [], rounds = sum(all.rounds_by_proposer);
  for (const [name, plan] of Object.entries(status?.plans || {})) said.push(`The policy of ${name} now chooses: ${plan}.`);
  if (rounds) {
    const own = all.proposals ? `: its own one, and ${digits(all.accepted / rounds, 2)} of those proposed` : ", since nobody proposed any";
    said.push(`A pass of the target gave a session ${digits(all.tokens / rounds, 2)} tokens${own}.`);
  }
  if (all.kv_total) {
    const host = all.kv_fetched / all.kv_total, share = all.kv_read / all.kv_total;
    said.push(share > .995 ? "Rounds read all of the KV; approximate requests over long prompts read less." :
      `Rounds read ${percent(share)} of the KV that dense ones would have read${host ? `: ${percent(share - host)} at hand, ${percent(host)} fetched from host memory` : ""}.`);
  }
  if (all.prompt_tokens) said.push(`The KV of ${percent(all.cached_tokens / all.prompt_tokens)} of ${plural(all.prompt_tokens, "prompt token")} was there already, so that they were not read again.`);
  if (!said.length) said.push("Nothing was served in this time.");
  $("reasons").replaceChildren(...said.map(text => Object.assign(document.createElement("li"), {textContent: text})));
}

// Charts. All have the same frame, with room for labels.

const H = 132, LEFT = 34, BOTTOM = 16, TOP = 6;
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function ceiling(value) {  // a round number that is not below it
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find(step => step * power >= value);
}
function frame(id, top, label) {
  const svg = $(id), width = Math.round(svg.getBoundingClientRect().width);
  svg.setAttribute("viewBox", `0 0 ${width} ${H}`);
  svg.setAttribute("aria-label", label);
  const y = value => TOP + (H - TOP - BOTTOM) * (1 - Math.min(value, top) / top);
  const parts = [];
  for (const value of [0, top / 2, top]) {
    parts.push(shape("line", {class: "grid-line", x1: LEFT, x2: width, y1: y(value), y2: y(value)}));
    parts.push(shape("text", {x: LEFT - 5, y: y(value) + 4, "text-anchor": "end"}, value >= 10000 ? digits(value / 1000, 0) + "k" : +value.toPrecision(3)));
  }
  svg.replaceChildren(...parts);
  return {svg, width, y};
}
function addTimes(svg, width) {
  const text = minutes === 60 ? "1 hour ago" : `${minutes} minutes ago`;
  svg.append(shape("text", {x: LEFT, y: H - 2}, text), shape("text", {x: width, y: H - 2, "text-anchor": "end"}, "now"));
}
function lines(id, label, points, series, top) {  // series: [[value of a point (or null), color, how]]; how: "thin", "filled" or ""
  const values = series.map(([of]) => points.map(of)), highest = top || ceiling(Math.max(0, ...values.flat().map(value => value ?? 0)));
  const {svg, width, y} = frame(id, highest, label), x = i => LEFT + (width - LEFT) * (i + .5) / POINTS;
  series.forEach(([, color, how], s) => {
    let path = "", before = null;
    values[s].forEach((value, i) => {
      if (value === null) return;
      const joined = before !== null && i - before <= 3;  // points without requests are bridged if they are few
      path += `${joined ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}${joined ? "" : "h.5"}`;
      before = i;
    });
    if (how === "filled") svg.append(shape("path", {d: path.replace("M", `M${x(0)},${y(0)}L`) + `V${y(0)}Z`, fill: `var(${color})`, opacity: .14}));
    const stroke = {"stroke-width": how === "thin" ? 1 : 1.75, opacity: how === "thin" ? .6 : 1, "stroke-linejoin": "round", "stroke-linecap": "round"};
    if (path) svg.append(shape("path", {d: path, fill: "none", stroke: `var(${color})`, ...stroke}));
  });
  addTimes(svg, width);
}
function stacks(id, label, points, series) {  // series: [[percentage of a point (or null), color]], from below
  const {svg, width, y} = frame(id, 100, label), wide = (width - LEFT) / POINTS;
  points.forEach((point, i) => {
    let below = 0;
    for (const [of, color] of series) {
      const share = of(point);
      if (share) svg.append(shape("rect", {x: LEFT + wide * i, y: y(below + share), width: wide * .86, height: y(below) - y(below + share), fill: `var(${color})`}));
      below += share || 0;
    }
  });
  addTimes(svg, width);
}
function places(all) {
  const shares = all.accepted_at.map(count => count / Math.max(1, all.proposals));
  const {svg, width, y} = frame("c-places", 100, shares.length ? "Accepted by place: " + shares.map((s, i) => `${i + 1}: ${percent(s)}`).join(", ") : "No rounds yet");
  const step = (width - LEFT) / Math.max(1, shares.length), bar = Math.min(56, .7 * step);
  shares.forEach((share, i) => {
    const x = LEFT + step * (i + .5);
    svg.append(shape("rect", {x: x - bar / 2, y: y(100 * share), width: bar, height: y(0) - y(100 * share), fill: "var(--blue)", rx: 2}));
    if (step > 26) svg.append(shape("text", {x, y: y(100 * share) + (share > .85 ? 13 : -3), "text-anchor": "middle", class: share > .85 ? "inside" : ""}, digits(100 * share, 0)));
    if (step > 14 || i % 4 === 0) svg.append(shape("text", {x, y: H - 2, "text-anchor": "middle"}, i + 1));
  });
}

const COLORS = ["--own", "--lookup", "--self", "--blue"];  // by who proposes
function drawCharts() {
  const step = 60 * minutes / POINTS, end = Math.ceil(clock / step);
  const parts = Array.from({length: POINTS}, () => []);
  for (const sample of samples) parts[POINTS - end + Math.floor(sample.time / step)]?.push(sample);
  const points = parts.map(merge), all = merge(parts.flat());
  drawTiles(all, points, step);
  drawReasons(all);
  const both = (id, name, what, factor) => lines(id, `${what}: median ${inTime(quantile(all[name], .5)).join(" ")}`, points,
    [.95, .5].map(share => [point => { const value = quantile(point[name], share); return value === null ? null : factor * value; }, "--blue", share === .5 ? "" : "thin"]));
  lines("c-rate", `Tokens a second; ${plural(all.tokens, "token")} in all`, points, [[point => point.tokens / step, "--blue", "filled"]]);
  both("c-first", "first", "Seconds to the first token", 1);
  both("c-turn", "turn", "Seconds to the end of the answer", 1);
  both("c-between", "between", "Milliseconds between tokens", 1000);
  stacks("c-who", "Who proposes, in percent of rounds", points, [3, 2, 1, 0].map(who => [point => 100 * point.rounds_by_proposer[who] / sum(point.rounds_by_proposer), COLORS[who]]));
  lines("c-accept", "Proposed tokens accepted, in percent", points, [[point => point.drafted ? 100 * point.accepted / point.drafted : null, "--blue", ""]], 100);
  const each = name => point => point.proposals ? point[name] / point.proposals : null;
  lines("c-gamma", "Tokens proposed and accepted a round", points, [[each("drafted"), "--own", ""], [each("accepted"), "--blue", ""]]);
  places(all);
  const share = of => point => point.kv_total ? 100 * of(point) / point.kv_total : null;
  stacks("c-read", "KV that rounds read, in percent of what dense rounds read", points,
    [[share(point => point.kv_read - point.kv_fetched), "--blue"], [share(point => point.kv_fetched), "--host"]]);
}
