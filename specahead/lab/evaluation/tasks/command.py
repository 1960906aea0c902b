"""`specahead evaluate tasks`: scores of a server's answers, by task, context and exactness."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.endpoint import Endpoint
from specahead.lab.evaluation.tasks.asking import Answers, Asker, Question, Record, Way
from specahead.lab.evaluation.tasks.intervals import bootstrap_ratio, wilson
from specahead.lab.evaluation.tasks.others import longbench_tasks, other_tasks
from specahead.lab.evaluation.tasks.ruler import NOISE, ruler_tasks
from specahead.lab.evaluation.tasks.samples import Haystack, Task
from specahead.lab.plotting import make_figure, plain_ticks, put_legend, save_figure
from specahead.lab.results import Columns, text_table

RULER = tuple(ruler_tasks(NOISE, 4096))


@dataclass(frozen=True)
class TaskRow:
    """The scores of one task, context and exactness."""

    task: str
    """Or the mean of RULER's tasks."""
    context: int
    exactness: str
    samples: int
    score: float
    """The mean, from 0 to 1."""
    interval: tuple[float, float]
    """Wilson's, 95 %."""
    kv_read: float | None
    """The mean share of the KV that verification read; None: the server does not say."""
    of_exact: tuple[float, float, float] | None
    """The score over that of `exact` on the same samples, with its bootstrap interval; None: nothing to compare."""


def run(flags: argparse.Namespace) -> None:
    """Ask, print the table, and write the files that are named. Raises ValueError for flags that do not fit and for
    refused requests, OSError where the server does not answer."""
    ways = [Way(name) for name in flags.exactness or [""]]
    texts = [Path(file).read_text(encoding="utf-8") for file in flags.text]
    questions = choose_questions(flags, Haystack.of_text("\n".join(texts)) if texts else NOISE, {}, {})
    records, answers = ask(flags, flags.url, questions, ways, {})
    rows = to_rows(records)
    answers.save({"settings": settings_of(flags), "rows": rows})
    print(text_table(COLUMNS, rows))
    if flags.plot:
        _plot(rows, Path(flags.plot))


def ask(
    flags: argparse.Namespace, url: str, questions: list[Question], ways: list[Way], fields: dict[str, Any]
) -> tuple[list[Record], Answers]:
    """Ask a server as the flags say; return the records and the file of answers. Raises as `run`."""
    if min(flags.concurrency, flags.samples, *flags.contexts) < 1:
        raise ValueError("--concurrency, --samples and --contexts must be positive")
    if flags.resume and not flags.json:
        raise ValueError("--resume goes on from the answers in a --json file: name one")
    answers = Answers(Path(flags.json) if flags.json else None, flags.resume)
    asker = Asker(Endpoint(url, flags), load_tokenizer(flags.tokenizer), flags.chat, flags.seed, answers)
    return asker.ask_all(questions, ways, flags.concurrency, fields), answers


def settings_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that results depend on."""
    kept = ("url", "model", "chat", "tokenizer", "text", "longbench", "samples", "seed")
    return {name: getattr(flags, name) for name in kept}


def choose_questions(
    flags: argparse.Namespace, essay: Haystack, unjudged: dict[str, Task], more: dict[str, Task]
) -> list[Question]:
    """Return the questions of the tasks that are chosen among RULER's, the other ones and the `unjudged` ones, then of
    `more` tasks, and of LongBench's files. Raises ValueError for an unknown task."""
    questions = []
    lines = [task for file in flags.longbench for task in longbench_tasks(Path(file))][: flags.samples]
    for context in flags.contexts:
        known = ruler_tasks(essay, context) | other_tasks() | unjudged
        unknown = set(flags.tasks or ()) - known.keys()
        if unknown:
            raise ValueError(f"--tasks {' '.join(sorted(unknown))}: expected some of {' '.join(known)}")
        chosen = {name: task for name, task in known.items() if flags.tasks is None or name in flags.tasks}
        for name, task in (chosen | more).items():
            questions += [Question(name, task, context, index) for index in range(flags.samples)]
        questions += [Question("longbench", task, context, index) for index, task in enumerate(lines)]
    return questions


