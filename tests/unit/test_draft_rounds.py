"""A drafter over the bundled draft: its proposals and announcements against teacher-forced passes of the same tokens.

The reference runs the model's own modules over all tokens at once. Without a GPU rounds run launch by launch through
the torch kernels; on a GPU they are captured.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from specahead import models
from specahead.config import DraftSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV, pages_for
from specahead.engine.loading.model import load_model, load_modules
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import USE_DRAFT, Sampling, uniforms
from specahead.engine.sampling.grammars import Grammars, unpack_mask
from specahead.engine.steps import round_launches as launches
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.rejection import race, truncated_probs
from specahead.lab.evaluation.attending import forward_weighing
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At, Begin, DraftEvent, Proposal, Proposals, Verdict
from specahead.wire.selection_codec import decode_selection
from tests.books import random_tokens as tokens
from tests.plans import announce, bundled_plan
from tests.proposals import apart
from tests.settings import draft_settings
from tests.unit.distributions import changed_row
from tests.unit.fake_models import limit_support
from tests.unit.inline import Inline
from tests.unit.steps import run_steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A budget by which there is something to announce in short contexts.
PLAN = bundled_plan(budget=0.25)
VOCAB, GAMMA = 4096, 4
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, top_p=0.8, seed=5)
RULED = Sampling(0.8, 0.9, 5, 0, 0.05, 0.5, 0.4, 1.5, {7: 3.0, 9: -100.0}, 100)


@pytest.fixture(autouse=True)
def memory_that_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for evidence is as it was left: here by something that no sum gets rid of."""
    make = launches._make_evidence

    def make_of_nan(*args: Any) -> Tensor | None:
        evidence = make(*args)
        return None if evidence is None else evidence.fill_(torch.nan)

    monkeypatch.setattr(launches, "_make_evidence", make_of_nan)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(load_model(str(models.DRAFT), torch.float32, DEVICE), 16384, max_context=1000)


@pytest.fixture(scope="module")
def reference(runner: ModelRunner) -> ModelRunner:
    decoder = load_modules(str(models.DRAFT), torch.float32, DEVICE).decoder
    sizes = runner.kv.num_layers, runner.kv.kv_heads, runner.kv.k_pages[0].shape[3]
    kv = KVCache(*sizes, pages_for(1024), device=DEVICE)
    return ModelRunner(decoder, kv, VOCAB, 1000)


def run_all(reference: ModelRunner, text: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
    """Run `text` and `drafted` in one dense pass.

    Returns the logits of the last token of `text` and of all that was drafted, [drafted + 1, vocab], and the mean of
    their weights over blocks, [layers, heads, blocks].
    """
    kv, queries = SequenceKV(), len(drafted) + 1
    logits, weights = forward_weighing(reference, kv, [*text, *drafted], PLAN.block_size, queries)
    reference.kv.release(kv)
    return logits[-queries:].cpu(), weights.mean(1).cpu()


class Side:
    """A drafter and what it sends. `announced`: all selections of a session, by epoch and round."""

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None, **settings: Any) -> None:
        self.sent: list[DraftEvent] = []
        # A branch is looked up by its place, and the reference reads everything: also on a GPU.
        drafter_settings = draft_settings(gamma=GAMMA, **{"branches": 1, "draft_read_share": 1.0} | settings)
        self.overlaps = drafter_settings.chosen.branches > 0
        self.drafter = Drafter(runner, PLAN, drafter_settings, grammars=grammars)
        self.peer = TargetPeer(self.sent.append)
        self.drafter.attach(self.peer)
        self.announced: dict[str, dict[Any, BlockSelection]] = {}

    def run(self, *events: Any) -> list[DraftEvent]:
        for event in events:
            self.drafter.receive(self.peer, event)
        self.sent.clear()
        run_steps(self.drafter)
        return list(self.sent)

    def decode(self, event: Proposals) -> BlockSelection:
        name, epoch, round_, base = event.at
        assert self.peer.sessions[name].terms.announces
        held = self.announced.setdefault(name, {})
        rows, blocks = announced_rows(PLAN), PLAN.num_blocks(base)
        held[epoch, round_] = decode_selection(event.selection, held, rows, blocks)
        return held[epoch, round_]

    def close(self) -> None:
        self.drafter.detach(self.peer)
        self.run()
        assert self.drafter.session_count == len(self.drafter.admission.waiting) == 0
        assert self.drafter.runner.kv.pool.held == 0


