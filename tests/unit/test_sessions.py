"""Drafter and verifier in one process, over fake models with real paged KV and a link that may misbehave."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import target_service.verifier
from benchmarks.recording import ReadRecording, load_reads
from config import DraftSettings, TargetSettings
from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from engine.judging import Drafted, judge_rounds
from engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from engine.kv.tiered import TieredKV
from engine.sampling import USE_ACCEPT, USE_TARGET, Sampling, uniforms
from orchestrator.ledger import Ledger, Record
from sparsity.announce import draft_heads
from sparsity.methods import METHODS, methods_of
from sparsity.plan import Plan
from sparsity.selection import BlockSelection
from target_service.verifier import DraftPeer, Verifier, cut_at_end
from tests.unit.fake_models import (
    DRAFT_HEADS,
    DRAFT_LAYERS,
    GREEDY,
    KV_HEADS,
    LAYERS,
    PLAN,
    VOCAB,
    FakeModel,
    FakeRunner,
)
from wire import convert
from wire import messages as m
from wire.errors import InvalidArgument, ResourceExhausted, Unavailable
from wire.selection_codec import encode_selection

# The world that they live in


class Clock:
    """Stands in for the verifier's `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(target_service.verifier, "time", stopped)
    return stopped


class Link:
    """A stream between draft and target. Events travel as protobuf bytes."""

    def __init__(self, number: int) -> None:
        self.to_draft: list[m.TargetEvent] = []
        self.to_target: list[m.DraftEvent] = []
        self.target_end = DraftPeer(f"draft-{number}", self.to_draft.append)
        self.draft_end = TargetPeer(f"target-{number}", self.to_target.append)


def as_draft_event(event: m.DraftEvent) -> m.DraftEvent:
    frame = convert.draft_events_to_pb([event])
    return convert.draft_event_from_pb(type(frame).FromString(frame.SerializeToString()).batch.events[0])


def as_target_event(event: m.TargetEvent) -> m.TargetEvent:
    frame = convert.target_events_to_pb([event])
    return convert.target_event_from_pb(type(frame).FromString(frame.SerializeToString()).batch.events[0])


@dataclass
class Faults:
    """How many times in all the link may do something wrong, and how far it may put an event back."""

    left: int = 0
    window: int = 4
    jumps: int = 0  # of the clock, beyond the verifier's patience


@dataclass
class Side:
    """A drafter or a verifier and the step that it is in. `dirty`: something has happened since it found nothing."""

    actor: Any
    step: Any = None
    result: Any = None
    dirty: bool = True

    def advance(self, rng: random.Random) -> None:
        """Plan, or finish; the model runs at either end, since events may arrive before or after it does."""
        if self.step is None:
            self.step, self.result = self.actor.plan_step(), None
            self.dirty = self.step is not None
            if self.step is not None and rng.random() < 0.5:
                self.result = self.actor.execute(self.step)
        else:
            result = self.actor.execute(self.step) if self.result is None else self.result
            self.actor.finish_step(self.step, result)
            self.step = None


class World:
    """One target, its drafts, their links; one random thing after another happens until nothing is left to do."""

    def __init__(
        self,
        clock: Clock,
        seed: int = 0,
        model: FakeModel | None = None,
        plan: Plan = PLAN,
        gamma: int = 4,
        ahead: bool = True,
        pages: int = 200,
        draft_pages: int = 200,
        prefill_chunk: int = 24,
        faults: Faults | None = None,
        max_sessions: int = 64,
        draft_context: int = 500,
    ) -> None:
        self.clock, self.rng = clock, random.Random(seed)
        self.model = model or FakeModel()
        self.faults = faults or Faults()
        self.target = FakeRunner(self.model.target, self.model.ends, LAYERS, 1, pages, self.model.recent)
        self.verifier = Verifier(
            self.target,
            plan,
            TargetSettings(
                gamma=gamma,
                prefill_chunk=prefill_chunk,
                max_sessions=max_sessions,
                max_queued=5000,
                max_context=500,
            ),
        )
        self.draft = FakeRunner(self.model.draft, False, DRAFT_LAYERS, DRAFT_HEADS, draft_pages)
        settings = DraftSettings(
            gamma=gamma, ahead=ahead, prefill_chunk=prefill_chunk, max_context=draft_context
        )
        self.drafter = Drafter(self.draft, plan, settings)
        self.target_side, self.draft_side = Side(self.verifier), Side(self.drafter)
        self.links: list[Link] = []
        self.attached = 0
        self.history: list[tuple[list[Any], Any]] = []
        self.ledger = Ledger()
        self.commits: dict[str, list[m.Commit]] = {}
        self.requests: dict[str, m.Open] = {}
        self.closed: list[m.Closed] = []
        self.script: list[
            Callable[[], None]
        ] = []  # what happens from outside, in this order, at random times

    # From outside.

    def open(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop: list[int] | None = None,
        exactness: m.Exactness = m.Exactness.EXACT,
        done: list[int] | None = None,
        name: str = "",
        sparsity: str = "",
    ) -> str:
        """`done`: tokens generated before, as when a session is opened again."""
        name = name or f"s{len(self.requests)}"
        tokens = prompt + (done or [])
        record = Record(name, tokens, len(prompt), max_tokens, stop or [], sampling, exactness, sparsity)
        self.ledger.open(record)
        self.commits[name], self.requests[name] = [], record.to_open()
        self.verifier.open(record.to_open(), self._emit)
        self.target_side.dirty = True
        return name

    def _emit(self, event: m.ServedEvent) -> None:
        if isinstance(event, m.Closed):
            self.closed.append(event)
            return
        assert not self.ended(event.at.session)
        assert self.ledger.apply(event) is not None
        self.commits[event.at.session].append(event)
        session = self.verifier._sessions[event.at.session]
        kept = [*session.proposals, *session.announced]
        assert all(epoch == session.epoch and round_ >= session.round for epoch, round_ in kept)

    def ended(self, name: str) -> bool:
        return self.ledger.records[name].finish_reason is not m.FinishReason.NONE

    def abort(self, name: str) -> None:
        self.verifier.abort(name)
        self.target_side.dirty = True

    def attach(self) -> Link:
        link = Link(self.attached)
        self.attached += 1
        self.links.append(link)
        self.verifier.attach_draft(link.target_end)
        self.drafter.attach(link.draft_end)
        self.target_side.dirty = True
        return link

    def detach(self, link: Link) -> None:
        """The stream breaks; what was on its way is lost."""
        self.links.remove(link)
        self.verifier.detach_draft(link.target_end)
        self.drafter.detach(link.draft_end)
        self.target_side.dirty = self.draft_side.dirty = True

    # What happens.

    def run(self) -> None:
        for _ in range(60_000):
            if not self.happen():
                return
        raise AssertionError("the sessions do not come to an end")

    def happen(self) -> bool:
        """One thing, or if there is none the end of the verifier's patience; False if all is over."""
        choices = list(self._choices())
        if choices:
            self.rng.choice(choices)()
        elif self.busy():
            patience = self.verifier.next_deadline()
            assert patience is not None, "sessions are open, and nothing will ever happen again"
            self.clock.now += patience
            self.target_side.dirty = True
        return bool(choices) or self.busy()

    def busy(self) -> bool:
        return bool(self.verifier.gauges["sessions"] or self.verifier.gauges["queued_sessions"])

    def _choices(self) -> Iterator[Callable[[], None]]:
        for side in (self.target_side, self.draft_side):
            if side.dirty or side.step is not None:
                yield lambda side=side: self._advance(side)
        for link in self.links:
            if link.to_target:
                yield lambda link=link: self._deliver(link, link.to_target)
            if link.to_draft:
                yield lambda link=link: self._deliver(link, link.to_draft)
        if self.script:
            yield lambda: self.script.pop(0)()
        if self.faults.jumps and self.busy():
            yield self._jump

    def _advance(self, side: Side) -> None:
        side.advance(self.rng)
        if side.step is None:
            self.check_kv()

    def check_kv(self) -> None:
        """Between steps every session's KV is that of its own tokens, on both sides."""
        if self.target_side.step is None:
            for session in self.verifier._sessions.values():
                assert self.target.tokens_in(session.kv) == session.tokens[: session.kv.length]
        if self.draft_side.step is None:
            for link in self.links:
                for drafted in link.draft_end.sessions.values():
                    assert self.draft.tokens_in(drafted.kv) == drafted.tokens[: drafted.kv.length]

    def _jump(self) -> None:
        if self.rng.random() < 0.05:
            self.faults.jumps -= 1
            self.clock.now += 1.5
            self.target_side.dirty = True

    def _deliver(self, link: Link, queue: list[Any]) -> None:
        event = queue.pop(self._misplaced(len(queue)))
        if queue is link.to_target:
            self.verifier.receive(link.target_end, as_draft_event(event))
            self.target_side.dirty = True
        else:
            self.drafter.receive(link.draft_end, as_target_event(event))
            self.draft_side.dirty = True
        if self.faults.left:
            self.history.append((queue, event))
            if self._goes_wrong():  # once more, at once or later
                queue.insert(self.rng.randint(0, min(len(queue), self.faults.window)), event)
            if self._goes_wrong():  # something from long ago
                old_queue, old = self.rng.choice(self.history)
                old_queue.insert(0, old)

    def _misplaced(self, waiting: int) -> int:
        return self.rng.randrange(min(waiting, self.faults.window)) if self._goes_wrong() else 0

    def _goes_wrong(self) -> bool:
        wrong = self.faults.left > 0 and self.rng.random() < 0.15
        self.faults.left -= wrong
        return wrong

    # What must hold.

    def check_greedy(self, name: str) -> None:
        request, record = self.requests[name], self.ledger.records[name]
        prompt = request.tokens[: request.prompt_tokens]
        tokens, reason = self.model.plain(prompt, request.max_tokens, request.stop_token_ids)
        assert record.tokens == tokens
        assert record.finish_reason is reason

    def check_nothing_left(self) -> None:
        for runner in (self.target, self.draft):
            runner.kv.pool.check_integrity()
            assert runner.kv.pool.held == 0
        assert self.verifier.gauges["sessions"] == self.verifier.gauges["queued_sessions"] == 0
        assert self.verifier._reserved == 0
        assert not self.verifier._emit
        assert self.drafter.is_idle
        assert all(not link.target_end.sessions and not link.draft_end.sessions for link in self.links)


