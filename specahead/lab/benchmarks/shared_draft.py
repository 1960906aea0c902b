"""`specahead bench shared-draft`: what two targets lose by having one draft between them.

The services are those of `bench serve`: processes of their own, random weights, imposed acceptance. First each target
runs its sessions while the other is idle, then both do at once, in turns. Where the draft's time suffices both keep
their pace. With a GPU for each service nothing else is shared. Where targets share one they disturb each other whatever
the draft does: how much longer rounds wait for the draft is told apart, and the second target may sleep in place of
running a model, so that it loads nothing but the draft.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

from specahead.lab.benchmarks.processes import children
from specahead.lab.benchmarks.serve import most_gamma, read_speculation
from specahead.lab.benchmarks.serving.clients import MOST_PLAIN, TRIED_ROUNDS, Figures, Load, run_clients
from specahead.lab.benchmarks.serving.controls import Controls
from specahead.lab.benchmarks.serving.deployment import Deployment, Pair, Room, note
from specahead.lab.benchmarks.serving.rows import Shape

TARGETS = 2
_MARGIN = 64  # tokens of room beside prompt and output


@dataclass(frozen=True)
class SharedRow:
    """A target's runs, and means over them."""

    target: str
    others: bool
    """Whether the other target had sessions as well."""
    runs: list[float]
    """Tokens a second of each run."""
    rate: float
    """Their median."""
    draft_busy: float
    """Share of the time in which the draft's model ran."""
    round: float
    """Milliseconds of a round."""
    for_draft: float
    """Milliseconds of it that passed before the draft's proposals were here."""
    kept: float | None = None
    """Share of the rate while the other target was idle; None in that row."""
    lost: float | None = None
    """What the other target adds to for_draft, as a share of the round without it."""


def run(flags: argparse.Namespace) -> list[SharedRow]:
    """Measure, print each row as it comes, write all to the JSON file if one is named, and return them.

    Raises ValueError for flags that give nothing to measure, ChildProcessError if a service does not start.
    """
    shape, gamma = Shape.parse(flags.shape), most_gamma(read_speculation(flags.speculation))
    if flags.repeat < 1 or flags.tokens < 8 * (gamma + 1):
        raise ValueError(f"--repeat must be positive, --tokens {8 * (gamma + 1)} or more")
    print(
        f"{'target':>10} {'other':>7} {'tokens/s':>10} {'kept':>7} {'draft busy':>10} {'a round':>8} {'for draft':>9} "
        f"{'lost':>7}  runs",
        flush=True,
    )
    rows = _measure(flags, shape)
    print(
        "Kept: of the tokens a second of the same target while the other one was idle. A round, and what of it passes\n"
        "until the draft's proposals are here: ms. Lost: what of that the other target adds, of a round without it."
    )
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def _measure(flags: argparse.Namespace, shape: Shape) -> list[SharedRow]:
    """Start the services and return their rows."""
    room = Room(shape.sessions, shape.context + flags.tokens + _MARGIN)
    with tempfile.TemporaryDirectory() as folder, children() as start:
        deployment = Deployment(start, Path(folder), _pair(flags), room, lambda: flags.part_limit, timed=True)
        clients = _Clients(flags, shape, deployment.targets, [over.grpc for over in deployment.start()])
        deployment.wait_until_prepared()
        deployment.control(Controls(foresight=flags.foresight))
        clients.wait_until_drafted()
        runs: dict[tuple[bool, str], list[Figures]] = {}
        for repeat in range(flags.repeat):
            for loaded in (*([name] for name in deployment.targets), deployment.targets):
                for name, figures in clients.run(loaded, flags.tokens, repeat).items():
                    runs.setdefault((len(loaded) > 1, name), []).append(figures)
        alone: dict[str, SharedRow] = {}
        rows = []
        for (others, name), measured in sorted(runs.items()):
            row = _row(deployment, name, others, measured)
            if others:
                before = alone[name]
                lost = (row.for_draft - before.for_draft) / before.round
                row = replace(row, kept=row.rate / before.rate, lost=lost)
            else:
                alone[name] = row
            rows.append(row)
            _print(row)
        note("stopping the services")
        return rows


