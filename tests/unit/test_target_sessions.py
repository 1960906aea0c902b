"""A target alone: what single events of a draft do to its sessions, what it opens, and steps that fail."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.step_loop import run_step_loop
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.selection import BlockSelection
from specahead.wire import messages as m
from specahead.wire.errors import InvalidArgument, ResourceExhausted, Unavailable
from specahead.wire.selection_codec import encode_selection
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from tests.plans import selection_of
from tests.proposals import together
from tests.settings import target_settings
from tests.unit.fake_models import GREEDY, KV_HEADS, LAYERS, PLAN, VOCAB, FakeModel, FakeRunner
from tests.unit.steps import run_steps, take_step

INTERNAL = StatusCode.INTERNAL
pytestmark = pytest.mark.usefixtures("clock")


# Single frames at the target


@dataclass
class Stand:
    """A target alone, with one session of `base` tokens that waits for its first proposal, as if nothing was committed;
    `sent`: what the draft was sent.
    """

    exactness: m.Exactness = m.Exactness.APPROXIMATE
    sampling: Sampling = GREEDY
    base: int = 100
    max_context: int = 500
    max_sessions: int = 64
    sent: list[m.TargetEvent] = field(default_factory=list)
    served: list[m.ServedEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = FakeModel(ends=True)
        self.runner = FakeRunner(model.target, True, LAYERS, 1, 40)
        limits = target_settings(gamma=4, max_context=self.max_context, max_queued=2, max_sessions=self.max_sessions)
        self.verifier = Verifier(self.runner, PLAN, limits)
        self.peer = DraftPeer("draft", self.sent.append)
        self.verifier.protocol.attach(self.peer)
        self.tokens = [7] * self.base
        opening = self.opening("a", tokens=self.tokens[1:], prompt_tokens=self.base - 1)
        self.verifier.admission.open(opening, self.served.append)
        run_steps(self.verifier)
        self.session = self.verifier.admission.running["a"]
        self.session.tokens[-1] = 7  # it has no KV yet
        self.session.epoch = self.session.round = 0
        self.session.draft.last_judged = None
        self.served.clear()
        del self.sent[1:]  # but Begin
        self.heads = announced_rows(PLAN)

    def opening(self, name: str, **changes: Any) -> m.Open:
        known = m.Open(name, self.tokens, self.base, 200, [], self.sampling, self.exactness)
        return replace(known, **changes)

    def step(self) -> bool:
        return take_step(self.verifier) is not None

    def selection(self, base: int, block: int = 2) -> BlockSelection:
        return selection_of([[block]] * self.heads, PLAN.num_blocks(base))

    def proposal(self, tokens: list[int] | None = None, selection: bytes | None = None, **changes: Any) -> m.Proposals:
        """Return a proposal for the current round, with an announcement where the session takes one."""
        if selection is None:
            announces = self.session.reading.is_announced
            selection = encode_selection(self.selection(self.session.at.base)) if announces else b""
        made = m.Proposal(self.session.at, self.session.tokens[-1], tokens or [1, 2, 3, 4])
        return together(replace(made, **changes), selection=selection)

    def receive(self, event: m.DraftEvent) -> None:
        self.verifier.protocol.receive(self.peer, event)

    def state(self) -> Any:
        """All that a frame could change, but counters and statistics."""
        session = self.session
        announced = {key: selection.words.tolist() for key, selection in session.draft.announced.items()}
        known = (session.at, list(session.tokens), session.draft.awaited, dict(session.draft.proposals), announced)
        return *known, list(session.draft.announced_before), session.kv.length, list(session.kv.pages)


def test_sessions_are_shared_among_drafts_and_the_one_placed_beside_the_target_comes_first() -> None:
    """Each goes to the draft with the fewest of all targets; those of a draft that is lost go on with the others."""
    drafts = {name: DraftPeer(name, lambda event: None) for name in ("draft-1", "draft-2", "draft-3")}
    runner = FakeRunner(FakeModel(ends=True).target, True, LAYERS, 1, 40)
    verifier = Verifier(runner, PLAN, target_settings(name="target-2", gamma=4, max_context=100))
    for draft in drafts.values():
        verifier.protocol.attach(draft)

    def open_session(name: str) -> list[int]:
        opening = m.Open(name, [7] * 20, 20, 50, [], GREEDY, m.Exactness.EXACT)
        verifier.admission.open(opening, lambda event: None)
        verifier.plan_step()
        return [len(draft.sessions) for draft in drafts.values()]

    counts = [open_session(name) for name in ("a", "b", "c", "d")]
    assert counts == [[0, 1, 0], [1, 1, 0], [1, 1, 1], [1, 2, 1]]
    verifier.protocol.detach(drafts["draft-2"])
    assert [len(drafts[name].sessions) for name in ("draft-1", "draft-3")] == [2, 2]
    verifier.protocol.receive(drafts["draft-1"], m.Load(other_sessions=2))
    for name in ("e", "f"):
        open_session(name)
    assert [len(drafts[name].sessions) for name in ("draft-1", "draft-3")] == [2, 4], (
        "draft-1 has others' sessions, too"
    )


def test_frames_of_a_judged_round_change_nothing_and_are_answered_again() -> None:
    stand = Stand()
    frame = stand.proposal()
    stand.receive(frame)
    assert stand.step()
    verdict = stand.sent[-1]
    assert isinstance(verdict, m.Verdict)
    before = stand.state()
    stand.receive(frame)
    assert stand.state() == before
    assert stand.sent[-1] == verdict
    assert stand.sent.count(verdict) == 2
    assert stand.verifier.counters["repeated_frames"] == 1
    assert not stand.step()


def test_a_gap_is_refused_with_what_is_expected() -> None:
    stand = Stand()
    at = stand.session.at
    for ahead in (at._replace(epoch=1), at._replace(round=2), at._replace(epoch=3, round=9)):
        before = stand.state()
        stand.receive(stand.proposal(at=ahead))
        refusal = stand.sent.pop()
        assert refusal.expected == at
        assert stand.state() == before


def test_a_difference_against_an_unknown_selection_is_refused() -> None:
    stand = Stand()
    dense = BlockSelection.from_matrix(np.random.default_rng(0).random((stand.heads, PLAN.num_blocks(100))) < 0.7)
    data = encode_selection(dense, ((0, 7), dense))
    before = stand.state()
    stand.receive(stand.proposal(selection=data))
    assert isinstance(stand.sent[-1], m.Refusal)
    assert stand.state() == before


def test_frames_that_no_honest_draft_sends() -> None:
    stand = Stand()
    at, before = stand.session.at, stand.state()
    wide = m.Support(np.array([1, VOCAB]), np.array([0.5, 0.5], dtype=np.float32))
    shorter = encode_selection(stand.selection(stand.base - PAGE_SIZE))
    heads = encode_selection(selection_of([[1]] * (stand.heads + 1), PLAN.num_blocks(stand.base)))
    wrong = [
        (stand.proposal([1, 2, 3, 4, 5]), "γ is 4"),
        (stand.proposal([1, VOCAB]), "outside the vocabulary"),
        (stand.proposal([1], supports=[wide]), "outside the vocabulary"),
        (stand.proposal([1], supports=[m.Support(np.array([1]), np.ones(1, np.float32))]), "carry no distributions"),
        (stand.proposal(at=at._replace(base=99)), "\\(99, 7\\)"),
        (stand.proposal(at=at._replace(base=101)), "\\(101, 7\\)"),
        (stand.proposal(assumed_token=8), "\\[\\(100, 8\\)\\]"),
        (stand.proposal(at=at._replace(round=1, base=100)), "base 100"),
        (stand.proposal(at=at._replace(round=1, base=106)), "base 106"),
        (together(ahead(stand, 101, 1), ahead(stand, 106, 1)), "base 101"),
        (together(*(m.Proposal(at, token, [1]) for token in (7, 8))), "\\(100, 8\\)"),
        (together(m.Proposal(at, 7, [1]), m.Proposal(at._replace(base=103), 7, [1])), "\\(103, 7\\)"),
        (together(ahead(stand, 101, 1), replace(ahead(stand, 102, 1), tokens=[1] * 5)), "γ is 4"),
        (replace(stand.proposal(), at=at._replace(base=95), offsets=[5]), "up to 95"),
        (stand.proposal(selection=b"nonsense"), "announcement"),
        (stand.proposal(selection=shorter), "6 blocks"),
        (stand.proposal(selection=heads), "heads"),
    ]
    for event, reason in wrong:
        with pytest.raises(InvalidArgument, match=reason):
            stand.receive(event)
        assert stand.state() == before
    dense = Stand(m.Exactness.EXACT)
    with pytest.raises(InvalidArgument, match="takes no announcements"):
        dense.receive(dense.proposal(selection=encode_selection(stand.selection(stand.base))))


def ahead(stand: Stand, base: int, token: int) -> m.Proposal:
    """Return a proposal for the next round, behind an outcome of this one."""
    at = stand.session.at
    return m.Proposal(at._replace(round=at.round + 1, base=base), token, [1, 2, 3, 4])


def test_a_verdict_meets_one_of_several_outcomes_that_were_drafted_for() -> None:
    stand = Stand(m.Exactness.EXACT)
    right = FakeModel(ends=True).plain(stand.tokens, 10, [])[0][stand.base :]
    stand.receive(stand.proposal([*right[:2], (right[2] + 1) % VOCAB]))
    others = [ahead(stand, 101, 5), ahead(stand, 103, (right[2] + 2) % VOCAB), ahead(stand, 104, 9)]
    met = replace(ahead(stand, 103, right[2]), tokens=right[3:7])
    stand.receive(together(others[0], met, others[1]))
    assert stand.step()
    assert (stand.session.at.epoch, stand.session.at.base, stand.session.draft.foreseen) == (0, 103, True)
    before = stand.state()
    stand.receive(together(others[2]))  # whatever else is said of the round
    assert stand.state() == before
    assert stand.verifier.counters["repeated_frames"] == 1
    assert stand.step()
    assert stand.session.tokens == [*stand.tokens, *right[:8]]
    assert not stand.session.draft.foreseen
    assert stand.verifier.counters["foreseen_rounds"] == 1


def test_what_was_drafted_ahead_and_crossed_the_verdict_that_it_foresaw_is_taken() -> None:
    stand = Stand(m.Exactness.EXACT)
    right = FakeModel(ends=True).plain(stand.tokens, 10, [])[0][stand.base :]
    late = together(ahead(stand, 101, 5), replace(ahead(stand, 103, right[2]), tokens=right[3:7]))
    stand.receive(stand.proposal(right[:2]))
    assert stand.step()
    assert (stand.session.at.epoch, stand.session.at.base) == (1, 103)
    stand.receive(late)
    again = replace(stand.proposal([9, 9]), draft_seconds=1.0)
    before = stand.state()
    stand.receive(again)  # as a draft says it once it has the verdict
    assert stand.state() == before
    assert stand.verifier.counters["late_rounds"] == stand.verifier.counters["repeated_frames"] == 1
    assert stand.step()
    assert stand.session.tokens == [*stand.tokens, *right[:8]]
    verdict = stand.sent[-1]
    assert (verdict.plain, verdict.accepted) == (False, 4)


def test_an_abort_during_a_step_frees_the_name_at_once() -> None:
    """The step has no say any more; its pages are held until it is over, and the next session has later epochs."""
    stand = Stand()
    frame = stand.proposal()
    stand.receive(frame)
    step = stand.verifier.plan_step()
    stand.verifier.abort("a")
    assert stand.sent[-1] == m.End("a")
    later: list[m.ServedEvent] = []
    stand.verifier.admission.open(stand.opening("a", max_tokens=2), later.append)
    assert stand.verifier.runner.kv.pool.held > 0
    stand.verifier.finish_step(step, stand.verifier.execute(step))
    assert stand.served == later == []
    run_steps(stand.verifier)
    begin = next(event for event in stand.sent if isinstance(event, m.Begin) and event.at.epoch > 0)
    assert begin.tokens == stand.tokens
    stand.receive(frame)
    assert stand.verifier.counters["stale_frames"] == 1
    stand.receive(m.Decline("a", "no room"))
    assert stand.step()
    told = [event.finish_reason for event in later if isinstance(event, m.Commit)]
    assert told == [m.FinishReason.NONE, m.FinishReason.LENGTH]
    assert not stand.step()
    assert stand.served == []
    assert stand.verifier.runner.kv.pool.held == 0
    stand.verifier.runner.kv.pool.check_integrity()


def test_an_abort_that_crosses_the_end_spares_the_next_session_of_that_name() -> None:
    stand = Stand()
    stand.verifier.abort("a")
    stand.verifier.abort("a")
    stand.verifier.admission.open(stand.opening("a"), stand.served.append)
    run_steps(stand.verifier)
    assert stand.verifier.gauges["sessions"] == 1
    assert stand.verifier.counters["aborted_sessions"] == 1


# Steps that fail


def test_a_step_that_fails_ends_its_sessions_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Their owners learn why, with one line in the log; their pages and names are free for others."""
    stand, others = Stand(), list[m.ServedEvent]()
    stand.verifier.admission.open(stand.opening("b", max_tokens=3), others.append)
    run_steps(stand.verifier)
    other = stand.verifier.admission.running["b"]
    stand.receive(stand.proposal())
    stand.runner.errors = [RuntimeError("no kernel\n image")]
    step = stand.verifier.plan_step()
    assert step is not None and list(step.sessions) == [stand.session]
    with pytest.raises(RuntimeError) as raised:
        stand.verifier.execute(step)
    with caplog.at_level("INFO"):
        assert stand.verifier.fail_step(step, raised.value)
    reason = "the target failed in a step of this request: RuntimeError: no kernel image"
    assert stand.served == [m.Closed("a", INTERNAL.value[0], reason)]
    assert stand.sent[-1] == m.End("a")
    (record,) = caplog.records
    assert record.getMessage() == (
        "a step of the target failed, which ends its 1 sessions: RuntimeError: no kernel image"
    )
    assert record.exc_info is None
    totals = stand.verifier.totals
    assert (totals["failed_steps"], totals["failed_sessions"]) == (1, 1)
    stand.receive(m.Decline("b", "no room"))
    assert stand.step()
    assert stand.verifier.runner.kv.pool.held == len(other.kv.pages)
    run_steps(stand.verifier)
    assert [event.finish_reason for event in others if isinstance(event, m.Commit)][-1] is m.FinishReason.LENGTH
    assert len(stand.served) == 1
    stand.verifier.plan_step()
    assert stand.verifier.runner.kv.pool.held == 0
    stand.verifier.runner.kv.pool.check_integrity()
    stand.verifier.admission.open(stand.opening("a"), others.append)


