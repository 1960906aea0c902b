"""Drafting whole rounds: one graph a shape on a GPU, the same launches one by one elsewhere."""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.decoder import Decoder
from engine.grammars import WORD, unpack_mask
from engine.graphs import Captured, Graphs
from engine.kv.cache import KVCache
from engine.modules import ModulesDecoder
from engine.rounds.buffers import (
    RoundShape,
    bring_kept,
    bring_rules,
    lay_out_round,
    make_round_buffers,
    read_round,
    take_kept,
)
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
        self._one_by_one = Graphs(captures=False)
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
        """Draft a round of each, in request order. Raises OutOfPages.

        Those of one method are drafted together, and those of them that do not allow all tokens apart.
        """
        outputs: dict[int, RoundOutput] = {}
        kinds = [(item.announce.method if item.announce else "", item.allowed is not None) for item in requests]
        for kind in sorted(set(kinds)):
            chosen = [i for i, of_request in enumerate(kinds) if of_request == kind]
            outputs.update(zip(chosen, self._draft([requests[i] for i in chosen], *kind), strict=True))
        return [outputs[i] for i in range(len(requests))]

    def _draft(self, requests: list[RoundRequest], method: str, asks: bool) -> list[RoundOutput]:
        for item in requests:
            own = max(1, len(item.branches)) * (self._settings.gamma + 1)
            self._kv.grow(item.kv, item.kv.length + max(own, len(item.tokens) + self._settings.gamma))
        shape = self._shape_of(requests, method)
        round_ = self._round_of(shape, requests if asks else None)
        lay_out_round(round_.buffers, shape, requests)
        bring_kept(round_.buffers, requests)
        bring_rules(round_.buffers, requests)
        round_.run()
        take_kept(round_.buffers, self._settings, requests)
        return read_round(round_.buffers, shape, requests)

    def _shape_of(self, requests: list[RoundRequest], method: str) -> RoundShape:
        sampled = any(item.temperature > 0 for item in requests)
        ruled = any(item.rules is not None for item in requests)
        # KV is moved by rounds with branches; those of one branch need not know how.
        branched = any(len(item.branches) > 1 or item.moved is not None for item in requests)
        if not self._graphs.captures:
            pages = max(len(item.kv.pages) for item in requests)
            queries = max(1, *(len(item.tokens) for item in requests), 1)
            branches = max(2, *(len(item.branches) for item in requests), 2) if branched else 1
            return RoundShape(len(requests), queries, pages, sampled, method, branches, ruled)
        branches = self._settings.branches if branched else 1
        of_runner = ROUND_QUERIES, self._max_pages
        return RoundShape(power_of_two(len(requests)), *of_runner, sampled, method, branches, ruled)

    def _round_of(self, shape: RoundShape, asking: list[RoundRequest] | None = None) -> Captured:
        """Return what runs a shape. asking: the requests, where the host is asked which tokens they allow."""

        def make_buffers() -> Buffers:
            buffers = make_round_buffers(shape, self._settings, self._vocab_size, self._kv.device)
            if self._settings.refresh_every > 1:
                buffers.tensors["kept"] = self._kept_of(shape)
            return buffers

        def launch(buffers: Buffers) -> None:
            forbid = None if asking is None else partial(_forbid, asking, shape.branches)
            run_round(self._decoder, self._kv, self._settings, shape, buffers, self._attention, forbid)

        graphs = self._graphs if asking is None else self._one_by_one
        return graphs.of(shape, make_buffers, launch)

    def _kept_of(self, shape: RoundShape) -> Tensor:
        sizes = shape.sequences, self._decoder.num_layers, self._decoder.heads, shape.blocks(self._settings)
        if not self._graphs.captures:
            return torch.zeros(sizes, device=self._kv.device)
        if self._kept is None or len(self._kept) < shape.sequences:
            self._kept = torch.zeros(sizes, device=self._kv.device)
        return self._kept[: shape.sequences]


def _forbid(requests: list[RoundRequest], branches: int, logits: Tensor, tokens: list[Tensor]) -> None:
    """Set to -inf, in place, what requests do not allow behind the tokens drafted so far. logits: [rows, vocab]."""
    drafted = torch.stack(tokens, 1).tolist() if tokens else [[]] * len(logits)
    masks = np.full((len(logits), -(-logits.shape[1] // WORD)), -1, dtype=np.int32)
    for i, item in enumerate(requests):
        assert item.allowed is not None
        for j in range(len(item.branches) or 1):
            masks[i * branches + j] = item.allowed(j, drafted[i * branches + j])
    logits.masked_fill_(~unpack_mask(torch.from_numpy(masks).to(logits.device), logits.shape[1]), -torch.inf)
