"""Rules that change the logits of a draft's rounds on the device: the counterpart of `engine.logit_rules`.

A round that changes logits has launches of its own, so that others do not pay for it. The draft's distributions come
close to the target's so; that outcomes are right does not depend on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.logit_rules import TokenCounts, penalise


class SessionRules:
    """The rules of one session, and its rows of biases and counts on the model's device."""

    def __init__(self, sampling: Sampling, prompt_tokens: int, stop_token_ids: list[int]) -> None:
        self.sampling, self.prompt_tokens, self.stop_token_ids = sampling, prompt_tokens, stop_token_ids
        self._counts = TokenCounts(prompt_tokens)
        self._biases = torch.empty(0)
        self._masked: bool | None = None  # whether stop tokens are, by min_tokens

    def update(self, committed: Sequence[int], vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what is added to logits after the committed tokens, [vocab] float32, and `TokenCounts` of these."""
        masked = len(committed) < self.prompt_tokens + self.sampling.min_tokens
        if masked != self._masked:
            stops = dict.fromkeys(self.stop_token_ids, -torch.inf) if masked else {}
            biases = {token: bias for token, bias in (self.sampling.logit_bias | stops).items() if token < vocab}
            self._biases = torch.zeros(vocab)
            self._biases[list(biases)] = torch.tensor(list(biases.values()))
            self._biases, self._masked = self._biases.to(device), masked
        return self._biases, self._counts.update(committed, vocab, device)


@dataclass(frozen=True)
class RoundRules:
    """The rules of a session's round."""

    session: SessionRules
    committed: Sequence[int]
    """The committed tokens."""
    guessed: list[list[int]]
    """The tokens that each branch begins with after the committed ones; without branches those of the one continuation
    of a round that is drafted before its verdict."""


def session_rules(sampling: Sampling, prompt_tokens: int, stop_token_ids: list[int]) -> SessionRules | None:
    """Return the rules that a session's sampling asks for, None for none."""
    if sampling.penalises or sampling.logit_bias or (sampling.min_tokens and stop_token_ids):
        return SessionRules(sampling, prompt_tokens, stop_token_ids)
    return None


class ChangedLogits:
    """Changes the logits of a round's passes, and counts the tokens that they lead to. It launches only.

    given: the buffers of a round with rules. rules: what SessionRules.update gives, [3, sequences, vocab]. penalties:
    repetition, frequency and presence, [3, rows]. guessed: RoundRules.guessed, [rows, γ + 1], -1 after the last.
    """

    def __init__(self, given: dict[str, Tensor], branches: int) -> None:
        self._bias, self._in_prompt = given["rules"][:2, :, None]
        self._counts = given["rules"][2].repeat_interleave(branches, 0)
        self._penalties = given["penalties"].unflatten(1, (-1, branches))[..., None]
        guessed = given["guessed"].long()
        self._counts.scatter_add_(1, guessed.clamp(min=0), (guessed >= 0).float())

    def change(self, logits: Tensor) -> Tensor:
        """Return changed logits [rows, vocab] float32."""
        counts = self._counts.view(len(self._bias), -1, logits.shape[1])
        return penalise(logits.view_as(counts) + self._bias, self._in_prompt, counts, *self._penalties).flatten(0, 1)

    def count(self, tokens: Tensor) -> None:
        """Count the tokens [rows] that were drawn."""
        self._counts.scatter_add_(1, tokens[:, None], torch.ones_like(self._counts[:, :1]))
