"""Every message comes out of protobuf as it went in, and what cannot be is refused."""

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import Sampling, Support
from protos import control_pb2, speculation_pb2
from wire import convert
from wire import messages as m
from wire.errors import InvalidArgument

names = st.text(min_size=1, max_size=convert.MOST_NAME)
numbers = st.integers(0, 2**31 - 1)
tokens = st.lists(numbers, max_size=5)
seconds = st.floats(0, 1e6, width=32)
STRATEGIES = {
    str: st.text(max_size=20),
    int: numbers,
    bool: st.booleans(),
    float: seconds,
    bytes: st.binary(max_size=40),
    list[int]: tokens,
    m.At: st.builds(m.At, names, numbers, numbers, numbers),
    m.Exactness: st.sampled_from(m.Exactness),
    m.FinishReason: st.sampled_from(m.FinishReason),
    Sampling: st.sampled_from([Sampling(), Sampling(0.0), Sampling(0.5, 0.25, 2**64 - 1)]),
    list[Support]: st.just([]),
}
GIVEN = {"session": names, "accepted": numbers}
UNIONS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (m.DraftEvent, convert.draft_events_to_pb, convert.draft_event_from_pb),
    (m.TargetEvent, convert.target_events_to_pb, convert.target_event_from_pb),
    (m.ServedEvent, convert.served_events_to_pb, convert.served_event_from_pb),
]


def instances(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {name: GIVEN.get(name, STRATEGIES.get(hint)) for name, hint in hints.items()}
    if kind is m.Proposal:
        fields["tokens"] = st.lists(numbers, min_size=1, max_size=5)
    return st.builds(kind, **{name: strategy for name, strategy in fields.items() if strategy is not None})


@pytest.mark.parametrize(
    ("kind", "write", "read"),
    [(kind, write, read) for union, write, read in UNIONS for kind in (*get_args(union), m.Beat)],
)
def test_an_event_comes_out_as_it_went_in(kind: type, write: Callable[..., Any], read: Callable[..., Any]) -> None:
    @given(instances(kind))
    def check(event: Any) -> None:
        frame = type(write([])).FromString(write([event]).SerializeToString())
        (pb,) = frame.events if hasattr(frame, "events") else frame.batch.events
        assert read(pb) == event

    check()


@pytest.mark.parametrize("kind", [*get_args(m.ServeRequest), m.Beat])
def test_a_request_comes_out_as_it_went_in(kind: type) -> None:
    @given(instances(kind))
    def check(request: Any) -> None:
        data = convert.serve_request_to_pb(request).SerializeToString()
        assert convert.serve_request_from_pb(control_pb2.ServeFrame.FromString(data)) == request

    check()


AT = m.At("a", 1, 2, 3)


def supported(ids: list[int], probs: list[float]) -> m.Proposal:
    return m.Proposal(AT, False, 7, [5], [Support(np.array(ids), np.array(probs, dtype=np.float32))])


def through_pb(proposal: m.Proposal) -> Any:
    frame = convert.draft_events_to_pb([proposal])
    return convert.draft_event_from_pb(frame.batch.events[0])


def test_a_distribution_comes_out_as_it_went_in() -> None:
    (support,) = through_pb(supported([5, 9], [0.75, 0.25])).supports
    assert support.ids.tolist() == [5, 9] and support.probs.tolist() == [0.75, 0.25]


@pytest.mark.parametrize(
    ("ids", "probs", "reason"),
    [
        ([9, 8], [0.5, 0.5], "token 5 has no probability"),
        ([5, 9], [0.0, 1.0], "token 5 has no probability"),
        ([5, 9], [1.0, 1.0], "do not sum to 1"),
        ([5, 9], [1.5, -0.5], "no probabilities"),
        ([5, 9], [float("nan"), 1.0], "no probabilities"),
        ([5, 5], [0.5, 0.5], "names a token twice"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(ids: list[int], probs: list[float], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        through_pb(supported(ids, probs))


@pytest.mark.parametrize("name", ["", "x" * (convert.MOST_NAME + 1)])
def test_a_session_has_a_name_and_not_too_long_a_one(name: str) -> None:
    frame = control_pb2.ServeFrame(abort=control_pb2.Abort(session=name))
    with pytest.raises(InvalidArgument, match="expected 1 to 160 characters"):
        convert.serve_request_from_pb(frame)
    assert convert.session_in(frame, "body") == ""


@pytest.mark.parametrize(
    "values", [{"temperature": 1e-40}, {"temperature": -1}, {"temperature": float("inf")}, {"top_p": 0}, {"top_p": 1.5}]
)
def test_sampling_that_cannot_be_is_refused(values: dict[str, float]) -> None:
    frame = convert.serve_request_to_pb(m.Open("a", [1], 1, 2, [], Sampling(), m.Exactness.EXACT))
    for name, value in values.items():
        setattr(frame.open.sampling, name, value)
    with pytest.raises(InvalidArgument, match="sampling: expected"):
        convert.serve_request_from_pb(frame)


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="none of announcement"):
        convert.draft_event_from_pb(speculation_pb2.DraftEvent())
    frame = convert.serve_request_to_pb(m.Open("a", [1], 1, 2, [], Sampling(), m.Exactness.EXACT))
    frame.open.exactness = 0  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="neither exact nor approximate"):
        convert.serve_request_from_pb(frame)
    commit = control_pb2.Commit(at=speculation_pb2.At(session="a"), finish_reason=97)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="97 is no finish reason"):
        convert.served_event_from_pb(control_pb2.ServedEvent(commit=commit))