@pytest.mark.parametrize(("failures", "ends"), [(2, False), (3, True)])
async def test_a_target_outlives_a_step_that_fails_but_not_three_in_a_row(failures: int, ends: bool) -> None:
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 40)
    verifier = Verifier(runner, PLAN, target_settings(max_sessions=1))
    served: list[m.ServedEvent] = []
    names = ["a", "b", "c", "d"]
    for name in names:
        verifier.admission.open(exact(name, 5, 2), served.append)
    runner.errors = [RuntimeError(f"failure {i}") for i in range(failures)]
    wake = asyncio.Event()
    loop = run_step_loop(verifier, wake, 60)
    if ends:
        with pytest.raises(RuntimeError, match="3 model steps failed in a row, the last with RuntimeError: failure 2"):
            async with asyncio.timeout(10):
                await loop
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await loop
    failed = [event.session for event in served if isinstance(event, m.Closed)]
    assert failed == names[:failures]
    whole = {event.at.session for event in served if isinstance(event, m.Commit) and event.finish_reason}
    assert whole == (set() if ends else set(names[failures:]))


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
        stand.verifier.admission.open(request, stand.served.append)
        return
    with pytest.raises(InvalidArgument, match=reason):
        stand.verifier.admission.open(request, stand.served.append)


def test_a_full_queue_refuses_and_can_be_aborted_from() -> None:
    """Without a place for a second session, two wait; a third is refused until one of them goes."""
    stand = Stand(max_sessions=1)
    for name in ("b", "c"):
        stand.verifier.admission.open(stand.opening(name), stand.served.append)
    stand.step()
    assert stand.verifier.gauges["queued_sessions"] == 2
    with pytest.raises(ResourceExhausted, match="queued already"):
        stand.verifier.admission.open(stand.opening("d"), stand.served.append)
    stand.verifier.abort("b")
    stand.verifier.admission.open(stand.opening("d"), stand.served.append)
    stand.verifier.close_all(Unavailable("stopping"))
    assert {event.session for event in stand.served if isinstance(event, m.Closed)} == {"a", "c", "d"}


