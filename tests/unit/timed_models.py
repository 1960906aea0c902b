"""A scripted pair on virtual time: what a target serves that runs its draft itself, or has a draft service beside it.

Steps take what those of an 8B target and a 1B draft in 8 bits take on an H200 (docs/performance.md), as far as sizes
tell; the host takes a time of its own, during which the device goes on with what is launched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, TypeVar

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from specahead import models
from specahead.config import TargetSettings
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.device_chain import Imposed
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.outputs import RoundsUnderWay, StepUnderWay
from specahead.engine.steps.requests import RoundOutput, RoundRequest
from specahead.kernels.linear import MOST_ROWS
from specahead.lab.benchmarks.scripted import KV_HEADS, LAYERS, VOCAB, ScriptedRunner, scripted_plan
from specahead.lab.benchmarks.serving.imposed import ImposedVerdicts
from specahead.lab.benchmarks.serving.parts import MeasuredDrafter
from specahead.wire import messages as m
from target_service.draft_in_target import StepsByTurns
from target_service.hooks import Hooks
from target_service.policy.sizes import LINK
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from tests.chaining import ChainingRunner
from tests.settings import draft_settings, target_settings
from tests.unit.clock import Clock

Launched = TypeVar("Launched")
SETTLED = 5  # commits of a session before its tokens count
HOST = 0.0003, 0.00002  # seconds between two steps, in any case and for each session
WIRE = 0.0005  # seconds between draft and target
PLAN = scripted_plan()
SELF_READ = TargetSettings.self_read_share
TILE = 32  # rows of queries, heads of a group times queries
CONFIRMING = 1.28  # of the time of reading KV: 16 tokens of a session instead of 5, 4 x 32K and 4 x 102K on an H200
# Of a step's time without KV where it reads the weights in 8 bits, as up to MOST_ROWS do: layers of 8B with 40 rows on
# an H200; and with 8 rows, of passes that draft for their own target.
LIGHT, LIGHTEST = 0.7, 0.63
# Of tokens of KV that lie on the host and are listed to screen: fetched anew in a round. Most have been before.
LISTED_ANEW = 0.1


@dataclass
class Device:
    """Runs what is launched, one after the other. free: when it has run all of it."""

    clock: Clock
    free: float = 0.0

    def launch(self, seconds: float) -> float:
        """Launch what takes so long; return when it will have ended."""
        self.free = max(self.free, self.clock.now) + seconds
        return self.free

    def wait(self, until: float) -> None:
        self.clock.now = max(self.clock.now, until)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: `always` or, of many, for each token that it runs; and besides for each of its sequences, for
    each token of KV that it reads, and once for choosing what is read, if anything is."""

    always: float
    choosing: float
    a_session: float
    a_kv_token: float
    a_token: float


TARGET = Costs(0.0039, 0.0017, 3e-5, 3.25e-8, 2.7e-5)
DRAFT_PASS = Costs(0.00095, 0.0, 1e-5, 2e-9, 3.5e-6)


def _drafts(item: SequenceInput) -> bool:
    return item.read is not None and item.read.drafts


def _is_sparse(item: SequenceInput) -> bool:
    return item.read is not None and not item.read.drafts


