"""`specahead bench copy`: decoding with prompt lookup (`--draft ngram`) beside plain decoding, on a target alone.

The verifier as the target service has it, in one process and without gRPC. What it says is dictated, whatever the model
makes of it, so that any model says just the text of a row: 500 tokens of its context, say. Prompts are not counted.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from config import TargetSettings
from engine.loading.model import default_device, load_model, resolve_dtype
from engine.loading.runner import make_runner
from engine.loading.tokenizer import load_tokenizer
from engine.model_runner import ModelRunner
from engine.sampling import Sampling
from sparsity.methods import load_served_plan
from target_service.planning import VerifyRound
from target_service.verifier import Verifier
from wire.messages import Exactness, Open

LEAD = 8  # tokens of what is copied that the prompt ends with
PROPOSERS = ("none", "ngram")


@dataclass(frozen=True)
class Dictation:
    """What sessions of a row are given and what they say."""

    name: str
    prompt: list[int]
    said: list[int]


@dataclass(frozen=True)
class CopyRow:
    """plain, looked_up: milliseconds a token of all sessions, without and with prompt lookup. rounds, accepted: of a
    session with it; proposed: share of its rounds that had a proposal.
    """

    text: str
    sessions: int
    plain: float
    looked_up: float
    rounds: float
    proposed: float
    accepted: float

    @property
    def speedup(self) -> float:
        """How many times as fast prompt lookup is."""
        return self.plain / self.looked_up


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
    runner: ModelRunner, settings: TargetSettings, text: Dictation, sessions: int, clock: Callable[[], float]
) -> tuple[float, dict[str, int]]:
    """Have so many sessions say a text at once; return the seconds from the end of all prompts, and the counters."""
    plan = load_served_plan(settings.plan_file, 0.0, "", settings.model)
    verifier = Verifier(runner, plan, settings)
    for number in range(sessions):
        lengths = len(text.prompt), len(text.said)
        request = Open(str(number), text.prompt, *lengths, [], Sampling(temperature=0.0), Exactness.EXACT)
        verifier.admission.open(request, lambda event: None)
    seconds = 0.0
    while (step := verifier.plan_step()) is not None:
        began = clock()
        result = verifier.execute(step)
        for item, output in zip(step.rounds, result.outputs, strict=True):
            output.verdict = dictated(item, text)
        verifier.finish_step(step, result)
        seconds += 0 if step.prefills else clock() - began
    verifier.admission.release_closed()
    return seconds, verifier.counters


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
    device = default_device()
    most = max(flags.sessions)
    longest = flags.context + flags.tokens + 2 * flags.gamma + 2
    model = load_model(flags.target, resolve_dtype("auto", device), device)
    runner = make_runner(model, most * (longest + 32), 0, longest, (), step_queries=flags.gamma + 1)
    # Of a CPU processor time, so that what else a machine does counts for less.
    clock = time.process_time if device == "cpu" else time.perf_counter
    said = dictations(text, flags.context, flags.tokens, runner.vocab_size)
    cases = [(item, sessions) for sessions in flags.sessions for item in said]
    rows = []
    for item, sessions in tqdm(cases, desc="generating"):
        took: dict[str, list[float]] = {proposer: [] for proposer in PROPOSERS}
        for proposer in PROPOSERS * flags.repeats:
            settings = TargetSettings(model=flags.target, draft=proposer, gamma=flags.gamma, max_context=longest)
            seconds, counted = measure(runner, settings, item, sessions, clock)
            took[proposer].append(1e3 * seconds / flags.tokens / sessions)
        rounds = counted["rounds"] + counted["plain_rounds"]
        rows.append(
            CopyRow(
                item.name,
                sessions,
                plain=statistics.median(took["none"]),
                looked_up=statistics.median(took["ngram"]),
                rounds=rounds / sessions,
                proposed=counted["rounds"] / rounds,
                accepted=counted["ngram_accepted_tokens"] / sessions,
            )
        )
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench copy --sessions {' '.join(map(str, flags.sessions))} --context {flags.context} "
        f"--tokens {flags.tokens} --gamma {flags.gamma} --repeats {flags.repeats}",
        "target": f"{Path(flags.target).name} on {device}",
    }
    print(_report(head, rows))
    if flags.json:
        content = head | {"rows": [asdict(row) | {"speedup": row.speedup} for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")


def _report(head: dict[str, str], rows: list[CopyRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    columns = f"{'plain':>9} {'ngram':>9} {'faster':>7} {'rounds':>7} {'proposed':>9} {'accepted':>9}"
    lines.append(f"{'text':<28} {'sessions':>8} {columns}")
    for row in rows:
        lines.append(
            f"{row.text:<28} {row.sessions:>8} {row.plain:>6.2f} ms {row.looked_up:>6.2f} ms {row.speedup:>5.2f} x "
            f"{row.rounds:>7.0f} {row.proposed:>9.1%} {row.accepted:>9.0f}"
        )
    lines.append("Plain, ngram: a token of all sessions, medians. Rounds, accepted: of a session with ngram.")
    return "\n".join(lines)