def prompts(rng: random.Random, count: int, longest: int = 150) -> list[list[int]]:
    """Of any length; many begin with the same pages."""
    common = [rng.randrange(VOCAB) for _ in range(longest)]
    made = []
    for _ in range(count):
        shared = rng.choice([0, 0, 16, 90, longest])
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60]))]
        made.append(([*common[:shared], *own])[:longest])
    return made


def totals(world: World) -> tuple[int, int]:
    commits = [commit for commits in world.commits.values() for commit in commits]
    return sum(commit.drafted for commit in commits), sum(commit.accepted for commit in commits)


# Greedy outcomes


@pytest.mark.parametrize("exactness", m.Exactness)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("agreement", [0, 2, 3, 4])
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_is_plain_decoding(
    clock: Clock, exactness: m.Exactness, ahead: bool, agreement: int, gamma: int
) -> None:
    """Whatever the draft proposes; what it agrees on is what is accepted."""
    model = FakeModel(ends=exactness is m.Exactness.APPROXIMATE, agreement=agreement)
    world = World(clock, gamma, model, gamma=gamma, ahead=ahead)
    world.attach()
    names = [world.open(prompt, 25, exactness=exactness) for prompt in prompts(world.rng, 4)]
    world.run()
    for name in names:
        world.check_greedy(name)
    drafted, accepted = totals(world)
    assert drafted > 40
    if agreement == 0:
        assert accepted == 0
    elif agreement == 4:
        assert accepted == drafted
        assert not world.drafter.counters["resyncs"]
    else:
        assert 0 < accepted < drafted
    assert not world.verifier.counters["draft_timeouts"]
    assert world.drafter.counters["refused_frames"] == world.verifier.counters["refused_frames"] == 0
    world.check_nothing_left()


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_acceptance_can_be_imposed_for_measurements(clock: Clock, rate: float) -> None:
    world = World(clock, 3, FakeModel(agreement=3))
    world.verifier.settings = replace(world.verifier.settings, synthetic_acceptance=rate)
    world.attach()
    # The only session of a draft is drafted ahead whatever came of it before.
    texts = prompts(world.rng, 1 if rate == 1.0 else 3)
    names = [world.open(p, 60, Sampling(temperature=0, seed=i)) for i, p in enumerate(texts)]
    world.run()
    drafted = accepted = 0
    for name in names:
        assert len(world.ledger.records[name].tokens) - world.requests[name].prompt_tokens == 60
        for commit in world.commits[name][:-1]:  # the last one is cut
            drafted, accepted = drafted + commit.drafted, accepted + commit.accepted
    if rate == 0.5:
        assert 0.15 < accepted / drafted < 0.4  # ½ + ¼ + … of four
    else:
        assert accepted == rate * drafted
    if rate == 1.0:  # a guess that is here by then comes true as well: what was drafted ahead is kept
        assert any(commit.at.epoch < commit.at.round for name in names for commit in world.commits[name])
    world.check_nothing_left()


def test_what_sparse_rounds_read_can_be_recorded(clock: Clock, tmp_path: Path) -> None:
    """Of approximate sessions alone, and not of rounds without an announcement, which read everything."""
    world = World(clock, 5, FakeModel(ends=True, agreement=3))
    recording = world.verifier._recording = ReadRecording(str(tmp_path / "reads.npz"))
    plain = False
    kinds = (m.Exactness.APPROXIMATE, m.Exactness.EXACT)
    names = [world.open(p, 40, exactness=kinds[i % 2]) for i, p in enumerate(prompts(world.rng, 4))]
    link = world.attach()
    pause: list[Callable[[], Any]] = [lambda: None] * 20
    world.script = [*pause, lambda: world.detach(link), *pause, world.attach]
    world.run()
    recording.save()
    sessions = {session.session: session.reads for session in load_reads(tmp_path / "reads.npz")}
    assert set(sessions) <= set(names[::2]) and sessions
    for name, reads in sessions.items():
        commits = {commit.at: commit for commit in world.commits[name]}
        for read in reads:
            commit = commits.pop(read.at)
            assert read.accepted == commit.accepted
            assert read.blocks.count(0, read.blocks.num_blocks) * PLAN.block_size == commit.kv_tokens_read
        assert all(commit.kv_tokens_read == commit.kv_tokens_total for commit in commits.values())
        plain |= bool(commits)
    assert plain
    world.check_nothing_left()


