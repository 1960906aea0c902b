"""Domain types to protobuf messages and back. What arrives is checked here; a wrong message is InvalidArgument.

Fields have the same names on both sides and are copied, arrays as bytes. A oneof names a message by its type in lower
case. Only what a message says by itself is checked: the services check it against a session (base, indices,
vocabulary).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import IntEnum
from typing import Any

import numpy as np

from protos import control_pb2 as control
from protos import speculation_pb2 as speculation
from specahead.engine.sampling.distributions import LEAST_TEMPERATURE, Sampling
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.wire import messages as m
from specahead.wire.errors import InvalidArgument

MOST_NAME = 160  # characters of a session's name, to which an orchestrator adds what makes it unique


def _by_name(*kinds: type) -> dict[str, type]:
    """Return types of messages by their names in a oneof."""
    return {kind.__name__.lower(): kind for kind in kinds}


_DRAFT_EVENTS = _by_name(m.Proposals, m.Ready, m.Decline, m.Resync, m.Load, m.Beat)
_TARGET_EVENTS = _by_name(m.Begin, m.Verdict, m.End, m.Refusal, m.Beat)
_SERVE_REQUESTS = _by_name(m.Open, m.Abort, m.Beat)
_SERVED_EVENTS = _by_name(m.Commit, m.Closed, m.Report, m.Beat)
_ONEOF = {
    kind: name
    for kinds in (_DRAFT_EVENTS, _TARGET_EVENTS, _SERVE_REQUESTS, _SERVED_EVENTS)
    for name, kind in kinds.items()
}
# Fields of a message whose own fields are those of the protobuf message.
_GROUPS: dict[Any, dict[str, type]] = {m.Commit: {"figures": m.RoundFigures}}
_PARTS = (m.RoundFigures, m.Hello, m.ServiceStatus, Sampling, TokenLogprobs)
_KINDS: tuple[Any, ...] = (*_ONEOF, *_PARTS)
_NAMES = {kind: tuple(each.name for each in fields(kind) if each.name not in _GROUPS.get(kind, ())) for kind in _KINDS}

# To protobuf


def hello_to_pb(hello: m.Hello) -> speculation.Hello:
    return speculation.Hello(**vars(hello))


def status_to_pb(status: m.ServiceStatus) -> control.ServiceStatus:
    return control.ServiceStatus(**vars(status))


def draft_events_to_pb(events: Iterable[m.DraftEvent | m.Beat]) -> speculation.DraftFrame:
    return speculation.DraftFrame(batch={"events": list(map(_named_values, events))})


def target_events_to_pb(events: Iterable[m.TargetEvent | m.Beat]) -> speculation.TargetFrame:
    return speculation.TargetFrame(batch={"events": list(map(_named_values, events))})


def serve_request_to_pb(request: m.ServeRequest | m.Beat) -> control.ServeFrame:
    return control.ServeFrame(**_named_values(request))


def served_events_to_pb(events: Iterable[m.ServedEvent | m.Beat]) -> control.ServedFrame:
    return control.ServedFrame(events=list(map(_named_values, events)))


def commit_to_bytes(commit: m.Commit) -> bytes:
    """Return a commit as a serialized ServedEvent."""
    data: bytes = served_events_to_pb([commit]).events[0].SerializeToString()
    return data


def _named_values(message: Any) -> dict[str, Any]:
    """Return the argument of a oneof's constructor: a message's values by the name of its field there."""
    return {_ONEOF[type(message)]: _values(message)}


def _values(message: Any) -> dict[str, Any]:
    """Return a message's values as protobuf's constructors take them; setting each would be slower."""
    values = dict(vars(message))
    for name in _GROUPS.get(type(message), ()):
        values |= vars(values.pop(name))
    for name, write in _WRITES[type(message)]:
        values[name] = write(values[name])
    return values


def _all_vars(items: list[Any]) -> list[dict[str, Any]]:
    return [vars(item) for item in items]


# Fields that are not written as they are.
_WRITERS: dict[str, Callable[[Any], Any]] = {
    "at": m.At._asdict,
    "expected": m.At._asdict,
    "sampling": vars,
    "support_ids": np.ndarray.tobytes,
    "support_probs": np.ndarray.tobytes,
    "logprobs": _all_vars,
    "prompt_logprobs": _all_vars,
}
_WRITES = {kind: tuple((name, _WRITERS[name]) for name in names if name in _WRITERS) for kind, names in _NAMES.items()}


# From protobuf


def hello_from_pb(pb: speculation.Hello) -> m.Hello:
    return _read(m.Hello, pb)


def status_from_pb(pb: control.ServiceStatus) -> m.ServiceStatus:
    return _read(m.ServiceStatus, pb)


def draft_event_from_pb(pb: speculation.DraftEvent) -> m.DraftEvent | m.Beat:
    return _read_oneof(_DRAFT_EVENTS, pb, "event", "draft event")


def target_event_from_pb(pb: speculation.TargetEvent) -> m.TargetEvent | m.Beat:
    return _read_oneof(_TARGET_EVENTS, pb, "event", "target event")


def serve_request_from_pb(pb: control.ServeFrame) -> m.ServeRequest | m.Beat:
    return _read_oneof(_SERVE_REQUESTS, pb, "body", "serve frame")


def served_event_from_pb(pb: control.ServedEvent) -> m.ServedEvent | m.Beat:
    return _read_oneof(_SERVED_EVENTS, pb, "event", "served event")


def commit_from_bytes(data: bytes) -> m.Commit:
    """Return the commit that `commit_to_bytes` wrote."""
    commit: m.Commit = _read(m.Commit, control.ServedEvent.FromString(data).commit)
    return commit


def session_in(pb: Any, oneof: str) -> str:
    """Return the session that a message with this oneof names, even if the message is wrong; empty for none."""
    name = pb.WhichOneof(oneof)
    inner = None if name is None else getattr(pb, name)
    session = getattr(getattr(inner, "at", inner), "session", "")
    return session if len(session) <= MOST_NAME else ""


def _read_oneof(kinds: Mapping[str, type], pb: Any, oneof: str, what: str) -> Any:
    """Return the message, one of `kinds`, that is set in `pb`. Raises InvalidArgument for none. what: names `pb`."""
    name = pb.WhichOneof(oneof)
    if name not in kinds:
        raise InvalidArgument(f"{what}: none of {', '.join(kinds)} is set")
    return _read(kinds[name], getattr(pb, name))


def _read(kind: Any, pb: Any) -> Any:
    """Return a message of type `kind`, a dataclass. Raises InvalidArgument for values that it cannot have."""
    names, reads = _READS[kind]
    values = {name: getattr(pb, name) for name in names}
    for name, read in reads:
        values[name] = read(values[name])
    for name, group in _GROUPS.get(kind, {}).items():
        values[name] = _read(group, pb)
    message = kind.__new__(kind)
    vars(message).update(values)  # __init__ of a frozen class makes one call for each field
    if kind is m.Proposals:
        _check_proposals(message)
    return message


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


def _read_enum(kind: type[IntEnum]) -> Callable[[int], IntEnum]:
    def read(number: int) -> IntEnum:
        try:
            return kind(number)
        except ValueError:
            raise InvalidArgument(f"commit: {number} is no {kind.__name__}") from None

    return read


def _read_all(kind: type) -> Callable[[Iterable[Any]], list[Any]]:
    return lambda pbs: [_read(kind, pb) for pb in pbs]


def _read_array(dtype: str) -> Callable[[bytes], np.ndarray]:
    nothing = np.empty(0, dtype)

    def read(data: bytes) -> np.ndarray:
        if len(data) % 4:
            raise InvalidArgument(f"proposals: {len(data)} bytes of distributions, expected numbers of 4 bytes each")
        return np.frombuffer(data, dtype) if data else nothing

    return read


_LISTS = (
    *("tokens", "offsets", "assumed_tokens", "counts", "support_counts", "stop_token_ids", "top_ids", "top_logprobs"),
    *("attached", "read", "fetched", "indexed", "evicted", "left", "taken"),
)
# Fields that are not read as they are.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_LISTS, list),
    **dict.fromkeys(("logit_bias", "counters", "gauges"), dict),
    **dict.fromkeys(("at", "expected"), _read_at),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _read_all(TokenLogprobs)),
    "session": _read_session,
    "sampling": _read_sampling,
    "exactness": _read_exactness,
    "finish_reason": _read_enum(m.FinishReason),
    "proposer": _read_enum(m.Proposer),
    "support_ids": _read_array("<u4"),
    "support_probs": _read_array("<f4"),
}

_READS = {
    kind: (names, [(name, _READERS[name]) for name in names if name in _READERS]) for kind, names in _NAMES.items()
}


def _check_proposals(proposals: m.Proposals) -> None:
    """Raise InvalidArgument for proposals whose counts do not fit each other, or that name an outcome twice."""
    offsets, assumed, counts = proposals.offsets, proposals.assumed_tokens, proposals.counts
    if not math.isfinite(proposals.draft_seconds):
        raise InvalidArgument("proposals: draft_seconds is not finite")
    if not (counts and len(offsets) == len(assumed) == len(counts) and min(counts) > 0):
        raise InvalidArgument(
            f"proposals: {len(offsets)} offsets, {len(assumed)} assumed tokens and the counts {counts[:32]}, expected "
            "one or more of each, and no tokens for none"
        )
    if sum(counts) != len(proposals.tokens):
        raise InvalidArgument(f"proposals: {len(proposals.tokens)} tokens, the counts have {sum(counts)}")
    if len(set(zip(offsets, assumed, strict=True))) != len(offsets):
        raise InvalidArgument("proposals: two for one outcome")
    if proposals.support_counts or proposals.support_ids.size or proposals.support_probs.size:
        _check_supports(proposals)


def _check_supports(proposals: m.Proposals) -> None:
    """Raise InvalidArgument unless each token has a distribution in which it has a chance."""
    tokens, ids, probs = proposals.tokens, proposals.support_ids, proposals.support_probs
    counts = np.array(proposals.support_counts, dtype=np.int64)
    if len(counts) != len(tokens) or not counts.all():
        raise InvalidArgument(f"proposals: {np.count_nonzero(counts)} distributions for {len(tokens)} tokens")
    if not counts.sum() == len(ids) == len(probs):
        raise InvalidArgument(
            f"proposals: distributions of {counts.sum()} entries in all, {len(ids)} ids, {len(probs)} probabilities"
        )
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(probs, starts, dtype=np.float64)
    if not (np.isfinite(probs).all() and (probs >= 0).all() and (abs(sums - 1) <= 1e-3).all()):
        raise InvalidArgument("proposals: a distribution with entries that are no probabilities or do not sum to 1")
    keys = np.repeat(np.arange(len(tokens), dtype=np.uint64) << np.uint64(32), counts) | ids
    keys.sort()
    if (keys[1:] == keys[:-1]).any():
        raise InvalidArgument("proposals: a distribution names a token twice")
    possible = np.logical_or.reduceat((ids == np.repeat(tokens, counts)) & (probs > 0), starts)
    if not possible.all():
        token = tokens[int(possible.argmin())]
        raise InvalidArgument(f"proposals: token {token} has no probability in the distribution it is drawn from")
