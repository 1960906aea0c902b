"""Verdicts: which drafted tokens of a round are kept, and which token comes next.

`judge` only launches kernels. It is part of a step's graph, which judges all of its rows as if they were plain. Rounds
that are not (`Drafted.is_plain`) are judged again outside of the graph by `judge_by_rules`: it changes their logits,
has `judge` decide, and returns log probabilities and distributions. So sessions without rules do not pay for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import (
    USE_ACCEPT,
    USE_SCREEN_ACCEPT,
    USE_SCREEN_DRAW,
    USE_TARGET,
    Sampling,
    Support,
    uniforms,
)
from specahead.engine.sampling.logit_rules import LogitRule
from specahead.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from specahead.engine.staging import Layout, Staging
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.rejection import (
    DraftedRows,
    accept_greedy,
    draw_own,
    judge_greedy,
    judge_sampled,
    truncated_probs,
)

WIDE_SUPPORT = 4096  # entries of a distribution of the model's own, so that next to nothing is cut off


@dataclass(frozen=True)
class Drafted:
    """The drafted tokens of a round that a pass judges. The pass runs one token more, before these."""

    tokens: list[int]
    supports: list[Support]
    """The distribution of each token; none if each is taken to be certain (one-hot)."""
    sampling: Sampling
    base: int
    """The position of the first token."""
    rules: tuple[LogitRule, ...] = ()
    """The rules that change the logits, given `committed`."""
    committed: Sequence[int] = ()
    """The tokens before `base`."""
    logprobs: int | None = None
    """How many likely tokens to return at each position with their log probabilities, beside the verdict's own token;
    None: nothing is returned."""
    screens: bool = False
    """Whether a later pass judges the tokens that this one keeps. Then sampled tokens are drawn from the WIDE_SUPPORT
    likeliest, by uniforms of their own, and the output has the distribution that each was drawn from."""
    foresees: bool = False
    """Whether the later pass draws its own tokens, whatever was screened (a deterministic runner). Then this pass draws
    by the same uniforms, so that both mostly draw the same token, and returns no distributions."""

    @property
    def is_plain(self) -> bool:
        """Whether a step's graph judges the round finally."""
        return not self.rules and self.logprobs is None and not self.tells_supports

    @property
    def tells_supports(self) -> bool:
        """Whether the output has the distributions that the verdict's tokens were drawn from."""
        return self.screens and not self.foresees and not self.sampling.greedy


def verdict_layout(rows: int, gamma: int, support: int, cuts: int = 0) -> Layout:
    """Return the inputs of `judge` for up to `rows` rounds of up to `gamma` tokens.

    support: entries of a draft's distribution, 0 if all rounds are greedy. cuts: as `cuts_of` gives it.
    """
    layout: Layout = {"draft_tokens": ((rows, gamma), torch.int32), "draft_counts": ((rows,), torch.int32)}
    if support:
        layout |= {
            "support_ids": ((rows, gamma, support), torch.int32),
            "support_probs": ((rows, gamma, support), torch.float32),
            "temperature": ((rows,), torch.float32),
            "top_p": ((rows,), torch.float32),
            "accept_uniforms": ((rows, gamma), torch.float64),
            "draw_uniforms": ((rows, gamma + 1), torch.float64),
        }
    if cuts:
        layout |= {"top_k": ((rows,), torch.int32), "min_p": ((rows,), torch.float32)}
    return layout


def support_of(rounds: list[Drafted]) -> int:
    """Return the `support` that `verdict_layout` needs for these rounds."""
    if all(item.sampling.greedy for item in rounds):
        return 0
    return max((len(support.ids) for item in rounds for support in item.supports), default=1)


def cuts_of(rounds: list[Drafted]) -> int:
    """Return the largest top_k of these rounds; 1 if there is only a min_p, 0 if there is neither."""
    return max((item.sampling.top_k or 1 for item in rounds if item.sampling.cuts), default=0)


