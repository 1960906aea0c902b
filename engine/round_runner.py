"""Drafting whole rounds: one graph a shape on a GPU, the same launches one by one elsewhere."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from engine.decoder import Decoder
from engine.graphs import Captured, Graphs
from engine.kv.cache import KVCache
from engine.modules import ModulesDecoder
from engine.rounds.buffers import RoundShape, bring_kept, lay_out_round, make_round_buffers, read_round, take_kept
from engine.rounds.launches import run_round
from engine.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from engine.staging import Buffers
from kernels.backends import Backend, power_of_two

ROUND_QUERIES = 2  # tokens that a round begins with: one, or two where the target's own was not foreseen


class RoundRunner:
    """Drafts rounds by `settings`. max_pages: of a sequence. captures: whether as CUDA graphs."""

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        settings: RoundSettings,
        vocab_size: int,
        max_pages: int,
        attention: Backend,
        captures: bool,
    ) -> None:
        if kv.offloads:
            raise NotImplementedError("rounds are drafted over KV that lies on one device: no backing store")
        self._decoder, self._kv, self._attention = decoder, kv, attention
        self._settings = settings.to(kv.device)
        self._vocab_size, self._max_pages, self._graphs = vocab_size, max_pages, Graphs(captures)
        self._kept: Tensor | None = None  # of all shapes, which never run at the same time

    def warm_up(self, sequences: int, methods: Sequence[str]) -> None:
        """Capture rounds of up to `sequences` sessions, greedy and sampled, that announce nothing or by `methods`."""
        if not self._graphs.captures:
            return
        # The largest first: what all shapes share is made to fit it.
        sizes = [1 << i for i in reversed(range(power_of_two(sequences).bit_length()))]
        branches = sorted({1, self._settings.branches}, reverse=True)
        kinds = list(itertools.product((False, True), ("", *methods), sizes, branches))
        for sampled, method, count, of_each in tqdm(kinds, desc="capturing CUDA graphs of rounds", disable=None):
            self._round_of(RoundShape(count, ROUND_QUERIES, self._max_pages, sampled, method, of_each))

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
            self._kv.grow(item.kv, item.kv.length + item.tokens_written(self._settings.gamma))
        shape = self._shape_of(requests, method)
        round_ = self._round_of(shape)
        lay_out_round(round_.buffers, shape, requests)
        bring_kept(round_.buffers, requests)
        round_.run()
        take_kept(round_.buffers, self._settings, requests)
        return read_round(round_.buffers, shape, requests)

    def _shape_of(self, requests: list[RoundRequest], method: str) -> RoundShape:
        sampled = any(item.temperature > 0 for item in requests)
        # KV is moved by rounds with branches; those of one branch need not know how.
        branched = any(len(item.branches) > 1 or item.moved is not None for item in requests)
        if not self._graphs.captures:
            pages = max(len(item.kv.pages) for item in requests)
            queries = max(1, *(len(item.tokens) for item in requests), 1)
            branches = max(2, *(len(item.branches) for item in requests), 2) if branched else 1
            return RoundShape(len(requests), queries, pages, sampled, method, branches)
        branches = self._settings.branches if branched else 1
        return RoundShape(power_of_two(len(requests)), ROUND_QUERIES, self._max_pages, sampled, method, branches)

    def _round_of(self, shape: RoundShape) -> Captured:
        def make_buffers() -> Buffers:
            buffers = make_round_buffers(shape, self._settings, self._vocab_size, self._kv.device)
            if self._settings.refresh_every > 1:
                buffers.tensors["kept"] = self._kept_of(shape)
            return buffers

        def launch(buffers: Buffers) -> None:
            run_round(self._decoder, self._kv, self._settings, shape, buffers, self._attention)

        return self._graphs.of(shape, make_buffers, launch)

    def _kept_of(self, shape: RoundShape) -> Tensor:
        sizes = shape.sequences, self._decoder.num_layers, self._decoder.heads, shape.blocks(self._settings)
        if not self._graphs.captures:
            return torch.zeros(sizes, device=self._kv.device)
        if self._kept is None or len(self._kept) < shape.sequences:
            self._kept = torch.zeros(sizes, device=self._kv.device)
        return self._kept[: shape.sequences]
