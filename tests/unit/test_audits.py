"""Audited rounds run sparsely, then densely, and what both say is compared; the others' passes stay as they are."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.divergence import divergence
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import Audit, SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from tests.unit.test_joined_rounds import DEVICE, budget_of, tokens

LENGTHS, DRAFTED = (300, 200, 81), (3, 2, 0)
SAMPLED = Sampling(0.9, 0.95, seed=3)


# The comparison.


def test_the_divergence_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(1)
    seen, true = rng.normal(size=(2, 5, 40)).astype(np.float32) * 3
    true[1], seen[3, :7] = seen[1], -np.inf
    true[3, :7] = -np.inf
    p, q = (np.exp(each.astype(np.float64)) for each in (true, seen))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        nats = np.where(p > 0, p * np.log(p / q), 0).sum(1)
    wanted = np.stack((abs(p - q).sum(1) / 2, nats, p.argmax(1) == q.argmax(1)), 1)
    found = divergence(torch.from_numpy(seen), torch.from_numpy(true))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)
    assert found[1].tolist() == pytest.approx([0, 0, 1], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distributions_without_a_common_token_are_as_far_as_can_be(dtype: torch.dtype) -> None:
    seen = torch.tensor([[60.0, 0, 0, 0]], dtype=dtype)
    variation, nats, same = divergence(seen, seen.flip(1))[0].tolist()
    assert (variation, same) == (pytest.approx(1), 0) and nats == pytest.approx(60)


# Passes.


class Step:
    """Three sessions with KV, the first two of which may read sparsely, and a round of each."""

    def __init__(self, runner: ModelRunner, sampling: Sampling) -> None:
        self.runner, self.sampling = runner, sampling
        self.prompts = [tokens(length, length) for length in LENGTHS]
        self.kv = [SequenceKV(dense=False) for _ in LENGTHS]
        runner.forward([SequenceInput(kv, prompt[:-1]) for kv, prompt in zip(self.kv, self.prompts, strict=True)])

    def input(self, i: int, **how: Any) -> SequenceInput:
        """Return the round of a session; it ends in logits unless it is judged."""
        drafted = Drafted(tokens(DRAFTED[i], 7 + i), [], self.sampling, LENGTHS[i])
        judged = drafted if how.pop("judged", True) else None
        return SequenceInput(self.kv[i], [self.prompts[i][-1], *drafted.tokens], "all", drafted=judged, **how)

    def run(self, *inputs: SequenceInput) -> tuple[list[SequenceOutput], list[torch.Tensor]]:
        """Run inputs; return their outputs and the values that the last layer's KV then has, and forget the round."""
        outputs, values = self.runner.forward(list(inputs)), []
        for item in inputs:
            places = [(item.kv.pages[at // 16], at % 16) for at in range(item.kv.length)]
            values.append(torch.stack([self.runner.kv.v_pages[-1][page, :, row] for page, row in places]))
            self.runner.kv.truncate(item.kv, item.kv.length - len(item.tokens))
        return outputs, values


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "joined"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    runner = make_runner(load_model(str(models.TARGET), torch.float32, DEVICE), 8192)
    runner._joins = request.param  # as on a GPU
    runner.kv.keep_group_means(64)
    return runner


@pytest.mark.parametrize("sampling", [Sampling(0.0), SAMPLED], ids=["greedy", "sampled"])
def test_an_audited_round_is_a_dense_one(runner: ModelRunner, sampling: Sampling) -> None:
    """Its verdict and KV are those of a dense round, whatever runs beside it, and the divergence is that of both."""
    step = Step(runner, sampling)
    reads = [budget_of(LENGTHS[i], DRAFTED[i], ()) for i in range(2)]
    (dense,), (dense_kv,) = step.run(step.input(0))
    (sparse,), _ = step.run(step.input(0, read=budget_of(LENGTHS[0], DRAFTED[0], ()), judged=False))
    (whole,), _ = step.run(step.input(0, judged=False))
    (beside,), _ = step.run(step.input(1, read=budget_of(LENGTHS[1], DRAFTED[1], ())))

    with patch.object(ModelRunner, "_start", autospec=True, side_effect=ModelRunner._start) as passes:
        outputs, values = step.run(step.input(1, read=reads[1]), step.input(0, audit=Audit(reads[0])), step.input(2))
    assert passes.call_count == (2 if runner._joins else 3), "one pass more than without the audit"
    other, audited, _ = outputs
    assert audited.verdict == dense.verdict and audited.blocks_read is None
    torch.testing.assert_close(values[1], dense_kv, atol=1e-5, rtol=1e-5)
    assert (other.verdict, other.blocks_read, other.divergence) == (beside.verdict, beside.blocks_read, None)
    wanted = divergence(sparse.logits, whole.logits)
    np.testing.assert_allclose(audited.divergence, wanted.cpu().numpy(), atol=2e-4)
    assert audited.divergence.shape == (DRAFTED[0] + 1, 3) and audited.divergence[:, 0].min() > 1e-3


def test_reading_everything_does_not_diverge(runner: ModelRunner) -> None:
    step = Step(runner, Sampling(0.0))
    read = budget_of(LENGTHS[1], DRAFTED[1], ())
    read.budget.first = read.budget.last
    (output,), _ = step.run(step.input(1, audit=Audit(read)))
    np.testing.assert_allclose(output.divergence, [[0, 0, 1]] * (DRAFTED[1] + 1), atol=1e-4)


def test_several_sessions_share_both_passes(runner: ModelRunner) -> None:
    step = Step(runner, SAMPLED)
    audits = [Audit(budget_of(LENGTHS[i], DRAFTED[i], ())) for i in range(2)]
    with patch.object(ModelRunner, "_start", autospec=True, side_effect=ModelRunner._start) as passes:
        outputs, _ = step.run(*(step.input(i, audit=audit) for i, audit in enumerate(audits)))
    assert passes.call_count == 2
    assert [len(output.divergence) for output in outputs if output.divergence is not None] == [4, 3]
