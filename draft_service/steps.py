"""One model step of a drafter: whole rounds for the sessions of a micro-batch, and a share of the prompts to read."""

from collections import Counter
from dataclasses import dataclass, replace

from config import DraftSettings
from draft_service.sessions import DraftSession
from engine.inputs import SequenceInput
from engine.rounds.requests import RoundOutput, RoundRequest
from engine.sampling import USE_DRAFT, Support, uniforms
from engine.step_loop import share_prefill
from sparsity.plan import Plan
from sparsity.rounds import announced_selection, announcement_request
from wire.messages import Announcement, Proposal, Ready
from wire.selection_codec import encode_selection


@dataclass(frozen=True)
class DraftStep:
    """`requests`: a round of each of the sessions `drafting`. `inputs`: a part of the prompt of each of `reading`."""

    drafting: list[DraftSession]
    requests: list[RoundRequest]
    reading: list[DraftSession]
    inputs: list[SequenceInput]

    @property
    def sessions(self) -> list[DraftSession]:
        return self.drafting + self.reading


@dataclass(frozen=True)
class DraftStepResult:
    """`rounds`: one for each request. `seconds`: what the step took."""

    rounds: list[RoundOutput]
    seconds: float


def plan_draft_step(sessions: list[DraftSession], plan: Plan, settings: DraftSettings, number: int) -> DraftStep | None:
    """Return the next step of these sessions, None if there is nothing to do. number: of the step, from 1 on.

    Of the sessions with a round to draft one micro-batch is taken, those that have waited longest first. Sessions that
    are drafted are told to be ready.
    """
    # A few tokens behind is catching up, not reading a prompt.
    behind = 2 * (settings.gamma + 1)
    near = [session for session in sessions if len(session.tokens) - session.kv.length <= behind]
    drafting = [session for session in near if session.proposal is None]
    reading = [session for session in sessions if len(session.tokens) - session.kv.length > behind]
    if not drafting and not reading:
        return None
    for session in drafting:
        session.waiting = session.waiting or number
    drafting.sort(key=lambda session: session.waiting)
    del drafting[-(-len(near) // settings.micro_batches) :]
    for session in drafting:
        if session.ready_due:
            session.ready_due = False
            session.peer.send(Ready(session.at))
    shares = share_prefill([len(session.pending) - 1 for session in reading], settings.prefill_chunk)
    parts = [(session, share) for session, share in zip(reading, shares, strict=True) if share]
    return DraftStep(
        drafting,
        [_request_round(session, plan, settings.gamma) for session in drafting],
        [session for session, _ in parts],
        [SequenceInput(session.kv, session.pending[:share]) for session, share in parts],
    )


def _request_round(session: DraftSession, plan: Plan, gamma: int) -> RoundRequest:
    sampling, announce = session.sampling, None
    if session.method is not None:
        announce = announcement_request(session.method, plan, session.base, session.last_announced)
    return RoundRequest(
        kv=session.kv,
        tokens=session.pending,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        uniforms=uniforms(sampling.seed, session.base, gamma + 1, USE_DRAFT),
        announce=announce,
    )


def take_round(session: DraftSession, output: RoundOutput, plan: Plan, seconds: float, counters: Counter[str]) -> None:
    """Take the round that was drafted for a session in so many seconds, and send it."""
    count = session.tokens_to_propose
    session.tokens += output.tokens[:count]
    session.kv.length = session.base + count
    session.guess = output.tokens[count]
    supports = []
    if output.ids is not None and output.probs is not None:
        for ids, probs in zip(output.ids[:count], output.probs[:count], strict=True):
            held = probs > 0
            supports.append(Support(ids[held], probs[held]))
    if output.bitmap is not None:
        session.selection = announced_selection(output.bitmap, plan, session.base)
    session.proposal = Proposal(
        at=session.at,
        announces=session.method is not None,
        assumed_token=session.tokens[session.base - 1],
        tokens=output.tokens[:count],
        supports=supports,
        draft_seconds=seconds,
    )
    send_round(session, counters)


def send_round(session: DraftSession, counters: Counter[str]) -> None:
    """Send what the session's round announces, if it does, coded against what the target holds, and its proposal.

    Also a second time, for a round drafted ahead which still holds although the epoch has moved. Before it is drafted
    there is nothing to send.
    """
    if session.selection is not None:
        data = encode_selection(session.selection, session.newest_known)
        counters["announcements"] += 1
        counters["announced_bytes"] += len(data)
        session.peer.send(Announcement(session.at, session.tokens[session.base - 1], data))
    if session.proposal is not None:
        counters["proposals"] += 1
        session.proposal = replace(session.proposal, at=session.at)
        session.peer.send(session.proposal)
