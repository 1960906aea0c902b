"""Scripted models: the next token is a checksum of all tokens before it, read from the KV pages.

A page that is wrong, stale or another session's gives other tokens than the script, and is reported.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.steps.device_chain import Imposed
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.outputs import StepUnderWay
from specahead.engine.steps.requests import (
    AnnouncementRequest,
    Branch,
    DraftedTokens,
    RoundOutput,
    RoundRequest,
    RoundSettings,
)
from specahead.sparsity.plan import uniform_plan
from specahead.sparsity.selection import last_word_mask, row_words
from target_service.policy.lookup import FirstGuess, PromptLookup
from tests.chaining import ChainingRunner

VOCAB = 64
STOP = 0
LAYERS, KV_HEADS = 1, 1
PLAN = uniform_plan(LAYERS, KV_HEADS, LAYERS, KV_HEADS, budget=0.5, group_size=0, sink_blocks=1, window_blocks=1)
_SUPPORT = np.array([0.75, 0.25], np.float32)


def next_token(checksum: int) -> int:
    """Return the token that follows tokens with this checksum."""
    return (checksum * 2654435761 >> 13) % VOCAB


def script(prompt: list[int], max_tokens: int, stop: list[int]) -> list[int]:
    """Return the tokens that a session generates, up to a stop token or `max_tokens`."""
    checksum, tokens = zlib.crc32(bytes(prompt)), list[int]()
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(next_token(checksum))
        checksum = zlib.crc32(bytes(tokens[-1:]), checksum)
    return tokens


def guess_by_script(guess: FirstGuess, _: PromptLookup, text: Sequence[int], room: int, alone: bool) -> None:
    """Stand in for `FirstGuess.guess`, since scripted texts do not repeat themselves: guess for an eighth of all texts,
    and in half of these cases with a wrong token.
    """
    checksum, guess.tokens = zlib.crc32(bytes(text), 1), []
    if checksum % 8 == 0 and room > 0 and not guess.pause.lasts(len(text)):
        guess.tokens = script(list(text), min(guess.most, room), [])
        if checksum // 8 % 2:
            guess.tokens[checksum // 16 % len(guess.tokens)] ^= 1


class ScriptedRunner(ChainingRunner):
    """A model whose cells of pages hold (position, token). Sampled tokens are the greedy ones; distributions are made
    up.

    errs: number of 16 drafted tokens that are wrong. report: called with a description of what must not happen. fault:
    called before each step; it may raise. is_sick: returns whether an output's logits are not finite.
    """

    def __init__(self, pages: int, errs: int, report: Callable[[str], None], fault: Callable[[], None]) -> None:
        self.kv = KVCache(LAYERS, KV_HEADS, 1, pages)
        self.vocab_size = VOCAB
        self.is_sick: Callable[[], bool] = lambda: False
        self.unprepared = 2
        self._errs, self._report, self._fault = errs, report, fault
        self._cells = [[-1] * PAGE_SIZE for _ in range(pages)]
        self._rounds: RoundSettings | None = None
        # Where each sequence of the last launched step continues, and with which token.
        self._left: list[tuple[int, int]] = []

    # KV.

    def _write(self, kv: SequenceKV, start: int, tokens: list[int], at: int | None = None) -> None:
        """Write tokens to the cells from `start` on. at: the position of the first one, if it differs from its cell."""
        position = start if at is None else at
        for index, token in enumerate(tokens):
            page, row = divmod(start + index, PAGE_SIZE)
            self._cells[kv.pages[page]][row] = (position + index) << 8 | token

    def _read(self, kv: SequenceKV, length: int) -> int:
        """Return the checksum of the first `length` tokens."""
        cells = [cell for page in kv.pages[: -(-length // PAGE_SIZE)] for cell in self._cells[page]][:length]
        if [cell >> 8 for cell in cells] != list(range(length)):
            self._report(f"KV of {length} tokens holds positions {[cell >> 8 for cell in cells]}")
        return zlib.crc32(bytes(cell & 255 for cell in cells))

    # Passes.

    def warm_up_more(self) -> None:
        self.unprepared -= 1

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        self._fault()
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        for item in inputs:
            if item.read is not None and item.read.drafts:
                self._draft_for_itself(item)
            self._write(item.kv, item.kv.length, item.tokens)
        outputs = [self._run(item) for item in inputs]
        for item in inputs:
            item.kv.length += len(item.tokens)
        return outputs

    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Imposed] | None = None) -> StepUnderWay:
        if any(item.draft_row is not None for item in inputs):
            return super().launch(inputs, imposed)
        lengths = [item.kv.length for item in inputs]
        for item in inputs:
            if item.follows is not None:  # the host laid it out as if no token had been accepted
                item.kv.length, item.tokens[0] = self._left[item.follows]
        begins = [item.kv.length for item in inputs]
        try:
            outputs = self.forward(inputs)
        finally:
            for item, length in zip(inputs, lengths, strict=True):
                item.kv.length = length
        for item in inputs:
            item.kv.length += len(item.tokens)
        verdicts = [output.verdict for output in outputs if output.verdict is not None]
        self._left = [(begin + 1 + kept, token) for begin, (kept, token) in zip(begins, verdicts, strict=True)]
        return lambda: outputs

    def _draft_for_itself(self, item: SequenceInput) -> None:
        """Draft all tokens of a round except the first."""
        checksum = self._read(item.kv, item.kv.length)
        for index in range(len(item.drafted.tokens)):
            checksum = zlib.crc32(bytes([item.tokens[index]]), checksum)
            item.tokens[index + 1] = item.drafted.tokens[index] = self._drafted_behind(checksum)

    def _drafted_behind(self, checksum: int) -> int:
        """Return the token that is drafted behind tokens with this checksum: the right one, or the next."""
        return (next_token(checksum) + ((checksum >> 7) % 16 < self._errs)) % VOCAB

    def _run(self, item: SequenceInput) -> SequenceOutput:
        output = SequenceOutput()
        checksum = self._read(item.kv, item.kv.length + item.drafted_from)
        if item.drafted is not None:
            output.finite = not self.is_sick()
            output.verdict = self._judge(checksum, item.drafted.tokens, errs=2 * item.drafted.screens)
        if item.read is not None:
            output.blocks_read = 1
        return output

    def _judge(self, checksum: int, drafted: list[int], errs: int) -> tuple[int, int]:
        """Return how many tokens are right, and the token behind them. errs: number of 16 tokens that are misjudged."""
        for accepted, token in enumerate([*drafted, -1]):
            right = (next_token(checksum) + 3 * ((checksum >> 11) % 16 < errs)) % VOCAB
            if token != right:
                return accepted, right
            checksum = zlib.crc32(bytes([token]), checksum)
        raise AssertionError("no token is -1")

    # Rounds.

    def prepare_rounds(self, settings: RoundSettings) -> None:
        self._rounds = settings

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        self._fault()
        for item in requests:
            self.kv.grow(item.kv, item.kv.length + item.tokens_written(self._rounds.gamma))
            if item.moved is not None:
                for step in range(item.moved.count):
                    self._copy(item.kv, item.moved.source + step, item.moved.target + step)
        return [self._draft(item, self._rounds) for item in requests]

    def _copy(self, kv: SequenceKV, source: int, target: int) -> None:
        (from_page, from_row), (page, row) = divmod(source, PAGE_SIZE), divmod(target, PAGE_SIZE)
        self._cells[kv.pages[page]][row] = self._cells[kv.pages[from_page]][from_row]

    def _draft(self, item: RoundRequest, settings: RoundSettings) -> RoundOutput:
        branches, length = item.branches, item.kv.length
        if not branches:
            self._write(item.kv, length, item.tokens[:-1])
            length += len(item.tokens) - 1
            branches = (Branch(length, item.tokens[-1], item.uniforms),)
        sampled, passes = item.temperature > 0, (item.gamma or settings.gamma) + settings.runs_last
        drafted = [
            self._draft_branch(item.kv, branch, length + index * passes, passes, settings, sampled)
            for index, branch in enumerate(branches)
        ]
        base = min(branch.length for branch in branches) + 1
        bitmap = None if item.announce is None else _selection(item.announce, settings, base, drafted[0].tokens[0])
        return RoundOutput(drafted, bitmap)

    def _draft_branch(
        self, kv: SequenceKV, branch: Branch, own: int, passes: int, settings: RoundSettings, sampled: bool
    ) -> DraftedTokens:
        checksum, token = self._read(kv, branch.length), branch.token
        tokens: list[int] = []
        right: list[int] = []
        for index in range(passes):
            self._write(kv, own + index, [token], at=branch.length + index)
            checksum = zlib.crc32(bytes([token]), checksum)
            right.append(next_token(checksum))
            token = self._drafted_behind(checksum)
            tokens.append(token)
        likeliest = None
        if settings.alternatives:
            others = range(2, 2 + settings.alternatives)
            rows = [(a, b, *((b + i) % VOCAB for i in others)) for a, b in zip(tokens, right, strict=True)]
            likeliest = np.array([row[: settings.alternatives] for row in rows])
        if not sampled:
            return DraftedTokens(tokens, alternatives=likeliest, runs_last=settings.runs_last)
        ids = np.array([(token, (token + 5) % VOCAB) for token in tokens])
        probs = np.tile(_SUPPORT, (len(tokens), 1))
        if self.is_sick():
            probs[:] = np.nan
        return DraftedTokens(tokens, ids, probs, likeliest, settings.runs_last)


def _selection(request: AnnouncementRequest, settings: RoundSettings, base: int, token: int) -> np.ndarray:
    """Return arbitrary blocks of `base` tokens that change from round to round: uint64 [rows, words]."""
    rows, blocks = len(settings.announcer.heads), -(-base // PAGE_SIZE)
    bitmap = np.full((rows, row_words(blocks)), token * 0x9E3779B97F4A7C15 % 2**64, np.uint64)
    bitmap[:, -1] &= last_word_mask(blocks)
    return bitmap
