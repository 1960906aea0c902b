"""A model that costs next to nothing: `python -m specahead.lab.benchmarks.scripted target|draft`, to measure all else.

The next token is a fixed function of the position, so both sides agree; the draft errs at a fixed share of the
positions, which gives rounds their acceptance. Random choices play no part.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
import uvloop

from draft_service import service as draft_service
from specahead.config import DraftSettings, Speculation, TargetSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SharedBudget
from specahead.engine.steps.requests import AnnouncementRequest, DraftedTokens, RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.runner import TargetOrDraftRunner
from specahead.sparsity.plan import Plan, uniform_plan
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import Hello
from specahead.wire.server import RunningServer, serve_until_signal
from target_service import service as target_service

VOCAB = 4096  # the bundled tokenizer's
LAYERS, KV_HEADS, HEADS = 2, 2, 4
_PERIOD, _ERRORS = 61, (7, 18, 29, 40, 51)  # positions of a period at which the draft errs: one in twelve
_MAX_BLOCKS = 2048  # of 16 tokens: the services' largest context
_CHANGING = 0.13  # share of a block's weight that changes from position to position


class ScriptedRunner(TargetOrDraftRunner):
    """Tokens follow from positions; KV pages hold one number each. It knows greedy sessions and shared budgets alone.

    Block weights are random and change from position to position so that about a third of a round's selection is new,
    as with the bundled pair on prose. errs: whether it is the draft, which errs now and then.
    """

    def __init__(self, errs: bool, pages: int = 20_000) -> None:
        self.vocab_size = VOCAB
        self.kv = KVCache(LAYERS, KV_HEADS, 1, pages)
        self._following = [0 if errs and i in _ERRORS else i + 1 for i in range(_PERIOD)]
        noise = np.random.default_rng(0).random((_PERIOD + 1, LAYERS * KV_HEADS, _MAX_BLOCKS), np.float32)
        self._weights = (1 - _CHANGING) * noise[-1:] + _CHANGING * noise[:-1]
        self._gamma = self._block_size = self._alternatives = 0  # until rounds are prepared
        self._runs_last = True

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs = []
        for item in inputs:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens))
            item.kv.length += len(item.tokens)
            output = SequenceOutput()
            if item.drafted is not None:
                output.verdict = self._judge(item.drafted)
            if item.read is not None:
                assert item.read.budget is not None
                output.blocks_read = _count_blocks(item.read.budget, item.kv.length, item.read.block_size)
            outputs.append(output)
        return outputs

    def _judge(self, drafted: Drafted) -> tuple[int, int]:
        if not drafted.sampling.greedy:
            raise NotImplementedError("the scripted model decodes greedily: ask for temperature 0")
        own = self._tokens_from(drafted.base, len(drafted.tokens) + 1)
        agree = [a == b for a, b in zip(drafted.tokens, own, strict=False)]
        accepted = len(agree) if all(agree) else agree.index(False)
        return accepted, own[accepted]

    def _tokens_from(self, position: int, count: int) -> list[int]:
        return [self._following[(position - 1 + i) % _PERIOD] for i in range(count)]

    def prepare_rounds(self, settings: RoundSettings) -> None:
        self._gamma, self._block_size, self._runs_last = settings.gamma, settings.block_size, settings.runs_last
        self._alternatives = settings.alternatives

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        outputs = []
        for item in requests:
            base = item.kv.length + len(item.tokens)
            self.kv.grow(item.kv, item.kv.length + item.tokens_written(self._gamma))
            bases = [branch.length + 1 for branch in item.branches] or [base]
            bitmap = None if item.announce is None else self._announce(item.announce, min(bases))
            outputs.append(RoundOutput([self._drafted(at) for at in bases], bitmap))
        return outputs

    def _drafted(self, base: int) -> DraftedTokens:
        """Return the draft's tokens from `base` on; where it errs, the right token is its second choice."""
        tokens = self._tokens_from(base, self._gamma + self._runs_last)
        if not self._alternatives:
            return DraftedTokens(tokens, runs_last=self._runs_last)
        right = (np.arange(base - 1, base - 1 + len(tokens)) % _PERIOD + 1).astype(np.int32)
        others = np.broadcast_to(np.arange(VOCAB - self._alternatives, VOCAB), (len(tokens), self._alternatives))
        likeliest = np.concatenate((np.array(tokens)[:, None], right[:, None], others), 1)[:, : self._alternatives]
        return DraftedTokens(tokens, alternatives=likeliest, runs_last=self._runs_last)

    def _announce(self, request: AnnouncementRequest, base: int) -> np.ndarray:
        """The blocks of highest weight over all rows: uint64 [rows, words]."""
        weights = self._weights[base % _PERIOD, :, request.first : request.last]
        count = min(max(0, request.count), weights.size)
        highest = np.argpartition(weights, weights.size - count, axis=None)[weights.size - count :]
        rows, columns = np.divmod(highest, weights.shape[1])
        chosen = np.zeros((len(weights), -(-base // self._block_size)), dtype=bool)
        chosen[rows, columns + request.first] = True
        return BlockSelection.from_matrix(chosen).words


def _count_blocks(budget: SharedBudget, length: int, block_size: int) -> int:
    """Count what a pass over `length` tokens reads: all that is read in any case, and all that there is room for."""
    blocks, rows = -(-length // block_size), len(budget.bitmap)
    announced = BlockSelection(rows, blocks, budget.bitmap)
    middle = budget.last - budget.first
    chosen = max(announced.count(budget.first, budget.last), budget.room)
    return rows * (blocks - middle) + min(chosen, rows * middle)


def scripted_plan() -> Plan:
    return uniform_plan(LAYERS, KV_HEADS, LAYERS, HEADS, dense_layers=())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specahead.lab.benchmarks.scripted", description=__doc__)
    parser.add_argument("side", choices=["target", "draft"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--target", default="", metavar="HOST:PORT", help="for the draft: what to dial")
    parser.add_argument("--gamma", type=int, default=4)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    plan = scripted_plan()
    hello = Hello(flags.side, "scripted", VOCAB, "scripted", plan.hash, flags.gamma, plan.block_size)

    async def run(on_ready: Callable[[RunningServer], None]) -> None:
        runner, speculation = ScriptedRunner(errs=flags.side == "draft"), Speculation(gamma=flags.gamma)
        if flags.side == "target":
            settings = TargetSettings(port=flags.port, speculation=speculation)
            await target_service.serve(settings, runner, plan, hello, on_ready)
        else:
            draft_settings = DraftSettings(targets=(flags.target,), port=flags.port, speculation=speculation)
            await draft_service.serve(draft_settings, runner, plan, hello, on_ready)

    uvloop.run(serve_until_signal(flags.side, run))


if __name__ == "__main__":
    main()
