"""The scripted model of the stack benchmark: target and draft agree but for fixed errors, selections change slowly."""

import numpy as np
import pytest

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SharedBudget, SparseRead
from specahead.engine.steps.requests import RoundOutput, RoundRequest
from specahead.lab.benchmarks.scripted import KV_HEADS, LAYERS, ScriptedRunner, right_tokens, scripted_plan
from specahead.sparsity.announce import announced_limits
from specahead.sparsity.rounds import announced_selection, announcement_request, round_settings
from specahead.sparsity.selection import BlockSelection, row_words

PLAN, GAMMA, LENGTH = scripted_plan(), 4, 2000
GREEDY = Sampling(temperature=0.0)


def draft(runner: ScriptedRunner, base: int) -> RoundOutput:
    kv = SequenceKV()
    runner.forward([SequenceInput(kv, [1] * (base - 1))])
    announce = announcement_request(PLAN, base, None)
    (output,) = runner.draft_rounds([RoundRequest(kv, [1], 0.0, 1.0, np.zeros(GAMMA + 1), announce)])
    runner.kv.release(kv)
    return output


@pytest.fixture
def drafting() -> ScriptedRunner:
    runner = ScriptedRunner(errs=True)
    runner.prepare_rounds(round_settings(PLAN, GAMMA, 64))
    return runner


def test_most_of_a_draft_is_accepted_and_some_is_not(drafting: ScriptedRunner) -> None:
    target, accepted = ScriptedRunner(errs=False), []
    for base in range(LENGTH, LENGTH + 200):
        drafted = Drafted(draft(drafting, base).tokens[:GAMMA], [], GREEDY, base)
        kv = SequenceKV(length=0)
        item = SequenceInput(kv, [0, *drafted.tokens], "all", drafted=drafted)
        ((count, following),) = [output.verdict for output in target.forward([item])]  # type: ignore[misc]
        assert [*drafted.tokens[:count], following] == right_tokens(base, count + 1)
        accepted.append(count)
        target.kv.release(kv)
    assert 0.6 < np.mean(accepted) / GAMMA < 0.95
    assert set(accepted) == {0, 1, 2, 3, 4}


def test_about_a_third_of_a_selection_is_new_in_each_round(drafting: ScriptedRunner) -> None:
    shares, before = [], np.zeros((LAYERS * KV_HEADS, PLAN.num_blocks(LENGTH)), bool)
    for base in range(LENGTH, LENGTH + 400, GAMMA + 1):
        bitmap = draft(drafting, base).bitmap
        assert bitmap is not None and bitmap.shape[1] >= row_words(PLAN.num_blocks(base))
        selection = announced_selection(bitmap, PLAN, base)
        *_, count = announced_limits(PLAN, base)
        assert selection.count(0, selection.num_blocks) == count > 20
        blocks = selection.resized(before.shape[1]).matrix()
        shares.append((blocks & ~before).sum() / blocks.sum())
        before = blocks
    assert 0.25 < np.mean(shares[1:]) < 0.4


def test_what_a_budget_reads_is_counted() -> None:
    """Of ten blocks the first and the last two in every row, and six between them, what is announced among them."""
    runner, kv = ScriptedRunner(errs=False), SequenceKV()
    rows = LAYERS * KV_HEADS
    announced = BlockSelection.from_lists([[0, 4, 5], [4], [], [9]], 10).words
    budget = SharedBudget(announced, 1, 8, 6, ReadMemory(None, 0.9), ())  # type: ignore[arg-type]
    item = SequenceInput(kv, [1] * 160, "all", SparseRead(16, budget), drafted=Drafted([], [], GREEDY, 159))
    (output,) = runner.forward([item])
    assert output.blocks_read == rows * 3 + 6


def test_sampling_is_refused() -> None:
    item = SequenceInput(SequenceKV(), [1], "all", drafted=Drafted([], [], Sampling(1.0), 1))
    with pytest.raises(NotImplementedError, match="temperature 0"):
        ScriptedRunner(errs=False).forward([item])