def lay_out_verdicts(arrays: Mapping[str, np.ndarray], rounds: list[Drafted]) -> None:
    """Write rounds into arrays of `verdict_layout`; rows after them become empty greedy rounds.

    A pass that knows positions or drafted tokens on the device only has no arrays of uniforms or of supports.
    """
    for name in ("draft_counts", "temperature", "support_probs", "top_k", "min_p"):
        if name in arrays:
            arrays[name][:] = 0
    for i, item in enumerate(rounds):
        n, sampling = len(item.tokens), item.sampling
        arrays["draft_counts"][i] = n
        arrays["draft_tokens"][i, :n] = item.tokens
        if "temperature" not in arrays or sampling.greedy:
            continue
        arrays["temperature"][i] = sampling.temperature
        arrays["top_p"][i] = sampling.top_p
        if "top_k" in arrays:
            arrays["top_k"][i] = sampling.top_k
            arrays["min_p"][i] = sampling.min_p
        if "accept_uniforms" in arrays:
            accept, draw = (USE_SCREEN_ACCEPT, USE_SCREEN_DRAW) if item.tells_supports else (USE_ACCEPT, USE_TARGET)
            arrays["accept_uniforms"][i, :n] = uniforms(sampling.seed, item.base, n, accept)
            arrays["draw_uniforms"][i, : n + 1] = uniforms(sampling.seed, item.base, n + 1, draw)
        if "support_ids" in arrays:
            _lay_out_supports(arrays["support_ids"][i], arrays["support_probs"][i], item)


def _lay_out_supports(ids: np.ndarray, probs: np.ndarray, item: Drafted) -> None:
    for j, support in enumerate(item.supports):
        ids[j, : len(support.ids)] = support.ids
        probs[j, : len(support.ids)] = support.probs
    if not item.supports:
        ids[: len(item.tokens), 0] = item.tokens
        probs[: len(item.tokens), 0] = 1


def judge(
    logits: Tensor, inputs: Mapping[str, Tensor], backend: Backend, draws_own: bool = False, cuts: int = 0
) -> tuple[Tensor, Tensor]:
    """Return how many tokens of each round are accepted, and its next token: int32 [rows] each. Launches only.

    logits: [rows, γ + 1, vocab].
    inputs: the tensors of `verdict_layout`; others are ignored.
    draws_own: whether the target draws its own token at each position, and accepts a drafted token if it is the same.
        Then sampled tokens, too, are those of plain decoding, whatever is drafted. That is as exact as the rule of
        speculative sampling, which accepts somewhat more, but whose tokens depend on the proposed ones.
    cuts: at least `cuts_of` the rounds; 0 if it is 0.
    """
    if "temperature" not in inputs:
        return judge_greedy(logits, inputs["draft_tokens"], inputs["draft_counts"], backend)
    drafted = DraftedRows(**{name: inputs[name] for name in verdict_layout(0, 0, 1)})
    if cuts:
        logits = cut_logits(logits, inputs["temperature"], inputs["top_k"], inputs["min_p"], cuts)
    if not draws_own:
        return judge_sampled(logits, drafted, backend)
    rows, places, _ = logits.shape
    # The target draws at each position as at a row of its own.
    temperature, top_p = (each.repeat_interleave(places) for each in (drafted.temperature, drafted.top_p))
    own = draw_own(logits.flatten(0, 1), temperature, top_p, drafted.draw_uniforms.flatten(), backend)
    tokens, counts = drafted.draft_tokens.long(), drafted.draft_counts.long()
    accepted, following = accept_greedy(tokens, counts, own.view(rows, places).long())
    return accepted.int(), following.int()


def cut_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, min_p: Tensor, most: int) -> Tensor:
    """Return logits with -inf for the tokens that top_k and min_p leave out.

    logits: [rows, places, vocab]. temperature, min_p: [rows] float32. top_k: [rows] int32, at most `most`, 0 for all.
    """
    best = logits.topk(min(most, logits.shape[-1])).values.float()  # [rows, places, most]
    last = (top_k.long().clamp(1, best.shape[-1]) - 1)[:, None, None].expand(-1, best.shape[1], 1)
    least = best.gather(2, last).where(top_k[:, None, None] > 0, -torch.inf)
    # p >= min_p of the largest p, at this temperature.
    reach = (temperature * min_p.log()).where(min_p > 0, -torch.inf)[:, None, None]
    least = torch.maximum(least, best[..., :1] + reach)
    return logits.masked_fill(logits < least, -torch.inf)


# Rounds that are not plain


@dataclass(frozen=True)
class RuledVerdict:
    """The outcome of a round that is not plain."""

    verdict: tuple[int, int]
    """Tokens accepted, and the next token."""
    finite: bool
    """Whether all logits that decided are numbers."""
    logprobs: list[TokenLogprobs]
    """Of each token of the verdict, if they are asked for."""
    supports: list[Support] = field(default_factory=list)
    """The distribution that each token of the verdict was drawn from, if `tells_supports`."""


