"""`specahead bench shared-draft`: what two targets lose by having one draft between them.

The services are those of `bench serve`: processes of their own, random weights, imposed acceptance. First each target
runs its sessions while the other is idle, then both do at once, in turns. Where the draft's time suffices both keep
their pace. With a GPU for each service nothing else is shared; where targets share one, `--two-drafts` tells what that
alone costs.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.processes import children
from benchmarks.serving.clients import MOST_PLAIN, TRIED_ROUNDS, Figures, Load, run_clients
from benchmarks.serving.controls import Controls
from benchmarks.serving.deployment import Deployment, Pair, Room, note
from benchmarks.serving.rows import Shape

TARGETS = 2
_MARGIN = 64  # tokens of room beside prompt and output


@dataclass(frozen=True)
class SharedRow:
    """A target's runs. drafts: of both targets together. others: whether the other target had sessions as well.

    runs: tokens a second of each run; rate: their median. kept: of the rate of the same target with its draft for
    itself, None in that row. draft_busy: the share of the time in which the draft's model ran, of the last run.
    """

    target: str
    drafts: int
    others: bool
    runs: list[float]
    rate: float
    kept: float | None
    draft_busy: float


def run(flags: argparse.Namespace) -> list[SharedRow]:
    """Measure, print each row as it comes, write all to the JSON file if one is named, and return them.

    Raises ValueError for flags that give nothing to measure, ChildProcessError if a service does not start.
    """
    shape = Shape.parse(flags.shape)
    if flags.repeat < 1 or flags.tokens < 8 * (flags.gamma + 1):
        raise ValueError(f"--repeat must be positive, --tokens {8 * (flags.gamma + 1)} or more with this gamma")
    services = TARGETS + 1 + flags.two_drafts
    if flags.gpus and len(flags.gpus) != services:
        raise ValueError(f"--gpus: {len(flags.gpus)} devices for {services} services, two of them targets")
    print(
        f"{'target':>10} {'drafts':>6} {'other':>7} {'tokens/s':>10} {'kept':>7} {'draft busy':>10}  runs", flush=True
    )
    rows = _measure(flags, shape, 1)
    if flags.two_drafts:
        rows += _measure(flags, shape, 2, {row.target: row.rate for row in rows if not row.others})
    print("kept: of the tokens a second of the same target while the other one was idle and the draft was its own.")
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def _measure(
    flags: argparse.Namespace, shape: Shape, drafts: int, alone: dict[str, float] | None = None
) -> list[SharedRow]:
    """Start services with so many drafts and return their rows. alone: rates that were measured before, by target."""
    room = Room(shape.sessions, shape.context + flags.tokens + _MARGIN, shape.context)
    with tempfile.TemporaryDirectory() as folder, children() as start:
        deployment = Deployment(
            start, Path(folder), _pair(flags, drafts), room, True, False, lambda: flags.part_limit, TARGETS, drafts
        )
        clients = _Clients(flags, shape, deployment.targets, deployment.start(with_draft=True))
        deployment.control(Controls(flags.waves, flags.ahead == "yes", flags.branches, foresight=flags.foresight))
        clients.wait_until_drafted()
        runs: dict[tuple[bool, str], list[Figures]] = {}
        ways = [[name] for name in deployment.targets] if alone is None else []
        for repeat in range(flags.repeat):
            for loaded in (*ways, deployment.targets):
                for name, figures in clients.run(loaded, flags.tokens, repeat).items():
                    runs.setdefault((len(loaded) > 1, name), []).append(figures)
        alone, rows = dict(alone or {}), []
        for (others, name), measured in sorted(runs.items()):
            draft = deployment.drafts[deployment.targets.index(name) % drafts]
            idle = deployment.breakdown(measured[-1].name, name, draft).draft_idle
            rates = [each.tokens_a_second for each in measured]
            if not all(rates):
                raise ValueError(f"{name}: at no moment did all {shape.sessions} sessions generate; give more --tokens")
            row = SharedRow(name, drafts, others, rates, median(rates), None, 1 - idle)
            if others:
                row = SharedRow(**asdict(row) | {"kept": row.rate / alone[name]})
            else:
                alone[name] = row.rate
            rows.append(row)
            _print(row)
        note("stopping the services")
        return rows


def _pair(flags: argparse.Namespace, drafts: int) -> Pair:
    names = ["target-1", "target-2", *(["draft"] if drafts == 1 else ["draft-1", "draft-2"])]
    return Pair(
        flags.target_shape,
        flags.draft_shape,
        flags.gamma,
        flags.acceptance,
        flags.budget,
        flags.read_share,
        flags.branches,
        gpus=dict(zip(names, flags.gpus, strict=False)),  # a single draft is on the first one's device
    )


def _print(row: SharedRow) -> None:
    kept = "" if row.kept is None else f"{row.kept:.3f}"
    other, runs = "loaded" if row.others else "idle", " ".join(f"{rate:.0f}" for rate in row.runs)
    print(
        f"{row.target:>10} {row.drafts:>6} {other:>7} {row.rate:>10.1f} {kept:>7} {row.draft_busy:>10.1%}  {runs}",
        flush=True,
    )


class _Clients:
    """Those of all targets. addresses: of the endpoints over each target."""

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
        note("reading the prompts")
        while True:
            figures = self.run(list(self._addresses), TRIED_ROUNDS * (self._flags.gamma + 1), repeat)
            worst = max(each.plain_share for each in figures.values())
            if worst <= MOST_PLAIN:
                return
            if time.monotonic() > limit:
                raise ValueError(f"{worst:.0%} of a target's rounds are still not drafted")
            repeat -= 1
