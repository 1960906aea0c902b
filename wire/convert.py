"""Domain types to protobuf messages and back. What arrives is checked here; a wrong message is InvalidArgument.

Fields have the same names on both sides and are copied, but for a proposal's distributions. A oneof names a message by
its type in lower case. Range checks against a session (base, indices, vocabulary) are the services': here only what a
message says alone.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from engine.logprobs import TokenLogprobs
from engine.sampling import LEAST_TEMPERATURE, Sampling, Support
from protos import control_pb2 as control
from protos import speculation_pb2 as speculation
from wire import messages as m
from wire.errors import InvalidArgument

MOST_NAME = 160  # characters of a session's name: an orchestrator makes those of its clients unique
_KINDS: tuple[Any, ...] = (
    *(m.Hello, m.ServiceStatus, m.SessionReads, m.Beat, Sampling, TokenLogprobs),
    *(m.Announcement, m.Proposal, m.Ready, m.Decline, m.Resync),
    *(m.Begin, m.Verdict, m.End, m.Refusal),
    *(m.Open, m.Abort, m.Commit, m.Closed, m.Report),
)
# The fields that are copied: all but a proposal's distributions.
_OF_LOGPROBS = "logprobs", "prompt_logprobs"
_NAMES = {kind: tuple(each.name for each in fields(kind) if each.name != "supports") for kind in _KINDS}

# To protobuf


def hello_to_pb(hello: m.Hello) -> speculation.Hello:
    return speculation.Hello(**vars(hello))


def status_to_pb(status: m.ServiceStatus) -> control.ServiceStatus:
    return control.ServiceStatus(**vars(status))


def reads_to_pb(reads: m.SessionReads) -> control.SessionReads:
    pb = control.SessionReads()
    _write(pb, reads)
    return pb


def draft_events_to_pb(events: Iterable[m.DraftEvent | m.Beat]) -> speculation.DraftFrame:
    frame = speculation.DraftFrame()
    for event in events:
        _write_oneof(frame.batch.events.add(), event)
    return frame


def target_events_to_pb(events: Iterable[m.TargetEvent | m.Beat]) -> speculation.TargetFrame:
    frame = speculation.TargetFrame()
    for event in events:
        _write_oneof(frame.batch.events.add(), event)
    return frame


def serve_request_to_pb(request: m.ServeRequest | m.Beat) -> control.ServeFrame:
    frame = control.ServeFrame()
    _write_oneof(frame, request)
    return frame


def served_events_to_pb(events: Iterable[m.ServedEvent | m.Beat]) -> control.ServedFrame:
    frame = control.ServedFrame()
    for event in events:
        _write_oneof(frame.events.add(), event)
    return frame


def _write_oneof(pb: Any, message: Any) -> None:
    """Set the field of `pb` that is named as the message's type."""
    field = getattr(pb, type(message).__name__.lower())
    field.SetInParent()  # also where all values are the defaults
    _write(field, message)


def _write(pb: Any, message: Any) -> None:
    """Copy a message's values; those of the messages in it, and lists, into what `pb` has already."""
    for name in _NAMES[type(message)]:
        value = getattr(message, name)
        if isinstance(value, m.At):
            at = getattr(pb, name)
            at.session, at.epoch, at.round, at.base = value
        elif name in _OF_LOGPROBS:
            write_logprobs(getattr(pb, name), value)
        elif isinstance(value, list | tuple):
            getattr(pb, name).extend(value)
        elif isinstance(value, dict):
            getattr(pb, name).update(value)
        elif isinstance(value, Sampling):
            _write(getattr(pb, name), value)
        else:
            setattr(pb, name, value)
    if isinstance(message, m.Proposal) and message.supports:
        pb.support_counts.extend(len(support.ids) for support in message.supports)
        pb.support_ids.extend(i for support in message.supports for i in support.ids.tolist())
        pb.support_probs.extend(p for support in message.supports for p in support.probs.tolist())


def write_logprobs(pbs: Any, logprobs: list[TokenLogprobs]) -> None:
    """Append log probabilities to a repeated field."""
    for item in logprobs:
        _write(pbs.add(), item)


# From protobuf


def hello_from_pb(pb: speculation.Hello) -> m.Hello:
    return _read(m.Hello, pb)


def status_from_pb(pb: control.ServiceStatus) -> m.ServiceStatus:
    return _read(m.ServiceStatus, pb)


def reads_from_pb(pb: control.SessionReads) -> m.SessionReads:
    return _read(m.SessionReads, pb)


def draft_event_from_pb(pb: speculation.DraftEvent) -> m.DraftEvent | m.Beat:
    unset = "draft event: none of announcement, proposal, ready, decline, resync, beat is set"
    return _read_oneof((m.Announcement, m.Proposal, m.Ready, m.Decline, m.Resync, m.Beat), pb, "event", unset)


def target_event_from_pb(pb: speculation.TargetEvent) -> m.TargetEvent | m.Beat:
    unset = "target event: none of begin, verdict, end, refusal, beat is set"
    return _read_oneof((m.Begin, m.Verdict, m.End, m.Refusal, m.Beat), pb, "event", unset)


def serve_request_from_pb(pb: control.ServeFrame) -> m.ServeRequest | m.Beat:
    return _read_oneof((m.Open, m.Abort, m.Beat), pb, "body", "serve frame: none of open, abort, beat is set")


def served_event_from_pb(pb: control.ServedEvent) -> m.ServedEvent | m.Beat:
    unset = "served event: none of commit, closed, report, beat is set"
    return _read_oneof((m.Commit, m.Closed, m.Report, m.Beat), pb, "event", unset)


