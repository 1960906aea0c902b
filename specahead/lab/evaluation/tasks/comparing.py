"""`specahead evaluate acceptance` of several servers: what each accepts, and how fast it decodes, on the same prompts.

The servers take turns, so that they may share a GPU: only one of them is asked at a time. They change after each group
of requests that are asked at once, and each repeat begins with another one, so that none is favoured. No server has
read a prompt before, since what a draft takes to read prompts is part of what a choice of its tokens costs.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from statistics import geometric_mean, mean

from tqdm import tqdm

from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.endpoint import WARM_UP_PROMPT, WARM_UP_TOKENS, Endpoint, Streamed
from specahead.lab.evaluation.tasks.asking import Question, Way, make_sample, prompt_ids
from specahead.lab.evaluation.tasks.command import settings_of
from specahead.lab.evaluation.tasks.intervals import bootstrap_ratio
from specahead.lab.results import align, write_json

Prompt = list[int]


@dataclass(frozen=True)
class Measured:
    """What one server gave in a row of the table."""

    tokens_a_second: float
    """Of all requests at once, from when they were sent to the last token; the mean over repeats."""
    by_repeat: tuple[float, ...]
    """The same in each repeat."""
    decoding: float
    """The same between first and last tokens."""
    accepted: float | None
    """Accepted tokens a round, rounds without proposals included; None: the server does not say."""
    plain_rounds: float | None
    """The share of rounds without proposals."""
    kv_read: float | None
    """The mean share of the KV that verification read."""
    audited_tokens: int


@dataclass(frozen=True)
class ComparedRow:
    """One task, context, temperature and exactness, with so many requests at once."""

    task: str
    context: int
    temperature: float
    exactness: str
    at_once: int
    servers: tuple[Measured, ...]
    """In the order of --url."""
    over_best: tuple[float, float, float]
    """Tokens a second of the first server over those of the fastest other, and the bootstrap interval over repeats."""


def compare(flags: argparse.Namespace, questions: Sequence[Question], ways: Sequence[Way]) -> None:
    """Ask the servers by turns, print the table, and write the JSON file.

    Raises ValueError for flags that do not fit, for servers of different models and for refused requests, OSError where
    a server does not answer.
    """
    _check(flags)
    if not questions:
        raise ValueError("--tasks and --text name nothing to ask")
    servers = [Endpoint(url, flags) for url in flags.url]
    for server in servers:
        if server.model != servers[0].model:
            raise ValueError(
                f"{server.url} serves {server.model}, {servers[0].url} serves {servers[0].model}: expected servers of "
                "the same model"
            )
    tokenizer, kinds = load_tokenizer(flags.tokenizer), dict[tuple[str, int], list[Prompt]]()
    for question in questions:
        sample, _ = make_sample(tokenizer, question, flags.generated, flags.chat, flags.seed)
        prompt = prompt_ids(tokenizer, question.made_by, sample.prompt, flags.chat)
        kinds.setdefault((question.task, question.context), []).append(prompt)
    rows: list[ComparedRow] = []
    for row in _measure(flags, servers, kinds, ways):
        rows.append(row)
        write_json(flags.json, {"settings": settings_of(flags), "rows": rows})
    for number, server in enumerate(servers, 1):
        print(f"server {number}: {server.url}")
    print(to_text(rows))


def _check(flags: argparse.Namespace) -> None:
    if flags.plan or flags.resume:
        raise ValueError("--plan and --resume are for one server: name one --url")
    if min(*flags.at_once, flags.repeats, flags.samples, *flags.contexts) < 1 or flags.generated < 2:
        raise ValueError("--at-once, --repeats, --samples and --contexts must be positive, --generated at least 2")


def _measure(
    flags: argparse.Namespace,
    servers: Sequence[Endpoint],
    kinds: Mapping[tuple[str, int], list[Prompt]],
    ways: Sequence[Way],
) -> Iterator[ComparedRow]:
    """Give the rows as they are measured."""
    _warm_up(servers, max(kinds.values(), key=lambda prompts: len(prompts[0])), ways, flags.at_once)
    cells = list(product(ways, flags.at_once))
    with tqdm(total=len(kinds) * len(cells) * flags.repeats * len(servers), desc="asking", unit="group") as progress:
        for (task, context), prompts in kinds.items():
            if len(prompts) < flags.samples:
                raise ValueError(f"{task}: there are {len(prompts)} prompts, but its rows need {flags.samples}")
            unread = iter(prompts)
            for way, at_once in cells:
                groups = [list(islice(unread, at_once)) for _ in range(flags.repeats)]
                answers: list[list[list[Streamed]]] = [[] for _ in servers]
                for repeat, turn in product(range(flags.repeats), range(len(servers))):
                    chosen = (repeat + turn) % len(servers)
                    asked = _ask(servers[chosen], groups[repeat], flags.generated, way, flags.seed + repeat)
                    answers[chosen].append(asked)
                    progress.update()
                measured = tuple(map(_measured, answers))
                best = max(measured[1:], key=lambda each: each.tokens_a_second)
                over = bootstrap_ratio(measured[0].by_repeat, best.by_repeat)
                assert over is not None  # no speed is 0
                yield ComparedRow(task, context, way.temperature, way.exactness, at_once, measured, over)


def _ask(server: Endpoint, prompts: Sequence[Prompt], count: int, way: Way, seed: int = 0) -> list[Streamed]:
    fields = {"exactness": way.exactness} if way.exactness else {}
    return server.generate_at_once(prompts, count, way.temperature, seed=seed, **fields)


def _warm_up(servers: Sequence[Endpoint], prompts: Sequence[Prompt], ways: Sequence[Way], at_once: list[int]) -> None:
    """Let each server compile and capture what it does so at its first requests of each kind."""
    for server, way, count in product(servers, ways, at_once):
        _ask(server, [prompt[-WARM_UP_PROMPT:] for prompt in prompts[:count]], WARM_UP_TOKENS, way)


def _measured(groups: Sequence[Sequence[Streamed]]) -> Measured:
    """Return what the answers of a server come to. groups: the answers of each repeat."""
    answers = [answer for group in groups for answer in group]
    decoding = [sum(answer.tokens_a_second for answer in group) for group in groups]
    if not all(decoding):
        raise ValueError("an answer came in one piece, so that its speed is not known: --generated should be greater")
    rates = tuple(sum(len(each.tokens) for each in group) / _seconds(group) for group in groups)
    said = [answer.speculation for answer in answers if answer.speculation is not None]
    plain_rounds = sum(each["plain_rounds"] for each in said)
    rounds = max(1, plain_rounds + sum(each["rounds"] for each in said))
    return Measured(
        tokens_a_second=mean(rates),
        by_repeat=rates,
        decoding=mean(decoding),
        accepted=sum(each["accepted"] for each in said) / rounds if said else None,
        plain_rounds=plain_rounds / rounds if said else None,
        kv_read=mean(each["kv_read_fraction"] for each in said) if said else None,
        audited_tokens=sum(each["audited_tokens"] for each in said),
    )


def _seconds(group: Sequence[Streamed]) -> float:
    return max(answer.last for answer in group) - min(answer.sent for answer in group)


def to_text(rows: Sequence[ComparedRow]) -> str:
    """Return the table, with what the last column comes to."""
    numbers = range(1, len(rows[0].servers) + 1)
    head = ["task", "exactness", "context", "temperature", "at once"]
    head += [f"{number}: {name}" for number in numbers for name in ("accepted", "KV read", "tokens/s", "decoding")]
    over = [row.over_best[0] for row in rows]
    # A row is short, so that the best of several others is often the luckiest one: the means of all rows say more.
    means = [geometric_mean(row.servers[number - 1].tokens_a_second for row in rows) for number in numbers]
    last = f"1 over the best other, geometric mean: {geometric_mean(over):.3f}; least {min(over):.3f}"
    last += f"\ntokens/s, geometric mean: {', '.join(f'{each:.1f}' for each in means)}"
    return "\n".join([align([[*head, "1 over best", "95 %"], *map(_cells, rows)]), last])


def _cells(row: ComparedRow) -> list[str]:
    cells = [row.task, row.exactness or "not said", str(row.context), f"{row.temperature:g}", str(row.at_once)]
    for each in row.servers:
        cells.append("" if each.accepted is None else f"{each.accepted:.2f}")
        cells.append("" if each.kv_read is None else f"{100 * each.kv_read:.0f} %")
        cells += [f"{each.tokens_a_second:.1f}", f"{each.decoding:.1f}"]
    over, low, high = row.over_best
    return [*cells, f"{over:.3f}", f"{low:.3f} to {high:.3f}"]
