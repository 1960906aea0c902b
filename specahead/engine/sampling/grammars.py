"""Grammars that a session's text must follow, by llguidance. Knows no requests.

A grammar is sent as its source, the JSON that llguidance takes. Each service compiles it for the model's tokenizer, in
a thread, and then asks it which tokens may come next.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from specahead.engine.sampling.logit_rules import Followed

KEPT_GRAMMARS = 64  # compiled grammars, the last ones used; sessions copy them
WORD = 32  # tokens of a word of a mask
# Fields of LLParserLimits. A session whose mask would take a step longer than some 15 ms, once 50, or that needs much
# memory, ends with an error.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 50_000,
    "initial_lexer_fuel": 100_000,
    "verbose_errors": False,
}


class GrammarState:
    """The state of a session in its grammar, as a rule of its logits (engine.sampling.logit_rules.LogitRule).

    It follows the committed tokens after the first `prompt_tokens`; proposed ones are taken back before a call returns.
    After a token that ends the text everything is allowed, since nothing there is read. `ready` says that the grammar
    is compiled, or failed to compile; `error` why it cannot be followed any more, empty as long as it can.
    """

    def __init__(self, source: str, prompt_tokens: int, ends: Sequence[int], vocab_size: int) -> None:
        self.source, self.ready, self.error = source, False, ""
        self._ends, self._vocab_size = frozenset(ends), vocab_size
        self._followed = Followed(prompt_tokens)
        self._consumed = prompt_tokens  # committed tokens up to the last one that the matcher has consumed
        self._ended = False
        self._matcher: LLMatcher | None = None

    def open(self, compile_grammar: Callable[[], LLMatcher], committed: Sequence[int]) -> None:
        """Compile the grammar and follow the committed tokens; then `ready` is true."""
        try:
            self._matcher = compile_grammar()
            self.follow(committed)
        except BaseException as error:  # only this session ends; Rust panics with no Exception
            self.error = f"the grammar does not compile: {error}"
        self.ready = True

    def follow(self, committed: Sequence[int], count: int | None = None) -> None:
        """Follow the committed tokens to their end, after going back over those that were taken back.

        count: how many tokens are committed; None: all.
        """
        end = len(committed) if count is None else count
        gone = self._followed.go_back(committed, end)
        if gone and not self.error:
            back = max(0, self._consumed - self._followed.count)
            if back and not self._opened().rollback(back):
                self.error = _reason(self._opened())
            self._consumed, self._ended = self._consumed - back, self._ended and self._consumed < self._followed.count
        new = self._followed.go_on(committed, end)
        if not new or self._ended or self.error:
            return
        matcher = self._opened()
        taken = self._consume(matcher, new)
        self._consumed += taken
        self._ended = taken < len(new) and new[taken] in self._ends and matcher.is_accepting()
        if taken < len(new) and not self._ended:
            told = f"token {new[taken]} at {self._consumed} is not what the grammar allows"
            self.error = _reason(matcher) if matcher.is_error() else told

    def _opened(self) -> LLMatcher:
        if self._matcher is None:
            raise RuntimeError("the grammar is not compiled yet: wait until `ready`")
        return self._matcher

    def masks(self, proposed: Sequence[int]) -> np.ndarray:
        """Return which tokens may follow the committed ones and the first i proposed ones, int32 [rows, vocab / 32].

        Each bit is a token, lowest first. There is a row for each i from 0 on, up to the first proposed token that is
        not allowed or ends the text. No token is allowed once there is an error.
        """
        words = -(-self._vocab_size // WORD)
        if self.error or self._ended:
            return np.full((1, words), 0 if self.error else -1, dtype=np.int32)
        matcher = self._opened()
        masks = np.zeros((len(proposed) + 1, words), dtype=np.int32)
        taken = 0
        try:
            for row in range(len(proposed) + 1):
                matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
                if row == len(proposed) or not self._consume(matcher, proposed[row : row + 1]):
                    break
                taken += 1
        finally:
            if taken and not matcher.rollback(taken):
                self.error = _reason(matcher)
        if matcher.is_error() or not masks[0].any():
            self.error = _reason(matcher)
            return np.zeros((1, words), dtype=np.int32)
        return masks[: row + 1]

    def mask_behind(self, proposed: Sequence[int]) -> np.ndarray:
        """Return which tokens may follow the committed and all proposed ones, int32 [vocab / 32]; all if none may."""
        words = -(-self._vocab_size // WORD)
        everything = np.full(words, -1, dtype=np.int32)
        if self.error or self._ended:
            return everything
        matcher, mask = self._opened(), everything
        taken = self._consume(matcher, proposed)
        if taken == len(proposed):
            mask = np.zeros(words, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if (taken and not matcher.rollback(taken)) or matcher.is_error():
            self.error = _reason(matcher)
        return mask if mask.any() else everything

    def apply(self, logits: Tensor, committed: Sequence[int], proposed: Sequence[int]) -> None:
        """Change logits in place, as LogitRule says: tokens that the grammar does not allow get -inf."""
        self.follow(committed)
        masks = self.masks(proposed)
        allowed = unpack_mask(torch.from_numpy(masks).to(logits.device), logits.shape[1])
        logits[: len(masks)].masked_fill_(~allowed, -torch.inf)

    def _consume(self, matcher: LLMatcher, tokens: Sequence[int]) -> int:
        """Consume tokens up to the first that ends the text or is not allowed; return how many were consumed."""
        # The matcher does not get tokens that end the text: it counts them in some states only.
        end = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        return int(matcher.try_consume_tokens(list(tokens[:end])))


def unpack_mask(mask: Tensor, vocab_size: int) -> Tensor:
    """Return a mask as bools [..., vocab]. mask: int32 [..., words], a bit a token, lowest first."""
    bits = torch.arange(WORD, dtype=torch.int32, device=mask.device)
    return ((mask[..., None] >> bits) & 1).bool().flatten(-2)[..., :vocab_size]


def _reason(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).strip().partition("\n")[0] or "the grammar cannot be followed"


class Grammars:
    """Compiles grammars for a tokenizer, one after the other in a thread of its own, and keeps the last ones.

    tokenizer: a model's, by transformers. ends: the tokens that end a text, which may come where a grammar is complete.
    executor: runs the compilation; None: a thread. `on_compiled` is called there when a session's grammar is ready.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int], executor: Executor | None = None) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, list(ends)
        self.on_compiled: Callable[[], object] = lambda: None
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # These are touched in that thread alone.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._prepared: LLTokenizer | None = None

    def start(self, source: str, committed: Sequence[int], prompt_tokens: int) -> GrammarState:
        """Begin to compile a grammar for a session; return its state, which follows the committed tokens."""
        state = GrammarState(source, prompt_tokens, self._ends, self._vocab_size)
        opening = self._executor.submit(state.open, partial(self._compile, source), list(committed))
        opening.add_done_callback(lambda _: self.on_compiled())
        return state

    def _compile(self, source: str) -> LLMatcher:
        """Return a matcher of its own at the start of a grammar. Raises ValueError if it does not compile."""
        if source not in self._compiled:
            if self._prepared is None:  # takes a second for a large vocabulary
                self._prepared = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends)
            matcher = LLMatcher(self._prepared, source, log_level=0, limits=LLParserLimits(**LIMITS))
            if matcher.is_error():
                raise ValueError(_reason(matcher))
            self._compiled[source] = matcher
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return self._compiled[source].deep_copy()
