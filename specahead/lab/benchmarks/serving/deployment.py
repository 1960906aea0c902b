"""The services of a benchmark: models of random weights in the shapes of real ones, processes, no Ray."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import torch

from orchestrator.cluster.directory import Directory, name_services, side_of
from orchestrator.cluster.service_status import ControlLine
from specahead import models
from specahead.lab.benchmarks.processes import (
    Start,
    free_addresses,
    launch_endpoints,
    port_of,
    wait_for_endpoints,
    wait_for_service,
)
from specahead.lab.benchmarks.serving.breakdown import Breakdown, break_down
from specahead.lab.benchmarks.serving.clients import SETTLED
from specahead.lab.benchmarks.serving.controls import Controls
from specahead.lab.benchmarks.serving.timeline import read_timeline, timeline_of_draft
from specahead.lab.benchmarks.shapes import SHAPES
from specahead.lab.evaluation.plans import save_plan
from specahead.sparsity.plan import uniform_plan
from specahead.wire.access import PeerAccess

PREFILL_CHUNK = 8192  # prompt tokens a step, at most
_TIMELINE_SECONDS = 3.0  # until a service that has become idle has written its timeline


@dataclass(frozen=True)
class Pair:
    """target_shape, draft_shape: names in SHAPES. acceptance: imposed, a token. read_share: of later draft passes.
    branches: the most that a row drafts. ahead: whether a draft service drafts on before a verdict is there. adaptive:
    whether the target decides how many tokens up to γ are drafted. draft_in_target: whether each target runs the draft.
    target_flags, draft_flags: further flags of the services. gpus: the device of each service by name; empty: as torch
    finds. slept: milliseconds that each step of a target takes, by its name, which has no model then."""

    target_shape: str
    draft_shape: str
    gamma: int
    acceptance: float
    budget: float
    read_share: float
    branches: int = 1
    ahead: bool = True
    adaptive: bool = False
    draft_in_target: bool = False
    target_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)
    slept: Mapping[str, float] = field(default_factory=dict)

    @property
    def speculation(self) -> dict[str, float | None]:
        """What the services are told of speculation."""
        gamma = {"gamma": None if self.adaptive else self.gamma, "max_gamma": self.gamma, "hold": 0}
        return gamma | {"draft_read_share": self.read_share, "branches": self.branches, "overlap": self.ahead}

    @property
    def sparse_rows(self) -> int:
        """Heads of the target that read sparsely: all of them."""
        shape = SHAPES[self.target_shape]
        return shape.num_hidden_layers * shape.num_key_value_heads


@dataclass(frozen=True)
class Room:
    """What target and draft have room for. context: prompt and output of a session. hot: the share of the target's KV
    that lies on its GPU, the backing store being host memory; 0: all of it does, and there is no store."""

    sessions: int
    context: int
    prompt: int
    hot: float = 0.0

    def tiers(self, shape: str) -> list[str]:
        """Return the flags that put the KV of a target of this shape in tiers, if it is to be."""
        if not self.hot:
            return []
        tokens = self.sessions * (self.context + 32)
        gib = 1.01 * kv_gib(shape, tokens, 2 if torch.cuda.is_available() else 4)
        return ["--host-kv-memory", f"{gib:.6f}", "--kv-tokens", str(int(self.hot * tokens))]


class Deployment:
    """Targets, a draft for all of them, and endpoints over each target or over all, in a folder of their own."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        pair: Pair,
        room: Room,
        timed: bool,
        replayed: bool,
        seconds: Callable[[], float],
        targets: int = 1,
        together: bool = False,
    ) -> None:
        """start: starts a process (processes.py). timed: whether the services write timelines. seconds: returns
        how long the next start may take. together: whether the same endpoints are over all targets.
        """
        self.folder, self.pair = folder, pair
        self._start, self._room, self._timed, self._replayed, self._seconds = start, room, timed, replayed, seconds
        self._models, self._plan = _write_pair(folder, pair, room.context + 256)
        self.targets = name_services("target", targets)
        self._together = together
        names = [*self.targets, "draft"]
        self._addresses = dict(zip(names, free_addresses(len(names)), strict=True))
        self._launched: dict[str, float] = {}
        self.start_seconds: dict[str, float] = {}  # from a service's start until it served, by name
        self.control(Controls(attached=False))

    def start(self, with_draft: bool) -> list[str]:
        """Start the services and their endpoints; return the endpoints' addresses.

        The endpoints load beside the targets, and wait for them. A draft service, if there is to be one, loads beside
        them too where it has a GPU of its own, and stays away from the targets until controls say otherwise. Raises
        ChildProcessError for what does not start in time.
        """
        own = ["--synthetic-acceptance", str(self.pair.acceptance), *self._room.tiers(self.pair.target_shape)]
        own += ["--replay"] if self._replayed else []
        own += ["--controls", str(self._controls)]
        if self.pair.draft_in_target:
            own += ["--placement", "together", "--draft", self._models["draft"]]
        targets = {name: self._launch(name, *own, *self.pair.target_flags) for name in self.targets}
        with_service, gpus = with_draft and not self.pair.draft_in_target, self.pair.gpus
        apart = bool(gpus) and with_service and gpus["draft"] not in {gpus[name] for name in targets}
        draft = self._launch_draft() if apart else None
        began, endpoints = time.monotonic(), self._launch_endpoints()
        for name, process in targets.items():
            self._wait_for(name, process)
        if with_service and draft is None:
            draft = self._launch_draft()
        addresses = [wait_for_endpoints(process, self._seconds()) for process in endpoints]
        note(f"clients are served after {time.monotonic() - began:.1f} s")
        if draft is not None:
            self._wait_for("draft", draft)
        return addresses

    def wait_until_prepared(self) -> None:
        """Wait until the services are ready for all kinds of steps, which they become while nobody asks for anything.

        Raises TimeoutError if that takes too long.
        """
        began, limit = time.monotonic(), self._seconds()
        while not all(map(self._is_prepared, self.start_seconds)):
            if time.monotonic() - began > limit:
                raise TimeoutError(f"after {limit:.0f} s the services are still not ready for all kinds of steps")
            time.sleep(0.2)
        note(f"ready for all kinds of steps {time.monotonic() - began:.1f} s later")

    def _is_prepared(self, name: str) -> bool:
        line = ControlLine(name, Directory(self._addresses), PeerAccess())
        try:
            return not asyncio.run(line.status()).gauges["unprepared_steps"]
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # it is busy with them
                return False
            raise

    def control(self, controls: Controls) -> None:
        """Say how the draft drafts from its next session on."""
        whole = self._controls.with_suffix(".new")  # the draft never reads a half of it
        whole.write_text(json.dumps(asdict(controls)))
        whole.replace(self._controls)

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
                return break_down(read_timeline(self.timeline(target)), drafted, run, SETTLED)
            except ValueError:
                if time.monotonic() > limit:
                    raise
            time.sleep(0.1)

    def _timeline_of(self, draft: str, target: str) -> Path:
        return timeline_of_draft(self.timeline(target)) if self.pair.draft_in_target else self.timeline(draft)

    @property
    def _controls(self) -> Path:
        return self.folder / "controls.json"

    def _launch_endpoints(self) -> "list[subprocess.Popen[str]]":
        named = ("--target", self._models["target"], "--draft", self._models["draft"], "--plan", self._plan)
        limits = ("--max-context", str(self._room.context), "--timeouts", '{"shutdown": 0, "connect": 0}')
        each = [self._addresses[name] for name in self.targets]
        return [
            launch_endpoints(self._start, *named, *limits, "--target-address", over)
            for over in ([",".join(each)] if self._together else each)
        ]

    def _launch_draft(self) -> "subprocess.Popen[str]":
        own = [word for target in self.targets for word in ("--target", self._addresses[target])]
        own += ["--controls", str(self._controls)]
        sessions = self._room.sessions * len(self.targets)
        return self._launch("draft", *own, *self.pair.draft_flags, sessions=sessions)

    def _launch(self, name: str, *own: str, sessions: int = 0) -> "subprocess.Popen[str]":
        side, sessions = side_of(name), sessions or self._room.sessions
        command = ["specahead.lab.benchmarks.serving", side, "--model", self._models[side], "--plan", self._plan]
        command += ["--port", port_of(self._addresses[name]), "--speculation", json.dumps(self.pair.speculation)]
        command += ["--max-context", str(self._room.context), "--max-sessions", str(sessions)]
        command += ["--load-format", "dummy", "--prefill-chunk", str(min(PREFILL_CHUNK, self._room.prompt))]
        command += ["--timeline", str(self.timeline(name))] if self._timed else []
        command += ["--slept", str(self.pair.slept[name])] if name in self.pair.slept else []
        self._launched[name] = time.monotonic()
        return self._start(*command, *own, stdout=subprocess.PIPE, gpu=self.pair.gpus.get(name))

    def _wait_for(self, name: str, process: "subprocess.Popen[str]") -> None:
        wait_for_service(process, self._seconds())
        self.start_seconds[name] = time.monotonic() - self._launched[name]
        note(f"{name} serves after {self.start_seconds[name]:.1f} s")


