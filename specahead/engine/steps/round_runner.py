"""Drafting whole rounds: one graph a shape on a GPU, the same launches one by one elsewhere."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.grammars import WORD, unpack_mask
from specahead.engine.steps.graphs import Captured, Graphs, tell_captures
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.rounds.behind_steps import LeftVerdicts
from specahead.engine.steps.rounds.buffers import RoundShape, bring_rules, lay_out_round, make_round_buffers
from specahead.engine.steps.rounds.launches import run_round
from specahead.engine.steps.rounds.requests import RoundMemory, RoundRequest, RoundSettings, branches_of
from specahead.engine.steps.rounds.under_way import LaunchedRound, RoundsUnderWay
from specahead.engine.steps.runner import COMPILED_SESSIONS, WARM_SESSIONS
from specahead.engine.steps.staging import Buffers
from specahead.kernels.backends import Backend, power_of_two
from specahead.kernels.compiling import compile_ahead

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
        self._memories = ReadMemories(settings.memories + 1)
        self._nobody = RoundMemory()  # takes what is left by sequences that nothing is remembered of
        self._rules = torch.empty(3, 0, 0)
        self.left_verdicts: LeftVerdicts | None = None  # of the last step that rounds may be launched behind

    def warm_up(self, sequences: int, methods: Sequence[str], gammas: Sequence[int]) -> list[Callable[[], object]]:
        """Capture rounds that announce nothing or by `methods`: greedy and sampled ones, of up to WARM_SESSIONS
        sessions. Return what captures those of up to `sequences`, those whose logits are changed, and those of fewer
        tokens, `gammas` of them.
        """
        if not self._graphs.captures:
            return []
        sizes = [1 << i for i in reversed(range(power_of_two(sequences).bit_length()))]
        draws = {"sampled": False, "ruled": False}, {"sampled": True, "ruled": False}, {"sampled": True, "ruled": True}
        self._rules_of(sizes[0])  # all shapes share it, so it is made to fit the largest
        shapes = []
        sized = [(count, most) for count in sizes for most in sorted({1, self._branches_of(count)}, reverse=True)]
        for draw, method, (count, of_each) in itertools.product(draws, ("", *methods), sized):
            shape = RoundShape(count, ROUND_QUERIES, self._max_pages, method=method, branches=of_each, **draw)
            shape = replace(shape, behind=self._may_go_behind(of_each))
            shapes.append(shape)
            if self._settings.refresh_every > 1 and of_each == self._branches_of(count):
                shapes.append(replace(shape, refreshes=False))
        compiled = [shape for shape in shapes if shape.sequences <= COMPILED_SESSIONS]
        compile_ahead([partial(self._launches_of, shape) for shape in compiled])
        now = [shape for shape in shapes if shape.sequences <= WARM_SESSIONS and not shape.ruled]
        with tell_captures(self._graphs, "rounds"):
            for shape in tqdm(now, desc="capturing CUDA graphs of rounds", disable=None):
                self._round_of(shape, prepared=True)
        fewer = [replace(shape, gamma=gamma) for gamma in gammas for shape in shapes]
        later = [shape for shape in shapes if shape not in now]
        later = sorted([*later, *fewer], key=lambda shape: (shape.ruled, shape.sequences))
        return [partial(self._round_of, shape, prepared=True) for shape in later]

    def launch(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        """Draft a round of each, those of one method and one γ that refresh, or do not, together. Raises OutOfPages.

        Those that do not allow all tokens are drafted apart, and waited for.
        """
        parts: list[LaunchedRound] = []
        refreshes = [item.refresh or self._settings.refresh_every == 1 for item in requests]
        methods = [item.announce.method if item.announce else "" for item in requests]
        gammas = [0 if item.gamma == self._settings.gamma else item.gamma for item in requests]
        kinds = list(zip(methods, refreshes, (item.allowed is not None for item in requests), gammas, strict=True))
        for kind in sorted(set(kinds)):
            chosen = [i for i, of_request in enumerate(kinds) if of_request == kind]
            parts.append(self._launch(chosen, [requests[i] for i in chosen], *kind))
        return RoundsUnderWay(parts)

    def _launch(
        self, places: list[int], requests: list[RoundRequest], method: str, refreshes: bool, asks: bool, gamma: int
    ) -> LaunchedRound:
        for item in requests:
            self._kv.grow(item.kv, item.kv.length + item.tokens_written(self._settings.gamma))
        shape = replace(self._shape_of(requests, method, refreshes), gamma=gamma)
        round_ = self._round_of(shape, requests if asks else None)
        memories = [self._nobody if item.memory is None else item.memory for item in requests]
        remembered = []
        if self._settings.refresh_every > 1:
            remembered = [self._memories.index_of(memory) for memory in (*memories, self._nobody)]
        lay_out_round(round_.buffers, shape, requests, remembered)
        bring_rules(round_.buffers, requests)
        round_.run()
        for item, memory in zip(requests, memories, strict=True):
            if refreshes:
                memory.length = min([branch.length for branch in item.branches] or [item.kv.length + len(item.tokens)])
            memory.rounds = 0 if refreshes else memory.rounds + 1
        results = round_.buffers.results
        return LaunchedRound(places, requests, shape, results, results.send_back(), self._settings.runs_last)

    def _shape_of(self, requests: list[RoundRequest], method: str, refreshes: bool) -> RoundShape:
        ruled = any(item.rules is not None for item in requests)
        # Rounds with rules are sampled ones: a graph serves both, and greedy sessions are greedy in any.
        sampled = ruled or any(item.temperature > 0 for item in requests)
        # KV is moved by rounds with branches; those of one branch need not know how.
        branched = any(len(item.branches) > 1 or item.moved is not None for item in requests)
        if not self._graphs.captures:
            pages = max(len(item.kv.pages) for item in requests)
            queries = max(1, *(len(item.tokens) for item in requests), 1)
            branches = max(2, *(len(item.branches) for item in requests), 2) if branched else 1
            behind = any(item.behind is not None for item in requests)
            return RoundShape(len(requests), queries, pages, sampled, method, branches, refreshes, ruled, behind=behind)
        branches = self._branches_of(len(requests)) if branched else 1
        sizes = power_of_two(len(requests)), ROUND_QUERIES, self._max_pages
        behind = self._may_go_behind(branches)
        return RoundShape(*sizes, sampled, method, branches, refreshes, ruled, behind=behind)

    def _branches_of(self, sequences: int) -> int:
        return branches_of(sequences, self._settings.branches)

    def _may_go_behind(self, branches: int) -> bool:
        """Return whether rounds of so many branches may be behind a step: one graph serves them and others."""
        return self.left_verdicts is not None and branches == 1

    def _round_of(
        self, shape: RoundShape, asking: list[RoundRequest] | None = None, prepared: bool = False
    ) -> Captured:
        """Return what runs a shape. asking: the requests, where the host is asked which tokens they allow. prepared: as
        of `Graphs.of`.
        """
        graphs = self._graphs if asking is None else self._one_by_one
        return graphs.of(shape, *self._ways_of(shape, asking), prepared)

    def _ways_of(
        self, shape: RoundShape, asking: list[RoundRequest] | None = None
    ) -> tuple[Callable[[], Buffers], Callable[[Buffers], None]]:
        """Return what makes the buffers of a shape, and what launches its rounds."""

        def make_buffers() -> Buffers:
            nobody = self._memories.index_of(self._nobody)
            buffers = make_round_buffers(shape, self._settings, self._vocab_size, self._kv.device, nobody)
            if self._settings.refresh_every > 1:
                buffers.tensors["memory"] = self._weights()
            if shape.ruled:
                buffers.tensors["rules"] = self._rules_of(shape.sequences)
            if shape.behind:
                assert self.left_verdicts is not None
                buffers.tensors |= {f"left_{name}": kept for name, kept in vars(self.left_verdicts).items()}
            return buffers

        def launch(buffers: Buffers) -> None:
            forbid = None if asking is None else partial(_forbid, asking, shape.branches)
            run_round(self._decoder, self._kv, self._settings, shape, buffers, self._attention, forbid)

        return make_buffers, launch

    def _launches_of(self, shape: RoundShape) -> Callable[[], None]:
        """Return what launches all that a round of a shape does, in buffers of its own: of passes behind the second,
        which launch what that one does, none.
        """
        make_buffers, launch = self._ways_of(replace(shape, gamma=min(2, self._settings.gamma)))
        return partial(launch, make_buffers())

    def _rules_of(self, sequences: int) -> Tensor:
        """Return room for what changes logits, [3, sequences, vocab] float32: the same for all shapes that fit."""
        if sequences > self._rules.shape[1]:
            self._rules = torch.zeros(3, sequences, self._vocab_size, device=self._kv.device)
        return self._rules[:, :sequences]

    def _weights(self) -> Tensor:
        """Return what is remembered of all sessions, [places, layers * heads, blocks] float32."""
        blocks = -(-self._max_pages * PAGE_SIZE // self._settings.block_size)
        return self._memories.weights(self._decoder.num_layers * self._decoder.heads, blocks, self._kv.device)


def _forbid(requests: list[RoundRequest], branches: int, logits: Tensor, tokens: list[Tensor]) -> None:
    """Set to -inf, in place, what requests do not allow behind the tokens drafted so far. logits: [rows, vocab]."""
    drafted = torch.stack(tokens, 1).tolist() if tokens else [[]] * len(logits)
    masks = np.full((len(logits), -(-logits.shape[1] // WORD)), -1, dtype=np.int32)
    for i, item in enumerate(requests):
        assert item.allowed is not None
        for j in range(len(item.branches) or 1):
            masks[i * branches + j] = item.allowed(j, drafted[i * branches + j])
    logits.masked_fill_(~unpack_mask(torch.from_numpy(masks).to(logits.device), logits.shape[1]), -torch.inf)