@pytest.mark.parametrize("seed", range(4))
def test_approximate_with_the_whole_budget_reads_everything(clock: Clock, seed: int) -> None:
    """This model sees all tokens, so that one page left out would be noticed."""
    world = World(clock, seed, FakeModel(agreement=3), plan=replace(PLAN, budget=1.0))
    world.attach()
    names = [world.open(p, 20, exactness=m.Exactness.APPROXIMATE) for p in prompts(world.rng, 3)]
    world.run()
    for name in names:
        world.check_greedy(name)
        assert all(commit.kv_tokens_read == commit.kv_tokens_total for commit in world.commits[name])
        assert sum(commit.announced_bytes for commit in world.commits[name]) > 0
    world.check_nothing_left()


def test_commits_tell_what_was_read(clock: Clock) -> None:
    """Tokens in whole pages as the runner counted them; fewer than all for approximate, all for exact."""
    for exactness in m.Exactness:
        world = World(clock, 1, FakeModel(ends=True, agreement=3))
        world.attach()
        name = world.open([*range(30)] * 11, 30, exactness=exactness)
        world.run()
        world.check_greedy(name)
        commits = world.commits[name]
        assert [commit.kv_tokens_read for commit in commits] == [
            16 * pages for pages in world.target.pages_read
        ]
        speculated = [commit for commit in commits if commit.drafted]
        assert len(speculated) > 3
        fewer = [commit.kv_tokens_read < commit.kv_tokens_total for commit in speculated]
        assert all(fewer) if exactness is m.Exactness.APPROXIMATE else not any(fewer)


def test_work_ahead_that_is_right_is_kept(clock: Clock) -> None:
    """In lockstep a draft that agrees is a round ahead each time: no epoch passes, nothing is drafted twice."""
    world = World(clock, model=FakeModel(ends=True))
    link = world.attach()
    world.open([3] * 40, 26, exactness=m.Exactness.APPROXIMATE)
    for _ in range(300):
        for queue in (link.to_draft, link.to_target):
            while queue:
                world._deliver(link, queue)
        world.draft_side.advance(world.rng)
        while world.draft_side.dirty or world.draft_side.step:
            world.draft_side.advance(world.rng)
        while link.to_target:
            world._deliver(link, link.to_target)
        world.target_side.advance(world.rng)
    world.check_greedy("s0")
    assert [commit.at.epoch for commit in world.commits["s0"]] == [0] * 6
    assert [commit.drafted for commit in world.commits["s0"]] == [4, 4, 4, 4, 4, 1]
    assert world.drafter.counters["proposals"] == 6
    world.check_nothing_left()


def test_without_a_draft_the_target_decodes_plainly(clock: Clock) -> None:
    world = World(clock, 3)
    names = [world.open(prompt, 12) for prompt in prompts(world.rng, 3)]
    world.run()
    for name in names:
        world.check_greedy(name)
        assert [len(commit.tokens) for commit in world.commits[name]] == [1] * 12
    assert clock.now == 0  # no one was waited for
    world.check_nothing_left()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 10, 11])
@pytest.mark.parametrize("agreement", [3, 4])
def test_max_tokens_cut_exactly(clock: Clock, max_tokens: int, agreement: int) -> None:
    for ahead in (True, False):
        world = World(clock, max_tokens, FakeModel(agreement=agreement), ahead=ahead)
        world.attach()
        name = world.open([5] * 20, max_tokens)
        world.run()
        world.check_greedy(name)
        assert len(world.ledger.records[name].generated) == max_tokens
        assert world.commits[name][-1].finish_reason is m.FinishReason.LENGTH
        world.check_nothing_left()


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("agreement", [3, 4])
def test_stop_tokens_cut_exactly(clock: Clock, place: int, agreement: int) -> None:
    """Wherever in a round one falls; it is the last token, and nothing that was accepted behind it counts."""
    model = FakeModel(agreement=agreement)
    prompt = [9, place]
    generated = model.plain(prompt, 12, [])[0][2:]
    stop = [generated[place], VOCAB - 1]
    world = World(clock, place, model)
    world.attach()
    name = world.open(prompt, 40, stop=stop)
    world.run()
    world.check_greedy(name)
    record = world.ledger.records[name]
    assert record.generated == generated[: generated.index(generated[place]) + 1]
    assert record.finish_reason is m.FinishReason.STOP
    assert all(commit.accepted <= len(commit.tokens) for commit in world.commits[name])
    world.check_nothing_left()


def test_cut_at_end_by_hand() -> None:
    stop = frozenset([7])
    assert cut_at_end([1, 2, 3], 9, stop) == ([1, 2, 3], m.FinishReason.NONE)
    assert cut_at_end([1, 2, 3], 3, stop) == ([1, 2, 3], m.FinishReason.LENGTH)
    assert cut_at_end([1, 2, 3], 2, stop) == ([1, 2], m.FinishReason.LENGTH)
    assert cut_at_end([1, 7, 7], 9, stop) == ([1, 7], m.FinishReason.STOP)
    assert cut_at_end([1, 7, 3], 2, stop) == ([1, 7], m.FinishReason.STOP)
    assert cut_at_end([1, 2, 7], 2, stop) == ([1, 2], m.FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(3))
def test_a_session_opened_again_goes_on_where_it_stood(clock: Clock, seed: int) -> None:
    world = World(clock, seed, FakeModel(agreement=3))
    world.attach()
    prompt = [seed] * 30
    whole = world.model.plain(prompt, 20, [])[0]
    name = world.open(prompt, 20, done=whole[30:41])
    world.run()
    assert world.ledger.records[name].tokens == whole
    assert world.commits[name][0].at.base == 41
    world.check_nothing_left()


@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_a_prompt_that_was_read_before_is_not_read_again(clock: Clock, length: int) -> None:
    """But for its last token, which the first round runs: on both sides, up to whole pages."""
    world = World(clock, length)
    world.attach()
    prompt = [length % VOCAB] * length
    first = world.open(prompt, 20)
    world.run()
    world.check_greedy(first)
    covered = (length - 1) // PAGE_SIZE * PAGE_SIZE
    again = world.open(prompt, 20)
    world.verifier._admit()
    (link,) = world.links
    while link.to_draft:
        world._deliver(link, link.to_draft)
    world.drafter._apply_inbox()
    assert world.verifier._sessions[again].kv.length == covered
    assert link.draft_end.sessions[again].kv.length == covered
    world.run()
    world.check_greedy(again)
    world.check_nothing_left()


@pytest.mark.parametrize("exactness", m.Exactness)
def test_only_kv_that_was_computed_densely_is_offered(clock: Clock, exactness: m.Exactness) -> None:
    """To a later session with the same text: an approximate session offers its prompt, an exact one all."""
    world = World(clock, 6, FakeModel(ends=True))
    world.attach()
    name = world.open([5] * 170, 60, exactness=exactness)
    world.run()
    later = SequenceKV()
    covered = world.target.kv.reuse_prefix(later, world.ledger.records[name].tokens)
    assert covered == (160 if exactness is m.Exactness.APPROXIMATE else 224)
    world.target.kv.release(later)
    world.check_nothing_left()


# Sampled outcomes


