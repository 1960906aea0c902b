"""Drafting whole rounds: one graph a shape on a GPU, the same launches one by one elsewhere."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from engine.decoder import Decoder
from engine.graphs import Captured, GraphPool
from engine.kv.cache import KVCache
from engine.modules import ModulesDecoder
from engine.rounds.buffers import RoundShape, bring_kept, lay_out_round, make_round_buffers, read_round, take_kept
from engine.rounds.launches import run_round
from engine.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from kernels.backends import Backend, power_of_two

ROUND_QUERIES = 2  # tokens that a round begins with: one, or two where the target's own was not foreseen


class RoundRunner:
    """Drafts rounds by `settings`. max_pages: of a sequence. pool: None runs without graphs."""

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        settings: RoundSettings,
        vocab_size: int,
        max_pages: int,
        attention: Backend,
        pool: GraphPool | None,
    ) -> None:
        if kv.offloads:
            raise NotImplementedError("rounds are drafted over KV that lies on one device: no backing store")
        self._decoder, self._kv, self._attention = decoder, kv, attention
        self._settings = settings.to(kv.device)
        self._vocab_size, self._max_pages, self._pool = vocab_size, max_pages, pool
        self._rounds: dict[RoundShape, Captured] = {}
        self._kept: Tensor | None = None  # of all shapes, which never run at the same time

    def warm_up(self, sequences: int, methods: Sequence[str]) -> None:
        """Capture rounds of up to `sequences` sessions, greedy and sampled, that announce nothing or by `methods`."""
        if self._pool is None:
            return
        # The largest first: what all shapes share is made to fit it.
        sizes = [1 << i for i in reversed(range(power_of_two(sequences).bit_length()))]
        kinds = list(itertools.product((False, True), ("", *methods), sizes))
        for sampled, method, count in tqdm(kinds, desc="capturing CUDA graphs of rounds", disable=None):
            self._round_of(RoundShape(count, ROUND_QUERIES, self._max_pages, sampled, method))

    def draft(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """Draft a round of each, those of one method together, in request order. Raises OutOfPages."""
        outputs: dict[int, RoundOutput] = {}
        methods = [item.announce.method if item.announce else "" for item in requests]
        for method in sorted(set(methods)):
            chosen = [i for i, of_request in enumerate(methods) if of_request == method]
            outputs.update(zip(chosen, self._draft([requests[i] for i in chosen], method), strict=True))
        return [outputs[i] for i in range(len(requests))]

    def _draft(self, requests: list[RoundRequest], method: str) -> list[RoundOutput]:
        for item in requests:
            self._kv.grow(item.kv, item.kv.length + len(item.tokens) + self._settings.gamma)
        sampled = any(item.temperature > 0 for item in requests)
        if self._pool is None:
            pages = max(len(item.kv.pages) for item in requests)
            queries = max(len(item.tokens) for item in requests)
            shape = RoundShape(len(requests), queries, pages, sampled, method)
        else:
            shape = RoundShape(power_of_two(len(requests)), ROUND_QUERIES, self._max_pages, sampled, method)
        round_ = self._round_of(shape)
        lay_out_round(round_.buffers, requests)
        bring_kept(round_.buffers, requests)
        round_.run()
        take_kept(round_.buffers, self._settings, requests)
        return read_round(round_.buffers, requests)

    def _round_of(self, shape: RoundShape) -> Captured:
        if shape in self._rounds:
            return self._rounds[shape]
        buffers = make_round_buffers(shape, self._settings, self._vocab_size, self._kv.device)
        if self._settings.refresh_every > 1:
            buffers.tensors["kept"] = self._kept_of(shape)

        def launch() -> None:
            run_round(self._decoder, self._kv, self._settings, shape, buffers, self._attention)

        if self._pool is None:  # of the exact size, for one round
            return Captured(buffers, launch)
        self._rounds[shape] = self._pool.capture(buffers, launch)
        return self._rounds[shape]

    def _kept_of(self, shape: RoundShape) -> Tensor:
        sizes = shape.sequences, self._decoder.num_layers, self._decoder.heads, shape.blocks(self._settings)
        if self._pool is None:
            return torch.zeros(sizes, device=self._kv.device)
        if self._kept is None or len(self._kept) < shape.sequences:
            self._kept = torch.zeros(sizes, device=self._kv.device)
        return self._kept[: shape.sequences]