def judge_by_rules(logits: Tensor, rounds: list[Drafted], draws_own: bool = False) -> list[RuledVerdict]:
    """Judge rounds by the distributions that their rules leave. Waits for the device.

    logits: [rounds, places, vocab] of any floating dtype, row i of a round for position base + i; they stay as they
        are. places: at least one more than the longest round has tokens.
    draws_own: as for `judge`.
    """
    inputs = _bring(rounds, logits.shape[1], logits.device)
    ruled, judged = _launch(logits, rounds, inputs, draws_own)
    found = [((accepted, following), bool(finite)) for accepted, following, finite in judged.tolist()]
    logprobs = _logprobs(logits, rounds, [verdict if finite else None for verdict, finite in found])
    verdicts = []
    for i, (verdict, finite) in enumerate(found):
        supports = []
        if rounds[i].tells_supports and finite:
            of_round = {name: tensor[i : i + 1] for name, tensor in inputs.items()}
            supports = _supports(ruled[i : i + 1, : verdict[0] + 1], of_round, cuts_of(rounds))
        verdicts.append(RuledVerdict(verdict, finite, logprobs[i], supports))
    return verdicts


def launches_of_rules(rounds: list[Drafted], vocab: int, device: torch.device, draws_own: bool) -> Callable[[], None]:
    """Return a function that launches all kernels of `judge_by_rules` for rounds of equal length without waiting."""
    places = len(rounds[0].tokens) + 1
    inputs = _bring(rounds, places, device)

    def launch() -> None:
        _launch(torch.zeros(len(rounds), places, vocab, device=device), rounds, inputs, draws_own)

    return launch


def _bring(rounds: list[Drafted], places: int, device: torch.device) -> Mapping[str, Tensor]:
    """Return the inputs of `judge` on the device."""
    staging = Staging(verdict_layout(len(rounds), places - 1, support_of(rounds), cuts_of(rounds)), device)
    lay_out_verdicts(staging.host, rounds)
    staging.send()
    return staging.device


def _launch(
    logits: Tensor, rounds: list[Drafted], inputs: Mapping[str, Tensor], draws_own: bool
) -> tuple[Tensor, Tensor]:
    """Return the logits as the rules leave them, float32, and int32 [rounds, 3]: accepted, next token, and whether all
    logits that decided are numbers.
    """
    ruled = logits.to(torch.float32, copy=True)
    for of_round, item in zip(ruled, rounds, strict=True):
        for rule in item.rules:
            rule.apply(of_round[: len(item.tokens) + 1], item.committed, item.tokens)
        if item.tells_supports and logits.shape[2] > WIDE_SUPPORT:
            best, ids = of_round.topk(WIDE_SUPPORT)
            of_round.fill_(-torch.inf).scatter_(1, ids, best)
    backend = default_backend(logits.device)
    accepted, following = judge(ruled, inputs, backend, draws_own, cuts_of(rounds))
    after = torch.arange(logits.shape[1], device=logits.device) > accepted[:, None]
    finite = (ruled.amax(2).isfinite() | after).all(1)
    return ruled, torch.stack((accepted, following, finite.int()), 1)


def _supports(logits: Tensor, inputs: Mapping[str, Tensor], cuts: int) -> list[Support]:
    """Return the distribution of the token at each place of one round. logits: [1, places, vocab]."""
    temperature, top_p, places = inputs["temperature"], inputs["top_p"], logits.shape[1]
    if cuts:
        logits = cut_logits(logits, temperature, inputs["top_k"], inputs["min_p"], cuts)
    drawn_from = truncated_probs(logits[0], temperature.expand(places), top_p.expand(places))
    probs, ids = drawn_from.topk(min(WIDE_SUPPORT, drawn_from.shape[1]))
    width = int((probs > 0).any(0).sum())
    rows = zip(ids[:, :width].cpu().numpy(), probs[:, :width].cpu().numpy(), strict=True)
    return [Support(*row) for row in rows]


def _logprobs(
    logits: Tensor, rounds: list[Drafted], verdicts: list[tuple[int, int] | None]
) -> list[list[TokenLogprobs]]:
    """Return the log probabilities of each verdict's tokens; none for a round that does not ask for them."""
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