def session_in(pb: Any, oneof: str) -> str:
    """Return the session that a message with this oneof names, also where the message is wrong; empty for none."""
    name = pb.WhichOneof(oneof)
    inner = None if name is None else getattr(pb, name)
    session = getattr(getattr(inner, "at", inner), "session", "")
    return session if len(session) <= MOST_NAME else ""


def _read_oneof(kinds: tuple[type, ...], pb: Any, oneof: str, unset: str) -> Any:
    """Return the message that is set in `pb`, of one of `kinds`; raise InvalidArgument with text `unset` for none."""
    name = pb.WhichOneof(oneof)
    for kind in kinds:
        if kind.__name__.lower() == name:
            return _read(kind, getattr(pb, name))
    raise InvalidArgument(unset)


def _read(kind: Any, pb: Any) -> Any:
    """Return a message of type `kind`, a dataclass. Raises InvalidArgument for values that it cannot have."""
    values = {name: getattr(pb, name) if read is None else read(getattr(pb, name)) for name, read in _READS[kind]}
    if kind is m.Proposal:
        values["supports"] = _read_supports(pb)
    return kind(**values)


def _read_session(session: str) -> str:
    if not session or len(session) > MOST_NAME:
        raise InvalidArgument(f"session: expected 1 to {MOST_NAME} characters, got {len(session)}")
    return session


def _read_at(pb: speculation.At) -> m.At:
    return m.At(_read_session(pb.session), pb.epoch, pb.round, pb.base)


def _read_sampling(pb: speculation.Sampling) -> Sampling:
    is_heat = pb.temperature == 0 or np.float32(LEAST_TEMPERATURE) <= pb.temperature < math.inf
    if not (is_heat and 0 < pb.top_p <= 1):
        raise InvalidArgument(
            f"sampling: expected a temperature of 0 or from {LEAST_TEMPERATURE} on and top_p in (0, 1], got "
            f"{pb.temperature} and {pb.top_p}"
        )
    sampling: Sampling = _read(Sampling, pb)
    numbers = sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values()
    if not (all(map(math.isfinite, numbers)) and 0 < sampling.repetition_penalty < math.inf and 0 <= pb.min_p <= 1):
        raise InvalidArgument(
            "sampling: expected finite penalties and biases, a repetition_penalty above 0 and min_p in [0, 1], got "
            f"{str(sampling)[:500]}"
        )
    return sampling


def _read_exactness(number: int) -> m.Exactness:
    if number not in (m.Exactness.EXACT, m.Exactness.APPROXIMATE):
        raise InvalidArgument(f"open: exactness {number} is neither exact nor approximate")
    return m.Exactness(number)


def _read_finish_reason(number: int) -> m.FinishReason:
    if number not in list(m.FinishReason):
        raise InvalidArgument(f"commit: {number} is no finish reason")
    return m.FinishReason(number)


def _read_logprobs(pbs: Iterable[control.TokenLogprobs]) -> list[TokenLogprobs]:
    return [_read(TokenLogprobs, pb) for pb in pbs]


# How fields are read that are not taken as they are.
_READERS: dict[str, Callable[[Any], Any]] = {
    "session": _read_session,
    "at": _read_at,
    "expected": _read_at,
    "sampling": _read_sampling,
    "exactness": _read_exactness,
    "finish_reason": _read_finish_reason,
    "tokens": list,
    "stop_token_ids": list,
    "attached": list,
    "logit_bias": dict,
    "logprobs": _read_logprobs,
    "prompt_logprobs": _read_logprobs,
    "top_ids": list,
    "top_logprobs": list,
    "read": list,
    "fetched": list,
    "indexed": list,
    "evicted": list,
    "counters": dict,
    "gauges": dict,
}
_READS = {kind: tuple((name, _READERS.get(name)) for name in names) for kind, names in _NAMES.items()}


def _read_supports(pb: speculation.Proposal) -> list[Support]:
    """Return the distributions of a proposal's tokens, none if it is greedy. Raises InvalidArgument for bad numbers."""
    if not math.isfinite(pb.draft_seconds):
        raise InvalidArgument("proposal: draft_seconds is not finite")
    if not pb.tokens:
        raise InvalidArgument("proposal: no tokens")
    if not (pb.support_counts or pb.support_ids or pb.support_probs):
        return []
    tokens, counts = list(pb.tokens), list(pb.support_counts)
    if counts and len(counts) != len(tokens):
        raise InvalidArgument(f"proposal: {len(counts)} distributions for {len(tokens)} tokens")
    if not sum(counts) == len(pb.support_ids) == len(pb.support_probs):
        raise InvalidArgument(
            f"proposal: distributions of {sum(counts)} entries in all, {len(pb.support_ids)} ids, "
            f"{len(pb.support_probs)} probabilities"
        )
    if not counts:
        return []
    ends = np.cumsum(counts)[:-1]
    ids = np.split(np.array(pb.support_ids, dtype=np.int64), ends)
    probs = np.split(np.array(pb.support_probs, dtype=np.float32), ends)
    supports = [Support(i, p) for i, p in zip(ids, probs, strict=True)]
    for token, support in zip(tokens, supports, strict=True):
        _check_support(token, support)
    return supports


def _check_support(token: int, support: Support) -> None:
    probs = support.probs
    if not np.isfinite(probs).all() or (probs < 0).any() or abs(float(probs.sum()) - 1) > 1e-3:
        raise InvalidArgument("proposal: a distribution with entries that are no probabilities or do not sum to 1")
    if len(set(support.ids.tolist())) != len(support.ids):
        raise InvalidArgument("proposal: a distribution names a token twice")
    if not (probs[support.ids == token] > 0).any():
        raise InvalidArgument(f"proposal: token {token} has no probability in the distribution it is drawn from")