def to_rows(records: Sequence[Record]) -> list[TaskRow]:
    """Return a row for each task, context and exactness, and behind each context the mean of RULER's tasks."""
    groups: dict[tuple[int, str], dict[str, list[Record]]] = {}
    for record in records:
        by_way = groups.setdefault((record.context, record.task), {})
        by_way.setdefault(record.exactness, []).append(record)
    rows = []
    for context in dict.fromkeys(context for context, _ in groups):
        tasks = {task: by_way for (of, task), by_way in groups.items() if of == context}
        named = [task for task in tasks if task in RULER]
        ways = dict.fromkeys(way for by_way in tasks.values() for way in by_way)
        if len(named) > 1:
            tasks[f"mean of {len(named)}"] = {way: [r for task in named for r in tasks[task][way]] for way in ways}
        rows += [_row(task, context, way, by_way) for task, by_way in tasks.items() for way in by_way]
    return rows


def _row(task: str, context: int, way: str, by_way: dict[str, list[Record]]) -> TaskRow:
    scores = [record.score or 0.0 for record in by_way[way]]
    exact = [record.score or 0.0 for record in by_way.get("exact", [])]
    mean = sum(scores) / len(scores)
    compared = bootstrap_ratio(scores, exact) if exact and way != "exact" else None
    said = [record.speculation["kv_read_fraction"] for record in by_way[way] if record.speculation]
    kv_read = sum(said) / len(said) if said else None
    return TaskRow(task, context, way, len(scores), mean, wilson(mean, len(scores)), kv_read, compared)


def percent(value: float) -> str:
    """Return a share as a cell."""
    return f"{100 * value:.1f} %"


def percents(low: float, high: float) -> str:
    """Return the interval of a share as a cell."""
    return f"{100 * low:.1f} to {100 * high:.1f}"


COLUMNS: Columns[TaskRow] = {
    "task": lambda row: row.task,
    "exactness": lambda row: row.exactness or "not said",
    "context": lambda row: str(row.context),
    "samples": lambda row: str(row.samples),
    "KV read": lambda row: "" if row.kv_read is None else percent(row.kv_read),
    "score": lambda row: percent(row.score),
    "95 %": lambda row: percents(*row.interval),
    "of exact": lambda row: percent(row.of_exact[0]) if row.of_exact else "",
    "its 95 %": lambda row: percents(*row.of_exact[1:]) if row.of_exact else "",
}


def _plot(rows: Sequence[TaskRow], path: Path) -> None:
    """Plot the mean over contexts, and each task at the longest context, by exactness."""
    ways = list(dict.fromkeys(row.exactness for row in rows))
    longest = max(row.context for row in rows)
    each = f"Score of each task at {longest:,} tokens: further right is better"
    figure, (lines, bars) = make_figure("Mean score by length of the prompt: higher is better", each)
    contexts = sorted({row.context for row in rows})
    for i, way in enumerate(ways):
        of_way = [row for row in rows if row.exactness == way and not row.task.startswith("mean")]
        scores = [[row.score for row in of_way if row.context == context] for context in contexts]
        lines.plot(contexts, [100 * sum(s) / len(s) for s in scores], "o-", label=way or "as served")
        last = [row for row in of_way if row.context == longest]
        spans = [[100 * abs(row.score - row.interval[end]) for row in last] for end in (0, 1)]
        places = [place + 0.8 * i / len(ways) for place in range(len(last))]
        bars.barh(places, [100 * row.score for row in last], 0.8 / len(ways), xerr=spans, label=way or "as served")
        bars.set_yticks(range(len(last)), [row.task for row in last], fontsize=7)
    lines.set(xscale="log", xlabel="tokens of the prompt", ylabel="mean score of all tasks, %", ylim=(0, 102))
    plain_ticks(lines.xaxis, contexts)
    bars.set(xlabel="score, %, with 95 % intervals")
    put_legend(bars)
    save_figure(figure, path)
