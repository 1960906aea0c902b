"""What changes the logits of a draft's rounds, on the device: the counterpart of `engine.logit_rules` for launches.

A round that changes logits has launches of its own, so that others do not pay for it. The draft's distributions come
close to the target's so; that outcomes are right does not depend on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.logit_rules import penalise
from engine.sampling import Sampling

BIAS, IN_PROMPT, IN_OUTPUT = range(3)  # rows of SessionRules


@dataclass(eq=False)
class SessionRules:
    """What changes the logits of one session, and the rows of it that are kept where the model lives.

    rows: [3, vocab] float32: what is added to logits; how often each token occurs in the prompt, and in the output.
    counted: tokens that are in these. masked: whether the tokens in stop_token_ids are, by min_tokens.
    """

    sampling: Sampling
    prompt_tokens: int
    stop_token_ids: list[int]
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    counted: int = 0
    masked: bool | None = None

    def update(self, committed: Sequence[int], vocab: int, device: torch.device) -> Tensor:
        """Return the rows as they are behind the committed tokens, which begin with those of the last call."""
        if not self.counted:
            self.rows = torch.zeros(3, vocab, device=device)
        new = torch.tensor(committed[self.counted :], device=device)
        since = max(0, self.prompt_tokens - self.counted)
        for row, tokens in ((IN_PROMPT, new[:since]), (IN_OUTPUT, new[since:])):
            if len(tokens):
                self.rows[row].index_put_((tokens,), torch.ones_like(tokens, dtype=torch.float32), accumulate=True)
        self.counted = len(committed)
        self._mask(self.counted < self.prompt_tokens + self.sampling.min_tokens)
        return self.rows

    def _mask(self, masked: bool) -> None:
        """Write the biases, of stop tokens that must not come yet as well."""
        if masked == self.masked:
            return
        biases = self.sampling.logit_bias | (dict.fromkeys(self.stop_token_ids, -torch.inf) if masked else {})
        biases = {token: bias for token, bias in biases.items() if token < self.rows.shape[1]}
        self.rows[BIAS] = 0
        if biases:
            self.rows[BIAS, list(biases)] = torch.tensor(list(biases.values()), device=self.rows.device)
        self.masked = masked


@dataclass(frozen=True)
class RoundRules:
    """The rules of a session's round. guessed: of each branch that it has, the tokens that it begins with behind the
    committed ones; in a round ahead without branches, of its one continuation.
    """

    session: SessionRules
    committed: Sequence[int]
    guessed: list[list[int]]


def session_rules(sampling: Sampling, prompt_tokens: int, stop_token_ids: list[int]) -> SessionRules | None:
    """Return the rules that a session's sampling asks for, None for none."""
    if sampling.penalises or sampling.logit_bias or (sampling.min_tokens and stop_token_ids):
        return SessionRules(sampling, prompt_tokens, stop_token_ids)
    return None


class ChangedLogits:
    """Changes the logits of a round's passes, and counts the tokens that they lead to. It launches only.

    given: the buffers of a round with rules. rules: SessionRules.rows, [3, sequences, vocab]. penalties: repetition,
    frequency and presence, [3, rows]. guessed: RoundRules.guessed, [rows, γ + 1], -1 behind the last.
    """

    def __init__(self, given: dict[str, Tensor], branches: int) -> None:
        self._bias, self._in_prompt = given["rules"][:IN_OUTPUT, :, None]
        self._counts = given["rules"][IN_OUTPUT].repeat_interleave(branches, 0)
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