class TimedRunner(ChainingRunner, ScriptedRunner):
    """A scripted model whose steps take their time on a device. costs: of a step, or of a pass of a draft's round.
    cold: the share of all KV that lies on the host; anew: of this, that is fetched once more where it is listed.
    """

    def __init__(self, device: Device, costs: Costs, errs: bool, pages: int) -> None:
        super().__init__(errs, pages)
        self.chains_steps = self.chains_rounds = True
        self.weight_tokens = costs.always / costs.a_kv_token
        self._device, self._costs = device, costs
        self.cold, self.anew = 0.0, LISTED_ANEW
        self.drafts_lightly = False  # by weights in 8 bits, for itself
        self._launches = False  # what runs now is not waited for
        self._ends = 0.0  # when what was launched last has ended

    def _run(self, seconds: float) -> None:
        self._ends = self._device.launch(seconds)
        if not self._launches:
            self._device.wait(self._ends)

    def _launched(self, launch: Callable[[], Launched]) -> Launched:
        self._launches = True
        try:
            return launch()
        finally:
            self._launches = False

    def _step_seconds(self, inputs: list[SequenceInput], outputs: list[SequenceOutput]) -> float:
        tokens = sum(len(item.tokens) for item in inputs)
        rows = LAYERS * KV_HEADS
        reads = [
            output.blocks_read * item.read.block_size / rows if _is_sparse(item) else item.kv.length
            for item, output in zip(inputs, outputs, strict=True)
        ]
        costs = self._costs
        is_light = tokens <= MOST_ROWS and all(item.light for item in inputs)
        always = max(costs.always * (LIGHT if is_light else 1.0), tokens * costs.a_token)
        always += costs.choosing if any(map(_is_sparse, inputs)) else 0.0
        if any(item.held for item in inputs):
            reads = [CONFIRMING * read for read in reads]
        dense = always + sum(reads) * costs.a_kv_token + len(inputs) * costs.a_session
        for item, output, read in zip(inputs, outputs, reads, strict=True):
            fetched = self.cold * (min(read * self.anew, item.kv.length) if _is_sparse(item) else item.kv.length)
            output.tokens_fetched = round(fetched) * rows
            dense += fetched * LINK * costs.a_kv_token
        drafted = max((len(item.tokens) - 1 for item in inputs if _drafts(item)), default=0)
        read = SELF_READ * sum(item.kv.length for item in inputs)
        a_pass = costs.always * (LIGHTEST if self.drafts_lightly else 1.0) + costs.choosing / 2
        return dense + drafted * (a_pass + read * costs.a_kv_token + len(inputs) * costs.a_session)

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs = super().forward([replace(item, read=None) if _drafts(item) else item for item in inputs])
        self._run(self._step_seconds(inputs, outputs))
        return outputs

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Imposed] | None = None) -> StepUnderWay:
        def forward() -> list[SequenceOutput]:
            judges = any(item.draft_row is not None for item in inputs)
            return super(TimedRunner, self).launch(inputs, imposed)() if judges else self.forward(inputs)

        outputs = self._launched(forward)
        return self._ending(outputs)

    def _ending(self, outputs: list[Any]) -> Callable[[], list[Any]]:
        """Return what waits for the last launch, and returns the outputs."""
        device, ends = self._device, self._ends

        def end() -> list[Any]:
            device.wait(ends)
            return outputs

        return end

    def alternatives_beside(self, gamma: int) -> int:
        """As many as fit into a tile of queries beside a token that runs in any case, with 4 heads to a KV head."""
        return max(0, min(gamma, TILE // 4 - 1 - gamma))

    def _accept_alternative(self, *of_round: object) -> None:
        """Do nothing: verdicts are imposed, and an alternative runs in the pass of what was drafted."""

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        outputs = super().draft_rounds(requests)
        passes = max(item.gamma or self._gamma for item in requests) + self._runs_last
        passes += any(len(item.tokens) > 2 for item in requests)  # a pass for what is unread
        read = sum(item.kv.length for item in requests) * self._costs.a_kv_token
        rows = sum(max(1, len(item.branches)) for item in requests)
        self._run(passes * (self._costs.always + read + rows * self._costs.a_session))
        return outputs

    def launch_rounds(self, requests: list[RoundRequest], imposed: Sequence[Imposed] | None = None) -> RoundsUnderWay:
        outputs = self._launched(lambda: ChainingRunner.launch_rounds(self, requests, imposed).outputs())
        return RoundsUnderWay(all(len(each.branches) == 1 for each in outputs), self._ending(outputs))


class Timed:
    """What serves, and its clients. clock: the time of all modules."""

    clock: Clock
    verifier: Verifier

    def __init__(self) -> None:
        self._commits: dict[str, list[tuple[float, int]]] = {}
        self._opened = 0

    def run_until_idle(self) -> None:
        raise NotImplementedError

    def generate(self, sessions: Sequence[tuple[int, m.Exactness]], tokens: int) -> float:
        """Have sessions of so many prompt tokens each generate at once; return the tokens a second of all while all of
        them do.
        """
        prompts = [[(index * 31 + i) % VOCAB for i in range(context)] for index, (context, _) in enumerate(sessions)]
        names = [self.open(prompt, tokens, kind) for prompt, (_, kind) in zip(prompts, sessions, strict=True)]
        self.run_until_idle()
        times = [self._commits.pop(name) for name in names]
        began, ended = max(each[SETTLED][0] for each in times), min(each[-1][0] for each in times)
        counted = sum(count for each in times for at, count in each if began < at <= ended)
        return counted / (ended - began)

    def open(self, prompt: list[int], tokens: int, exactness: m.Exactness) -> str:
        """Open a session; return its name."""
        name, sampling = f"s{self._opened}", Sampling(temperature=0.0, seed=self._opened)
        self._opened += 1
        self._commits[name] = []
        opened = m.Open(name, prompt, len(prompt), tokens, [], sampling, exactness)
        self.verifier.admission.open(opened, self._emit)
        return name

    def _emit(self, event: m.ServedEvent) -> None:
        assert isinstance(event, m.Commit), event
        self._commits[event.at.session].append((self.clock.now, len(event.tokens)))

    def take_host_time(self) -> None:
        """Let the host's time between two steps pass."""
        always, each = HOST
        self.clock.now += always + each * len(self.verifier.admission.running)


def _target_settings(sessions: int, context: int, **others: Any) -> TargetSettings:
    limits = {"max_sessions": max(4, sessions), "max_context": context + 1000, "prefill_chunk": 8192}
    return target_settings(**({"draft": str(models.DRAFT), "gamma": None} | limits | others))


def _judge(acceptance: float, confirmation: float, alternatives: float | None) -> Hooks:
    """Impose verdicts. By default a draft that is mostly wrong has a second choice that is wrong, too."""
    if alternatives is None:
        alternatives = -1.0 if acceptance >= 0.8 else 0.0
    return Hooks(judge=ImposedVerdicts(acceptance, confirmation, alternatives))


def _runners(devices: Sequence[Device], sessions: int, context: int) -> list[TimedRunner]:
    """Return a target and a draft with room for so many sessions. devices: of each."""
    pages = sessions * (context // PAGE_SIZE + 40) + 1000
    return [
        TimedRunner(device, costs, errs, pages)
        for device, costs, errs in zip(devices, (TARGET, DRAFT_PASS), (False, True), strict=True)
    ]


class TimedTarget(Timed):
    """A target with its draft in it, or one that drafts for itself (draft="self"), which the host runs step by step."""

    def __init__(
        self,
        clock: Clock,
        sessions: int,
        context: int,
        acceptance: float,
        confirmation: float = 1.0,
        alternatives: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.clock = clock
        target, draft = _runners([Device(clock)] * 2, sessions, context)
        alone = others.get("draft") == "self"
        how = {"max_gamma": 8} if alone else {"placement": "together"}
        settings = _target_settings(sessions, context, **how, **others)
        target.drafts_lightly = alone and settings.speculation.draft_quantization == "fp8"
        self.verifier = Verifier(target, PLAN, settings, _judge(acceptance, confirmation, alternatives))
        self._steps: Any = self.verifier
        if not alone:
            self._steps = StepsByTurns(self.verifier, Drafter(draft, PLAN, settings.own_draft))

    def leave_out_draft(self) -> None:
        """Have nothing drafted any more."""
        self._left_out = list(self.verifier.protocol.drafts)
        for draft in self._left_out:
            self.verifier.protocol.detach(draft)

    def take_draft_back(self) -> None:
        """Have the draft that was left out draft again."""
        for draft in self._left_out:
            self.verifier.protocol.attach(draft)

    def answer(self, requests: Sequence[tuple[float, list[int], int, m.Exactness]]) -> float:
        """Answer requests, each of which comes at a time with a prompt and how many tokens it wants; return the mean of
        the seconds that they took.
        """
        began, waiting = self.clock.now, list(requests)
        opened: dict[str, float] = {}
        while waiting or not self.verifier.is_idle:
            if self.verifier.is_idle:
                self.clock.now = max(self.clock.now, began + waiting[0][0])
            while waiting and began + waiting[0][0] <= self.clock.now:
                at, *asked = waiting.pop(0)
                opened[self.open(*asked)] = began + at
            self._run_step()
        return sum(self._commits.pop(name)[-1][0] - at for name, at in opened.items()) / len(opened)

    def run_until_idle(self) -> None:
        while not self.verifier.is_idle:
            self._run_step()

    def _run_step(self) -> None:
        step = self._steps.plan_step()
        if step is not None:
            self.take_host_time()
            self._steps.finish_step(step, self._steps.execute(step))
        elif not self.verifier.is_idle:
            patience = self._steps.next_deadline()
            assert patience is not None, "sessions are open, and nothing will ever happen again"
            self.clock.now += patience


@dataclass
class _Side:
    """A drafter or a verifier. step: that it is in."""

    actor: Any
    step: Any = None


class TimedPair(Timed):
    """A target and a draft service, each on a device and a host of its own."""

    def __init__(
        self,
        clock: Clock,
        sessions: int,
        context: int,
        acceptance: float,
        branches: int = 8,
        confirmation: float = 1.0,
        alternatives: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.target, draft = _runners([Device(clock), Device(clock)], sessions, context)
        settings = _target_settings(sessions, context, **others)
        limits = {"max_sessions": settings.max_sessions, "max_context": settings.max_context, "prefill_chunk": 8192}
        drafting = draft_settings(gamma=None, max_gamma=settings.most_drafted, branches=branches, **limits)
        self.verifier = Verifier(self.target, PLAN, settings, _judge(acceptance, confirmation, alternatives))
        self.drafter = MeasuredDrafter(draft, PLAN, drafting)
        self._target, self._draft = _Side(self.verifier), _Side(self.drafter)
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when, and which was asked for first
        self._count = 0
        self._at_target = DraftPeer("draft", lambda event: self._send(self._draft, event))
        self._at_draft = TargetPeer(lambda event: self._send(self._target, event))
        self.verifier.protocol.attach(self._at_target)
        self.drafter.attach(self._at_draft)

    def have_cold(self, share: float, anew: float = LISTED_ANEW) -> None:
        """Have this share of the target's KV lie on the host; such a part of it is fetched anew where it is listed."""
        self.target.cold, self.target.anew = share, anew
        self.target.chains_steps = self.target.chains_rounds = False
        self.target.kv.is_resident = lambda sequence: False

    def run_until_idle(self) -> None:
        self._at(self.clock.now, lambda: self._advance(self._target))
        while not self.verifier.is_idle:
            self.clock.now, _, happen = heappop(self._events)
            happen()

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, happen))

    def _send(self, side: _Side, event: Any) -> None:
        self._at(self.clock.now + WIRE, lambda: self._receive(side, event))

    def _receive(self, side: _Side, event: Any) -> None:
        if side is self._draft:
            side.actor.receive(self._at_draft, event)
        else:
            side.actor.protocol.receive(self._at_target, event)
        self._advance(side)

    def _advance(self, side: _Side) -> None:
        """Begin a step of a side that is in none, if it finds one."""
        if side.step is not None:
            return
        side.step = side.actor.plan_step()
        if side.step is not None:
            self.take_host_time()
            result = side.actor.execute(side.step)
            self._at(self.clock.now, lambda: self._finish(side, result))
        elif (patience := side.actor.next_deadline()) is not None:
            self._at(self.clock.now + patience, lambda: self._advance(side))

    def _finish(self, side: _Side, result: Any) -> None:
        step, side.step = side.step, None
        side.actor.finish_step(step, result)
        self._at(self.clock.now, lambda: self._advance(side))