def test_who_has_many_sessions_keeps_nobody_out() -> None:
    """A full queue makes room for who has fewer sessions in it, and the next place is theirs who have fewer running."""
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 400)
    verifier = Verifier(runner, PLAN, target_settings(max_sessions=2, max_queued=3, max_context=600))
    many: list[m.ServedEvent] = []
    few: list[m.ServedEvent] = []
    for i in range(5):
        verifier.admission.open(exact(f"m{i}"), many.append)
    verifier.admission.admit()
    with pytest.raises(ResourceExhausted):
        verifier.admission.open(exact("m5"), many.append)
    verifier.admission.open(exact("f0"), few.append)
    assert [session.id for session in verifier.admission.queue] == ["m2", "m3", "f0"]
    (closed,) = many
    assert (closed.session, closed.code) == ("m4", ResourceExhausted.status.value[0])
    verifier.abort("m0")
    verifier.admission.release_closed()
    assert [session.id for session in verifier.admission.admit()] == ["f0"]
    verifier.abort("m1")
    verifier.admission.release_closed()
    assert [session.id for session in verifier.admission.admit()] == ["m2"]


def test_a_session_that_was_accepted_before_is_neither_refused_nor_evicted() -> None:
    """Whatever the limit of the queue, with tokens or without; nor does anybody give way for one that is refused."""
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 400)
    verifier = Verifier(runner, PLAN, target_settings(max_sessions=1, max_queued=2, max_context=600))
    admission, ours, theirs = verifier.admission, list[m.ServedEvent](), list[m.ServedEvent]()
    for name in ("runs", "w0", "w1"):
        admission.open(exact(name), ours.append)
        admission.admit()
    begun = exact("r0")
    admission.open(replace(begun, tokens=[*begun.tokens, 1], resumed=True), ours.append)
    admission.open(replace(exact("r1"), resumed=True), ours.append)
    assert admission.room(theirs.append).queue_places == 0, "places taken over would leave too many still"
    with pytest.raises(ResourceExhausted, match="4 sessions are queued already of at most 2"):
        admission.open(exact("t0"), theirs.append)
    assert not ours and [session.id for session in admission.queue] == ["w0", "w1", "r0", "r1"]
    for name in ("w0", "w1"):
        verifier.abort(name)
    with pytest.raises(ResourceExhausted):
        admission.open(exact("t0"), theirs.append)
    assert [session.id for session in admission.queue] == ["r0", "r1"]
    verifier.abort("r0")
    assert admission.room(theirs.append).queue_places == 1
    admission.open(exact("t0"), theirs.append)
    with pytest.raises(ResourceExhausted):
        admission.open(exact("w2"), ours.append)
    run_steps(verifier)
    assert {event.at.session for event in ours + theirs if isinstance(event, m.Commit) and event.finish_reason} == {
        *("runs", "r1", "t0")
    }