def test_sampled_outcomes_have_the_targets_distribution(clock: Clock) -> None:
    """Sessions of three tokens, most of them speculated: each token given those before, as the target has it."""
    sampling, model, prompt = Sampling(temperature=0.8, top_p=0.95), FakeModel(agreement=2), [1, 2, 3]
    world = World(clock, 5, model, gamma=2, prefill_chunk=512)
    world.attach()
    names = [world.open(prompt, 3, replace(sampling, seed=seed)) for seed in range(900)]
    world.run()
    world.check_nothing_left()
    drafted, accepted = totals(world)
    assert drafted > 1500
    assert 0.2 < accepted / drafted < 0.9
    outcomes = [world.ledger.records[name].generated for name in names]
    after: dict[tuple[int, ...], Counter[int]] = {}
    for outcome in outcomes:
        for place, token in enumerate(outcome):
            after.setdefault(tuple(outcome[:place]), Counter())[token] += 1
    seen = {start: counts for start, counts in after.items() if sum(counts.values()) >= 120}
    assert {len(start) for start in seen} == {0, 1, 2}
    for start, counts in seen.items():
        assert p_value(counts, target_probs(model.target([*prompt, *start]), sampling)) > 1e-4
    # A control: the draft's own distribution is another one, and would be told apart.
    assert p_value(seen[()], target_probs(model.draft(prompt), sampling)) < 1e-6