def note(text: str) -> None:
    """Say on stderr, with the time, what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def kv_gib(shape: str, tokens: int, bytes_a_number: int) -> float:
    """Return how many GiB the KV of so many tokens takes."""
    sizes = SHAPES[shape]
    numbers = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    return tokens * numbers * bytes_a_number / 2**30


def _write_pair(folder: Path, pair: Pair, context: int) -> tuple[dict[str, str], str]:
    """Write both models and a uniform plan; return the models' folders by side, and the plan's file."""
    big, small = SHAPES[pair.target_shape], SHAPES[pair.draft_shape]
    folders = {side: str(folder / side) for side in ("target", "draft")}
    for path, shape in zip(folders.values(), (pair.target_shape, pair.draft_shape), strict=True):
        write_model(Path(path), shape, big.vocab_size, context)
    sizes = (big.num_hidden_layers, big.num_key_value_heads)
    heads = (small.num_hidden_layers, small.num_attention_heads)
    plan = folder / "plan.json"
    save_plan(uniform_plan(*sizes, *heads, method="ahead", budget=pair.budget), plan)
    return folders, str(plan)


def write_model(folder: Path, shape: str, vocab: int, context: int) -> None:
    """A config in the shape of a real model beside the bundled tokenizer."""
    shutil.copytree(models.TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **asdict(SHAPES[shape]),
    }
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
