"""Running both models over texts, and counting where both look, block by block, at sampled rounds.

Both models read each text in strides; at the end of a stride the last γ + 1 queries give their weights by block, and
their mean is one sample. A sample is counted into sums as soon as it is there, so no L x L matrix is stored.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.kv_scales import values_by_token
from specahead.lab.evaluation.attending import forward_weighing
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, CalibrationSums, count_sample
from specahead.lab.evaluation.models import output_projections


def calibrate(
    draft: ModelRunner,
    target: ModelRunner,
    texts: list[list[int]],
    settings: CalibrationSettings,
    sums: CalibrationSums | None = None,
    on_text: Callable[[CalibrationSums], None] = lambda sums: None,
) -> CalibrationSums:
    """Count over texts (token ids), going on from `sums` if some are counted already.

    on_text is called after each text. Raises ValueError if no text is long enough for a sample.
    """
    sums = sums or CalibrationSums.zeros(draft, target)
    strides = sum(_usable(tokens, settings) // settings.stride for tokens in texts[sums.texts :])
    with tqdm(total=strides, desc="calibrating", unit="stride") as progress:
        for tokens in texts[sums.texts :]:
            for draft_weights, target_weights in _samples(draft, target, tokens, settings, sums):
                progress.update()
                if draft_weights is not None and target_weights is not None:
                    count_sample(sums, draft_weights, target_weights, settings)
            sums.texts += 1
            on_text(sums)
    if not sums.samples:
        raise ValueError(f"the texts are too short: a sample needs more than {settings.skipped} tokens")
    return sums


def _usable(tokens: list[int], settings: CalibrationSettings) -> int:
    return min(len(tokens), settings.context) // settings.stride * settings.stride


def _samples(
    draft: ModelRunner, target: ModelRunner, tokens: list[int], settings: CalibrationSettings, sums: CalibrationSums
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """For each stride, mean weights of draft heads [layers, heads, blocks] and KV heads; None where not sampled."""
    runners, sequences = (draft, target), (SequenceKV(), SequenceKV())
    try:
        for start in range(0, _usable(tokens, settings), settings.stride):
            chunk = tokens[start : start + settings.stride]
            sampled = start + settings.stride > settings.skipped
            means: list[Tensor | None] = []
            chances: list[Tensor] = []
            for runner, sequence in zip(runners, sequences, strict=True):
                if sampled:
                    logits, weights = forward_weighing(runner, sequence, chunk, settings.block_size, settings.queries)
                    means.append(weights.mean(1).cpu())
                    chances.append(logits.softmax(-1).cpu())
                else:
                    runner.forward([SequenceInput(sequence, chunk)])
                    means.append(None)
            if chances:  # both vocabularies are the same but for padding
                drafted, kept = chances
                both = min(drafted.shape[1], kept.shape[1])
                sums.accepted += float(torch.minimum(drafted[:, :both], kept[:, :both]).sum(1).mean())
            if means[1] is not None:
                means[1] = means[1].unflatten(1, (target.kv.kv_heads, -1)).sum(2)
            yield means[0], means[1]
        if _usable(tokens, settings):
            sums.value_spread += _value_spread(target, sequences[1])
    finally:
        for runner, sequence in zip(runners, sequences, strict=True):
            runner.kv.release(sequence)


def _value_spread(target: ModelRunner, sequence: SequenceKV) -> Tensor:
    """Mean length of what leaving a token out can change through each KV head: |W_o (v - v̄)|, [layers * kv_heads]."""
    spread = []
    pages = torch.tensor(sequence.pages)
    for v_pages, projection in zip(target.kv.v_pages, output_projections(target.decoder), strict=True):
        by_page = values_by_token(v_pages)[pages.to(v_pages.device)]
        values = by_page.transpose(0, 1).flatten(1, 2)[:, : sequence.length].float()
        values = values - values.mean(1, keepdim=True)
        by_head = projection.float().unflatten(1, (len(values), -1, values.shape[2]))  # [hidden, kv_heads, group, dim]
        moved = torch.einsum("knd,hkgd->kgnh", values, by_head)
        spread.append(moved.norm(dim=-1).mean((1, 2)))
    return torch.cat(spread).double().cpu()