def target_probs(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """The truncated distribution, worked out in float64 apart from the engine."""
    probs = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    probs /= probs.sum()
    kept: dict[int, float] = {}
    for token in np.argsort(-probs, kind="stable"):
        kept[int(token)] = float(probs[token])
        if sum(kept.values()) >= sampling.top_p:
            break
    return {token: p / sum(kept.values()) for token, p in kept.items()}


def p_value(observed: Counter[int], probs: dict[int, float]) -> float:
    """Chi-square; tokens expected fewer than five times are taken together. 0 if an impossible one occurs."""
    if not set(observed) <= set(probs):
        return 0.0
    total = sum(observed.values())
    cells = [(observed[token], p * total) for token, p in probs.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if small:
        cells.append((sum(o for o, _ in small), sum(e for _, e in small)))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def check_sampled(world: World, name: str) -> None:
    """As many tokens as asked for, each one that the target might have drawn there."""
    request, record = world.requests[name], world.ledger.records[name]
    assert len(record.generated) == request.max_tokens
    for place in range(record.prompt_tokens, len(record.tokens)):
        allowed = target_probs(world.model.target(record.tokens[:place]), record.sampling)
        assert record.tokens[place] in allowed


# Links that misbehave


def random_world(clock: Clock, seed: int, faults: Faults) -> tuple[World, list[str]]:
    """Any settings, models and sessions; room that is scarce on either side or not."""
    rng = random.Random(seed)
    world = World(
        clock,
        seed,
        FakeModel(ends=rng.random() < 0.5, agreement=rng.choice([0, 2, 3, 3, 4])),
        gamma=rng.choice([1, 2, 4]),
        ahead=rng.random() < 0.7,
        pages=rng.choice([24, 200]),
        draft_pages=rng.choice([10, 24, 200]),
        prefill_chunk=rng.choice([8, 64]),
        faults=faults,
        max_sessions=rng.choice([2, 64]),
    )
    names: list[str] = []
    for prompt in prompts(rng, 5):
        stop = [rng.randrange(VOCAB)] if rng.random() < 0.3 else []
        sampling = GREEDY
        if rng.random() < 0.25:
            sampling, stop = Sampling(0.7, 0.6, rng.randrange(2**64)), []
        approximate = world.model.ends and rng.random() < 0.7
        exactness = m.Exactness.APPROXIMATE if approximate else m.Exactness.EXACT
        arguments = (prompt, rng.randint(1, 30), sampling, stop, exactness)
        world.script.append(lambda arguments=arguments: names.append(world.open(*arguments)))
    return world, names


def check(world: World, names: list[str]) -> None:
    for name in names:
        (world.check_greedy if world.requests[name].sampling.greedy else lambda n: check_sampled(world, n))(
            name
        )


@pytest.mark.parametrize("seed", range(40))
def test_repeated_reordered_and_stale_frames_change_no_outcome(clock: Clock, seed: int) -> None:
    """Nor does one that is honest but out of place ever count as dishonest."""
    world, names = random_world(clock, seed, Faults(left=120))
    world.attach()
    world.run()
    assert len(names) == 5
    check(world, names)
    world.check_nothing_left()


def test_the_faults_above_are_noticed(clock: Clock) -> None:
    """Over some seeds every way of turning a frame away is taken, and proposals are still accepted."""
    counters: Counter[str] = Counter()
    accepted = 0
    for seed in range(15):
        world, _ = random_world(clock, seed, Faults(left=120))
        world.attach()
        world.run()
        counters += world.verifier.counters + world.drafter.counters
        accepted += totals(world)[1]
    turned_away = [
        "repeated_frames",
        "stale_frames",
        "unknown_session_frames",
        "repeated_verdicts",
    ]
    assert all(counters[name] > 5 for name in turned_away), counters
    assert accepted > 200


@pytest.mark.parametrize("seed", range(30))
def test_drafts_come_and_go(clock: Clock, seed: int) -> None:
    """Streams break in mid-step and come back, a second draft joins, patience runs out; outcomes stay."""
    world, names = random_world(clock, 1000 + seed, Faults(left=20 * (seed % 3), jumps=5))
    rng = random.Random(seed)

    def disturb() -> None:
        if world.links and rng.random() < 0.6:
            world.detach(rng.choice(world.links))
        else:
            world.attach()

    for _ in range(rng.randint(2, 8)):
        world.script.insert(rng.randint(0, len(world.script)), disturb)
    world.attach()
    world.run()
    check(world, names)
    world.check_nothing_left()


@pytest.mark.parametrize("method", ["streaming", "pillar", "sts", "specattn", "ahead"])
@pytest.mark.parametrize("seed", range(4))
def test_sparse_sessions_outlive_their_drafts(clock: Clock, seed: int, method: str) -> None:
    """A method that announces reads everything while there is no draft; the others stay as they are.

    What is always read is all that this model looks at: with `ahead` the sinks and the block before a round.
    """
    plan = replace(PLAN, mass=0.5, group_size=32)
    world = World(clock, seed, FakeModel(ends=True, agreement=3, recent=1), plan)
    name = world.open([3] * 150, 60, exactness=m.Exactness.APPROXIMATE, sparsity=method)
    world.attach()

    def until_it_says_more(speculating: bool) -> None:
        before = len(world.commits[name])
        while not any((commit.drafted > 0) == speculating for commit in world.commits[name][before:]):
            assert world.happen()
            assert not world.ended(name)

    for _ in range(2):
        until_it_says_more(speculating=True)
        world.detach(world.links[0])
        until_it_says_more(speculating=False)
        world.attach()
    until_it_says_more(speculating=True)
    world.run()
    world.check_greedy(name)
    plain = [commit for commit in world.commits[name] if not commit.drafted]
    drafted = [commit for commit in world.commits[name] if commit.drafted]
    assert any(commit.kv_tokens_read < commit.kv_tokens_total for commit in drafted)
    dense = [commit.kv_tokens_read == commit.kv_tokens_total for commit in plain]
    assert all(dense) if METHODS[method].announcing else not any(dense)
    world.check_nothing_left()


@pytest.mark.parametrize("seed", range(20))
def test_aborts_leave_nothing_behind(clock: Clock, seed: int) -> None:
    """Aborted while queued, while reading, in mid-step, or when over; the others go on."""
    world, names = random_world(clock, 2000 + seed, Faults(left=20))
    rng = random.Random(seed)
    gone: set[str] = set()

    def abort() -> None:
        if names:
            name = rng.choice(names)
            gone.add(name)
            world.abort(name)

    for _ in range(4):
        world.script.insert(rng.randint(2, len(world.script)), abort)
    world.attach()
    world.run()
    check(world, [name for name in names if name not in gone])
    for name in gone:
        record = world.ledger.records[name]
        plain = world.model.plain(record.tokens[: record.prompt_tokens], record.max_tokens, [])[0]
        assert not record.sampling.greedy or plain[: len(record.tokens)] == record.tokens
    world.check_nothing_left()


def test_a_draft_that_asks_for_resync_is_begun_again(clock: Clock) -> None:
    """Also in the middle of a step on its proposal, whose verdict it then cannot know."""
    for moment in range(24):
        world = World(clock, moment, FakeModel(ends=True, agreement=3))
        link = world.attach()
        name = world.open([4] * 50, 20, exactness=m.Exactness.APPROXIMATE)
        world.script = [lambda: None] * (moment // 2) + [
            lambda link=link: link.to_target.append(m.Resync("s0"))
        ]
        world.run()
        world.check_greedy(name)
        assert world.commits[name][-1].drafted or world.commits[name][-2].drafted
        world.check_nothing_left()


def test_a_refused_frame_leads_to_resync_and_on(clock: Clock) -> None:
    """As after a frame that left a gap, at any moment of a session's life."""
    refused = 0
    for moment in range(20):
        world = World(clock, moment, FakeModel(ends=True, agreement=3))
        link = world.attach()
        name = world.open([4] * 50, 20, exactness=m.Exactness.APPROXIMATE)
        gap = m.Announcement(m.At(name, 0, 50, 300), 1, b"")
        world.script = [lambda: None] * moment + [lambda link=link, gap=gap: link.to_target.append(gap)]
        world.run()
        world.check_greedy(name)
        assert world.drafter.counters["refused_frames"] == world.verifier.counters["refused_frames"]
        refused += world.verifier.counters["refused_frames"]
        world.check_nothing_left()
    assert refused >= 10


def test_a_draft_that_stays_silent_is_waited_for_once(clock: Clock) -> None:
    world = World(clock)
    silent = DraftPeer("silent", lambda event: None)
    world.verifier.attach_draft(silent)
    name = world.open([1] * 20, 10)
    world.run()
    world.check_greedy(name)
    assert clock.now == pytest.approx(1.0)
    assert world.verifier.counters["draft_timeouts"] == 1
    assert world.verifier.counters["plain_rounds"] == 10


def test_a_session_is_drafted_again_after_a_timeout(clock: Clock) -> None:
    world = World(clock, 2)
    link = world.attach()
    name = world.open([1] * 20, 60)
    for _ in range(40):  # the draft hears nothing at first
        if world.target_side.dirty or world.target_side.step:
            world.target_side.advance(world.rng)
        else:
            clock.now += 1.5
            world.target_side.dirty = True
    assert 0 < len(world.commits[name]) < 30
    assert link.to_draft
    world.run()
    world.check_greedy(name)
    assert world.commits[name][-1].drafted
    world.check_nothing_left()


def test_sessions_without_room_at_the_draft_are_decoded_plainly_until_there_is(clock: Clock) -> None:
    world = World(clock, 4, draft_pages=pages_for(20 + 80 + 10))
    world.attach()
    first, second = world.open([1] * 20, 20), world.open([2] * 20, 80)
    world.run()
    world.check_greedy(first)
    world.check_greedy(second)
    assert world.drafter.counters["declined_sessions"] >= 1
    for name in (first, second):
        assert any(commit.drafted for commit in world.commits[name])
    assert any(not commit.drafted for commit in world.commits[second])
    world.check_nothing_left()


def test_a_session_that_is_too_long_for_the_draft_is_decoded_plainly(clock: Clock) -> None:
    world = World(clock, 4, draft_context=50)
    link = world.attach()
    begun: Counter[str] = Counter()
    send = link.target_end.send

    def count(event: m.TargetEvent) -> None:
        if isinstance(event, m.Begin):
            begun[event.at.session] += 1
        send(event)

    link.target_end.send = count  # type: ignore[method-assign]
    long, short = world.open([1] * 40, 20), world.open([2] * 20, 20)
    world.run()
    world.check_greedy(long)
    world.check_greedy(short)
    assert not any(commit.drafted for commit in world.commits[long])
    assert any(commit.drafted for commit in world.commits[short])
    assert begun == {long: 1, short: 1}
    world.check_nothing_left()


@pytest.mark.parametrize("seed", range(25))
def test_a_session_id_can_be_used_again(clock: Clock, seed: int) -> None:
    """By a client for its next request, or when a session is opened again; at once, however the last one ended.

    Frames of the last one that are still on their way are stale: they neither count nor look dishonest.
    """
    world = World(clock, seed, FakeModel(ends=True, agreement=3 + seed % 2))
    world.attach()
    rng = random.Random(seed)
    for _ in range(4):
        stop = rng.sample(range(VOCAB), 6)
        prompt = [rng.randrange(VOCAB)] * rng.choice([20, 23, 40])
        name = world.open(prompt, 30, stop=stop, exactness=m.Exactness.APPROXIMATE, name="mine")
        moment = rng.choice([10, 20, 200])
        while name in world.verifier._emit:
            world.happen()
            moment -= 1
            if moment == 0:
                world.abort(name)
        if moment > 0:
            world.check_greedy(name)
            last = world.commits[name]
            assert len(last) < 3 or any(commit.drafted for commit in last)
        world.ledger.close(name)
    assert not world.verifier.counters["draft_timeouts"]
    world.run()
    world.check_nothing_left()


# Single frames at the target


@dataclass
class Stand:
    """A target alone, with one session whose prompt is read; `sent`: what the draft was sent."""

    exactness: m.Exactness = m.Exactness.APPROXIMATE
    sampling: Sampling = GREEDY
    base: int = 100
    sparsity: str = ""
    sent: list[m.TargetEvent] = field(default_factory=list)
    served: list[m.ServedEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = FakeModel(ends=True)
        runner = FakeRunner(model.target, True, LAYERS, 1, 40)
        self.verifier = Verifier(runner, PLAN, TargetSettings(gamma=4, max_context=500, max_queued=2))
        self.peer = DraftPeer("draft", self.sent.append)
        self.verifier.attach_draft(self.peer)
        self.tokens = [7] * self.base
        self.verifier.open(self.opening("a"), self.served.append)
        while self.step():
            pass
        self.session = self.verifier._sessions["a"]
        self.heads = len(draft_heads(PLAN))

    def opening(self, name: str, **changes: Any) -> m.Open:
        known = m.Open(name, self.tokens, self.base, 200, [], self.sampling, self.exactness, self.sparsity)
        return replace(known, **changes)

    def step(self) -> bool:
        step = self.verifier.plan_step()
        if step is not None:
            self.verifier.finish_step(step, self.verifier.execute(step))
        return step is not None

    def announcement(self, **changes: Any) -> m.Announcement:
        data = encode_selection(self.selection(self.session.at.base))
        return replace(m.Announcement(self.session.at, self.session.tokens[-1], data), **changes)

    def selection(self, base: int, block: int = 2) -> BlockSelection:
        return BlockSelection.from_lists([[block]] * self.heads, PLAN.num_blocks(base))

    def proposal(self, tokens: list[int] | None = None, **changes: Any) -> m.Proposal:
        made = m.Proposal(self.session.at, True, self.session.tokens[-1], tokens or [1, 2, 3, 4])
        return replace(made, **changes)

    def receive(self, event: m.DraftEvent) -> None:
        self.verifier.receive(self.peer, event)

    def state(self) -> Any:
        """All that a frame could change, but counters and statistics."""
        session = self.session
        announced = {key: a.selection.keys.tolist() for key, a in session.announced.items()}
        known = (session.at, list(session.tokens), session.drafted, dict(session.proposals), announced)
        return *known, list(session.held), session.kv.length, list(session.kv.pages)


def test_a_repeated_frame_changes_nothing() -> None:
    stand = Stand()
    for event in (stand.announcement(), stand.proposal()):
        stand.receive(event)
        before, counted = stand.state(), stand.verifier.counters["repeated_frames"]
        stand.receive(event)
        assert stand.state() == before
        assert stand.verifier.counters["repeated_frames"] == counted + 1
    assert stand.step()
    assert not stand.step()


def test_an_announcement_is_waited_for_and_the_first_one_counts() -> None:
    stand = Stand()
    stand.receive(stand.proposal())
    assert not stand.step()
    other = encode_selection(stand.selection(stand.base, block=4))
    stand.receive(stand.announcement(selection=other))
    assert stand.session.announced[stand.session.key].selection.lists() == [[4]] * stand.heads
    before = stand.state()
    stand.receive(stand.announcement())
    assert stand.state() == before, "another one for the same round changes nothing"
    assert stand.step()
    assert stand.session.reader is not None
    assert stand.session.reader.chosen is not None
    assert stand.session.reader.chosen[1:, :, 4].all()
    assert not stand.session.reader.chosen[1:, :, 2].any()


def test_a_method_without_announcements_is_sparse_without_a_draft() -> None:
    stand = Stand(sparsity="streaming")
    assert stand.session.announced_by == ""
    with pytest.raises(InvalidArgument, match="takes no announcements"):
        stand.receive(stand.announcement())
    stand.receive(stand.proposal(announces=False))
    assert stand.step()
    commit = stand.served[-1]
    assert isinstance(commit, m.Commit)
    assert commit.kv_tokens_read < commit.kv_tokens_total


@pytest.mark.parametrize("name", ["nonesuch", "tidal"])
def test_a_method_that_the_plan_does_not_allow_is_refused_with_those_that_it_does(name: str) -> None:
    stand = Stand()
    with pytest.raises(InvalidArgument, match=f"one of {', '.join(methods_of(PLAN))}; got '{name}'"):
        stand.verifier.open(stand.opening("b", sparsity=name), stand.served.append)


def test_room_for_group_means_is_made_where_they_are_used() -> None:
    for plan, used in (
        (PLAN, True),
        (replace(PLAN, budget=1.0), False),
        (replace(PLAN, group_size=0), False),
    ):
        runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 40)
        Verifier(runner, plan, TargetSettings())
        assert (runner.kv.means is not None) == used


def test_frames_of_a_judged_round_change_nothing_and_are_answered_again() -> None:
    stand = Stand()
    frames = [stand.announcement(), stand.proposal()]
    for event in frames:
        stand.receive(event)
    assert stand.step()
    verdict = stand.sent[-1]
    assert isinstance(verdict, m.Verdict)
    before = stand.state()
    for event in frames:
        stand.receive(event)
    assert stand.state() == before
    assert stand.sent[-1] == verdict
    assert stand.sent.count(verdict) == 2
    assert stand.verifier.counters["repeated_frames"] == 2
    assert not stand.step()


def test_stale_frames_change_nothing() -> None:
    stand = Stand()
    frames = [stand.announcement(), stand.proposal()]
    for _ in range(2):
        for event in (stand.announcement(), stand.proposal()):
            stand.receive(event)
        assert stand.step()
    before, sent = stand.state(), list(stand.sent)
    for event in frames:
        stand.receive(event)
    assert stand.state() == before
    assert stand.sent == sent
    assert stand.verifier.counters["stale_frames"] == 2
    assert stand.session.stats.stale_rounds == 1


def test_a_gap_is_refused_with_what_is_expected() -> None:
    stand = Stand()
    at = stand.session.at
    for ahead in (at._replace(epoch=1), at._replace(round=2), at._replace(epoch=3, round=9)):
        before = stand.state()
        for event in (stand.announcement(at=ahead), stand.proposal(at=ahead)):
            stand.receive(event)
            refusal = stand.sent.pop()
            assert isinstance(refusal, m.Refusal)
            assert refusal.expected == at
        assert stand.state() == before


def test_a_difference_against_an_unknown_selection_is_refused() -> None:
    stand = Stand()
    dense = BlockSelection.from_matrix(
        np.random.default_rng(0).random((stand.heads, PLAN.num_blocks(100))) < 0.7
    )
    data = encode_selection(dense, dense, (0, 7))
    assert data[1] == 1, "it names one reference"
    before = stand.state()
    stand.receive(stand.announcement(selection=data))
    assert isinstance(stand.sent[-1], m.Refusal)
    assert stand.state() == before


def test_frames_of_sessions_that_are_not_the_drafts_are_ignored() -> None:
    """Those of another draft's session as well; whoever sends one is told that it is over."""
    stand = Stand()
    before = stand.state()
    sent: list[m.TargetEvent] = []
    stranger = DraftPeer("stranger", sent.append)
    stand.verifier.attach_draft(stranger)
    ready, decline = m.Ready(stand.session.at), m.Decline("a", "full")
    for event in (stand.announcement(), stand.proposal(), ready, decline, m.Resync("a")):
        stand.verifier.receive(stranger, event)
    stand.verifier.receive(stranger, m.Resync("unheard-of"))
    assert sent == [m.End("a")] * 5 + [m.End("unheard-of")]
    assert stand.state() == before
    assert stand.verifier.counters["unknown_session_frames"] == 6


def test_frames_that_no_honest_draft_sends() -> None:
    stand = Stand()
    at, before = stand.session.at, stand.state()
    wide = m.Support(np.array([1, VOCAB]), np.array([0.5, 0.5], dtype=np.float32))
    shorter = encode_selection(stand.selection(stand.base - PAGE_SIZE))
    heads = encode_selection(
        BlockSelection.from_lists([[1]] * (stand.heads + 1), PLAN.num_blocks(stand.base))
    )
    wrong = [
        (stand.proposal([1, 2, 3, 4, 5]), "γ is 4"),
        (stand.proposal([1, VOCAB]), "outside the vocabulary"),
        (stand.proposal([1], supports=[wide]), "outside the vocabulary"),
        (
            stand.proposal([1], supports=[m.Support(np.array([1]), np.ones(1, np.float32))]),
            "carry no distributions",
        ),
        (stand.proposal(at=at._replace(base=99)), "base 99"),
        (stand.proposal(at=at._replace(base=101)), "base 101"),
        (stand.proposal(at=at._replace(round=1, base=99)), "base 99"),
        (stand.proposal(at=at._replace(round=1, base=106)), "base 106"),
        (stand.announcement(at=at._replace(base=101)), "base 101"),
        (stand.announcement(selection=b"nonsense"), "announcement"),
        (stand.announcement(selection=shorter), "6 blocks"),
        (stand.announcement(selection=heads), "heads"),
    ]
    for event, reason in wrong:
        with pytest.raises(InvalidArgument, match=reason):
            stand.receive(event)
        assert stand.state() == before


def test_an_exact_session_takes_no_announcements() -> None:
    stand = Stand(m.Exactness.EXACT)
    with pytest.raises(InvalidArgument, match="takes no announcements"):
        stand.receive(stand.announcement())


def test_a_resync_during_a_step_makes_the_verdict_a_plain_one() -> None:
    """The draft that is begun again does not know the round; it learns the tokens as if decoded without it."""
    stand = Stand()
    for event in (stand.announcement(), stand.proposal()):
        stand.receive(event)
    step = stand.verifier.plan_step()
    assert step is not None
    stand.receive(m.Resync("a"))
    begin = stand.sent[-1]
    assert isinstance(begin, m.Begin)
    assert (begin.at.epoch, begin.at.round, begin.tokens) == (1, 0, stand.tokens)
    stand.verifier.finish_step(step, stand.verifier.execute(step))
    verdict = stand.sent[-1]
    assert isinstance(verdict, m.Verdict)
    assert verdict.plain
    assert (verdict.at.base, verdict.at.epoch, verdict.at.round) == (100, 2, 1)
    assert not stand.session.held


def test_a_draft_lost_during_a_step_has_no_say_in_what_follows() -> None:
    stand = Stand()
    for event in (stand.announcement(), stand.proposal()):
        stand.receive(event)
    step = stand.verifier.plan_step()
    assert step is not None
    stand.verifier.detach_draft(stand.peer)
    stand.verifier.finish_step(step, stand.verifier.execute(step))
    assert stand.session.draft is None
    assert len(stand.served) == 1
    assert stand.step()  # plainly


def test_an_abort_during_a_step_frees_the_name_at_once() -> None:
    """The step has no say any more; its pages are held until it is over, and the next session has later epochs."""
    stand = Stand()
    frames = [stand.announcement(), stand.proposal()]
    for event in frames:
        stand.receive(event)
    step = stand.verifier.plan_step()
    assert step is not None
    stand.verifier.abort("a")
    assert stand.sent[-1] == m.End("a")
    later: list[m.ServedEvent] = []
    stand.verifier.open(stand.opening("a", max_tokens=1), later.append)
    assert stand.verifier.runner.kv.pool.held > 0
    stand.verifier.finish_step(step, stand.verifier.execute(step))
    assert stand.served == later == []
    while stand.step():
        pass
    begin = next(event for event in stand.sent if isinstance(event, m.Begin) and event.at.epoch > 0)
    assert begin.tokens == stand.tokens
    for event in frames:
        stand.receive(event)
    assert stand.verifier.counters["stale_frames"] == 2
    stand.receive(m.Decline("a", "no room"))
    assert stand.step()
    assert [event.finish_reason for event in later if isinstance(event, m.Commit)] == [m.FinishReason.LENGTH]
    assert not stand.step()
    assert stand.served == []
    assert stand.verifier.runner.kv.pool.held == stand.verifier._reserved == 0
    stand.verifier.runner.kv.pool.check_integrity()


def test_an_abort_while_a_prompt_is_read() -> None:
    stand = Stand()
    stand.verifier.open(stand.opening("b", tokens=[8] * 100), stand.served.append)
    step = stand.verifier.plan_step()
    assert step is not None
    assert step.prefills
    stand.verifier.abort("b")
    stand.verifier.finish_step(step, stand.verifier.execute(step))
    stand.step()
    assert stand.verifier.gauges["sessions"] == 1
    assert stand.verifier.runner.kv.pool.held == len(stand.session.kv.pages)


def test_an_abort_that_crosses_the_end_spares_the_next_session_of_that_name() -> None:
    stand = Stand()
    stand.verifier.abort("a")
    stand.verifier.abort("a")
    stand.verifier.open(stand.opening("a"), stand.served.append)
    while stand.step():
        pass
    assert stand.verifier.gauges["sessions"] == 1
    assert stand.verifier.counters["aborted_sessions"] == 1


# Opening


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"session": "a"}, "open already"),
        ({"prompt_tokens": 0}, "0 prompt tokens"),
        ({"prompt_tokens": 101}, "101 prompt tokens among 100"),
        ({"tokens": [VOCAB] * 100}, "outside the vocabulary"),
        ({"max_tokens": 0}, "leaves nothing to generate"),
        ({"tokens": [1] * 120, "max_tokens": 20}, "leaves nothing to generate"),
        ({"max_tokens": 401}, "exceed the context of 500"),
        ({"tokens": [1] * 400, "prompt_tokens": 400, "max_tokens": 100, "session": "b"}, None),
    ],
)
def test_what_can_never_run_is_not_opened(changes: dict[str, Any], reason: str | None) -> None:
    stand = Stand()
    request = stand.opening("b", **{"session": "b"} | changes)
    if reason is None:
        stand.verifier.open(request, stand.served.append)
        return
    with pytest.raises(InvalidArgument, match=reason):
        stand.verifier.open(request, stand.served.append)