def _row(deployment: Deployment, target: str, others: bool, runs: list[Figures]) -> SharedRow:
    """Return a target's row, without what compares it. Raises ValueError for a run that was too short."""
    rates = [each.tokens_a_second for each in runs]
    if not all(rates):
        raise ValueError(f"{target}: at no moment did all its sessions generate; give more --tokens")
    seen = [deployment.breakdown(each.name, target, "draft") for each in runs]
    parts = [each.parts for each in seen]
    return SharedRow(
        target=target,
        others=others,
        runs=rates,
        rate=median(rates),
        draft_busy=1 - fmean(each.draft_idle for each in seen),
        round=fmean(each.whole for each in parts),
        for_draft=fmean(each.wire + each.others_drafting + each.draft_host + each.draft_gpu for each in parts),
    )


def _pair(flags: argparse.Namespace) -> Pair:
    return Pair(
        target_shape=flags.target_shape,
        draft_shape=flags.draft_shape,
        acceptance=flags.acceptance,
        budget=flags.budget,
        confirmation=flags.confirmation,
        speculation=read_speculation(flags.speculation),
        targets=TARGETS,
        slept={"target-2": flags.second_sleeps} if flags.second_sleeps else {},
    ).on(flags.gpus)


def _print(row: SharedRow) -> None:
    kept, lost = ("" if share is None else f"{share:.1%}" for share in (row.kept, row.lost))
    other, runs = "loaded" if row.others else "idle", " ".join(f"{rate:.0f}" for rate in row.runs)
    print(
        f"{row.target:>10} {other:>7} {row.rate:>10.1f} {kept:>7} {row.draft_busy:>10.1%} {row.round:>8.2f} "
        f"{row.for_draft:>9.2f} {lost:>7}  {runs}",
        flush=True,
    )


class _Clients:
    """The clients of all targets. addresses: the endpoints over each target."""

    def __init__(
        self, flags: argparse.Namespace, shape: Shape, targets: Sequence[str], addresses: Sequence[str]
    ) -> None:
        self._flags, self._shape = flags, shape
        self._addresses = dict(zip(targets, addresses, strict=True))

    def run(self, targets: Sequence[str], tokens: int, repeat: int) -> dict[str, Figures]:
        """Run the sessions of these targets at once and return what their clients saw. Raises grpc.RpcError."""
        with ThreadPoolExecutor(len(targets)) as pool:
            name = f"{'+'.join(targets)} {tokens} {repeat}"
            jobs = {target: pool.submit(self._run, name, target, tokens, repeat) for target in targets}
            return {target: job.result() for target, job in jobs.items()}

    def _run(self, name: str, target: str, tokens: int, repeat: int) -> Figures:
        sessions, context = self._shape.sessions, self._shape.context
        name, first = f"{name} {target}", list(self._addresses).index(target) * sessions
        load = Load(
            name, sessions, context, tokens, self._flags.exactness, max(0, repeat), self._flags.part_limit, first
        )
        return run_clients(self._addresses[target], load)

    def wait_until_drafted(self) -> None:
        """Have all prompts read, and wait until hardly a round is decoded plainly. Raises ValueError if none is."""
        limit, repeat = time.monotonic() + self._flags.part_limit, -1
        tokens = TRIED_ROUNDS * (most_gamma(read_speculation(self._flags.speculation)) + 1)
        note("reading the prompts")
        while True:
            figures = self.run(list(self._addresses), tokens, repeat)
            worst = max(each.plain_share for each in figures.values())
            if worst <= MOST_PLAIN:
                return
            if time.monotonic() > limit:
                raise ValueError(f"{worst:.0%} of a target's rounds are still not drafted")
            repeat -= 1
