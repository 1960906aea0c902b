"""KV room that grows: sessions give way to older ones when pages run out, and go on later with the same tokens."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead import models
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.wire import messages as m
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from tests.plans import bundled_plan
from tests.proposals import together
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import GREEDY, LAYERS, PLAN, FakeModel, FakeRunner, PinnedFakeRunner
from tests.unit.steps import run_steps, take_step
from tests.unit.world import Faults, World, prompts

# Whole sessions, over pools of any size


class Room(World):
    """A world that holds up the rules about room after everything that the target does.

    order: names in the order in which sessions started to run.
    """

    def __init__(self, *arguments: Any, **of_world: Any) -> None:
        super().__init__(*arguments, **of_world)
        self.order: list[str] = []

    def check_kv(self) -> None:
        super().check_kv()
        admission, pool = self.verifier.admission, self.target.kv.pool
        pool.check_integrity()
        self.order += [name for name in admission.running if name not in self.order]
        started = [*admission.running, *(session.id for session in admission.preempted)]
        assert started == sorted(started, key=self.order.index), "the oldest run, those that gave way are younger"
        assert admission.running or not admission.preempted or admission._closed, "the oldest of all runs"
        assert len(admission.running) <= self.verifier.settings.max_sessions
        for session in (*admission.preempted, *admission.queue):
            assert not session.kv.pages and not session.kv.groups and session.draft.peer is None
        if self.target_side.step is None:
            open_ = (*admission.running.values(), *admission._closed)
            assert pool.held == len({page for session in open_ for page in session.kv.pages})


def open_six(room: Room, seed: int, exactness: m.Exactness = m.Exactness.EXACT) -> list[str]:
    """Six sessions, of which two are sampled; the longest needs 16 pages."""
    names = []
    for number, prompt in enumerate(prompts(random.Random(seed), 6, 100)):
        sampling = GREEDY if number % 3 else Sampling(0.7, 0.9, seed + number)
        names.append(room.open(prompt, 40 + 20 * number, sampling, exactness=exactness))
    return names


@pytest.mark.parametrize("exactness", m.Exactness)
@settings(max_examples=4)
@given(seed=st.integers(0, 99), pages=st.integers(16, 40), draft_pages=st.integers(9, 60), places=st.integers(1, 6))
def test_tokens_are_those_of_plain_decoding_in_every_pool(
    clock: Clock, exactness: m.Exactness, seed: int, pages: int, draft_pages: int, places: int
) -> None:
    """Frames between draft and target may come in another order, twice or late."""
    room = Room(
        clock,
        seed,
        FakeModel(ends=exactness is m.Exactness.APPROXIMATE, agreement=3),
        branches=1 + 2 * (seed % 2),
        pages=pages,
        draft_pages=draft_pages,
        max_sessions=places,
        faults=Faults(left=seed % 3 * 20),
    )
    room.attach()
    names = open_six(room, seed, exactness)
    room.finish()
    for name in names:
        if room.requests[name].sampling.greedy:
            room.check_greedy(name)
        assert len(room.ledger.records[name].generated) == room.requests[name].max_tokens
    counted = sum(record.totals.figures.preemptions for record in room.ledger.records.values())
    assert counted == room.verifier.counters["preemptions"]
    assert room.verifier.counters["opened_sessions"] == 6


def test_sessions_gave_way_in_such_pools_on_both_sides(clock: Clock) -> None:
    """A larger pool has no more give way, and in one with room for all ends none does."""
    given_way, declined = Counter[int](), Counter[int]()
    for pages, seed in itertools.product((16, 24, 200), range(1, 3)):
        room = Room(clock, 7, FakeModel(agreement=3), pages=pages, draft_pages=pages)
        room.attach()
        open_six(room, seed)
        room.run()
        given_way[pages] += room.verifier.counters["preemptions"]
        declined[pages] += room.drafter.counters["declined_sessions"]
    assert given_way[16] > given_way[24] > given_way[200] == 0
    assert min(declined[16], declined[24]) > declined[200] == 0


class PinnedRunner(PinnedFakeRunner):
    """Every step has room for 16 tokens."""

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        assert all(item.drafted is None or len(item.tokens) <= 16 for item in inputs)
        return super().forward(inputs)


class PinnedRoom(Room):
    """It also checks that KV which is made again is made as the first time."""

    def check_kv(self) -> None:
        super().check_kv()
        assert isinstance(self.target, PinnedRunner)
        if self.target_side.step is None:
            self.target.check_runs(self.sessions.values())


def test_a_deterministic_target_repeats_seeded_tokens_in_every_pool(clock: Clock) -> None:
    """What was read as a prompt is read as one again, and what was generated runs in rounds again."""
    outcomes = []
    for pages in (200, 30, 18):
        room = PinnedRoom(clock, pages, FakeModel(agreement=3), pages=pages, runner=PinnedRunner)
        room.attach()
        names = open_six(room, 0)
        room.finish()
        outcomes.append([room.ledger.records[name].tokens for name in names])
        assert (room.verifier.counters["preemptions"] > 0) == (pages < 200)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_sessions_that_wait_for_room_can_be_aborted_and_drafts_come_and_go(clock: Clock) -> None:
    aborted = sum(abort_one_that_waits(clock, seed) for seed in range(5))
    assert aborted > 2


def abort_one_that_waits(clock: Clock, seed: int) -> int:
    """Returns how many met their end while they waited: one, unless none was found waiting."""
    room = Room(clock, seed, FakeModel(agreement=3), pages=18, faults=Faults(left=20, jumps=3))
    room.attach()
    names = open_six(room, seed)
    rng = random.Random(seed)
    gone: list[str] = []

    def abort() -> None:
        if room.verifier.admission.preempted:
            gone.append(rng.choice(list(room.verifier.admission.preempted)).id)
            room.abort(gone[-1])
        elif room.busy():
            room.script.append(abort)

    def change_the_draft() -> None:
        if room.links and rng.random() < 0.6:
            room.detach(rng.choice(room.links))
        else:
            room.attach()

    room.script = [abort, *[change_the_draft] * 3]
    room.finish()
    assert room.verifier.counters["aborted_sessions"] == len(gone)
    for name in names:
        if name not in gone and room.requests[name].sampling.greedy:
            room.check_greedy(name)
    return len(gone)


# Single decisions of a target


class Target:
    """A target without a draft, whose sessions do not end before they are asked to."""

    def __init__(self, pages: int, **changes: Any) -> None:
        self.runner = FakeRunner(FakeModel().target, False, LAYERS, 1, pages)
        of_target = target_settings(gamma=4, max_context=pages * PAGE_SIZE)
        self.verifier = Verifier(self.runner, PLAN, replace(of_target, **changes))
        self.admission = self.verifier.admission
        self.events: list[m.ServedEvent] = []

    def open(self, name: str, prompt: int, max_tokens: int) -> None:
        tokens = [len(self.events) % 30 + 1] * prompt
        request = m.Open(name, tokens, prompt, max_tokens, [], GREEDY, m.Exactness.EXACT)
        self.admission.open(request, self.events.append)

    def step(self) -> None:
        assert take_step(self.verifier) is not None

    @property
    def waiting(self) -> list[str]:
        return [session.id for session in (*self.admission.preempted, *self.admission.queue)]


def run_until_one_gives_way(target: Target) -> None:
    before = target.verifier.counters["preemptions"]
    while target.verifier.counters["preemptions"] == before:
        target.step()


def test_the_youngest_gives_way_and_goes_on_before_those_that_come(clock: Clock) -> None:
    target = Target(12, max_sessions=3)
    for name in "abc":
        target.open(name, 20, 150)
    target.step()
    assert list(target.admission.running) == ["a", "b", "c"]
    target.open("d", 5, 5)
    run_until_one_gives_way(target)
    assert (list(target.admission.running), target.waiting) == (["a", "b"], ["c", "d"])
    run_until_one_gives_way(target)
    assert (list(target.admission.running), target.waiting) == (["a"], ["b", "c", "d"])
    gauges = target.verifier.gauges
    assert (gauges["sessions"], gauges["queued_sessions"], gauges["preempted_sessions"]) == (1, 3, 2)
    target.verifier.abort("a")
    target.step()
    assert next(iter(target.admission.running)) == "b"


def test_a_session_is_not_let_in_where_it_would_have_to_give_way_at_once(clock: Clock) -> None:
    """Prompts that others still read count as if they were read, and each that runs keeps a page for itself."""
    target = Target(20, prefill_chunk=16)
    target.open("a", 150, 50)  # 10 pages with its next round
    target.open("b", 118, 5)  # 8 pages
    target.open("c", 5, 5)
    target.step()
    assert list(target.admission.running) == ["a", "b"]
    assert target.runner.kv.pool.held < 10
    while target.verifier.counters["preemptions"] == 0 and "b" in target.admission.running:
        target.step()
    assert target.verifier.counters["preemptions"] == 0


def test_what_a_session_found_in_the_prefix_index_is_not_read_again(clock: Clock) -> None:
    """Only what the older one took: from the end of the younger one's tokens."""
    target = Target(12)
    target.open("a", 20, 120)
    target.open("b", 90, 60)
    run_until_one_gives_way(target)
    (session,) = target.admission.preempted
    for _ in range(2 * PAGE_SIZE):
        target.step()
    assert target.waiting == ["b"]
    target.verifier.abort("a")
    target.verifier.plan_step()
    assert len(session.tokens) - 5 * PAGE_SIZE <= session.kv.length < len(session.tokens) - PAGE_SIZE