def test_what_needs_more_pages_than_there_are_is_not_opened() -> None:
    stand = Stand()
    stand.verifier.settings = replace(stand.verifier.settings, max_context=10_000)
    with pytest.raises(InvalidArgument, match="KV pages"):
        stand.verifier.open(stand.opening("b", max_tokens=600), stand.served.append)


def test_a_full_queue_refuses_and_can_be_aborted_from() -> None:
    """Without room for a second session, two wait; a third is refused until one of them goes."""
    stand = Stand()
    for name in ("b", "c"):
        stand.verifier.open(stand.opening(name, max_tokens=400), stand.served.append)
    stand.step()
    assert stand.verifier.gauges["queued_sessions"] == 2
    with pytest.raises(ResourceExhausted, match="queued already"):
        stand.verifier.open(stand.opening("d"), stand.served.append)
    stand.verifier.abort("b")
    stand.verifier.open(stand.opening("d"), stand.served.append)
    stand.verifier.close_all(Unavailable("stopping"))
    assert {event.session for event in stand.served if isinstance(event, m.Closed)} == {"a", "c", "d"}


def test_without_a_queue_a_session_runs_if_a_place_is_free_and_is_refused_otherwise() -> None:
    """Also before the step that takes it up, and as soon as one that ran has ended."""
    verifier = Verifier(
        FakeRunner(FakeModel().target, False, LAYERS, 1, 40),
        PLAN,
        TargetSettings(max_sessions=2, max_queued=0, max_context=600),
    )
    for name in ("a", "b"):
        verifier.open(exact(name, 5, 5), lambda _: None)
    with pytest.raises(
        ResourceExhausted, match="no place is free, and 0 sessions are queued already of at most 0"
    ):
        verifier.open(exact("c", 5, 5), lambda _: None)
    run_to_the_end(verifier)
    verifier.open(exact("c", 100, 400), lambda _: None)
    with pytest.raises(ResourceExhausted, match="try again later"):
        verifier.open(exact("d", 100, 400), lambda _: None)  # a place, but no pages
    verifier.plan_step()
    with pytest.raises(ResourceExhausted, match="try again later"):
        verifier.open(exact("d", 100, 400), lambda _: None)
    verifier.abort("c")
    verifier.open(exact("d", 100, 400), lambda _: None)
    assert verifier.plan_step() is not None
    assert verifier.gauges["queued_sessions"] == 0