def test_a_peer_gains_no_places_by_many_streams() -> None:
    """Places are shared between peers first, then between the streams of each, also where a report says how many."""
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 400)
    verifier = Verifier(runner, PLAN, target_settings(max_sessions=2, max_queued=4, max_context=600))
    admission, streams, calm = verifier.admission, [list[m.ServedEvent]() for _ in range(6)], list[m.ServedEvent]()
    with contextlib.ExitStack() as opened:
        for stream in streams:
            opened.enter_context(admission.shared(stream.append, "many"))
        opened.enter_context(admission.shared(calm.append, "calm"))
        for i, stream in enumerate(streams):
            admission.open(exact(f"m{i}"), stream.append)
            admission.admit()
        assert [session.id for session in admission.queue] == ["m2", "m3", "m4", "m5"]
        assert admission.room(calm.append).queue_places == 2
        for name in ("c0", "c1"):
            admission.open(exact(name), calm.append)
        assert [session.id for session in admission.queue] == ["m2", "m3", "c0", "c1"]
        assert admission.room(calm.append).queue_places == 0
        with pytest.raises(ResourceExhausted):
            admission.open(exact("m6"), streams[0].append)
        verifier.abort("m0")
        admission.release_closed()
        assert [session.id for session in admission.admit()] == ["c0"]


