"""A draft alone: what single events from a target do to its sessions, and what it says of a round."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.sessions import DraftedOutcome, DraftedRound, DraftSession, TargetPeer
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import OutOfPages, SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.requests import DraftedTokens
from specahead.engine.steps.step_loop import run_step_loop
from specahead.sparsity.announce import announced_rows
from specahead.wire import messages as m
from specahead.wire.selection_codec import decode_selection
from tests.plans import announce
from tests.proposals import apart
from tests.settings import draft_settings
from tests.unit.fake_models import DRAFT_HEADS, DRAFT_LAYERS, GREEDY, PLAN, VOCAB, FakeModel, FakeRunner
from tests.unit.steps import run_steps


@dataclass
class DraftStand:
    """A draft alone with one greedy session begun, of 40 tokens or as many as there are in `tokens`."""

    overlaps: bool = True
    pages: int = 20
    sent: list[m.DraftEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = FakeRunner(FakeModel().draft, False, DRAFT_LAYERS, DRAFT_HEADS, self.pages)
        self.drafter = Drafter(runner, PLAN, draft_settings(branches=None if self.overlaps else 0))
        self.peer = TargetPeer(self.sent.append)
        self.drafter.attach(self.peer)
        self.tokens = [7] * 40
        self.begin = m.Begin(m.At("a", 0, 0, 40), self.tokens, GREEDY, 90, True)
        self.receive(self.begin)

    def receive(self, *events: m.TargetEvent) -> list[m.DraftEvent]:
        """What the draft says to it, in all the steps that it then takes."""
        self.sent.clear()
        for event in events:
            self.drafter.receive(self.peer, event)
        run_steps(self.drafter)
        return list(self.sent)

    @property
    def state(self) -> Any:
        session = self.peer.sessions["a"]
        known = session.at, list(session.tokens), session.present, session.overlap
        return *known, session.kv.length, list(session.kv.pages)


def only_proposal(event: m.DraftEvent) -> m.Proposal:
    """Return what a message proposes, which must be one proposal."""
    assert isinstance(event, m.Proposals)
    (proposal,) = apart(event)
    return proposal


def test_a_draft_overlaps_one_round_and_no_more() -> None:
    for overlaps in (False, True):
        stand = DraftStand(overlaps)
        kinds = [type(event) for event in stand.sent]
        proposals = [item for event in stand.sent if isinstance(event, m.Proposals) for item in apart(event)]
        assert kinds == [m.Ready, *[m.Proposals] * (1 + overlaps)]
        assert all(event.selection for event in stand.sent[1:])
        assert [p.at for p in proposals] == [m.At("a", 0, r, 40 + 5 * r) for r in range(1 + overlaps)]
        if overlaps:
            assert proposals[1].assumed_token == FakeModel().plain(stand.tokens, 5, [])[0][-1]


@pytest.mark.parametrize(("round_", "base"), [(1, 41), (2, 40)], ids=["another position", "a gap"])
def test_a_verdict_that_does_not_fit_asks_for_resync(round_: int, base: int) -> None:
    stand = DraftStand()
    assert stand.receive(m.Verdict(m.At("a", 1, round_, base), 0, [1], plain=False))[0] == m.Resync("a")
    assert stand.drafter.counters["resyncs"] == 1


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("base", [43, 48, 50])
def test_a_verdict_may_take_back_what_was_committed(base: int, overlaps: bool) -> None:
    """Tokens that the target had only screened (target_service.screening), also of a page that is indexed already."""
    stand = DraftStand(overlaps)
    plain = FakeModel().plain(stand.tokens, 15, [])[0]
    for round_ in range(2):
        start = 40 + 5 * round_
        stand.receive(m.Verdict(m.At("a", 0, round_ + 1, start), 4, plain[start : start + 5], plain=False))
    session, kv = stand.peer.sessions["a"], stand.drafter.runner.kv
    assert session.committed == 50 and session.kv.indexed == 3
    other = (plain[base] + 1) % VOCAB
    sent = stand.receive(m.Verdict(m.At("a", 1, 3, base), 0, [other], plain=True))
    committed = [*plain[:base], other]
    assert stand.peer.sessions["a"] is session and session.tokens[: session.committed] == committed
    assert isinstance(sent[0], m.Ready)
    assert isinstance(sent[1], m.Proposals) and sent[1].at == m.At("a", 1, 3, base + 1)
    assert sent[1].tokens == FakeModel().plain(committed, 4, [])[0][base + 1 :]
    assert stand.drafter.runner.holds([(session.kv, session.tokens[: session.kv.length])])  # type: ignore[attr-defined]
    kv.pool.check_integrity()
    assert kv.reuse_prefix(SequenceKV(), plain[:48]) == (48 if base >= 48 else 32)


def test_a_begin_that_comes_after_its_end_lasts_until_the_target_answers() -> None:
    """The first word on it reaches a target that does not know the session, and says once more that it is over."""
    stand = DraftStand()
    sent = stand.receive(m.End("a"), stand.begin)
    assert sent[0] == m.Ready(stand.begin.at)
    assert stand.receive(m.End("a")) == []
    assert stand.drafter.session_count == 0
    assert stand.drafter.runner.kv.pool.held == 0


def test_rejected_work_is_drafted_again_from_the_verdict_on() -> None:
    """KV of the tokens that still hold is kept; the epoch is the verdict's."""
    stand = DraftStand()
    plain = FakeModel().plain(stand.tokens, 3, [])[0]
    other = (plain[42] + 1) % VOCAB
    sent = stand.receive(m.Verdict(m.At("a", 1, 1, 40), 2, [*plain[40:42], other], plain=False))
    assert [type(event) for event in sent] == [m.Proposals] * 2
    proposal = only_proposal(sent[0])
    committed = [*plain[:42], other]
    assert proposal.at == m.At("a", 1, 1, 43)
    assert proposal.tokens == FakeModel().plain(committed, 4, [])[0][43:]
    assert proposal.assumed_token == other


