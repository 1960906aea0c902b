"""A model that costs next to nothing, to measure everything else: `python -m benchmarks.scripted target|draft`.

The next token is a fixed function of the position, so both sides agree; the draft errs at a fixed share of the
positions, which gives rounds their acceptance. Random choices play no part.
"""

import argparse
import asyncio
from collections.abc import Callable

import torch
from torch import Tensor

from draft_service import service as draft_service
from draft_service.drafter import DrafterSettings
from engine.batch import SequenceInput
from engine.loading import load_tokenizer, tokenizer_hash
from engine.paged_kv import PagedKV
from engine.runner import SequenceOutput
from models import TARGET
from sparsity.plan import Plan, uniform_plan
from target_service import service as target_service
from target_service.verifier import VerifierSettings
from wire.messages import Hello
from wire.server import RunningServer, serve_until_signal

VOCAB = 4096  # the bundled tokenizer's
LAYERS, KV_HEADS, HEADS = 2, 2, 4
_PERIOD, _ERRORS = 61, (7, 18, 29, 40, 51)  # positions of a period at which the draft errs: one in twelve


class ScriptedRunner:
    """Logits are rows of one shared table; KV pages hold one number each.

    Block weights are random, a fifth of each anew at every position: about the churn of the bundled pair.
    """

    def __init__(self, errs: bool) -> None:
        self.vocab_size = VOCAB
        self.kv = PagedKV(LAYERS, KV_HEADS, 1, 20_000)
        self._table = torch.eye(_PERIOD + 1, VOCAB)
        offset = torch.arange(_PERIOD) + 1
        if errs:
            offset[list(_ERRORS)] = 0
        self._next = offset % (_PERIOD + 1)
        noise = torch.rand(_PERIOD + 1, LAYERS, HEADS, 512, generator=torch.Generator().manual_seed(0))
        self._weights = 0.8 * noise[-1:] + 0.2 * noise[:-1]

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs = []
        for item in inputs:
            end = item.kv.length + len(item.tokens)
            self.kv.grow(item.kv, end)
            rows = {"none": 0, "last": 1, "all": len(item.tokens)}[item.logits]
            logits = self._logits(end, rows) if rows else None
            blocks = -(-end // item.block_size) if item.block_size else 0
            outputs.append(
                SequenceOutput(logits, self._weights[end % _PERIOD, :, :, :blocks] if blocks else None)
            )
            item.kv.length = end
        return outputs

    def _logits(self, end: int, rows: int) -> Tensor:
        positions = torch.arange(end - rows, end) % _PERIOD
        return self._table[self._next[positions]]


def scripted_plan() -> Plan:
    return uniform_plan(LAYERS, KV_HEADS, LAYERS, HEADS, dense_layers=())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted", description=__doc__)
    parser.add_argument("side", choices=["target", "draft"])
    parser.add_argument("--target", default="")
    parser.add_argument("--gamma", type=int, default=4)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    plan = scripted_plan()
    hash_ = tokenizer_hash(load_tokenizer(str(TARGET)))
    hello = Hello(flags.side, "scripted", VOCAB, hash_, plan.hash, flags.gamma, plan.block_size)

    async def run(on_ready: Callable[[RunningServer], None]) -> None:
        runner = ScriptedRunner(errs=flags.side == "draft")
        if flags.side == "target":
            verifier = VerifierSettings(gamma=flags.gamma)
            settings = target_service.TargetServiceSettings(verifier=verifier)
            await target_service.serve(settings, runner, plan, hello, on_ready)
        else:
            drafter = DrafterSettings(gamma=flags.gamma)
            draft_settings = draft_service.DraftServiceSettings([flags.target], drafter=drafter)
            await draft_service.serve(draft_settings, runner, plan, hello, on_ready)

    asyncio.run(serve_until_signal(flags.side, run))


if __name__ == "__main__":
    main()
