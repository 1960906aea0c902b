"""Verdicts of rounds whose logits are changed first, or whose distributions are told. Runs outside of graphs.

A step's graph judges all of its rows as if they were plain; of those that are not, this puts the right verdict in
place. So sessions without rules pay nothing for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import (
    WIDE_SUPPORT,
    Drafted,
    cut_logits,
    cuts_of,
    judge,
    lay_out_verdicts,
    support_of,
    verdict_layout,
)
from specahead.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from specahead.engine.steps.staging import Staging
from specahead.kernels.backends import default_backend
from specahead.kernels.finite_rows import are_finite
from specahead.kernels.rejection import truncated_probs

Verdict = tuple[int, int]  # tokens accepted, and the next token


@dataclass(frozen=True)
class RuledVerdict:
    """As of `engine.inputs.SequenceOutput`: tokens accepted and the next token, and what goes with them."""

    verdict: Verdict
    finite: bool
    logprobs: list[TokenLogprobs]
    supports: list[Support] = field(default_factory=list)


def judge_by_rules(logits: Tensor, rounds: list[Drafted], whatever_is_drafted: bool = False) -> list[RuledVerdict]:
    """Judge rounds by the distributions that their rules leave.

    logits: [rounds, places, vocab] of any floating dtype, row i of a round for position base + i; they stay as they
    are. places: one more than the longest round has tokens, or more. whatever_is_drafted: as for `judge`.
    """
    judgement = _Judgement.of(logits.shape, rounds, logits.device)
    ruled, judged = judgement.launch(logits, whatever_is_drafted)
    found = judged.tolist()  # one wait for the device
    told = _logprobs(logits, rounds, [(a, b) if is_finite else None for a, b, is_finite in found])
    verdicts = [RuledVerdict((a, b), bool(is_finite), of) for (a, b, is_finite), of in zip(found, told, strict=True)]
    for i, (item, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
        if item.tells_supports and verdict.finite:
            of_row = {name: tensor[i : i + 1] for name, tensor in judgement.inputs.items()}
            verdict.supports.extend(_supports(ruled[i : i + 1, : verdict.verdict[0] + 1], of_row, judgement.cuts))
    return verdicts


def launches_of_rules(
    rounds: list[Drafted], vocab: int, device: torch.device, whatever_is_drafted: bool
) -> Callable[[], None]:
    """Return what launches all that `judge_by_rules` does for rounds of as many tokens each, and waits for nothing."""
    shape = len(rounds), len(rounds[0].tokens) + 1, vocab
    judgement = _Judgement.of(shape, rounds, device)

    def launch() -> None:
        judgement.launch(torch.zeros(shape, device=device), whatever_is_drafted)

    return launch


@dataclass(frozen=True)
class _Judgement:
    """What is judged. inputs: as of `judge`, on the device; cuts: of these rounds."""

    rounds: list[Drafted]
    inputs: Mapping[str, Tensor]
    cuts: int

    @staticmethod
    def of(shape: Sequence[int], rounds: list[Drafted], device: torch.device) -> "_Judgement":
        """shape: of the logits."""
        cuts = cuts_of(rounds)
        staging = Staging(verdict_layout(len(rounds), shape[1] - 1, support_of(rounds), cuts), device)
        lay_out_verdicts(staging.host, rounds)
        staging.send()
        return _Judgement(rounds, staging.device, cuts)

    def launch(self, logits: Tensor, whatever_is_drafted: bool) -> tuple[Tensor, Tensor]:
        """Return the logits as the rules leave them, and of each round what was accepted, the next token and whether
        all was finite, int32 [rounds, 3].
        """
        ruled = logits.to(torch.float32, copy=True)
        for of_round, item in zip(ruled, self.rounds, strict=True):
            for rule in item.rules:
                rule.apply(of_round[: len(item.tokens) + 1], item.committed, item.tokens)
            if item.tells_supports:
                _keep_likeliest(of_round)
        backend = default_backend(logits.device)
        finite = are_finite(ruled, self.inputs["draft_counts"], backend)
        accepted, following = judge(ruled, self.inputs, backend, whatever_is_drafted, self.cuts)
        return ruled, torch.stack((accepted, following, finite), 1)


def _keep_likeliest(logits: Tensor) -> None:
    """Leave the WIDE_SUPPORT likeliest entries of each row, [rows, vocab], and -inf in place of all others."""
    if logits.shape[1] > WIDE_SUPPORT:
        best, ids = logits.topk(WIDE_SUPPORT)
        logits.fill_(-torch.inf).scatter_(1, ids, best)


def _supports(logits: Tensor, inputs: Mapping[str, Tensor], cuts: int) -> list[Support]:
    """Return what tokens at these places are drawn from. logits: [1, places, vocab]; inputs, cuts: as of `judge`."""
    temperature, top_p, places = inputs["temperature"], inputs["top_p"], logits.shape[1]
    if cuts:
        logits = cut_logits(logits, temperature, inputs["top_k"], inputs["min_p"], cuts)
    drawn_from = truncated_probs(logits[0], temperature.expand(places), top_p.expand(places))
    probs, ids = drawn_from.topk(min(WIDE_SUPPORT, drawn_from.shape[1]))
    width = int((probs > 0).any(0).sum())
    rows = zip(ids[:, :width].cpu().numpy(), probs[:, :width].cpu().numpy(), strict=True)
    return [Support(*row) for row in rows]


def _logprobs(logits: Tensor, rounds: list[Drafted], verdicts: list[Verdict | None]) -> list[list[TokenLogprobs]]:
    """Return the log probabilities of each verdict's tokens, none of a round that does not ask for them."""
    rows, tokens, owners = list[int](), list[int](), list[int]()
    for i, (item, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
        if item.logprobs is not None and verdict is not None:
            accepted, following = verdict
            rows += [i * logits.shape[1] + place for place in range(accepted + 1)]
            tokens += [*item.tokens[:accepted], following]
            owners += [i] * (accepted + 1)
    told: list[list[TokenLogprobs]] = [[] for _ in rounds]
    if rows:
        most = max(item.logprobs or 0 for item in rounds)
        for owner, found in zip(owners, token_logprobs(logits.flatten(0, 1)[rows], tokens, most), strict=True):
            told[owner].append(found.first(rounds[owner].logprobs or 0))
    return told