def test_without_a_queue_a_session_runs_if_a_place_is_free_and_is_refused_otherwise() -> None:
    """This holds before the step that takes it up, and as soon as one that ran has ended."""
    verifier = Verifier(
        FakeRunner(FakeModel().target, False, LAYERS, 1, 40),
        PLAN,
        target_settings(max_sessions=2, max_queued=0, max_context=600),
    )
    for name in ("a", "b"):
        verifier.admission.open(exact(name, 5, 5), lambda _: None)
    with pytest.raises(ResourceExhausted, match="no place is free, and 0 sessions are queued already of at most 0"):
        verifier.admission.open(exact("c", 5, 5), lambda _: None)
    run_steps(verifier)
    verifier.admission.open(exact("c", 500, 5), lambda _: None)
    with pytest.raises(ResourceExhausted, match="try again later"):
        verifier.admission.open(exact("d", 500, 5), lambda _: None)  # a place, but no pages
    verifier.plan_step()
    with pytest.raises(ResourceExhausted, match="try again later"):
        verifier.admission.open(exact("d", 500, 5), lambda _: None)
    verifier.abort("c")
    verifier.admission.open(exact("d", 500, 5), lambda _: None)
    assert verifier.plan_step() is not None
    assert verifier.gauges["queued_sessions"] == 0


# KV in tiers


def over_tiers(gpu_pages: int) -> Verifier:
    """Return a target over a backing store, with so many pages on the GPU."""
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 1)
    runner.kv = TieredKV(LAYERS, KV_HEADS, 2, gpu_pages, 40, 500)
    return Verifier(runner, PLAN, target_settings(gamma=4, prefill_chunk=24, max_sessions=4, max_context=600))


def exact(name: str, prompt: int = 100, max_tokens: int = 200) -> m.Open:
    return m.Open(name, [7] * prompt, prompt, max_tokens, [], GREEDY, m.Exactness.EXACT)


def test_fewer_gpu_pages_than_are_written_at_once_are_refused() -> None:
    over_tiers(gpu_pages=14)
    with pytest.raises(
        ValueError,
        match="13 KV pages of 16 fit on the GPU; 4 sessions, and 24 prompt tokens a step, write up to 14 at once: "
        "raise kv_memory, or lower max_sessions or prefill_chunk",
    ):
        over_tiers(gpu_pages=13)
