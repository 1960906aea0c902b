"""The report of a plan: one HTML page that says in words whether the plan is good and what to expect."""

from collections.abc import Sequence
from html import escape
from itertools import takewhile
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from specahead.lab.evaluation.calibration.expected_speed import BATCHES, CONTEXTS, expected_speeds
from specahead.sparsity.plan import Plan

GOOD, FAIR = 0.01, 0.03  # increase of the perplexity up to which a plan is good, and up to which it is usable
FEW_SAMPLES = 200
LIKELY, UNLIKELY = 0.6, 0.4  # chances of a drafted token to be accepted
PAYS = 1.1  # times as fast as exact

_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1d1b18, #eceae6); --soft: light-dark(#6a655d, #9d9a94);
  --line: light-dark(#e3e0d9, #30343c); --page: light-dark(#ffffff, #14161a); --blue: light-dark(#0a5fa8, #6cb6ff); }
body { max-width: 860px; margin: 32px auto; padding: 0 16px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 32px 0 4px; } p { margin: 4px 0 10px; }
.soft, figcaption { color: var(--soft); font-size: 13px; } figure { margin: 0; overflow-x: auto; }
svg { width: 620px; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg .value { fill: var(--ink); } .verdict { font-size: 17px; font-weight: 600; margin: 14px 0; }
table { border-collapse: collapse; } td, th { padding: 5px 9px; white-space: nowrap;
  text-align: right; border: 1px solid var(--line); }
caption { font-weight: 600; text-align: left; padding: 4px 0; }
th { font-weight: 400; color: var(--soft); } .tables { display: flex; flex-wrap: wrap; gap: 24px; }
.facts td, .facts th { text-align: left; white-space: normal; border: 0; padding: 2px 12px 2px 0; }
"""


class Quality(NamedTuple):
    """What reading a share of the KV costs."""

    budget: float
    kv_read: float
    increase: float
    """Of the perplexity, over the dense one's."""
    total_variation: float = 0.0
    """From the dense distributions, on average; 0 in plans that do not know it."""


def write_report(plan: Plan, path: Path) -> None:
    """Write the page of a plan that `calibrate` has made."""
    rows = [Quality(**row) for row in plan.provenance["quality"]]
    at_budget = min(rows, key=lambda row: abs(row.budget - plan.budget))
    title = f"Plan for {plan.provenance['target']}, drafted by {plan.provenance['draft']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{verdict(at_budget)}</p>',
        *(f"<p>{sentence}</p>" for sentence in expectations(plan)),
        f"<h2>What reading less of the KV costs</h2><p>{_advice(plan, rows)}</p>",
        f"<figure>{quality_chart(rows, plan.budget)}<figcaption>Increase of the perplexity over the share of the KV "
        "that rounds read, on the last tokens of a few passages that the plan was made from. Other texts may cost "
        "more: <code>specahead evaluate perplexity</code> measures yours.</figcaption></figure>",
        "<h2>How much faster than plain decoding, by context and requests at once</h2>",
        "<p>These are estimates for a GPU, from the sizes of weights and KV and from the acceptance above. Nothing "
        "of this is measured; <code>specahead bench serve</code> does that.</p>",
        f'<div class="tables">{speed_table(plan, "exact")}{speed_table(plan, "approximate")}</div>',
        f"<h2>How the plan was made</h2>{_facts(plan)}",
    ]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    path.write_text(page + viewport + "\n".join(body) + "</html>\n", encoding="utf-8")


def verdict(row: Quality) -> str:
    """Return in a sentence whether a plan is good at its budget."""
    rises = f"raises the perplexity by {percent(row.increase, 1)}"
    costs = f"reading {percent(row.kv_read)} of the KV {rises if row.increase > 0 else 'does not raise the perplexity'}"
    if row.increase <= GOOD:
        return f"This is a good plan: {costs}."
    if row.increase <= FAIR:
        return f"This plan is usable: {costs}. A larger budget costs less."
    return f"This plan is poor: {costs}. Give a larger --budget, more texts like yours, or a draft that is more alike."


def expectations(plan: Plan) -> list[str]:
    """Return sentences about what users of the plan may expect."""
    chance, samples = plan.acceptance or 0.0, plan.provenance["samples"]
    how = "high" if chance >= LIKELY else "low" if chance < UNLIKELY else "usual"
    said = [
        f"The target accepts a drafted token with a chance of {percent(chance)}, which is {how}. The draft's attention "
        f"explains {percent(plan.provenance['blend_explained'])} of where the target looks; the rest is left to what "
        "the target remembers of its last passes."
    ]
    exact, approximate = (expected_speeds(plan, exactness) for exactness in ("exact", "approximate"))
    for batch in (BATCHES[0], BATCHES[2]):
        pays = [each for each in _contexts(plan) if approximate(each, batch) >= PAYS * exact(each, batch)]
        requests = "one request at a time" if batch == 1 else f"{batch} requests at once"
        if pays:
            said.append(
                f"With {requests}, <code>approximate</code> may pay from {pays[0] // 1024}K tokens of context on: "
                f"there it may be up to {approximate(pays[0], batch):.1f} times as fast as plain decoding, and "
                f"<code>exact</code> {exact(pays[0], batch):.1f} times."
            )
        else:
            said.append(f"With {requests}, <code>approximate</code> is not expected to be faster than exact.")
    if samples < FEW_SAMPLES:
        said.append(f"The plan rests on {samples} samples only: give more --text or --passages.")
    return said


def percent(share: float, places: int = 0) -> str:
    """Return a share in words."""
    return f"{100 * share:.{places}f} %"


def _advice(plan: Plan, rows: Sequence[Quality]) -> str:
    good = list(takewhile(lambda row: row.increase <= GOOD, reversed(rows)))
    if not good:
        return f"No budget that was tried keeps the increase of the perplexity within {percent(GOOD)}."
    return (
        f"From a budget of {percent(good[-1].budget)} on, the increase of the perplexity stays within {percent(GOOD)}. "
        f"The plan's own is {percent(plan.budget)}; <code>specahead serve --budget</code> states another."
    )


def quality_chart(rows: Sequence[Quality], budget: float) -> str:
    """Return an SVG: a line over the shares that were read, with the value at each of them."""
    wide, high, left, bottom, top = 620, 250, 56, 40, 24
    most = max(0.01, 1.1 * max(row.increase for row in rows))
    least = min(0.0, *(row.increase for row in rows))
    first, last = log2(rows[0].kv_read), log2(rows[-1].kv_read)

    def place(row: Quality) -> tuple[float, float]:
        x = left + 24 + (wide - left - 60) * (log2(row.kv_read) - first) / max(1e-9, last - first)
        return x, top + (high - top - bottom) * (most - row.increase) / (most - least)

    places = [place(row) for row in rows]
    parts = []
    for value in (0.0, most / 2.2, most / 1.1):
        y = place(Quality(0, rows[0].kv_read, value))[1]
        parts.append(f'<line x1="{left}" x2="{wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * value:.1f} %</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--blue)" stroke-width="2"/>')
    for row, (x, y) in zip(rows, places, strict=True):
        own = row.budget == budget
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if own else 3.5}" fill="var(--blue)"/>')
        label = f"{100 * row.increase:+.2f} %" + (" (this plan)" if own else "")
        parts.append(f'<text class="value" x="{x + 8:.1f}" y="{y - 9:.1f}">{label}</text>')
        parts.append(f'<text x="{x:.1f}" y="{high - 22}" text-anchor="middle">{100 * row.kv_read:.0f} %</text>')
    parts.append(
        f'<text x="{(left + wide) / 2}" y="{high - 4}" text-anchor="middle">share of the KV that is read</text>'
    )
    return f'<svg viewBox="0 0 {wide + 40} {high}" role="img" aria-label="Quality over budget">{"".join(parts)}</svg>'


