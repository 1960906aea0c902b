"""Whole rounds of the draft against the same rounds step by step: the same proposals and announcements.

Without a GPU the runner's rounds run eagerly through the torch kernels; on a GPU they are captured.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import models
from config import DraftSettings
from draft_service.drafter import Drafter, Peer
from engine.families import read_decoder
from engine.graphs import GraphRunner
from engine.loading import load_runner
from engine.runner import Runner
from engine.sampling import Sampling
from sparsity.announce import BY_DRAFT_HEAD, BY_TARGET_HEAD
from sparsity.plan import load_plan
from wire.messages import Announcement, At, Begin, DraftEvent, End, Proposal, Verdict
from wire.selection_codec import decode_selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = replace(
    load_plan(models.PLAN), budget=0.25
)  # so that there is something to announce in short contexts
ROWS = {name: announcing.rows(PLAN) for name, announcing in (("a", BY_TARGET_HEAD), ("d", BY_DRAFT_HEAD))}
ROWS["b"] = ROWS["a"]
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, top_p=0.8, seed=5)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def runners() -> list[Runner]:
    plain, other = (load_runner(str(models.DRAFT), torch.float32, DEVICE, 8192) for _ in range(2))
    return [plain, GraphRunner(read_decoder(other.model), other, 900)]


class Side:
    """A drafter and what it sends, by session."""

    def __init__(self, runner: Runner, **settings: Any) -> None:
        self.sent: list[DraftEvent] = []
        self.drafter = Drafter(runner, PLAN, DraftSettings(**settings))
        self.peer = Peer("target", self.sent.append)
        self.drafter.attach(self.peer)

    def run(self, *events: Any) -> list[DraftEvent]:
        for event in events:
            self.drafter.receive(self.peer, event)
        self.sent.clear()
        while (step := self.drafter.plan_step()) is not None:
            self.drafter.finish_step(step, self.drafter.execute(step))
        return list(self.sent)


def comparable(events: list[DraftEvent], known: dict[str, dict[Any, Any]]) -> list[Any]:
    """Events by session, with announcements decoded and times left out; the order within a session is free."""
    out = []
    for event in events:
        if isinstance(event, Announcement):
            held = known.setdefault(event.at.session, {})
            blocks = PLAN.num_blocks(event.at.base)
            selection = decode_selection(event.selection, held, ROWS[event.at.session], blocks)
            held[(event.at.epoch, event.at.round)] = selection
            out.append((event.at, "announcement", event.assumed_token, tuple(selection.keys)))
        elif isinstance(event, Proposal):
            ids = tuple(tuple(s.ids.tolist()) for s in event.supports)
            out.append((event.at, "proposal", event.announces, event.assumed_token, tuple(event.tokens), ids))
        else:
            out.append((getattr(event, "at", None), type(event).__name__))
    return sorted(out, key=repr)


def assert_alike(one: list[Any], two: list[Any]) -> None:
    """What `comparable` gives. On a GPU the two run other kernels, and nearly equal scores may change places."""
    if DEVICE == "cpu":
        assert one == two
        return
    assert [e[:3] for e in one] == [e[:3] for e in two]
    for a, b in zip(one, two, strict=True):
        if a[1] == "announcement":
            common = set(a[3]) & set(b[3])
            assert len(common) >= 0.9 * max(len(a[3]), len(b[3])) - 2
        else:
            assert a == b


def begin(name: str, length: int, method: str, sampling: Sampling, max_length: int = 800) -> Begin:
    return Begin(At(name, 0, 0, length), tokens(length, length), sampling, max_length, method)


@pytest.mark.parametrize("ahead", [True, False])
def test_whole_rounds_say_what_steps_say(ahead: bool) -> None:
    plain, whole = (Side(runner, ahead=ahead) for runner in runners())
    opening = [
        begin("a", 700, "ahead", GREEDY),
        begin("b", 420, "ahead", SAMPLED),
        begin("c", 180, "", GREEDY),
        begin("d", 740, "sts", GREEDY),  # its choice is made step by step
    ]
    said: set[str] = set()
    known: list[dict[str, dict[Any, Any]]] = [{}, {}]
    events: list[Any] = list(opening)
    proposals: dict[tuple[str, int], Proposal] = {}
    for turn in range(4):
        sent = [side.run(*events) for side in (plain, whole)]
        assert_alike(comparable(sent[0], known[0]), comparable(sent[1], known[1]))
        proposals |= {(e.at.session, e.at.round): e for e in sent[0] if isinstance(e, Proposal)}
        said |= {e.at.session for e in sent[1] if isinstance(e, Announcement)}
        events = []
        for name, session in plain.peer.sessions.items():
            proposal = proposals[name, session.judged]
            # Everything, a part, nothing.
            accepted = len(proposal.tokens) if turn % 2 == 0 else turn // 2
            at = proposal.at
            # Step by step a session that announces nothing and does not go ahead makes no guess.
            guess = whole.peer.sessions[name].guess or 0
            following = session.tokens[at.base + len(proposal.tokens)] if ahead else guess
            assert following is not None
            extra = following if accepted == len(proposal.tokens) else (proposal.tokens[accepted] + 1) % 4096
            epoch = at.epoch if accepted == len(proposal.tokens) and ahead else at.epoch + 1
            place = At(name, epoch, at.round + 1, at.base)
            events.append(Verdict(place, accepted, [*proposal.tokens[:accepted], extra], plain=False))
        if turn == 0 and ahead:
            for side in (plain, whole):
                assert {s.id for s in side.peer.sessions.values() if s.round == s.judged + 1} == set("abcd")
    assert said == set("abd")


def test_the_last_round_of_a_session_is_short() -> None:
    plain, whole = (Side(runner) for runner in runners())
    sent = [side.run(begin("a", 300, "ahead", GREEDY, 303)) for side in (plain, whole)]
    # A whole round weighs all its γ + 1 queries, also where it proposes fewer tokens.
    one, two = ([e[:3] for e in comparable(events, {})] for events in sent)
    assert one == two
    (proposal,) = [event for event in sent[1] if isinstance(event, Proposal) and event.at.round == 0]
    assert len(proposal.tokens) == 2


def test_later_steps_may_read_what_the_first_weighed_most() -> None:
    """With a share of everything the same; with a small one other evidence, and still γ tokens a round."""
    sides = [Side(runners()[1], ahead=False, read_share=share) for share in (1.0, 0.999, 0.1)]
    dense, all_listed, few = (side.run(begin("a", 500, "ahead", GREEDY)) for side in sides)
    # Lists split the work otherwise than dense reads, and nearly equal scores may change places.
    one, two = ({e[1]: e for e in comparable(events, {})} for events in (dense, all_listed))
    assert one["proposal"] == two["proposal"]
    common = set(one["announcement"][3]) & set(two["announcement"][3])
    assert len(common) >= 0.98 * len(one["announcement"][3])
    count = {type(event).__name__: event for event in few}
    assert set(count) == {"Announcement", "Proposal", "Ready"}
    assert len(count["Proposal"].tokens) == 4  # type: ignore[union-attr]
    assert comparable(dense, {}) != comparable(few, {})


def test_a_plan_without_blends_drafts_whole_rounds_for_exact_sessions() -> None:
    side = Side(runners()[1], ahead=False)
    (proposal,) = [e for e in side.run(begin("a", 100, "", SAMPLED)) if isinstance(e, Proposal)]
    assert len(proposal.supports) == 4
    assert all(abs(float(s.probs.sum()) - 1) < 1e-5 for s in proposal.supports)


def test_a_draft_that_fell_behind_catches_up_before_its_round() -> None:
    plain, whole = (Side(runner, ahead=False) for runner in runners())
    for side in (plain, whole):
        side.run(begin("a", 300, "ahead", GREEDY))
    behind = [Verdict(At("a", 1, k + 1, 300 + k), 0, [7 + k], plain=True) for k in range(6)]
    sent = [comparable(side.run(*behind), {"a": {}}) for side in (plain, whole)]
    assert_alike(*sent)
    (proposal,) = [event for event in sent[1] if event[1] == "proposal"]
    assert proposal[0].base == 306


def step(side: Side) -> list[str]:
    """One step; the sessions that it proposed for."""
    side.sent.clear()
    planned = side.drafter.plan_step()
    assert planned is not None
    side.drafter.finish_step(planned, side.drafter.execute(planned))
    return [e.at.session for e in side.sent if isinstance(e, Proposal)]


@pytest.mark.parametrize(("waves", "sizes"), [(1, [5]), (2, [3, 3]), (9, [1, 1, 1, 1, 1])])
def test_sessions_are_drafted_in_waves(waves: int, sizes: list[int]) -> None:
    """Who waited longest comes first, so that a wave that comes back does not pass the other by."""
    side = Side(runners()[1], ahead=False, waves=waves)
    side.run(*(begin(name, 100, "", GREEDY) for name in "abcde"))
    bases = dict.fromkeys("abcde", 100)

    def judge(name: str) -> None:
        bases[name] += 1
        place = At(name, bases[name] - 100, bases[name] - 100, bases[name] - 1)
        side.drafter.receive(side.peer, Verdict(place, 0, [7], plain=False))

    for name in "abcde":
        judge(name)
    waves_drafted = [step(side)]
    for name in waves_drafted[0]:  # they come back while others still wait
        judge(name)
    drafted = waves_drafted[0]
    while len(drafted) < 5:
        waves_drafted.append(step(side))
        drafted = drafted + waves_drafted[-1]
    assert [len(wave) for wave in waves_drafted] == sizes
    assert set(drafted) == set("abcde")


def test_drafting_ahead_stops_where_guesses_fail() -> None:
    """Not for the only session of a draft, and every 16th round is tried."""
    side = Side(runners()[1])

    def goes_ahead(name: str, turn: int) -> bool:
        session = side.peer.sessions[name]
        went = session.round == session.judged + 1
        base = 100 + turn
        side.run(Verdict(At(name, turn + 1, turn + 1, base), 0, [7], plain=False))
        return went

    side.run(begin("a", 100, "", GREEDY), begin("b", 100, "", GREEDY))
    tried = [goes_ahead("a", turn) for turn in range(40)]
    assert tried[:5] == [True] * 5
    assert [turn for turn in range(10, 40) if tried[turn]] == [16, 32]
    assert side.peer.sessions["b"].round == 1
    side.run(End("b"))
    goes_ahead("a", 40)  # drafted before
    assert all(goes_ahead("a", turn) for turn in range(41, 44))


def test_a_negative_number_of_waves_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_waves is -1"):
        DraftSettings(waves=-1)
