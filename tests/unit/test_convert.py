"""Every message comes out of protobuf as it went in, and what cannot be is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import control_pb2
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.wire import convert
from specahead.wire import messages as m
from specahead.wire.errors import InvalidArgument
from tests.proposals import together

names = st.text(min_size=1, max_size=convert.MOST_NAME)
numbers = st.integers(0, 2**31 - 1)
places = st.builds(m.At, names, st.integers(0, 2**64 - 1), numbers, numbers)
tokens = st.lists(numbers, max_size=5)
seconds = st.floats(0, 1e6, width=32)
STRATEGIES = {
    str: st.text(max_size=20),
    int: numbers,
    bool: st.booleans(),
    float: seconds,
    bytes: st.binary(max_size=40),
    list[int]: tokens,
    m.At: places,
    m.Exactness: st.sampled_from(m.Exactness),
    m.FinishReason: st.sampled_from(m.FinishReason),
    m.Proposer: st.sampled_from(m.Proposer),
    Sampling: st.sampled_from([Sampling(), Sampling(0.0), Sampling(0.5, 0.25, 2**64 - 1)]),
}
GIVEN = {"session": names, "accepted": numbers}
UNIONS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (m.DraftEvent, convert.draft_events_to_pb, convert.draft_event_from_pb),
    (m.TargetEvent, convert.target_events_to_pb, convert.target_event_from_pb),
    (m.ServedEvent, convert.served_events_to_pb, convert.served_event_from_pb),
]


@st.composite
def proposals_for_a_round(draw: st.DrawFn) -> m.Proposals:
    """Return proposals behind several outcomes, of several lengths, greedy or each token with a distribution."""
    at = draw(places)
    outcomes = draw(st.lists(st.tuples(st.integers(0, 9), numbers), min_size=1, max_size=8, unique=True))
    sampled, spent, selection = draw(st.booleans()), draw(seconds), draw(st.binary(max_size=40))
    items = []
    for offset, assumed in outcomes:
        proposed = draw(st.lists(numbers, min_size=1, max_size=5))
        supports = [draw(distributions(token)) for token in proposed] if sampled else []
        items.append(m.Proposal(at._replace(base=at.base + offset), assumed, proposed, supports, spent))
    return together(*items, selection=selection)


def distributions(token: int) -> st.SearchStrategy[Support]:
    """Return distributions in which a token has a chance."""
    others = st.lists(numbers.filter(lambda other: other != token), max_size=4, unique=True)
    return others.map(lambda ids: Support(np.array([token, *ids]), np.full(1 + len(ids), 1 / (1 + len(ids)), "<f4")))


rounds = proposals_for_a_round()


def plain(message: Any) -> dict[str, Any]:
    """Return a message's values so that they can be compared."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(message).items()}


def instances(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {name: GIVEN.get(name, STRATEGIES.get(hint)) for name, hint in hints.items()}
    if kind is m.Proposals:
        return rounds
    return st.builds(kind, **{name: strategy for name, strategy in fields.items() if strategy is not None})


STRATEGIES[m.RoundFigures] = instances(m.RoundFigures)


@pytest.mark.parametrize(
    ("kind", "write", "read"),
    [(kind, write, read) for union, write, read in UNIONS for kind in (*get_args(union), m.Beat)],
)
def test_an_event_comes_out_as_it_went_in(kind: type, write: Callable[..., Any], read: Callable[..., Any]) -> None:
    @settings(max_examples=50)
    @given(instances(kind))
    def check(event: Any) -> None:
        frame = type(write([])).FromString(write([event]).SerializeToString())
        (pb,) = frame.events if hasattr(frame, "events") else frame.batch.events
        assert plain(read(pb)) == plain(event)

    check()


@pytest.mark.parametrize("kind", [*get_args(m.ServeRequest), m.Beat])
def test_a_request_comes_out_as_it_went_in(kind: type) -> None:
    @settings(max_examples=50)
    @given(instances(kind))
    def check(request: Any) -> None:
        data = convert.serve_request_to_pb(request).SerializeToString()
        assert convert.serve_request_from_pb(control_pb2.ServeFrame.FromString(data)) == request

    check()


AT = m.At("a", 1, 2, 3)


def proposal(offset: int, assumed: int, *ids: int) -> m.Proposal:
    """Return one of as many tokens as ids, each of which is as likely as token 100."""
    supports = [Support(np.array([100, token]), np.array([0.5, 0.5], np.float32)) for token in ids]
    return m.Proposal(AT._replace(base=AT.base + offset), assumed, list(ids), supports)


def through_pb(proposals: m.Proposals) -> Any:
    frame = convert.draft_events_to_pb([proposals])
    return convert.draft_event_from_pb(frame.batch.events[0])


@settings(max_examples=50)
@given(rounds, st.data())
def test_each_proposal_of_a_round_is_found_by_its_outcome(event: m.Proposals, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(event.counts) - 1))
    base, assumed = event.outcomes[index]
    found = event.after(base, assumed)
    start = sum(event.counts[:index])
    assert (found.at, found.assumed_token) == (event.at._replace(base=base), assumed)
    assert found.tokens == event.tokens[start : start + event.counts[index]]
    assert len(found.supports) == (len(found.tokens) if event.support_counts else 0)
    for token, support in zip(found.tokens, found.supports, strict=False):
        assert support.ids[0] == token and support.probs.sum() == pytest.approx(1)
    assert event.after(base + 10, assumed) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"counts": []}, "3 tokens|2 offsets"),
        ({"counts": [1]}, "2 offsets, 2 assumed tokens and the counts \\[1\\]"),
        ({"counts": [3, 0]}, "no tokens for none"),
        ({"counts": [1, 3]}, "3 tokens, the counts have 4"),
        ({"offsets": [0]}, "1 offsets"),
        ({"assumed_tokens": [7]}, "1 assumed tokens"),
        ({"offsets": [2, 2], "assumed_tokens": [8, 8]}, "two for one outcome"),
        ({"draft_seconds": float("nan")}, "draft_seconds is not finite"),
        ({"support_counts": [2, 2]}, "2 distributions for 3 tokens"),
        ({"support_counts": [2, 4, 0]}, "2 distributions for 3 tokens"),
        ({"support_counts": [2, 2, 3]}, "7 entries in all, 6 ids"),
        ({"support_counts": []}, "0 distributions for 3 tokens"),
        ({"support_probs": np.full(5, 0.5, np.float32)}, "6 ids, 5 probabilities"),
        ({"support_ids": np.zeros(7, np.uint8)}, "7 bytes of distributions"),
    ],
)
def test_proposals_whose_numbers_do_not_fit_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        through_pb(replace(together(proposal(0, 7, 1), proposal(2, 8, 3, 5)), **changes))


@pytest.mark.parametrize(
    "values", [{"temperature": 1e-40}, {"temperature": -1}, {"temperature": float("inf")}, {"top_p": 0}, {"top_p": 1.5}]
)
def test_sampling_that_cannot_be_is_refused(values: dict[str, float]) -> None:
    frame = convert.serve_request_to_pb(m.Open("a", [1], 1, 2, [], Sampling(), m.Exactness.EXACT))
    for name, value in values.items():
        setattr(frame.open.sampling, name, value)
    with pytest.raises(InvalidArgument, match="sampling: expected"):
        convert.serve_request_from_pb(frame)