def test_waiting_sessions_of_a_lost_target_do_not_block_others() -> None:
    """Room that a broken stream leaves goes to a session of a stream that stands."""
    stand = DraftStand()  # holds 4 of 20 pages
    big = m.Begin(m.At("b", 0, 0, 250), [1] * 250, GREEDY, 300)
    sent: list[m.DraftEvent] = []
    other = TargetPeer(sent.append)
    stand.drafter.attach(other)
    assert isinstance(stand.receive(big)[0], m.Decline)
    stand.drafter.receive(other, replace(big, at=big.at._replace(session="c")))
    assert stand.receive() == []
    assert isinstance(sent.pop(), m.Decline)
    stand.drafter.detach(stand.peer)
    stand.receive()
    assert [each for each in sent if not isinstance(each, m.Load)] == [m.Resync("c")]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_announces_what_all_its_queries_weigh(overlaps: bool) -> None:
    """Against the block weights of the same tokens; a draft without overlap leaves the last one unread."""
    plan, sent, prompt = replace(PLAN, budget=0.3), list[m.DraftEvent](), [3] * 200
    runner = FakeRunner(FakeModel().draft, False, DRAFT_LAYERS, DRAFT_HEADS, 80)
    drafter = Drafter(runner, plan, draft_settings(branches=None if overlaps else 0))
    peer = TargetPeer(sent.append)
    drafter.attach(peer)
    drafter.receive(peer, m.Begin(m.At("a", 0, 0, 200), prompt, GREEDY, 400, True))
    run_steps(drafter)
    (said,) = [event for event in sent if isinstance(event, m.Proposals) and event.at.round == 0]
    proposal = only_proposal(said)
    runs = [[*prompt, *proposal.tokens[:i]] for i in range(len(proposal.tokens) + overlaps)]
    blocks = plan.num_blocks(200)
    weights = [runner.block_weights(run, 16, DRAFT_HEADS)[..., :blocks] for run in runs]
    expected = announce(torch.stack(weights).mean(0), plan, 200)
    found = decode_selection(said.selection, {}, announced_rows(plan), blocks)
    assert (found.matrix() == expected.matrix()).all()


# Steps that fail


def begin(name: str, epoch: int = 0) -> m.Begin:
    """A session whose prompt is short enough to be run with its first round."""
    return m.Begin(m.At(name, epoch, 0, 8), [1] * 8, GREEDY, 40, True)