# KV in tiers


def over_tiers(frames: int = 40, **changes: Any) -> Verifier:
    """A target with a home for 40 pages; nothing run here leaves its frames."""
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 1)
    runner.kv = TieredKV(LAYERS, KV_HEADS, 2, frames, 40, 500)
    settings = TargetSettings(gamma=4, prefill_chunk=24, max_sessions=4, max_context=600)
    return Verifier(runner, PLAN, replace(settings, **changes))


def exact(name: str, prompt: int = 100, max_tokens: int = 200) -> m.Open:
    return m.Open(name, [7] * prompt, prompt, max_tokens, [], GREEDY, m.Exactness.EXACT)


def run_to_the_end(verifier: Verifier) -> None:
    while (step := verifier.plan_step()) is not None:
        verifier.finish_step(step, verifier.execute(step))


def test_what_home_has_no_room_for_is_refused_until_others_have_ended() -> None:
    """Also beside those that are queued; what runs gets to its end."""
    verifier = over_tiers(max_sessions=1, max_queued=9)
    commits: list[m.ServedEvent] = []
    verifier.open(exact("a"), commits.append)
    verifier.plan_step()
    verifier.open(exact("b", max_tokens=180), commits.append)
    assert verifier.gauges["queued_sessions"] == 1
    with pytest.raises(
        ResourceExhausted,
        match="105 tokens need 7 KV pages, open sessions have 38 of the 40 in host memory; try again later",
    ):
        verifier.open(exact("c", max_tokens=5), commits.append)
    verifier.open(exact("d", 5, 5), commits.append)
    run_to_the_end(verifier)
    model, made = FakeModel(), Counter[str]()
    for event in commits:
        assert isinstance(event, m.Commit)
        made[event.at.session] += len(event.tokens)
    assert made == {"a": 200, "b": 180, "d": 5}
    text = [token for event in commits if event.at.session == "a" for token in event.tokens]  # type: ignore[union-attr]
    assert [7] * 100 + text == model.plain([7] * 100, 200, [])[0]
    verifier.open(exact("c", max_tokens=5), commits.append)


