"""Plain decoding whose next step is launched before the last one has been looked at: the tokens are the same.

Without a GPU the steps run at once; on a GPU they are captured and run while the host plans the next one.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.outputs import StepUnderWay
from specahead.engine.steps.step_shapes import step_shape
from specahead.lab.benchmarks.serving.imposed import ImposedVerdicts
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service import planning
from target_service.hooks import NO_HOOKS, Hooks
from target_service.policy import Policy
from target_service.session import DraftPeer, TargetSession
from target_service.verifier import Verifier
from tests.settings import target_settings
from tests.unit.steps import take_step
from tests.unit.test_graphs import CONFIGS, DEVICE

PLAN = uniform_plan(3, 2, 1, 1)
GREEDY, SEEDED = Sampling(0.0), Sampling(1.0, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ask:
    """A session: opened before step `at`, and aborted before step `aborted`, if that is not 0."""

    at: int
    prompt: int
    max_tokens: int
    sampling: Sampling = GREEDY
    stops: tuple[int, ...] = ()
    aborted: int = 0
    logprobs: bool = False
    exactness: m.Exactness = m.Exactness.EXACT


def drafts_from(patch: pytest.MonkeyPatch, least: int) -> None:
    """Have sessions that may draft for themselves do so from `least` tokens of all of them on."""

    def drafted(sessions: Iterable[TargetSession], policy: Policy, kv: KVCache) -> tuple[int, float]:
        tokens = sum(len(each.tokens) for each in sessions if each.reading.memory is not None and not each.is_paused)
        return (4, 0.4) if tokens and tokens >= least else (0, 0.0)

    patch.setattr(planning, "drafted_for_themselves", drafted)


@dataclass
class Target:
    """A target without a draft, and what it tells the owners of its sessions."""

    verifier: Verifier
    told: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, m.FinishReason] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    commits: list[m.Commit] = field(default_factory=list)
    left: int = 0  # steps that were left running

    def open(self, name: str, ask: Ask) -> None:
        tokens = [(7 * i + ask.prompt) % 90 + 1 for i in range(ask.prompt)]
        exact = ask.sampling, ask.exactness
        limits = len(tokens), ask.max_tokens, list(ask.stops)
        request = m.Open(name, tokens, *limits, *exact, wants_logprobs=ask.logprobs)
        self.told[name] = []
        self.verifier.admission.open(request, self._take)

    def _take(self, event: m.ServedEvent) -> None:
        if isinstance(event, m.Closed):
            self.failed.add(event.session)
        elif isinstance(event, m.Commit):
            self.told[event.at.session] += event.tokens
            self.commits.append(event)
            if event.finish_reason is not m.FinishReason.NONE:
                self.ended[event.at.session] = event.finish_reason

    def step(self) -> bool:
        step = take_step(self.verifier)
        self.left += step is not None and step.asynchronous
        return step is not None

    def run(self, asks: list[Ask]) -> None:
        """Open and abort sessions as asked, and step until all have ended."""
        number, last = 0, max(max(ask.at, ask.aborted) for ask in asks)
        while True:
            for i, ask in enumerate(asks):
                if ask.at == number:
                    self.open(str(i), ask)
                if ask.aborted == number and ask.aborted:
                    self.verifier.abort(str(i))
            if not self.step() and number > last:
                return
            number += 1


def target_of(folder: Path, chains: bool, pages: int = 200, hooks: Hooks = NO_HOOKS, **how: Any) -> Target:
    loaded = load_model(str(folder), torch.float32, DEVICE)
    runner = make_runner(loaded, pages * PAGE_SIZE, 0, 300, step_queries=5)
    runner.chains_steps = chains
    settings = {"max_context": 300, "max_sessions": 4, "draft": "none"} | how
    return Target(Verifier(runner, PLAN, target_settings(**settings), hooks))


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Target:
    return target_of(folder, True)


@pytest.fixture(scope="module")
def proposing(folder: Path) -> Target:
    """It drafts for itself, or looks up."""
    return target_of(folder, True, draft="auto", self_read_share=0.3)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Target:
    """It drafts for itself whatever that costs, over all blocks: so it drafts the same wherever a round begins."""
    return target_of(folder, True, draft="self", self_read_share=1.0)


@pytest.fixture(scope="module")
def drafting_waiting(folder: Path) -> Target:
    return target_of(folder, False, draft="self", self_read_share=1.0)


@pytest.fixture(scope="module")
def waiting(folder: Path) -> Target:
    return target_of(folder, False)


# What else is in a batch moves a GPU's logits by rounding errors, and this model's tokens are all about as likely.
SAMPLINGS = [GREEDY, SEEDED] if DEVICE == "cpu" else [GREEDY]
asks = st.builds(
    Ask,
    at=st.integers(0, 12),
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    sampling=st.sampled_from(SAMPLINGS),
    stops=st.sampled_from([(), (), tuple(range(0, 97, 9))]),
    aborted=st.sampled_from([0, 0, 3, 5, 9]),
    logprobs=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=20)
@given(st.lists(asks, min_size=1, max_size=6))
def test_the_tokens_are_those_of_steps_that_are_waited_for(ahead: Target, waiting: Target, asked: list[Ask]) -> None:
    """Whoever comes, ends, is aborted or needs the host at each step meanwhile."""
    ahead.run(asked)
    for i, ask in enumerate(asked):
        waiting.run([Ask(0, ask.prompt, ask.max_tokens, ask.sampling, ask.stops, logprobs=ask.logprobs)])
        alone, beside = waiting.told["0"], ahead.told[str(i)]
        if not ask.aborted:
            assert (beside, ahead.ended[str(i)]) == (alone, waiting.ended["0"])
        else:
            assert beside == alone[: len(beside)]
    for target in (ahead, waiting):
        assert not target.failed
        target.verifier.admission.release_closed()
        assert target.verifier.runner.kv.pool.held == 0


@settings(max_examples=10)
@given(st.lists(asks.filter(lambda ask: ask.sampling is GREEDY and not ask.aborted), min_size=1, max_size=5))
def test_what_the_target_proposes_by_itself_changes_no_token(
    proposing: Target, waiting: Target, asked: list[Ask]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        drafts_from(patch, 60)
        proposing.run(asked)
    for i, ask in enumerate(asked):
        waiting.run([Ask(0, ask.prompt, ask.max_tokens, ask.sampling, ask.stops, logprobs=ask.logprobs)])
        assert proposing.told[str(i)] == waiting.told["0"]
    assert not proposing.failed


@settings(max_examples=15)
@given(st.lists(asks, min_size=1, max_size=5))
def test_steps_that_draft_go_ahead_and_give_the_same(
    drafting: Target, drafting_waiting: Target, asked: list[Ask]
) -> None:
    """Sampled tokens as well: each position has its uniforms, wherever the round before it has ended."""
    with pytest.MonkeyPatch.context() as patch:  # or sessions would pause, whose sampled tokens are others then
        patch.setattr(Policy, "pause_if_useless", lambda *_: None)
        drafting.run(asked)
        for i, ask in enumerate(asked):
            drafting_waiting.run([Ask(0, ask.prompt, ask.max_tokens, ask.sampling, ask.stops, logprobs=ask.logprobs)])
            alone, beside = drafting_waiting.told["0"], drafting.told[str(i)]
            assert beside == (alone if not ask.aborted else alone[: len(beside)])
    for target in (drafting, drafting_waiting):
        assert not target.failed
        target.verifier.admission.release_closed()
        assert target.verifier.runner.kv.pool.held == 0


def test_where_verdicts_are_imposed_the_next_step_begins_behind_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "pause_if_useless", lambda *_: None)
    how: dict[str, Any] = {"draft": "self", "self_read_share": 1.0, "hooks": Hooks(judge=ImposedVerdicts(0.6))}
    target, waited = (target_of(folder, chains, **how) for chains in (True, False))
    for each in (target, waited):
        each.run([Ask(0, 40, 60), Ask(0, 55, 50)])
    assert target.told == waited.told
    assert target.verifier.counters["steps_chained_to_steps"] > 8
    assert {len(commit.tokens) for commit in target.commits} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("share", "least"), [(0.05, 0), (0.3, 0), (0.3, 380)])
def test_steps_that_draft_by_little_go_ahead_and_change_no_token(
    folder: Path, waiting: Target, monkeypatch: pytest.MonkeyPatch, share: float, least: int
) -> None:
    """The last round of a session drafts more than it may keep; least: tokens of all sessions from which on steps
    draft, which in the last case they do not at first.
    """
    drafts_from(monkeypatch, least)
    target = target_of(folder, True, draft="self", self_read_share=share)
    target.run([Ask(0, 200, 63), Ask(0, 150, 70), Ask(3, 20, 50)])
    counted = target.verifier.counters
    assert counted["steps_chained_to_steps"] > 10 and 0 < counted["self_accepted_tokens"] < counted["self_draft_tokens"]
    for name, ask in (("0", Ask(0, 200, 63)), ("1", Ask(0, 150, 70)), ("2", Ask(0, 20, 50))):
        waiting.run([ask])
        assert target.told[name] == waiting.told["0"]


@torch.inference_mode()
def test_making_a_graph_takes_no_tokens_away(folder: Path) -> None:
    """Its launches run without sequences, while another step has left the tokens that the next one takes."""
    runner = target_of(folder, True).verifier.runner
    assert isinstance(runner, ModelRunner)
    given: list[tuple[int, int]] = []
    for disturbed in (False, True):
        kv = SequenceKV()
        runner.kv.grow(kv, 12)
        first = SequenceInput(kv, [7], "all", drafted=Drafted([], [], GREEDY, 3))
        runner.forward([replace(first, tokens=[5, 6], drafted=None, logits="none")])
        steps = [runner.launch([first])]
        for base in (4, 5, 6):
            if disturbed:
                for turn in (1, 2):
                    shape = step_shape([first], runner.kv, runner._limits)
                    runner.passes.step_of(replace(shape, turn=turn)).launch()
            drafted = Drafted([], [], GREEDY, base)
            steps.append(runner.launch([SequenceInput(kv, [0], "all", drafted=drafted, follows=0)]))
        given.append(steps[-1]()[0].verdict or (0, 0))
        runner.kv.release(kv)
    assert given[0] == given[1]


def test_a_session_gives_way_where_pages_run_out_and_loses_nothing(folder: Path, waiting: Target) -> None:
    target = target_of(folder, True, pages=9)
    target.run([Ask(0, 40, 60), Ask(0, 35, 60)])
    assert target.verifier.counters["preemptions"] > 0 and target.left > 40
    for name, prompt in (("0", 40), ("1", 35)):
        waiting.run([Ask(0, prompt, 60)])
        assert target.told[name] == waiting.told["0"]


def test_others_go_ahead_while_a_session_waits_for_its_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its patience ends, or a proposal is here: then the step that runs is waited for."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = target_of(folder, True, draft="a model", draft_timeout=5.0)
    target.open("plain", Ask(0, 20, 200))
    target.open("drafted", Ask(0, 30, 200))
    for _ in range(3):
        target.step()
    sent: list[m.TargetEvent] = []
    draft = DraftPeer("draft", sent.append)
    verifier = target.verifier
    plain, drafted = verifier.admission.running["plain"], verifier.admission.running["drafted"]
    plain.pace.pause.next = 500
    plain.pause()
    verifier.protocol.attach(draft)
    verifier.protocol.receive(draft, m.Ready(drafted.at))

    def left_of(steps: int) -> int:
        before = target.left
        for _ in range(steps):
            assert target.step()
        return target.left - before

    assert left_of(2) < 2  # the step that runs had both
    tokens = len(drafted.tokens)
    assert left_of(10) == 10 and len(drafted.tokens) == tokens
    at = drafted.at
    proposal = m.Proposals(at, [0], [drafted.tokens[-1]], [2], [1, 2], [], np.empty(0), np.empty(0), 0.0, b"")
    verifier.protocol.receive(draft, proposal)
    assert left_of(2) == 0 and len(drafted.tokens) > tokens
    tokens = len(drafted.tokens)
    assert left_of(10) >= 9 and len(drafted.tokens) == tokens
    now[0] += 6
    assert left_of(4) == 3 and len(drafted.tokens) > tokens, "from then on both go ahead"
    assert verifier.counters["draft_timeouts"] == 1


def test_a_step_that_fails_ends_the_sessions_of_the_one_under_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, waiting: Target
) -> None:
    target = target_of(folder, True)
    target.open("a", Ask(0, 20, 40))
    for _ in range(4):
        target.step()
    known = list(target.told["a"])

    def fail(runner: ModelRunner, inputs: list[SequenceInput], imposed: Any = None) -> StepUnderWay:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", fail)
        step = target.verifier.plan_step()
        assert step is not None and step.rounds
        with pytest.raises(ValueError, match="no") as raised:
            target.verifier.execute(step)
        assert target.verifier.fail_step(step, raised.value)
    assert target.failed == {"a"} and target.told["a"] == known
    target.failed.clear()
    target.run([Ask(0, 20, 8)])
    waiting.run([Ask(0, 20, 8)])
    assert target.told["0"] == waiting.told["0"]