async def test_a_step_that_fails_costs_its_own_sessions_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Session "a" waits for a verdict, and "b", "c" and "d" are to be drafted in one step."""
    stand = DraftStand(overlaps=False, pages=100)
    runner = stand.drafter.runner
    assert isinstance(runner, FakeRunner)
    stand.sent.clear()
    for name in "bcd":
        stand.drafter.receive(stand.peer, begin(name))
    runner.errors.append(OutOfPages("3 pages wanted,\n2 available"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await run_step_loop(stand.drafter, asyncio.Event(), 60)
    declined = [event for event in stand.sent if isinstance(event, m.Decline)]
    assert [event.session for event in declined] == ["b", "c", "d"]
    assert all("OutOfPages: 3 pages wanted, 2 available" in event.reason for event in declined)
    assert set(stand.peer.sessions) == {"a"}
    assert stand.drafter.counters["failed_steps"] == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "OutOfPages: 3 pages wanted, 2 available" in line and "\n" not in line
    # Verdicts on what was declined are of no interest, others are drafted on, and the names can be used again.
    late = m.Verdict(m.At("b", 1, 1, 8), 0, [2], plain=True)
    judged = m.Verdict(m.At("a", 1, 1, 40), 0, [9], plain=False)
    said = stand.receive(late, judged, begin("c", epoch=2))
    assert {event.at.session for event in said if isinstance(event, m.Proposals)} == {"a", "c"}
    assert not any(isinstance(event, m.Resync) for event in said)
    stand.receive(*(m.End(name) for name in "ac"))
    admission = stand.drafter.admission
    assert stand.drafter.session_count == len(admission.waiting) == 0
    assert runner.kv.pool.held == 0


def test_a_draft_declines_a_session_whose_logits_are_no_numbers() -> None:
    stand = DraftStand()
    runner = stand.drafter.runner
    assert isinstance(runner, FakeRunner)
    sane = runner.logits
    runner.logits = lambda tokens: sane(tokens) * (float("nan") if len(tokens) == 8 else 1)
    sampled = replace(begin("b"), sampling=Sampling(1.0))
    said = stand.receive(sampled, m.Verdict(m.At("a", 1, 1, 40), 0, [9], plain=False))
    (declined,) = [event for event in said if isinstance(event, m.Decline)]
    assert declined.session == "b"
    assert "NaN" in declined.reason
    assert {event.at.session for event in said if isinstance(event, m.Proposals)} == {"a"}


# Several targets.


@dataclass
class SharedDraft:
    """A draft of two targets, `first` and `second`, with room for `pages`; sent: what each of them was told."""

    pages: int

    def __post_init__(self) -> None:
        runner = FakeRunner(FakeModel().draft, False, DRAFT_LAYERS, DRAFT_HEADS, self.pages)
        self.drafter = Drafter(runner, PLAN, draft_settings(gamma=4))
        self.sent: dict[str, list[m.DraftEvent]] = {"first": [], "second": []}
        self.peers = {name: TargetPeer(said.append) for name, said in self.sent.items()}
        for peer in self.peers.values():
            self.drafter.attach(peer)

    def begin(self, target: str, *names: str) -> None:
        for name in names:
            self.receive(target, m.Begin(m.At(name, 0, 0, 40), [7] * 40, GREEDY, 90))

    def receive(self, target: str, event: m.TargetEvent) -> None:
        self.drafter.receive(self.peers[target], event)
        self.drafter.plan_step()

    @property
    def sessions(self) -> dict[str, list[str]]:
        """Those that are drafted for, by target."""
        return {name: list(peer.sessions) for name, peer in self.peers.items()}


def test_targets_share_the_room_of_a_draft() -> None:
    """The session that gives way is one of whoever has most, and the one that goes on of whoever has fewest."""
    draft = SharedDraft(pages=16)
    draft.begin("first", "a", "b")
    draft.begin("second", "c")
    draft.begin("first", "d", "e")
    draft.begin("second", "f")
    assert draft.sessions == {"first": ["a", "b"], "second": ["c"]}, "there is no room for the others"
    draft.drafter.admission.preempt_youngest()
    assert draft.sessions == {"first": ["a"], "second": ["c"]}, "though c was begun last"
    draft.receive("second", m.End("c"))
    asked = {name: [each for each in said if isinstance(each, m.Resync)] for name, said in draft.sent.items()}
    assert asked == {"first": [], "second": [m.Resync("f")]}, "though three of the first target's have waited longer"


@pytest.mark.parametrize("tokens", [[10, 20, 30], [10, 11, 30], [10, 20, 31]])
def test_a_round_behind_an_alternative_is_met_by_it_alone(tokens: list[int]) -> None:
    """The session then has the text that the verdict says, and behind it what was drafted there."""
    begun = m.Begin(m.At("s", 0, 0, 3), [1, 2, 3], Sampling(0.0), 100)
    session = DraftSession.from_begin(TargetPeer(lambda event: None), begun, 3, None, 0)
    session.tokens += [10, 11, 12]
    drafted = DraftedTokens([10, 11, 12], runs_last=False)
    session.present = DraftedRound(3, [DraftedOutcome(3, 3, drafted, source=2)], 0.0)
    outcome = DraftedOutcome(6, 30, DraftedTokens([40, 41], runs_last=False), source=5, alternative=20)
    session.overlap = DraftedRound(6, [outcome], 0.0)
    met = session.apply(m.Verdict(m.At("s", 0, 1, 3), 2, tokens, plain=False), KVCache(1, 1, 2, 4))
    assert met == (tokens == [10, 20, 30])
    assert session.tokens == [1, 2, 3, *tokens, *([40, 41] if met else [])]