def speed_table(plan: Plan, exactness: str) -> str:
    """Return an HTML table of expected speeds: a row for each context, a column for each batch."""
    speed = expected_speeds(plan, exactness)
    head = "".join(f"<th>{batch}</th>" for batch in BATCHES)
    lines = [f"<caption>{exactness}</caption><tr><th>context \\ requests</th>{head}</tr>"]
    for context in _contexts(plan):
        cells = "".join(_cell(speed(context, batch)) for batch in BATCHES)
        lines.append(f"<tr><th>{context // 1024}K</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cell(speed: float) -> str:
    share = round(max(0, min(70, 35 * log2(speed))))
    return f'<td style="background: color-mix(in srgb, var(--blue) {share}%, transparent)">{speed:.1f} ×</td>'


def _contexts(plan: Plan) -> list[int]:
    return [each for each in CONTEXTS if each <= plan.provenance["longest"]] or [CONTEXTS[0]]


def _facts(plan: Plan) -> str:
    known: dict[str, Any] = plan.provenance
    tokens = known["settings"]["context"]
    facts = {
        "texts": f"{', '.join(known['files'])}: {known['texts']} passage(s) of up to {tokens:,} tokens",
        "samples": str(known["samples"]),
        "budget": f"{percent(plan.budget)} of the KV, and all of it up to {plan.least_tokens:,} tokens",
        "layers that read everything": ", ".join(map(str, plan.dense_layers)) or "none",
        "plan": plan.hash,
    }
    lines = (f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts">{"".join(lines)}</table>'
