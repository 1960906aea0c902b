"""`specahead evaluate acceptance`: what a server accepts of drafted tokens, by task, temperature and exactness."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specahead.lab.evaluation.plans import save_plan
from specahead.lab.evaluation.tasks.asking import Record, Way
from specahead.lab.evaluation.tasks.command import ask, choose_questions, percent, settings_of
from specahead.lab.evaluation.tasks.comparing import compare
from specahead.lab.evaluation.tasks.intervals import bootstrap_ratio
from specahead.lab.evaluation.tasks.others import bundled_texts, continuation, unjudged_tasks
from specahead.lab.evaluation.tasks.ruler import NOISE
from specahead.lab.results import Columns, text_table
from specahead.sparsity.plan import load_plan


@dataclass(frozen=True)
class AcceptanceRow:
    """The rounds of one task, context, temperature and exactness."""

    task: str
    context: int
    temperature: float
    exactness: str
    answers: int
    tokens: int
    """Generated."""
    rounds: int
    """With proposed tokens."""
    plain_rounds: int
    accepted: tuple[float, float, float] | None
    """Accepted tokens a round with proposals, and the bootstrap interval over answers; None: there were none."""
    chances: tuple[float, ...]
    """By position: the chance that a proposed token is accepted, given that those before it were."""
    rounds_by_gamma: tuple[int, ...]
    """Rounds that proposed 0, 1, 2 … tokens: what the policy chose."""
    confirmed: float | None
    """The share of screened tokens that dense passes confirmed; None: nothing was screened."""
    kv_read: float
    """The mean share of the KV that verification read."""


def run(flags: argparse.Namespace) -> None:
    """Ask, print the table, write the JSON file, and update the plan that is named. Raises as `evaluate tasks`."""
    texts = {Path(file).name: Path(file).read_text(encoding="utf-8") for file in flags.text or ()}
    texts = bundled_texts() if flags.text is None else texts
    more = {f"continue {name}": continuation(text) for name, text in texts.items()}
    ways = [Way(name, heat) for heat in flags.temperatures for name in flags.exactness or [""]]
    if len(flags.url) > 1:
        flags.samples = flags.repeats * len(ways) * sum(flags.at_once)  # each prompt is asked once
    questions = choose_questions(flags, NOISE, unjudged_tasks(), more)
    if len(flags.url) > 1:
        compare(flags, questions, ways)
        return
    plan = load_plan(flags.plan) if flags.plan else None
    if plan is not None and not plan.is_calibrated:
        raise ValueError(f"{flags.plan}: the plan is not calibrated; make one with specahead calibrate first")
    records, answers = ask(flags, flags.url[0], questions, ways, {"max_tokens": flags.generated})
    rows = to_rows(records)
    answers.save({"settings": settings_of(flags), "rows": rows})
    print(text_table(COLUMNS, rows))
    if plan is not None:
        chance, rounds = prior_of(records)
        known = {"acceptance": round(chance, 4), "acceptance_rounds": rounds} | divergence_of(records)
        save_plan(replace(plan, provenance=plan.provenance | known), flags.plan)
        print(
            f"{flags.plan}: a drafted token is accepted with {chance:.3f}, by {rounds} rounds; it was {plan.acceptance}"
        )


def to_rows(records: Sequence[Record]) -> list[AcceptanceRow]:
    """Return a row for each task, context, temperature and exactness. Raises ValueError for answers of a server that
    says nothing of speculation."""
    groups: dict[tuple[str, int, float, str], list[Record]] = {}
    for record in records:
        key = record.task, record.context, record.temperature, record.exactness
        groups.setdefault(key, []).append(record)
    return [_row(key, group) for key, group in groups.items()]


def _row(key: tuple[str, int, float, str], records: Sequence[Record]) -> AcceptanceRow:
    said = [_speculation(record) for record in records]
    screened = sum(each["screened"] for each in said)
    return AcceptanceRow(
        *key,
        answers=len(records),
        tokens=sum(record.generated for record in records),
        rounds=sum(each["rounds"] for each in said),
        plain_rounds=sum(each["plain_rounds"] for each in said),
        accepted=bootstrap_ratio([each["accepted"] for each in said], [each["rounds"] for each in said]),
        chances=tuple(kept / judged for kept, judged in _positions(said) if judged),
        rounds_by_gamma=tuple(_summed([each["rounds_by_gamma"] for each in said])),
        confirmed=sum(each["confirmed"] for each in said) / screened if screened else None,
        kv_read=sum(each["kv_read_fraction"] for each in said) / len(said),
    )


def _speculation(record: Record) -> dict[str, Any]:
    if record.speculation is None:
        raise ValueError("the server's answers have no `speculation`: acceptance is measured at a server of specahead")
    return record.speculation


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _positions(said: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return by position how many proposed tokens were accepted and, at most, judged.

    A token is judged where all before it were accepted and the round proposed it; of rounds with different numbers of
    tokens only the lesser of both counts is known, so that later positions may be slightly better than they look.
    """
    kept = _summed([each["accepted_per_position"] for each in said])
    by_gamma = _summed([each["rounds_by_gamma"] for each in said])
    reached = [sum(by_gamma), *kept]
    return [(count, min(reached[i], sum(by_gamma[i + 1 :]))) for i, count in enumerate(kept)]


def prior_of(records: Sequence[Record]) -> tuple[float, int]:
    """Return the chance that a drafted token of an `exact` request is accepted, over all positions, and the rounds it
    was found in. Raises ValueError if there were none."""
    said = [_speculation(record) for record in records if record.exactness == "exact"]
    positions = _positions(said)
    judged = sum(count for _, count in positions)
    if not judged:
        raise ValueError("no exact request had a round with drafted tokens: the plan stays as it is")
    return sum(kept for kept, _ in positions) / judged, sum(each["rounds"] for each in said)


def divergence_of(records: Sequence[Record]) -> dict[str, float]:
    """Return how far rounds of `approximate` requests were from dense ones, as a plan's provenance has it; {} if none
    was audited."""
    said = [_speculation(record) for record in records if record.exactness == "approximate"]
    audits = [(each.get("audited_tokens", 0), each.get("total_variation", 0.0)) for each in said]
    tokens, variation = sum(count for count, _ in audits), sum(count * mean for count, mean in audits)
    return {"divergence": round(variation / tokens, 4), "divergence_tokens": tokens} if tokens else {}


def _most_made(row: AcceptanceRow) -> int:
    """Return how many tokens most rounds propose."""
    return max(range(len(row.rounds_by_gamma)), key=row.rounds_by_gamma.__getitem__, default=0)


COLUMNS: Columns[AcceptanceRow] = {
    "task": lambda row: row.task,
    "exactness": lambda row: row.exactness or "not said",
    "context": lambda row: str(row.context),
    "temperature": lambda row: f"{row.temperature:g}",
    "tokens": lambda row: str(row.tokens),
    "rounds": lambda row: str(row.rounds),
    "plain": lambda row: str(row.plain_rounds),
    "accepted a round": lambda row: f"{row.accepted[0]:.2f}" if row.accepted else "",
    "95 %": lambda row: "{1:.2f} to {2:.2f}".format(*row.accepted) if row.accepted else "",
    "by position": lambda row: " ".join(f"{chance:.2f}" for chance in row.chances[:4]),
    "most rounds propose": lambda row: str(_most_made(row)),
    "confirmed": lambda row: "" if row.confirmed is None else percent(row.confirmed),
    "KV read": lambda row: percent(row.kv_read),
}
