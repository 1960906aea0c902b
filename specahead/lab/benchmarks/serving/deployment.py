"""The services of a benchmark: models of random weights in the shapes of real ones, processes, no Ray."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from tqdm import tqdm

from orchestrator.cluster.directory import Directory, name_services, side_of
from orchestrator.cluster.service_status import ControlLine
from specahead.config.speculation import KVCacheDtype, Quantization
from specahead.lab.benchmarks.model_folders import write_model
from specahead.lab.benchmarks.processes import (
    Endpoints,
    Start,
    free_addresses,
    launch_endpoints,
    port_of,
    wait_for_endpoints,
    wait_for_service,
)
from specahead.lab.benchmarks.serving.breakdown import Breakdown, break_down, time_shares
from specahead.lab.benchmarks.serving.clients import SETTLED
from specahead.lab.benchmarks.serving.timeline import Timeline, read_timeline, timeline_of_draft
from specahead.lab.benchmarks.shapes import SHAPES
from specahead.lab.evaluation.plans import save_plan
from specahead.sparsity.plan import uniform_plan
from specahead.wire.access import PeerAccess
from specahead.wire.messages import ServiceStatus

_SERVICE = "specahead.lab.benchmarks.serving.service"
_TIMELINE_SECONDS = 3.0  # until a service that has become idle has written its timeline


@dataclass(frozen=True)
class Pair:
    """The models of a benchmark, where they run, and what is imposed on them."""

    target_shape: str
    """A name in SHAPES."""
    draft_shape: str
    acceptance: float
    """Probability that a drafted token is kept."""
    budget: float
    """Share of the KV that approximate sessions read."""
    draft: str = "model"
    """model, or another value of the setting `draft`: self, lookup, auto, none."""
    together: bool = False
    """Whether each target runs the draft model itself; else one draft service serves all targets."""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """Overrides the services' own choices."""
    targets: int = 1
    quantization: Quantization = "none"
    """How the targets hold their weights."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How the targets hold their KV."""
    flags: tuple[str, ...] = ()
    """More flags of all services."""
    tensor_parallel_size: int = 1
    """Ranks of each target."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The devices of each service by name, one for each rank of a target; empty: as torch finds."""

    @property
    def names(self) -> list[str]:
        """All services, targets first."""
        with_service = self.draft == "model" and not self.together
        return [*name_services("target", self.targets), *(["draft"] if with_service else [])]

    @property
    def gpu_counts(self) -> dict[str, int]:
        """How many GPUs each service takes, by name."""
        return {name: self.tensor_parallel_size if side_of(name) == "target" else 1 for name in self.names}

    def on(self, devices: Sequence[int]) -> "Pair":
        """Return the pair with its services on these devices, in the order of `names`; without devices, as it is.

        Raises ValueError for another number of devices than the services take, and for a target with one of them twice.
        """
        if not devices:
            return self
        counts, left = self.gpu_counts, iter(devices)
        gpus = {name: tuple(itertools.islice(left, count)) for name, count in counts.items()}
        if len(devices) != sum(counts.values()) or any(len(set(own)) != counts[name] for name, own in gpus.items()):
            expected = ", ".join(f"{count} for {name}" for name, count in counts.items())
            raise ValueError(f"GPUs {' '.join(map(str, devices))}: expected {expected}, each once in a target")
        return replace(self, gpus=gpus)


@dataclass(frozen=True)
class Room:
    """What each target has room for."""

    sessions: int
    context: int
    """Tokens of a session's prompt and output."""