def test_what_host_memory_can_never_hold_is_an_invalid_argument() -> None:
    verifier = over_tiers(frames=30)
    verifier.runner.kv = TieredKV(LAYERS, KV_HEADS, 2, 30, 30, 500)
    with pytest.raises(InvalidArgument, match="600 tokens need 38 KV pages of 16, the target has 30"):
        verifier.open(exact("a", max_tokens=500), lambda _: None)


def test_counters_and_gauges_of_tiers_are_told() -> None:
    verifier = over_tiers()
    verifier.open(exact("a", max_tokens=5), lambda _: None)
    run_to_the_end(verifier)
    totals, gauges = verifier.totals, verifier.gauges
    assert totals["opened_sessions"] == 1
    assert {name for name in totals if name.startswith("kv_")} == {
        *("kv_hit_pages", "kv_fetched_pages", "kv_overflow_pages", "kv_staged_pages", "kv_stages"),
        *("kv_stored_pages", "kv_offloads", "kv_bytes_fetched", "kv_bytes_stored"),
    }
    assert (gauges["kv_gpu_pages"], gauges["kv_offload_active"], gauges["kv_pages_held"]) == (40, 0, 0)
    assert not any(name.startswith("kv_") for name in Stand().verifier.totals)


def test_fewer_frames_than_are_written_at_once_are_refused() -> None:
    over_tiers(frames=14)
    with pytest.raises(
        ValueError,
        match="13 KV pages of 16 fit on the GPU; 4 sessions, and 24 prompt tokens a step, write up to 14 at once: "
        "raise kv_memory, or lower max_sessions or prefill_chunk",
    ):
        over_tiers(frames=13)


@pytest.mark.parametrize("method", [name for name in methods_of(PLAN) if METHODS[name].just_in_time])
def test_what_chooses_while_the_target_runs_is_refused_over_tiers(method: str) -> None:
    """At once: a step that cannot be run would end the target."""
    verifier = over_tiers()
    request = replace(exact("a"), exactness=m.Exactness.APPROXIMATE, sparsity=method)
    with pytest.raises(InvalidArgument, match=f"{method} chooses while the target runs"):
        verifier.open(request, lambda _: None)
    verifier.open(replace(request, sparsity="streaming"), lambda _: None)


# Pieces


def judged_by_hand(logits: Tensor, item: Drafted) -> tuple[int, int]:
    """One round, token by token in float64: each position with its own uniforms, whatever round it falls in."""
    for i, row in enumerate(logits.numpy()):
        if item.sampling.greedy:
            following = int(row.argmax())
            if i == len(item.tokens) or item.tokens[i] != following:
                return i, following
            continue
        weights = target_probs(row, item.sampling)
        if i < len(item.tokens):
            token, draft = item.tokens[i], {item.tokens[i]: 1.0}
            if item.supports:
                ids, probs = item.supports[i].ids.tolist(), item.supports[i].probs.tolist()
                draft = dict(zip(ids, probs, strict=True))
            u = uniforms(item.sampling.seed, item.base + i, 1, USE_ACCEPT)[0]
            if u * draft[token] < weights.get(token, 0.0):
                continue
            weights = {t: max(p - draft.get(t, 0.0), 0.0) for t, p in weights.items()}
        threshold = uniforms(item.sampling.seed, item.base + i, 1, USE_TARGET)[0] * sum(weights.values())
        for token in sorted(weights):
            threshold -= weights[token]
            if threshold < 0:
                return i, token
    raise AssertionError("a round always has a next token")


def test_rounds_are_judged_as_each_by_hand() -> None:
    """Greedy and sampled ones together, of different lengths, with and without distributions."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    rounds, all_logits = [], []
    for i in range(300):
        count = i % 4
        logits = 1.5 * torch.randn(count + 1, VOCAB, generator=generator)
        likely = logits.topk(4).indices[:count].tolist()
        tokens = [int(rng.choice(row)) if rng.random() < 0.4 else row[0] for row in likely]
        sampling = GREEDY if i % 3 == 0 else Sampling(0.5, 0.9, seed=i)
        supports = []
        if not sampling.greedy and rng.random() < 0.7:
            others = [[token, (token + 1) % VOCAB, (token + 5) % VOCAB] for token in tokens]
            supports = [m.Support(np.array(ids), np.array([0.5, 0.25, 0.25], np.float32)) for ids in others]
        all_logits.append(logits)
        rounds.append(Drafted(tokens, supports, sampling, base=i))
    outcomes = judge_rounds(all_logits, rounds)
    assert outcomes == [judged_by_hand(*item) for item in zip(all_logits, rounds, strict=True)]
    assert {accepted for accepted, _ in outcomes} == {0, 1, 2, 3}