def test_the_draft_is_told_and_its_late_frames_count_for_nothing(clock: Clock) -> None:
    target = Target(12)
    sent: list[m.TargetEvent] = []
    peer = DraftPeer("draft", sent.append)
    target.verifier.protocol.attach(peer)
    for name in "ab":
        target.open(name, 60, 120)
        target.verifier.plan_step()
    for name in "ab":
        target.verifier.protocol.receive(peer, m.Decline(name, "no room"))
    run_until_one_gives_way(target)
    (session,) = target.admission.preempted
    assert (session.id, session.draft.peer, peer.sessions) == ("b", None, {"a"})
    begun = next(event for event in sent if isinstance(event, m.Begin) and event.at.session == "b")
    assert [event for event in sent if isinstance(event, m.End)] == [m.End("b")]
    late = together(m.Proposal(begun.at, begun.tokens[-1], [1, 2]))
    target.verifier.protocol.receive(peer, late)
    assert sent[-1] == m.End("b")
    target.verifier.abort("a")
    target.verifier.plan_step()
    again = sent[-1]
    assert isinstance(again, m.Begin)
    assert again.at.epoch > begun.at.epoch
    assert again.tokens == session.tokens
    target.verifier.protocol.receive(peer, late)
    assert target.verifier.counters["stale_frames"] == 1
    assert not session.draft.proposals


