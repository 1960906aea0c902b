"""A target whose draft sends anything: the tokens of exact sessions stay the model's own."""

from typing import Any

import numpy as np

from protos import speculation_pb2
from specahead.engine.sampling.distributions import Support
from specahead.sparsity.announce import announced_rows
from specahead.wire import convert
from specahead.wire import messages as m
from specahead.wire.errors import InvalidArgument
from specahead.wire.selection_codec import encode_selection
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from tests.fuzz.mutators import mutate_bytes, mutate_message
from tests.plans import selection_of
from tests.proposals import together
from tests.settings import target_settings
from tests.unit.fake_models import GREEDY, LAYERS, PLAN, FakeModel, FakeRunner

PROMPT, NEW_TOKENS = [7] * 40, 6
MODEL = FakeModel(ends=True)
EXPECTED = MODEL.plain(PROMPT, NEW_TOKENS, [])[0][len(PROMPT) :]
NAMES = {"exact": m.Exactness.EXACT, "approximate": m.Exactness.APPROXIMATE}


def seeds() -> list[bytes]:
    """Return frames of an honest draft for both sessions, at their first round."""
    heads, blocks = announced_rows(PLAN), PLAN.num_blocks(len(PROMPT))
    selection = encode_selection(selection_of([[0]] * heads, blocks))
    support = Support(np.array([EXPECTED[0], 3]), np.array([0.75, 0.25], dtype=np.float32))
    events: list[m.DraftEvent] = []
    for name in NAMES:
        at = m.At(name, 0, 0, len(PROMPT))
        ahead = m.At(name, 0, 1, len(PROMPT) + 4)
        events += [
            together(m.Proposal(at, PROMPT[-1], EXPECTED[:3]), selection=selection if name == "approximate" else b""),
            together(m.Proposal(at, PROMPT[-1], EXPECTED[:1], [support])),
            together(*(m.Proposal(ahead, token, EXPECTED[4:]) for token in (EXPECTED[3], 3))),
            m.Ready(at),
            m.Decline(name, "full"),
            m.Resync(name),
        ]
    frames = [convert.draft_events_to_pb(events), *(convert.draft_events_to_pb([event]) for event in events)]
    return [frame.SerializeToString() for frame in frames]


def take(data: bytes) -> str:
    """Give a frame to a target with two sessions, and run them to their end.

    Raises AssertionError if the exact session has other tokens than the model's, or if sessions or pages are left.
    """
    try:
        frame = speculation_pb2.DraftFrame.FromString(data)
    except Exception:  # the target of draft frames tests such refusals
        return "no message"
    runner = FakeRunner(MODEL.target, True, LAYERS, 1, 40)
    verifier = Verifier(runner, PLAN, target_settings(gamma=4, max_context=100, draft_timeout=1e-9))
    peer, tokens = DraftPeer("draft", lambda event: None), {name: [] for name in NAMES}

    def emit(event: m.ServedEvent) -> None:
        assert isinstance(event, m.Commit), event
        tokens[event.at.session].extend(event.tokens)

    verifier.protocol.attach(peer)
    for name, exactness in NAMES.items():
        verifier.admission.open(m.Open(name, PROMPT, len(PROMPT), NEW_TOKENS, [], GREEDY, exactness), emit)
    _step(verifier)  # reads the prompts
    for pb in frame.batch.events:
        _receive(verifier, peer, pb)
    for _ in range(4 * NEW_TOKENS):  # a round may wait for the draft first
        _step(verifier)
    assert tokens["exact"] == EXPECTED, tokens
    assert len(tokens["approximate"]) == NEW_TOKENS
    verifier.admission.release_closed()
    assert not verifier.admission.running and not verifier.admission.preempted
    return " ".join(sorted(verifier.counters))


def _step(verifier: Verifier) -> None:
    step = verifier.plan_step()
    if step is not None:
        verifier.finish_step(step, verifier.execute(step))


def _receive(verifier: Verifier, peer: DraftPeer, pb: speculation_pb2.DraftEvent) -> None:
    """Pass an event to the protocol, as the servicer does."""
    try:
        event = convert.draft_event_from_pb(pb)
        if not isinstance(event, m.Beat):
            verifier.protocol.receive(peer, event)
    except InvalidArgument as error:
        verifier.protocol.reject(peer, convert.session_in(pb, "event"), error)


def mutate(data: bytes, rng: Any) -> bytes:
    kind = speculation_pb2.DraftFrame
    return mutate_message(data, kind, rng) if rng.random() < 0.8 else mutate_bytes(data, rng)
