"""What a target reports is what it does: whom it would refuse, what it holds, and how fast it reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sessions.routing import TargetView, choose
from specahead.engine.kv.pages import SequenceKV
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Exactness, Open
from target_service.admission import Admission
from target_service.opening import SessionMaker
from target_service.orphaned_sessions import OrphanedSessions
from target_service.reporting import MOST_HASHES, REPORT_SECONDS, ReadingRate, Reporter
from target_service.target import Target
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import GREEDY, LAYERS, PLAN, FakeModel, FakeRunner

ACTS = st.tuples(st.sampled_from(["open", "resume", "step", "close"]), st.integers(0, 1), st.integers(1, 120))


def admission(runner: FakeRunner, **settings: int) -> Admission:
    target = Target(runner, PLAN, target_settings(gamma=4, max_context=500, **settings))
    return Admission(target, SessionMaker(target))


def reporter_of(target: Admission, runner: FakeRunner, emit: Any) -> Reporter:
    prefixes = runner.kv.pool.prefixes
    return Reporter(target, ReadingRate(), prefixes, emit, OrphanedSessions(60))


@given(st.lists(ACTS, max_size=40), st.integers(1, 4), st.integers(0, 3), st.integers(10, 40))
def test_a_router_refuses_nothing_that_the_target_would_take(
    acts: list[tuple[str, int, int]], max_sessions: int, max_queued: int, pages: int
) -> None:
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, pages)
    target = admission(runner, max_sessions=max_sessions, max_queued=max_queued)
    streams = [[].append, [].append]
    reporters = [reporter_of(target, runner, stream) for stream in streams]
    for number, (act, who, tokens) in enumerate(acts):
        if act == "open":
            view = TargetView("target")
            reporters[who]._number = 0  # at once
            view.take(*reporters[who].due())
            request = Open(f"{number}", [1] * tokens, tokens, 1, [], GREEDY, Exactness.EXACT)
            try:
                target.open(request, streams[who])
                assert not view.is_full(tokens)
            except ResourceExhausted:
                assert not view.has_room(tokens + 16)
        elif act == "resume":
            request = Open(f"{number}", [1] * tokens, tokens, 1, [], GREEDY, Exactness.EXACT, resumed=True)
            target.open(request, streams[who])
        elif act == "step":
            target.release_closed()
            for session in target.admit():
                runner.kv.grow(session.kv, len(session.tokens))
        else:
            for session in list(target.everyone())[:1]:
                target.close(session)


def test_turns_that_come_at_once_go_where_their_conversations_are() -> None:
    """A queued turn has not taken over its prefix yet, but what the target has KV of is not reported as unread."""
    runners = [FakeRunner(FakeModel().target, False, LAYERS, 1, 200) for _ in range(2)]
    targets = [admission(runner) for runner in runners]
    views, texts = [TargetView("cold"), TargetView("warm")], [[token] * 400 for token in (1, 2)]
    kv = runners[1].kv
    for text in texts:
        sequence = SequenceKV()
        kv.grow(sequence, len(text))
        sequence.length = len(text)
        kv.index_prefix(sequence, text)
        kv.release(sequence)
    for number, text in enumerate(texts):
        for view, target, runner in zip(views, targets, runners, strict=True):
            reporter = reporter_of(target, runner, print)
            reporter.opens, reporter._number = view.opens, number
            view.take(*reporter.due())
        turn = [*text, *[3] * 40]
        assert choose(views, turn) is views[1]
        targets[1].open(Open(f"{number}", turn, len(turn), 1, [], GREEDY, Exactness.EXACT), print)
        assert targets[1].room(print).unread_tokens == 39 * (number + 1)


def test_reports_come_in_time_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("target_service.reporting.time", clock)
    monkeypatch.setattr("target_service.reporting.MOST_HASHES", 2)
    runner = FakeRunner(FakeModel().target, False, LAYERS, 1, 20)
    pool = runner.kv.pool
    pages, serial = pool.allocate(5), 0
    for page in pages:
        serial = pool.index(page, (serial, page.to_bytes(4, "little") * 16))
    reporter = reporter_of(admission(runner), runner, print)
    reporter.opens = 3
    view, counts = TargetView("target"), []
    for _ in range(4):
        (report,) = reporter.due()
        assert report.opens == 3 and not reporter.due()
        counts.append(len(report.indexed))
        view.take(report)
        clock.now += REPORT_SECONDS
    assert counts == [2, 2, 1, 0] and MOST_HASHES > 2
    assert view.prefixes == set(pool.prefixes.hashes) and len(view.prefixes) == 5
    pool.forget(pages[4:])
    (report,) = reporter.due()
    assert (report.indexed, len(report.evicted), report.number) == ([], 1, 5)
    reporter.close()
    pool.forget(pages[:4])
    clock.now += REPORT_SECONDS
    (report,) = reporter.due()
    assert not report.evicted


def test_the_rate_of_reading_follows_the_last_steps() -> None:
    rate = ReadingRate()
    assert rate.per_second == 0
    rate.add(1000, 1.0)
    assert rate.per_second == 1000
    for _ in range(40):
        rate.add(1000, 0.5)
    assert rate.per_second == pytest.approx(2000, rel=0.05)