def proposals_in(sent: list[DraftEvent]) -> list[Proposal]:
    """Return all that was proposed, in order."""
    return [item for event in sent if isinstance(event, Proposals) for item in apart(event)]


def check_proposal(side: Side, event: Proposal, logits: Tensor) -> None:
    """logits: [γ + 1 or fewer, vocab] of the passes that drafted it"""
    session, count = side.peer.sessions[event.at.session], len(event.tokens)
    sampling = session.terms.sampling
    if session.terms.rules is not None:
        before = [*session.tokens[: event.at.base - 1], event.assumed_token]
        of_rules = session.terms.rules.prompt_tokens, sampling, session.terms.rules.stop_token_ids
        rows = [changed_row(row.numpy(), before + event.tokens[:i], *of_rules) for i, row in enumerate(logits)]
        logits = torch.from_numpy(np.stack(rows)).float()
    if sampling.greedy:
        assert event.tokens == logits[:count].argmax(-1).tolist()
        assert event.supports == []
        return
    probs = truncated_probs(logits, *(torch.full((len(logits),), x) for x in (sampling.temperature, sampling.top_p)))
    probs[probs < sampling.min_p * probs.amax(1, keepdim=True)] = 0
    ids, top = limit_support(probs, sampling.top_k or DraftSettings.support)
    drawn = race(top, ids, torch.from_numpy(uniforms(sampling.seed, event.at.base, len(logits), USE_DRAFT)))
    assert event.tokens == ids.gather(1, drawn[:, None])[:count, 0].tolist()
    assert len(event.supports) == count
    limited = torch.zeros_like(probs).scatter(1, ids, top)
    for support, row in zip(event.supports, limited, strict=False):
        assert abs(float(support.probs.sum()) - 1) < 1e-5
        torch.testing.assert_close(torch.from_numpy(support.probs), row[support.ids.tolist()], rtol=1e-3, atol=1e-5)


def check_announcement(side: Side, event: Proposals, weights: Tensor) -> None:
    """weights: [layers, heads, blocks], the evidence of the round"""
    name, _, round_, base = event.at
    assert side.peer.sessions[name].terms.announces
    before = [selection for (_, r), selection in side.announced.get(name, {}).items() if r == round_ - 1]
    last = before[-1] if before else None
    expected = announce(weights.cpu(), PLAN, base, last)
    found = side.decode(event)
    assert found.num_blocks == expected.num_blocks
    ours, theirs = found.matrix(), expected.matrix()
    assert theirs.sum() > 20
    if DEVICE == "cpu":
        assert (ours == theirs).all()
    else:  # nearly equal scores may change places between the kernels of the two
        assert (ours & theirs).sum() >= 0.9 * max(ours.sum(), theirs.sum())


def check(side: Side, reference: ModelRunner, sent: list[DraftEvent]) -> dict[str, list[Proposal]]:
    """Check all that was sent in one run; returns the proposals of each session, in order.

    Who drafts ahead also runs the last token that it proposes.
    """
    proposals: dict[str, list[Proposal]] = {}
    for event in proposals_in(sent):
        proposals.setdefault(event.at.session, []).append(event)
    passes = {
        event.at: run_all(
            reference,
            [*side.peer.sessions[name].tokens[: event.at.base - 1], event.assumed_token],
            event.tokens[: None if side.overlaps else -1],
        )
        for name, events in proposals.items()
        for event in events
    }
    for event in proposals_in(sent):
        check_proposal(side, event, passes[event.at][0])
    for announced in sent:
        if isinstance(announced, Proposals) and announced.selection:
            check_announcement(side, announced, passes[announced.at][1])
    return proposals


def begin(name: str, length: int, announces: bool, sampling: Sampling) -> Begin:
    return Begin(At(name, 0, 0, length), tokens(length, length), sampling, 800, announces)