# A real model; on a GPU the deterministic one, for which seeded tokens are the same, too

ON_GPU = torch.cuda.is_available()


def generate(pages: int, backing_pages: int = 0) -> tuple[list[list[int]], int]:
    """What the bundled target makes of four prompts, over so many pages on the device, and how often one gave way.

    backing_pages: in host memory; 0: there is none.
    """
    dtype, device = (torch.bfloat16, "cuda") if ON_GPU else (torch.float32, "cpu")
    model = load_model(str(models.TARGET), dtype, device)
    sizes = pages * PAGE_SIZE, backing_pages * PAGE_SIZE, 300
    runner = make_runner(model, *sizes, step_queries=5, deterministic=ON_GPU)
    of_target = target_settings(gamma=4, max_sessions=4, prefill_chunk=64, max_context=200)
    verifier = Verifier(runner, bundled_plan(), of_target)
    made: dict[str, list[int]] = {str(number): [] for number in range(4)}

    def emit(event: m.ServedEvent) -> None:
        made[event.at.session] += event.tokens

    for number, name in enumerate(made):
        prompt = [100 + 7 * number + i * i % 50 for i in range(40 + 9 * number)]
        sampling = Sampling(0.8, 0.95, number) if ON_GPU and number % 2 else GREEDY
        request = m.Open(name, prompt, len(prompt), 40, [], sampling, m.Exactness.EXACT)
        verifier.admission.open(request, emit)
    run_steps(verifier)
    assert runner.kv.pool.held == 0
    return list(made.values()), verifier.counters["preemptions"]


def test_a_real_model_makes_the_same_tokens_with_and_without_host_memory() -> None:
    wanted, given_way = generate(100)
    assert given_way == 0
    for pages, backing_pages in ((13, 0), (18, 22)):
        tokens, given_way = generate(pages, backing_pages)
        assert tokens == wanted
        assert given_way > 0
