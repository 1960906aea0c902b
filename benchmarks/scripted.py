"""A model that costs next to nothing, to measure everything else: `python -m benchmarks.scripted target|draft`.

The next token is a fixed function of the position, so both sides agree; the draft errs at a fixed share of the
positions, which gives rounds their acceptance. Random choices play no part.
"""

import argparse
import asyncio
from collections.abc import Callable

import torch

from config import DraftSettings, TargetSettings
from draft_service import service as draft_service
from engine.inputs import SequenceInput
from engine.kv.paged import PagedKV
from engine.runner import Runner, SequenceOutput
from sparsity.plan import Plan, uniform_plan
from target_service import service as target_service
from wire.messages import Hello
from wire.server import RunningServer, serve_until_signal

VOCAB = 4096  # the bundled tokenizer's
LAYERS, KV_HEADS, HEADS = 2, 2, 4
_PERIOD, _ERRORS = 61, (7, 18, 29, 40, 51)  # positions of a period at which the draft errs: one in twelve
_REPEATS = 3  # of the period in the table of logits, so that any round is one slice of it
_MAX_BLOCKS = 2048  # of 16 tokens: the services' largest context


class ScriptedRunner(Runner):
    """Logits are rows of one shared table; KV pages hold one number each.

    Block weights are random and change from position to position so that about a third of a round's selection
    is new, as with the bundled pair on prose.
    """

    def __init__(self, errs: bool) -> None:
        self.vocab_size = VOCAB
        self.kv = PagedKV(LAYERS, KV_HEADS, 1, 20_000)
        following = torch.arange(_PERIOD) + 1
        if errs:
            following[list(_ERRORS)] = 0
        self._table = torch.eye(_PERIOD + 1, VOCAB)[following].repeat(_REPEATS, 1)
        random = torch.Generator().manual_seed(0)
        noise = torch.rand(_PERIOD + 1, LAYERS, HEADS, _MAX_BLOCKS, generator=random)
        self._weights = 0.84 * noise[-1:] + 0.16 * noise[:-1]

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs = []
        for item in inputs:
            end = item.kv.length + len(item.tokens)
            self.kv.grow(item.kv, end)
            output = SequenceOutput()
            rows = {"none": 0, "last": 1, "all": len(item.tokens)}[item.logits]
            if rows:
                first = (end - rows) % _PERIOD
                output.logits = self._table[first : first + rows]
            if item.emitting:
                blocks = -(-end // item.block_size)
                output.block_weights = self._weights[end % _PERIOD, :, None, :, :blocks]
            if item.read is not None and item.read.emit:
                blocks = -(-end // item.read.block_size)
                output.read_weights = self._weights[end % _PERIOD, :, :KV_HEADS, :blocks]
            outputs.append(output)
            item.kv.length = end
        return outputs


def scripted_plan() -> Plan:
    return uniform_plan(LAYERS, KV_HEADS, LAYERS, HEADS, dense_layers=())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted", description=__doc__)
    parser.add_argument("side", choices=["target", "draft"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--target", default="", metavar="HOST:PORT", help="for the draft: what to dial")
    parser.add_argument("--gamma", type=int, default=4)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    plan = scripted_plan()
    hello = Hello(flags.side, "scripted", VOCAB, "scripted", plan.hash, flags.gamma, plan.block_size)

    async def run(on_ready: Callable[[RunningServer], None]) -> None:
        runner = ScriptedRunner(errs=flags.side == "draft")
        if flags.side == "target":
            settings = TargetSettings(port=flags.port, gamma=flags.gamma)
            await target_service.serve(settings, runner, plan, hello, on_ready)
        else:
            draft_settings = DraftSettings(targets=(flags.target,), port=flags.port, gamma=flags.gamma)
            await draft_service.serve(draft_settings, runner, plan, hello, on_ready)

    asyncio.run(serve_until_signal(flags.side, run))


if __name__ == "__main__":
    main()
