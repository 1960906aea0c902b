"""The events between drafts and target about sessions. docs/architecture.md has the table of answers."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from specahead.config.speculation import MAX_BRANCHES
from specahead.wire.errors import InvalidArgument
from specahead.wire.messages import Decline, DraftEvent, End, Load, Proposals, Ready, Refusal, Resync, Verdict
from specahead.wire.selection_codec import UnknownReference, decode_selection
from target_service.patience import Patience
from target_service.session import DraftPeer, RoundKey, TargetSession
from target_service.target import Target

log = logging.getLogger(__name__)


class DraftProtocol:
    """Owns the attached drafts. Assigns a draft to each session, and applies the draft's events to the session."""

    def __init__(self, target: Target, sessions: Mapping[str, TargetSession], patience: Patience) -> None:
        """sessions: the running ones, by name. patience: learns how long rounds of drafts take."""
        self.drafts: list[DraftPeer] = []
        self._sessions, self._patience, self._counters, self._hooks = sessions, patience, target.counters, target.hooks
        self._number = _number(target.settings.name)
        self._plan, self._gamma, self._vocab_size = target.plan, target.settings.most_drafted, target.runner.vocab_size

    # Which draft a session has.

    def attach(self, peer: DraftPeer) -> None:
        """Attach a draft; it drafts for all sessions that have none."""
        self.drafts.append(peer)
        self._counters["drafts_attached"] += 1
        for session in self._sessions.values():
            self.assign(session)

    def detach(self, peer: DraftPeer) -> None:
        """Detach a draft. Its sessions continue with another draft, or plainly if there is none."""
        self.drafts.remove(peer)
        for session in [session for session in self._sessions.values() if session.draft.peer is peer]:
            session.forget_draft()
            self.assign(session)

    def assign(self, session: TargetSession, wait: bool = False) -> None:
        """Assign a draft to a session, unless it has one, goes without one or is at its end, or no draft is attached.

        It is the draft with the fewest sessions of all targets; of several, the one that was placed beside this target
        (draft-2 beside target-2). wait: wait for its proposals before decoding plainly, as for a session that starts.
        One that takes turns with the target is also waited for by a session that it drafted for just now: it only has
        to catch up with prompt lookup, which it does behind the step that runs.
        """
        if not self.drafts or session.draft.peer is not None or session.goes_alone or session.awaits_its_end:
            return
        peer = min(self.drafts, key=lambda draft: (draft.load, _number(draft.name) != self._number))
        catches_up = peer.takes_turns and session.pace.last_gamma > 0
        session.draft.peer, session.draft.awaited = peer, wait or catches_up
        peer.sessions.add(session.id)
        peer.send(session.begin())

    def end(self, session: TargetSession) -> None:
        """Tell a session's draft to stop drafting for it."""
        if session.draft.peer is not None:
            session.draft.peer.send(End(session.id))
            session.forget_draft()

    def judge(self, session: TargetSession, key: RoundKey, verdict: Verdict) -> None:
        """Send the verdict on round `key` to a session's draft, if it has one; keep it in case the draft asks again."""
        if session.draft.peer is not None:
            session.draft.last_judged = (key, verdict)
            session.draft.peer.send(verdict)

    # What drafts send.

    def receive(self, peer: DraftPeer, event: DraftEvent) -> None:
        """Apply a draft's event. Raises InvalidArgument for an event that no correct draft sends."""
        if self._hooks.on_draft_event is not None:
            self._hooks.on_draft_event(event)
        if isinstance(event, Load):
            peer.other_sessions = event.other_sessions
            return
        name = event.session if isinstance(event, Decline | Resync) else event.at.session
        session = self._sessions.get(name)
        if session is None or session.draft.peer is not peer:
            self._counters["unknown_session_frames"] += 1
            peer.send(End(name))
            return
        if isinstance(event, Proposals):  # late ones above all
            self._patience.note(event.draft_seconds)
        match event:
            case Proposals() if session.came_late(event.at):
                self._take_late_proposals(session, event)
            case Proposals():
                self._take_proposals(peer, session, event)
            case Ready():
                session.draft.awaited = True
                session.stats.waiting_since = None
            case Decline():
                session.draft.awaited = False
            case Resync():
                session.epoch += 1
                session.draft.forget()
                peer.send(session.begin())

    def reject(self, peer: DraftPeer, name: str, error: InvalidArgument) -> None:
        """Let a session continue without its draft for a while, after a wrong event for it."""
        session = self._sessions.get(name)
        if session is None or session.draft.peer is not peer:
            return
        log.warning("draft %s, session %s: %s", peer.name, name, error)
        self._counters["rejected_events"] += 1
        self.end(session)
        session.pause()

    def _take_proposals(self, peer: DraftPeer, session: TargetSession, event: Proposals) -> None:
        if not self._is_current(peer, session, event):
            return
        self._check_outcomes(session, event)
        self._check_tokens(session, event)
        try:
            self._keep(session, event, (event.at.epoch, event.at.round))
        except UnknownReference as error:
            self._refuse(peer, session, str(error))

    def _take_late_proposals(self, session: TargetSession, event: Proposals) -> None:
        """Take proposals for this round that were sent before the verdict on the last one arrived, if they foresaw it.

        The draft will send them again under the new epoch; taking them now saves the wait.
        """
        self._check_tokens(session, event)
        if (len(session.tokens), session.tokens[-1]) in event.outcomes and session.key not in session.draft.proposals:
            try:
                self._keep(session, replace(event, at=event.at._replace(epoch=session.epoch)), session.key)
                self._counters["late_rounds"] += 1
                return
            except UnknownReference:
                pass  # the round before was decoded plainly; the draft says this one again
        self._counters["stale_frames"] += 1
        session.stats.stale_rounds += 1

    def _keep(self, session: TargetSession, event: Proposals, key: RoundKey) -> None:
        """Keep the proposals for a round and their announcement. Raises InvalidArgument, and UnknownReference for an
        announcement that refers to a selection that is not kept.
        """
        if event.selection:
            reader, base, committed = session.reading.reader, event.at.base, len(session.tokens)
            if reader is None or not session.reading.is_announced:
                raise InvalidArgument(f"session {session.id} takes no announcements")
            if base < committed - self._gamma:  # below the shortest of the outcomes that may have been drafted for
                raise InvalidArgument(f"session {session.id}: announced up to {base}, {committed} tokens are committed")
            blocks = self._plan.num_blocks(base)
            session.draft.announced[key] = decode_selection(
                event.selection, session.draft.known_selections, reader.announced_rows, blocks
            )
            session.stats.announced_bytes += len(event.selection)
            self._counters["announced_bytes"] += len(event.selection)
        session.draft.proposals[key] = event

    def _is_current(self, peer: DraftPeer, session: TargetSession, event: Proposals) -> bool:
        """Return whether proposals are the first for this round or the next one.

        Others are repeats, which are answered again, stale ones, which are dropped, or leave a gap and are refused.
        """
        at = event.at
        key = (at.epoch, at.round)
        if session.draft.last_judged is not None and key == session.draft.last_judged[0]:
            self._counters["repeated_frames"] += 1
            peer.send(session.draft.last_judged[1])
            return False
        if at.epoch < session.epoch or at.round < session.round:
            self._counters["stale_frames"] += 1
            session.stats.stale_rounds += 1
            return False
        if at.epoch > session.epoch or at.round > session.round + 1:
            self._refuse(peer, session, f"epoch {at.epoch}, round {at.round} leaves a gap")
            return False
        self._counters["repeated_frames"] += key in session.draft.proposals
        return key not in session.draft.proposals

    def _check_outcomes(self, session: TargetSession, event: Proposals) -> None:
        """Raise InvalidArgument for proposals that assume impossible outcomes.

        Proposals for this round must build on the committed tokens.
        """
        base, committed, gamma = event.at.base, len(session.tokens), self._gamma
        if event.at.round > session.round:
            if not committed < base <= base + max(event.offsets) <= committed + gamma + 1:
                raise InvalidArgument(f"session {session.id}: base {base} cannot follow {committed} tokens")
        elif event.outcomes != [(committed, session.tokens[-1])]:
            raise InvalidArgument(
                f"session {session.id}: proposals after {event.outcomes[:MAX_BRANCHES]} (base, assumed token); "
                f"{committed} tokens are committed, the last of them {session.tokens[-1]}"
            )

    def _check_tokens(self, session: TargetSession, event: Proposals) -> None:
        """Raise InvalidArgument for proposals that cannot be verified."""
        vocab, ids = self._vocab_size, event.support_ids
        if len(event.counts) > MAX_BRANCHES:
            raise InvalidArgument(f"{len(event.counts)} proposals for one round, expected {MAX_BRANCHES} at most")
        if max(event.counts) > self._gamma:
            raise InvalidArgument(f"a proposal of {max(event.counts)} tokens, γ is {self._gamma}")
        if max(event.tokens) >= vocab or (ids.size and ids.max() >= vocab):
            raise InvalidArgument(f"a proposed token lies outside the vocabulary of {vocab}")
        if session.asked.sampling.greedy and ids.size:
            raise InvalidArgument(f"session {session.id} is greedy; its proposals carry no distributions")

    def _refuse(self, peer: DraftPeer, session: TargetSession, reason: str) -> None:
        self._counters["refused_frames"] += 1
        peer.send(Refusal(session.at, reason))


def _number(service: str) -> str:
    """Return the number in the name of one of several services; "" for the only one of its side."""
    return service.partition("-")[2]
