"""The services of a benchmark: models of random weights in the shapes of real ones, processes, no Ray."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import models
from benchmarks.processes import Start, free_addresses, port_of, start_endpoints, wait_for_service
from benchmarks.serving.service import Controls
from benchmarks.shapes import SHAPES
from evaluation.plans import save_plan
from sparsity.plan import uniform_plan

PREFILL_CHUNK = 8192  # prompt tokens a step, at most


@dataclass(frozen=True)
class Pair:
    """target_shape, draft_shape: names in SHAPES. acceptance: imposed, a token. read_share: of later draft passes.
    branches: the most that a row drafts. adaptive: whether the target decides how many tokens up to γ are drafted.
    target_flags, draft_flags: further flags of the services. gpus: the device of
    target and draft; None: as torch finds."""

    target_shape: str
    draft_shape: str
    gamma: int
    acceptance: float
    budget: float
    read_share: float
    branches: int = 1
    adaptive: bool = False
    target_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    gpus: tuple[int, int] | None = None

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
    """Target, draft and endpoints in a folder of their own."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        pair: Pair,
        room: Room,
        timed: bool,
        replayed: bool,
        seconds: Callable[[], float],
    ) -> None:
        """start: starts a process (benchmarks.processes). timed: whether the services write timelines. seconds: returns
        how long the next start may take.
        """
        self.folder, self.pair = folder, pair
        self._start, self._room, self._timed, self._replayed, self._seconds = start, room, timed, replayed, seconds
        self._models, self._plan = _write_pair(folder, pair, room.context + 256)
        self._addresses = dict(zip(self._models, free_addresses(2), strict=True))
        self._launched: dict[str, float] = {}
        self.start_seconds: dict[str, float] = {}  # from a service's start until it served, by side
        self.control(Controls(attached=False))

    def start(self, with_draft: bool) -> str:
        """Start the services and the endpoints over them; return the endpoints' address.

        The draft, if there is to be one, loads beside the target where each has a GPU of its own, and stays away from
        the target until controls say otherwise. Raises ChildProcessError for what does not start in time.
        """
        own = ["--synthetic-acceptance", str(self.pair.acceptance), *self._room.tiers(self.pair.target_shape)]
        own += ["--replay"] if self._replayed else []
        target = self._launch("target", *own, *self.pair.target_flags)
        apart = self.pair.gpus is not None and self.pair.gpus[0] != self.pair.gpus[1]
        draft = self._launch_draft() if with_draft and apart else None
        self._wait_for("target", target)
        if with_draft:
            draft = draft or self._launch_draft()
        named = ("--target", self._models["target"], "--draft", self._models["draft"], "--plan", self._plan)
        limits = ("--max-context", str(self._room.context), "--shutdown-grace", "0")
        over = ("--target-address", self._addresses["target"])
        address = start_endpoints(self._start, *named, *limits, *over, seconds=self._seconds())
        if draft is not None:
            self._wait_for("draft", draft)
        return address

    def control(self, controls: Controls) -> None:
        """Say how the draft drafts from its next session on."""
        whole = self._controls.with_suffix(".new")  # the draft never reads a half of it
        whole.write_text(json.dumps(asdict(controls)))
        whole.replace(self._controls)

    def timeline(self, side: str) -> Path:
        """Return where a service writes its timeline."""
        return self.folder / f"{side}.timeline"

    @property
    def _controls(self) -> Path:
        return self.folder / "controls.json"

    def _launch_draft(self) -> "subprocess.Popen[str]":
        own = ["--target", self._addresses["target"], "--controls", str(self._controls)]
        own += ["--read-share", str(self.pair.read_share), "--branches", str(self.pair.branches)]
        return self._launch("draft", *own, *self.pair.draft_flags)

    def _launch(self, side: str, *own: str) -> "subprocess.Popen[str]":
        command = ["benchmarks.serving.service", side, "--model", self._models[side], "--plan", self._plan]
        command += ["--port", port_of(self._addresses[side]), "--max-gamma", str(self.pair.gamma)]
        command += ["--gamma", "auto" if self.pair.adaptive else str(self.pair.gamma)]
        command += ["--max-context", str(self._room.context), "--max-sessions", str(self._room.sessions)]
        command += ["--load-format", "dummy", "--prefill-chunk", str(min(PREFILL_CHUNK, self._room.prompt))]
        command += ["--timeline", str(self.timeline(side))] if self._timed else []
        gpu = self.pair.gpus[side == "draft"] if self.pair.gpus else None
        self._launched[side] = time.monotonic()
        return self._start(*command, *own, stdout=subprocess.PIPE, gpu=gpu)

    def _wait_for(self, side: str, process: "subprocess.Popen[str]") -> None:
        wait_for_service(process, self._seconds())
        self.start_seconds[side] = time.monotonic() - self._launched[side]
        note(f"{side} serves after {self.start_seconds[side]:.1f} s")


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