class Deployment:
    """Targets, a draft for all of them, and endpoints over all targets, in a folder of their own."""

    def __init__(self, start: Start, folder: Path, pair: Pair, room: Room, seconds: float, timed: bool = False) -> None:
        """start: starts a process (processes.py). seconds: how long each start may take. timed: whether the
        services write timelines.
        """
        self.folder, self.pair = folder, pair
        self._start, self._room, self._seconds = start, room, seconds
        self._timed = timed
        self._models, self._plan = _write_pair(folder, pair, room.context + 256)
        self.targets = name_services("target", pair.targets)
        self._addresses = dict(zip(pair.names, free_addresses(len(pair.names)), strict=True))
        self._launched: dict[str, float] = {}
        self.start_seconds: dict[str, float] = {}  # from a service's start until it served, by name

    def start(self) -> Endpoints:
        """Start the services and the endpoints over them; return the endpoints' addresses.

        All load at once. The draft stays away from its targets until `attach_draft`. Raises ChildProcessError for a
        process that does not start in time.
        """
        processes = {name: self._launch(name) for name in self.targets}
        of_targets = {gpu for name in self.targets for gpu in self.pair.gpus.get(name, ())}
        apart = not of_targets.intersection(self.pair.gpus.get("draft", ()))
        if "draft" in self._addresses and apart:
            processes["draft"] = self._launch("draft")
        began, endpoints = time.monotonic(), self._launch_endpoints()
        for name, process in processes.items():
            self._wait_for(name, process)
        if "draft" in self._addresses and not apart:  # it takes the memory that the targets leave
            self._wait_for("draft", self._launch("draft"))
        addresses = wait_for_endpoints(endpoints, self._seconds)
        note(f"clients are served after {time.monotonic() - began:.1f} s")
        return addresses

    def wait_until_prepared(self) -> None:
        """Wait until the services are ready for all kinds of steps, which they become while nobody asks for anything.

        Raises TimeoutError if that takes too long.
        """
        began, limit = time.monotonic(), self._seconds
        while not all(map(self._is_prepared, self.start_seconds)):
            if time.monotonic() - began > limit:
                raise TimeoutError(f"after {limit:.0f} s the services are still not ready for all kinds of steps")
            time.sleep(0.2)
        note(f"ready for all kinds of steps {time.monotonic() - began:.1f} s later")

    def _status(self, name: str) -> ServiceStatus | None:
        """Return the status of a service, None while it is too busy to answer, as while it prepares steps."""
        try:
            return asyncio.run(ControlLine(name, Directory(self._addresses), PeerAccess()).status())
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            raise

    def _is_prepared(self, name: str) -> bool:
        status = self._status(name)
        return status is not None and not status.gauges["unprepared_steps"]

    def _is_attached(self, name: str) -> bool:
        status = self._status(name)
        return status is None or bool(status.attached)

    def attach_draft(self, attached: bool) -> None:
        """Let the draft draft from the next session on, or no longer."""
        self._attached.touch() if attached else self._attached.unlink(missing_ok=True)
        while not attached and "draft" in self._addresses and self._is_attached("draft"):
            time.sleep(0.05)

    def timeline(self, name: str) -> Path:
        """Return where a service writes its timeline."""
        return self.folder / f"{name}.timeline"

    def breakdown(self, run: str, target: str, draft: str) -> Breakdown:
        """Return what the rounds of a run waited for that this target served. draft: its draft; empty if it had none.

        Raises ValueError if a service has not written when its steps ran.
        """
        limit = time.monotonic() + _TIMELINE_SECONDS
        while True:
            drafted = read_timeline(self._timeline_of(draft, target)) if draft else None
            try:
                return break_down(
                    read_timeline(self.timeline(target)), drafted, run, SETTLED, self.pair.together and bool(draft)
                )
            except ValueError:
                if time.monotonic() > limit:
                    raise
            time.sleep(0.1)

    def time_shares(self, began: float) -> dict[str, float]:
        """Return where the time of the first target went since `began`, by time.perf_counter, once it is idle."""
        time.sleep(_TIMELINE_SECONDS)
        target, draft = self.targets[0], "draft" if self.pair.draft == "model" else ""
        drafted = read_timeline(self._timeline_of(draft, target)) if draft else Timeline()
        return time_shares(read_timeline(self.timeline(target)), drafted, began)

    def _timeline_of(self, draft: str, target: str) -> Path:
        return timeline_of_draft(self.timeline(target)) if self.pair.together else self.timeline(draft)

    @property
    def _attached(self) -> Path:
        return self.folder / "attached"

    def _launch_endpoints(self) -> "subprocess.Popen[str]":
        named = ("--target", self._models["target"], "--draft", self._models["draft"], "--plan", self._plan)
        limits = ("--max-model-len", str(self._room.context), "--timeouts", '{"shutdown": 0, "connect": 0}')
        over = ",".join(self._addresses[name] for name in self.targets)
        return launch_endpoints(self._start, *named, *limits, "--target-address", over)

    def _launch(self, name: str) -> "subprocess.Popen[str]":
        side, sessions = side_of(name), self._room.sessions
        command = [_SERVICE, side, "--model", self._models[side], "--plan", self._plan, "--load-format", "dummy"]
        command += ["--port", port_of(self._addresses[name]), "--max-model-len", str(self._room.context)]
        command += ["--logging", '{"level": "warning"}', "--attached-while", str(self._attached)]
        command += ["--timeline", str(self.timeline(name))] if self._timed else []
        if side == "target":
            command += self._target_flags(name)
        else:
            sessions *= len(self.targets)
            command += [word for target in self.targets for word in ("--target", self._addresses[target])]
        command += ["--speculation", json.dumps(dict(self.pair.speculation))] if self.pair.speculation else []
        command += ["--max-sessions", str(sessions), *self.pair.flags]
        self._launched[name] = time.monotonic()
        return self._start(*command, stdout=subprocess.PIPE, gpus=self.pair.gpus.get(name, ()))

    def _target_flags(self, name: str) -> list[str]:
        pair = self.pair
        own = ["--acceptance", str(pair.acceptance)]
        own += ["--draft", self._models["draft"] if pair.draft == "model" else pair.draft]
        own += ["--quantization", pair.quantization, "--kv-cache-dtype", pair.kv_cache_dtype]
        own += ["--tensor-parallel-size", str(pair.tensor_parallel_size)]
        own += ["--placement", "together"] if pair.together else []
        return own

    def _wait_for(self, name: str, process: "subprocess.Popen[str]") -> None:
        wait_for_service(process, self._seconds)
        self.start_seconds[name] = time.monotonic() - self._launched[name]
        note(f"{name} serves after {self.start_seconds[name]:.1f} s")


def note(text: str) -> None:
    """Write what is being done to stderr, with the time."""
    tqdm.write(f"{time.strftime('%H:%M:%S')} {text}", sys.stderr)  # above a clock, if there is one


def _write_pair(folder: Path, pair: Pair, context: int) -> tuple[dict[str, str], str]:
    """Write both models and a uniform plan; return the models' folders by side, and the plan's file."""
    big, small = SHAPES[pair.target_shape], SHAPES[pair.draft_shape]
    folders = {side: str(folder / side) for side in ("target", "draft")}
    for path, shape in zip(folders.values(), (big, small), strict=True):
        write_model(Path(path), shape, big.vocab_size, context)
    sizes = (big.num_hidden_layers, big.num_key_value_heads)
    heads = (1, 1) if small.drafted else (small.num_hidden_layers, small.num_attention_heads)
    plan, file = uniform_plan(*sizes, *heads, budget=pair.budget), folder / "plan.json"
    if big.sparse_config:  # nothing is chosen for layers that choose by themselves
        plan = replace(plan, dense_layers=tuple(range(plan.target_layers)), group_size=0)
    save_plan(plan, file)
    return folders, str(file)
