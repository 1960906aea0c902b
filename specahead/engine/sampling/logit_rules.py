"""Rules that change a session's logits before its tokens are chosen: penalties, biases, masks. Knows no passes.

The target applies a session's rules in order to the logits of a round (engine.sampling.judging). The changed logits
are the target's distribution, whatever a draft proposes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specahead.engine.sampling.distributions import Sampling


class LogitRule(Protocol):
    """Changes the logits of one session. Between calls it may keep only what it has derived from committed tokens.

    Proposed tokens may be rejected, so a rule that goes through them must go back to the committed tokens before it
    returns. Committed tokens may be taken back, too, if a later pass has yet to confirm them: a rule that keeps what it
    has derived from them follows them by `Followed`.
    """

    def apply(self, logits: Tensor, committed: Sequence[int], proposed: Sequence[int]) -> None:
        """Change logits in place, float32 [len(proposed) + 1, vocab].

        Row i is for the token that follows `committed` and the first i proposed tokens. Rows after a proposed token
        that gets -inf are never read, and may stay as they are.
        """


class Followed:
    """How many of a session's committed tokens a rule has followed, and the last of these.

    By the last ones it sees whether tokens were taken back meanwhile, and others perhaps committed in their place.
    """

    KEPT = 64  # more than are ever unconfirmed

    def __init__(self, count: int) -> None:
        self.count = self._first = count
        self._last: list[int] = []

    def go_back(self, committed: Sequence[int], end: int) -> list[int]:
        """Go back to before the tokens that were taken back, and return these.

        The followed tokens are compared with the first `end` committed ones. Raises RuntimeError if more tokens were
        taken back than are kept.
        """
        first = self.count - len(self._last)
        stand = list(committed[first : min(self.count, end)])
        if stand == self._last:
            return []
        pairs = zip(stand, self._last, strict=False)
        same = next((place for place, (now, before) in enumerate(pairs) if now != before), len(stand))
        if not same and first > self._first:
            raise RuntimeError(f"more than the last {self.KEPT} of {self.count} committed tokens were taken back")
        gone = self._last[same:]
        del self._last[same:]
        self.count -= len(gone)
        return gone

    def go_on(self, committed: Sequence[int], end: int) -> Sequence[int]:
        """Follow the committed tokens up to `end`, and return those that are new."""
        new = committed[self.count : end]
        self.count += len(new)
        self._last = [*self._last, *new][-self.KEPT :]
        return new


class Bias:
    """Adds a number to the logits of some tokens."""

    def __init__(self, biases: dict[int, float]) -> None:
        self._tokens, self._biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()))

    def apply(self, logits: Tensor, committed: Sequence[int], proposed: Sequence[int]) -> None:
        """Change logits in place, as LogitRule says."""
        self._tokens, self._biases = self._tokens.to(logits.device), self._biases.to(logits.device)
        logits[:, self._tokens] += self._biases


class MinTokens:
    """Masks the tokens that end a session, until it has `length` tokens, counting its prompt.

    They are allowed where the rules before this one leave no other token, as a grammar does after a complete text.
    """

    def __init__(self, stop_token_ids: Sequence[int], length: int) -> None:
        self._stops, self._length = torch.tensor(list(stop_token_ids)), length

    def apply(self, logits: Tensor, committed: Sequence[int], proposed: Sequence[int]) -> None:
        """Change logits in place, as LogitRule says."""
        rows = max(0, self._length - len(committed))
        if rows:
            self._stops = self._stops.to(logits.device)
            masked = logits[:rows].index_fill(1, self._stops, -torch.inf)
            logits[:rows] = masked.where((masked > -torch.inf).any(1, keepdim=True), logits[:rows])


class TokenCounts:
    """Counts how often each token occurs in a session's prompt, and in its output."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens, self._followed = prompt_tokens, Followed(0)
        self._rows = torch.empty(0)

    def update(self, committed: Sequence[int], vocab: int, device: torch.device) -> Tensor:
        """Return the counts of the committed tokens in prompt and output, [2, vocab] float32, always the same tensor.

        Only output is ever taken back.
        """
        if not self._followed.count:
            self._rows = torch.zeros(2, vocab, device=device)
        in_prompt, in_output = self._rows
        _count(in_output, self._followed.go_back(committed, len(committed)), -1.0)
        since = max(0, self._prompt_tokens - self._followed.count)
        new = self._followed.go_on(committed, len(committed))
        _count(in_prompt, new[:since], 1.0)
        _count(in_output, new[since:], 1.0)
        return self._rows


def _count(row: Tensor, tokens: Sequence[int], each: float) -> None:
    """Add `each` to a row for each of these tokens, in place."""
    if tokens:
        at = torch.tensor(tokens, dtype=torch.int64, device=row.device)
        row.index_put_((at,), torch.full(at.shape, each, device=row.device), accumulate=True)


class Penalties:
    """Makes tokens less likely that occur before their position (`penalise`)."""

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        self._counts = TokenCounts(prompt_tokens)

    def apply(self, logits: Tensor, committed: Sequence[int], proposed: Sequence[int]) -> None:
        """Change logits in place, as LogitRule says."""
        in_prompt, in_output = self._counts.update(committed, logits.shape[1], logits.device)
        counts = in_output.repeat(len(logits), 1)
        if proposed:
            # A proposed token counts from the row after it on.
            rows, at = torch.tril_indices(len(logits), len(proposed), -1, device=logits.device)
            tokens = torch.tensor(proposed, device=logits.device)[at]
            counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=counts.dtype), accumulate=True)
        logits.copy_(penalise(logits, in_prompt, counts, *self._penalties))


def penalise(
    logits: Tensor,
    in_prompt: Tensor,
    in_output: Tensor,
    repetition: float | Tensor,
    frequency: float | Tensor,
    presence: float | Tensor,
) -> Tensor:
    """Return logits with penalties on tokens that occur already, as vLLM and OpenAI define them.

    The repetition penalty divides positive logits and multiplies others, for all tokens of prompt and output. Then the
    frequency penalty is subtracted once for each time that a token occurs in the output, the presence penalty once.

    logits, in_output: [..., vocab] float32. in_prompt, and penalties that are tensors: of shapes that broadcast to
    these.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = repeated.where((in_output > 0) | (in_prompt > 0), logits)
    return penalised - (frequency * in_output + presence * (in_output > 0))


def rules_of(sampling: Sampling, prompt_tokens: int, stop_token_ids: Sequence[int]) -> tuple[LogitRule, ...]:
    """Return the rules that a session's sampling asks for, in the order in which they apply; most ask for none."""
    rules: list[LogitRule] = []
    if sampling.logit_bias:
        rules.append(Bias(sampling.logit_bias))
    if sampling.min_tokens and stop_token_ids:
        rules.append(MinTokens(stop_token_ids, prompt_tokens + sampling.min_tokens))
    if sampling.penalises:
        rules.append(Penalties(sampling, prompt_tokens))
    return tuple(rules)
