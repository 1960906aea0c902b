"""Domain types to protobuf messages and back. What arrives is checked here; a wrong message is InvalidArgument.

Range checks against a session (base, indices, vocabulary) are the services': here only what a message says alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from engine.sampling import Sampling
from protos import control_pb2 as control
from protos import speculation_pb2 as speculation
from wire import messages as m
from wire.errors import InvalidArgument


def at_to_pb(at: m.At) -> speculation.At:
    return speculation.At(session=at.session, epoch=at.epoch, round=at.round, base=at.base)


def at_from_pb(pb: speculation.At) -> m.At:
    return m.At(_session(pb.session), pb.epoch, pb.round, pb.base)


def _session(session: str) -> str:
    if not session or len(session) > 128:
        raise InvalidArgument(f"session: expected 1 to 128 characters, got {len(session)}")
    return session


def sampling_to_pb(sampling: Sampling) -> speculation.Sampling:
    return speculation.Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)


def sampling_from_pb(pb: speculation.Sampling) -> Sampling:
    if not (math.isfinite(pb.temperature) and pb.temperature >= 0 and 0 < pb.top_p <= 1):
        raise InvalidArgument(f"sampling: temperature {pb.temperature} >= 0 and top_p {pb.top_p} in (0, 1] expected")
    return Sampling(pb.temperature, pb.top_p, pb.seed)


def hello_to_pb(hello: m.Hello) -> speculation.Hello:
    return speculation.Hello(**dataclasses.asdict(hello))


def hello_from_pb(pb: speculation.Hello) -> m.Hello:
    return m.Hello(**{field.name: getattr(pb, field.name) for field in dataclasses.fields(m.Hello)})


def draft_events_to_pb(events: Iterable[m.DraftEvent]) -> speculation.DraftFrame:
    return speculation.DraftFrame(batch=speculation.DraftEvents(events=[_draft_event_to_pb(e) for e in events]))


def _draft_event_to_pb(event: m.DraftEvent) -> speculation.DraftEvent:
    match event:
        case m.Announcement(at, assumed_token, selection):
            announcement = speculation.Announcement(at=at_to_pb(at), assumed_token=assumed_token, selection=selection)
            return speculation.DraftEvent(announcement=announcement)
        case m.Proposal():
            return speculation.DraftEvent(proposal=_proposal_to_pb(event))
        case m.Ready(at):
            return speculation.DraftEvent(ready=speculation.Ready(at=at_to_pb(at)))
        case m.Decline(session, reason):
            return speculation.DraftEvent(decline=speculation.Decline(session=session, reason=reason))
        case m.Resync(session):
            return speculation.DraftEvent(resync=speculation.Resync(session=session))


def _proposal_to_pb(proposal: m.Proposal) -> speculation.Proposal:
    supports = proposal.supports
    return speculation.Proposal(
        at=at_to_pb(proposal.at),
        announces=proposal.announces,
        assumed_token=proposal.assumed_token,
        tokens=proposal.tokens,
        support_counts=[len(support.ids) for support in supports],
        support_ids=[i for support in supports for i in support.ids.tolist()],
        support_probs=[p for support in supports for p in support.probs.tolist()],
        draft_seconds=proposal.draft_seconds,
    )


def _proposal_from_pb(pb: speculation.Proposal) -> m.Proposal:
    tokens, counts = list(pb.tokens), list(pb.support_counts)
    if not tokens:
        raise InvalidArgument("proposal: no tokens")
    if counts and len(counts) != len(tokens):
        raise InvalidArgument(f"proposal: {len(counts)} distributions for {len(tokens)} tokens")
    if not sum(counts) == len(pb.support_ids) == len(pb.support_probs):
        raise InvalidArgument(
            f"proposal: distributions of {sum(counts)} entries in all, {len(pb.support_ids)} ids, "
            f"{len(pb.support_probs)} probabilities"
        )
    supports: list[m.Support] = []
    if counts:
        ends = np.cumsum(counts)[:-1]
        ids = np.split(np.array(pb.support_ids, dtype=np.int64), ends)
        probs = np.split(np.array(pb.support_probs, dtype=np.float32), ends)
        supports = [m.Support(i, p) for i, p in zip(ids, probs, strict=True)]
        for token, support in zip(tokens, supports, strict=True):
            _check_support(token, support)
    if not math.isfinite(pb.draft_seconds):
        raise InvalidArgument("proposal: draft_seconds is not finite")
    at = at_from_pb(pb.at)
    return m.Proposal(at, pb.announces, pb.assumed_token, tokens, supports, pb.draft_seconds)


def _check_support(token: int, support: m.Support) -> None:
    probs = support.probs
    if not np.isfinite(probs).all() or (probs < 0).any() or abs(float(probs.sum()) - 1) > 1e-3:
        raise InvalidArgument("proposal: a distribution with entries that are no probabilities or do not sum to 1")
    if len(set(support.ids.tolist())) != len(support.ids):
        raise InvalidArgument("proposal: a distribution names a token twice")
    if not (probs[support.ids == token] > 0).any():
        raise InvalidArgument(f"proposal: token {token} has no probability in the distribution it is drawn from")


def draft_event_from_pb(pb: speculation.DraftEvent) -> m.DraftEvent:
    kind = pb.WhichOneof("event")
    if kind == "announcement":
        a = pb.announcement
        return m.Announcement(at_from_pb(a.at), a.assumed_token, a.selection)
    if kind == "proposal":
        return _proposal_from_pb(pb.proposal)
    if kind == "ready":
        return m.Ready(at_from_pb(pb.ready.at))
    if kind == "decline":
        return m.Decline(_session(pb.decline.session), pb.decline.reason)
    if kind == "resync":
        return m.Resync(_session(pb.resync.session))
    raise InvalidArgument("draft event: none of announcement, proposal, ready, decline, resync is set")


def target_events_to_pb(events: Iterable[m.TargetEvent]) -> speculation.TargetFrame:
    return speculation.TargetFrame(batch=speculation.TargetEvents(events=[_target_event_to_pb(e) for e in events]))


def _target_event_to_pb(event: m.TargetEvent) -> speculation.TargetEvent:
    match event:
        case m.Begin(at, tokens, sampling, max_length, method):
            begin = speculation.Begin(
                at=at_to_pb(at), tokens=tokens, sampling=sampling_to_pb(sampling), max_length=max_length, method=method
            )
            return speculation.TargetEvent(begin=begin)
        case m.Verdict(at, accepted, tokens, plain):
            verdict = speculation.Verdict(at=at_to_pb(at), accepted=accepted, tokens=tokens, plain=plain)
            return speculation.TargetEvent(verdict=verdict)
        case m.End(session):
            return speculation.TargetEvent(end=speculation.End(session=session))
        case m.Refusal(expected, reason):
            return speculation.TargetEvent(refusal=speculation.Refusal(expected=at_to_pb(expected), reason=reason))


def target_event_from_pb(pb: speculation.TargetEvent) -> m.TargetEvent:
    kind = pb.WhichOneof("event")
    if kind == "begin":
        b = pb.begin
        sampling = sampling_from_pb(b.sampling)
        return m.Begin(at_from_pb(b.at), list(b.tokens), sampling, b.max_length, b.method)
    if kind == "verdict":
        v = pb.verdict
        return m.Verdict(at_from_pb(v.at), v.accepted, list(v.tokens), v.plain)
    if kind == "end":
        return m.End(_session(pb.end.session))
    if kind == "refusal":
        return m.Refusal(at_from_pb(pb.refusal.expected), pb.refusal.reason)
    raise InvalidArgument("target event: none of begin, verdict, end, refusal is set")


def serve_request_to_pb(request: m.ServeRequest) -> control.ServeFrame:
    if isinstance(request, m.Abort):
        return control.ServeFrame(abort=control.Abort(session=request.session))
    opening = control.Open(
        session=request.session,
        tokens=request.tokens,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        sampling=sampling_to_pb(request.sampling),
        exactness=control.Exactness.Name(request.exactness),
        sparsity=request.sparsity,
    )
    return control.ServeFrame(open=opening)


def serve_request_from_pb(pb: control.ServeFrame) -> m.ServeRequest:
    kind = pb.WhichOneof("body")
    if kind == "abort":
        return m.Abort(_session(pb.abort.session))
    if kind != "open":
        raise InvalidArgument("serve frame: neither open nor abort is set")
    o = pb.open
    if o.exactness not in (m.Exactness.EXACT, m.Exactness.APPROXIMATE):
        raise InvalidArgument(f"open: exactness {o.exactness} is neither exact nor approximate")
    return m.Open(
        session=_session(o.session),
        tokens=list(o.tokens),
        prompt_tokens=o.prompt_tokens,
        max_tokens=o.max_tokens,
        stop_token_ids=list(o.stop_token_ids),
        sampling=sampling_from_pb(o.sampling),
        exactness=m.Exactness(o.exactness),
        sparsity=o.sparsity,
    )


def served_events_to_pb(events: Iterable[m.ServedEvent]) -> control.ServedFrame:
    return control.ServedFrame(events=[_served_event_to_pb(event) for event in events])


def _served_event_to_pb(event: m.ServedEvent) -> control.ServedEvent:
    if isinstance(event, m.Closed):
        return control.ServedEvent(closed=control.Closed(**vars(event)))
    fields: dict[str, Any] = vars(event) | {"at": at_to_pb(event.at)}
    return control.ServedEvent(commit=control.Commit(**fields))


_COMMIT_FIELDS = [field.name for field in dataclasses.fields(m.Commit)]
_COMMIT_READERS: dict[str, Callable[[Any], Any]] = {"at": at_from_pb, "tokens": list, "finish_reason": m.FinishReason}


def served_event_from_pb(pb: control.ServedEvent) -> m.ServedEvent:
    kind = pb.WhichOneof("event")
    if kind == "closed":
        return m.Closed(pb.closed.session, pb.closed.code, pb.closed.message)
    if kind != "commit":
        raise InvalidArgument("served event: neither commit nor closed is set")
    values = {name: getattr(pb.commit, name) for name in _COMMIT_FIELDS}
    for name, read in _COMMIT_READERS.items():
        values[name] = read(values[name])
    return m.Commit(**values)


def status_to_pb(status: m.ServiceStatus) -> control.ServiceStatus:
    return control.ServiceStatus(**vars(status))


def status_from_pb(pb: control.ServiceStatus) -> m.ServiceStatus:
    return m.ServiceStatus(pb.peer, pb.pid, list(pb.attached), pb.refusal, dict(pb.counters), dict(pb.gauges))