@pytest.mark.parametrize("overlaps", [True, False])
def test_rounds_are_what_teacher_forced_passes_give(
    runner: ModelRunner, reference: ModelRunner, overlaps: bool
) -> None:
    side = Side(runner, branches=int(overlaps))
    events: list[Any] = [
        begin("a", 440, True, GREEDY),
        begin("b", 420, True, SAMPLED),
        begin("c", 180, False, GREEDY),
        begin("d", 540, True, GREEDY),
        begin("e", 500, False, SAMPLED),
        replace(begin("f", 300, True, RULED), prompt_tokens=270, stop_token_ids=[5, 6]),
        replace(begin("g", 310, False, replace(RULED, temperature=0.0)), prompt_tokens=250, stop_token_ids=[5, 6]),
        begin("h", 320, False, Sampling(0.9, 1.0, 6, top_k=7)),
    ]
    announced: set[str] = set()
    for turn in range(3):
        sent = side.run(*events)
        proposals = check(side, reference, sent)
        announced |= {event.at.session for event in sent if isinstance(event, Proposals) and event.selection}
        assert set(proposals) == set("abcdefgh")
        events = []
        for name, session in side.peer.sessions.items():
            overlapped = session.overlap is not None
            assert overlapped == overlaps or turn > 0, "guesses that fail end overlap"
            proposed, guess = session.present.drafted.tokens[:GAMMA], session.present.drafted.tokens[-1]
            # Everything, a part, nothing.
            accepted = GAMMA if turn % 2 == 0 else turn // 2
            extra = guess if accepted == GAMMA else (proposed[accepted] + 1) % VOCAB
            epoch = session.at.epoch + (accepted < GAMMA or not overlapped)
            place = At(name, epoch, session.at.round + 1, session.committed)
            events.append(Verdict(place, accepted, [*proposed[:accepted], extra], plain=False))
    assert announced == set("abdf")
    side.close()


def test_later_passes_may_read_what_the_first_weighed_most(runner: ModelRunner) -> None:
    """With a share of everything the same; with a small one other evidence, and still γ tokens a round."""
    selections, proposed = [], []
    for share in (1.0, 0.999, 0.3):
        side = Side(runner, branches=0, draft_read_share=share)
        sent = side.run(begin("a", 500, True, GREEDY))
        (proposal,) = proposals_in(sent)
        (announcement,) = [event for event in sent if isinstance(event, Proposals)]
        proposed.append(proposal.tokens)
        selections.append(side.decode(announcement).matrix())
        side.close()
    dense, all_listed, few = selections
    assert proposed[0] == proposed[1]
    # Lists split the work otherwise than dense reads, and nearly equal scores may change places.
    assert (dense & all_listed).sum() >= 0.98 * dense.sum()
    assert len(proposed[2]) == GAMMA
    assert (few != dense).any()


def test_a_draft_that_fell_behind_catches_up_before_its_round(runner: ModelRunner, reference: ModelRunner) -> None:
    side = Side(runner, branches=0)
    side.run(begin("a", 300, True, GREEDY))
    behind = [Verdict(At("a", 1, k + 1, 300 + k), 0, [7 + k], plain=True) for k in range(6)]
    proposals = check(side, reference, side.run(*behind))
    assert [proposal.at.base for proposal in proposals["a"]] == [306]
    side.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("branches", [1, 3])
def test_a_round_and_its_branches_propose_what_a_grammar_allows(
    runner: ModelRunner, tokenizer: Any, sampling: Sampling, branches: int
) -> None:
    """Beside a session without a grammar, whose rounds are the same as alone."""
    source = LLMatcher.grammar_from_regex("[A-Z][a-z]{30,}([.,] [a-z]{30,})*")
    grammars = Grammars(tokenizer, VOCAB, [0], Inline())
    side, alone = Side(runner, grammars, branches=branches), Side(runner, branches=branches)
    prompt = tokens(40, 3)
    free = Begin(At("free", 0, 0, 40), prompt, sampling, 500, False, 40, [0])
    bound = Begin(At("bound", 0, 0, 40), prompt, sampling, 500, False, 40, [0], source)
    expected = proposals_in(alone.run(free))
    alone.close()
    proposals = proposals_in(side.run(free, bound))
    for event, other in zip((e for e in proposals if e.at.session == "free"), expected, strict=True):
        assert event.tokens == other.tokens
    first, *ahead = [event for event in proposals if event.at.session == "bound"]
    assert len(ahead) == branches
    assert len({(event.at.base, event.assumed_token) for event in ahead}) == branches
    for event in (first, *ahead):
        before = [*prompt, *first.tokens[: event.at.base - 41], event.assumed_token] if event is not first else prompt
        state = grammars.start(source, before, 40)
        assert not state.error
        for at in range(len(event.tokens)):
            mask = unpack_mask(torch.from_numpy(state.mask_behind(event.tokens[:at])), VOCAB)
            assert mask.sum() < VOCAB
            assert mask[event.tokens[at]]
    side.close()
