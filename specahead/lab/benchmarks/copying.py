"""`specahead bench copy`: decoding with prompt lookup, alone and before a draft model is asked, beside plain decoding.

The verifier as the target service has it, with the draft in it, in one process and without gRPC. What it says is
dictated, whatever the model makes of it, so that any model says just the text of a row: 500 tokens of its context, say.
Prompts are not counted: time and tokens count from where all sessions have said a few.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draft_service.drafter import Drafter
from specahead import models
from specahead.config import Speculation, TargetSettings
from specahead.config.speculation import READ_AT_ONCE
from specahead.engine.loading.model import LoadedModel, default_device, load_model, resolve_dtype
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.model_runner import ModelRunner
from specahead.sparsity.served_plan import load_served_plan
from specahead.wire.messages import Exactness, Open
from target_service.draft_in_target import StepsByTurns
from target_service.verifier import Verifier
from target_service.verify_step import VerifyResult, VerifyRound, VerifyStep

LEAD = 8  # tokens of what is copied that the prompt ends with
SAID = 8  # tokens of each session, from which on time counts


@dataclass(frozen=True)
class Dictation:
    """What sessions of a row are given and what they say."""

    name: str
    prompt: list[int]
    said: list[int]


@dataclass(frozen=True)
class Proposer:
    """Who proposes. settings: of the target, beside its models and sizes."""

    name: str
    settings: dict[str, Any]


PLAIN, LOOKUP = Proposer("none", {"draft": "none"}), Proposer("lookup", {"draft": "lookup"})


@dataclass(frozen=True)
class CopyRow:
    """milliseconds: a token of all sessions. faster: than without proposals. rounds, accepted: of a session, the tokens
    that were proposed and are right; proposed: share of the rounds that had a proposal.
    """

    text: str
    sessions: int
    proposer: str
    milliseconds: float
    faster: float
    rounds: float
    proposed: float
    accepted: float


def dictations(text: list[int], context: int, tokens: int, vocab: int) -> list[Dictation]:
    """Return the texts of the rows. text: at least context + tokens tokens."""
    at, rng = context // 3, random.Random(0)
    again = text[: context - LEAD] + text[at - LEAD : at]
    return [
        Dictation("copied from the context", again, text[at : at + tokens]),
        Dictation("what the text goes on with", text[:context], text[context : context + tokens]),
        Dictation("random tokens", text[:context], [rng.randrange(vocab) for _ in range(tokens)]),
    ]


def measure(
    runners: list[ModelRunner], settings: TargetSettings, text: Dictation, sessions: int, clock: Callable[[], float]
) -> tuple[float, dict[str, int]]:
    """Have so many sessions say a text at once; return the seconds of each token, and the counters. runners: of the
    target, and of a draft if there is one.
    """
    plan = load_served_plan(settings.plan_file, 0.0, *settings.pair)
    verifier = Verifier(runners[0], plan, settings)
    steps: Any = verifier
    if settings.draft_in_target:
        steps = StepsByTurns(verifier, Drafter(runners[1], plan, settings.own_draft))
    for number in range(sessions):
        lengths = len(text.prompt), len(text.said)
        request = Open(str(number), text.prompt, *lengths, [], Sampling(temperature=0.0), Exactness.EXACT)
        verifier.admission.open(request, lambda event: None)
    seconds, counted = 0.0, 0
    while True:
        running = verifier.admission.running.values()
        left = sum(len(text.prompt) + len(text.said) - len(session.tokens) for session in running)
        counts = counted > 0 or (running and all(len(each.tokens) >= len(text.prompt) + SAID for each in running))
        counted = counted or (left if counts else 0)
        began = clock()
        if (step := steps.plan_step()) is None:
            break
        result = steps.execute(step)
        if isinstance(step, VerifyStep) and isinstance(result, VerifyResult):
            for item, output in zip(step.rounds, result.outputs, strict=True):
                output.verdict = dictated(item, text)
        steps.finish_step(step, result)
        seconds += clock() - began if counts else 0.0
    verifier.admission.release_closed()
    return seconds / counted, verifier.counters


def dictated(item: VerifyRound, text: Dictation) -> tuple[int, int]:
    """Return the verdict on a round of a session that says this text: the tokens accepted, and the one behind them."""
    left = text.said[len(item.session.tokens) - len(text.prompt) :]
    accepted = 0
    while accepted < min(len(item.proposed), len(left) - 1) and item.proposed[accepted] == left[accepted]:
        accepted += 1
    return accepted, left[accepted]


def run(flags: argparse.Namespace) -> None:
    """Print the table, and write it to the JSON file if one is named. Raises ValueError for too short a text."""
    text = load_tokenizer(flags.target).encode(Path(flags.text).read_text(encoding="utf-8"))
    if len(text) < flags.context + flags.tokens or flags.context < 1.5 * (flags.tokens + LEAD):
        raise ValueError(
            f"{flags.text} has {len(text)} tokens, --context is {flags.context} and --tokens {flags.tokens}: their sum "
            "must be in the text, and what is copied in two thirds of the context"
        )
    if flags.tokens <= SAID + READ_AT_ONCE:  # a first round may say so many at once
        raise ValueError(f"--tokens {flags.tokens}: expected more than {SAID + READ_AT_ONCE}, so that some are timed")
    device, most = default_device(), max(flags.sessions)
    longest = flags.context + flags.tokens + 2 * flags.gamma + 32
    names = [flags.target, flags.draft] if flags.draft else [flags.target]
    loaded = [load_model(name, resolve_dtype("auto", device, name), device) for name in names]
    # Of a CPU processor time, so that what else a machine does counts for less.
    clock = time.process_time if device == "cpu" else time.perf_counter
    rows = []
    drafting = Speculation(gamma=flags.gamma, hold=0)
    proposers = [PLAIN, LOOKUP]
    if flags.draft:
        drafts = {"draft": flags.draft, "placement": "together"}
        both = drafts | {"speculation": replace(drafting, lookup=True)}
        proposers += [Proposer("draft", drafts), Proposer("lookup, draft", both)]
    sizes = {"model": flags.target, "speculation": drafting, "max_context": longest, "max_sessions": most}
    of_each = [TargetSettings(**(sizes | proposer.settings)) for proposer in proposers]
    runners = [_runners(loaded, each, most * (longest + 64)) for each in of_each]
    said = dictations(text, flags.context, flags.tokens, runners[0][0].vocab_size)
    for item, sessions in tqdm([(item, count) for count in flags.sessions for item in said], desc="generating"):
        took: list[list[float]] = [[] for _ in proposers]
        counters = [dict[str, int]() for _ in proposers]
        for _ in range(flags.repeats):
            for index, settings in enumerate(of_each):
                seconds, counters[index] = measure(runners[index], settings, item, sessions, clock)
                took[index].append(1e3 * seconds)
        plain, *_ = medians = [statistics.median(times) for times in took]
        for proposer, milliseconds, counted in zip(proposers, medians, counters, strict=True):
            rounds, drafted = counted["rounds"] + counted["plain_rounds"], counted["rounds"]
            accepted = sessions * flags.tokens - rounds  # each round adds a token of the target's own
            per_session = rounds / sessions, drafted / rounds, accepted / sessions
            rows.append(CopyRow(item.name, sessions, proposer.name, milliseconds, plain / milliseconds, *per_session))
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench copy --sessions {' '.join(map(str, flags.sessions))} --context {flags.context} "
        f"--tokens {flags.tokens} --gamma {flags.gamma} --repeats {flags.repeats}"
        + {"": "", str(models.DRAFT): " --draft"}.get(flags.draft, f" --draft {flags.draft}"),
        "models": f"{', '.join(Path(name).name for name in names)} on {device}",
    }
    print(_report(head, rows))
    if flags.json:
        content = head | {"rows": [asdict(row) for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")


def _runners(loaded: list[LoadedModel], settings: TargetSettings, kv_tokens: int) -> list[ModelRunner]:
    """Return runners for a target of these settings, and for a draft if there is one, which wait for each step: what it
    gave is replaced by what is dictated.
    """
    sizes: dict[str, Any] = {"step_queries": settings.most_drafted + 1, "most_queries": settings.widest_round}
    made = [make_runner(model, kv_tokens, 0, settings.max_context, **sizes) for model in loaded]
    for runner in made:
        runner.chains_steps = runner.chains_rounds = False
    return made


def _report(head: dict[str, str], rows: list[CopyRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    columns = f"{'a token':>9} {'faster':>7} {'rounds':>7} {'proposed':>9} {'accepted':>9}"
    lines.append(f"{'text':<28} {'sessions':>8} {'proposed by':<13} {columns}")
    for row in rows:
        lines.append(
            f"{row.text:<28} {row.sessions:>8} {row.proposer:<13} {row.milliseconds:>6.2f} ms {row.faster:>5.2f} x "
            f"{row.rounds:>7.0f} {row.proposed:>9.1%} {row.accepted:>9.0f}"
        )
    lines.append("A token: of all sessions, medians. Rounds, accepted: of a session. Proposed: rounds with a proposal.")
    return "\n".join(lines)
