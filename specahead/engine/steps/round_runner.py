"""Drafting whole rounds: one graph a shape on a GPU, the same launches one by one elsewhere."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specahead.engine.sampling.grammars import WORD, unpack_mask
from specahead.engine.staging import Buffers, Staging
from specahead.engine.steps.buffers import make_round_buffers
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.graphs import Captured, Graphs, tell_captures
from specahead.engine.steps.layout import bring_rules, lay_out_round
from specahead.engine.steps.outputs import RoundsUnderWay, in_order, read_round
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.requests import RoundOutput, RoundRequest, RoundSettings, branches_of
from specahead.engine.steps.round_launches import run_round
from specahead.engine.steps.runner import COMPILED_SESSIONS, WARM_SESSIONS
from specahead.engine.steps.shapes import RoundShape
from specahead.kernels.backends import power_of_two
from specahead.kernels.compiling import compile_ahead


class RoundRunner:
    """Drafts rounds by `settings`. max_pages: of a sequence. captures: whether as CUDA graphs."""

    def __init__(
        self, model: PagedModel, settings: RoundSettings, vocab_size: int, max_pages: int, captures: bool
    ) -> None:
        if model.kv.offloads:
            raise NotImplementedError("rounds are drafted over KV that lies on one device: no backing store")
        self._model, self._kv = model, model.kv
        self.settings = settings.to(model.kv.device)
        self._vocab_size, self._max_pages, self._graphs = vocab_size, max_pages, Graphs(captures)
        self._one_by_one = Graphs(captures=False)
        self._rules = torch.empty(3, 0, 0)
        self.chain: DeviceChain | None = None  # that rounds of one branch belong to

    def warm_up(self, sequences: int, announces: bool, gammas: Sequence[int]) -> list[Callable[[], object]]:
        """Capture greedy and sampled rounds of up to WARM_SESSIONS sessions, and those that announce blocks, if
        `announces`. Return what captures those of up to `sequences`, those whose logits are changed, and those of fewer
        tokens, `gammas` of them.
        """
        if not self._graphs.captures:
            return []
        sizes = [1 << i for i in reversed(range(power_of_two(sequences).bit_length()))]
        draws = {"sampled": False, "ruled": False}, {"sampled": True, "ruled": False}, {"sampled": True, "ruled": True}
        self._rules_of(sizes[0])  # all shapes share it, so it is made to fit the largest
        most = self.settings.branches
        sized = [(count, each) for count in sizes for each in sorted({1, branches_of(count, most)}, reverse=True)]
        shapes = [
            self._captured_shape(count, of_each, announcing, self.settings.gamma, **draw)
            for draw, announcing, (count, of_each) in itertools.product(draws, (False, True)[: 1 + announces], sized)
        ]
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
        """Draft a round of each, together where γ is the same and all announce blocks or none does. Raises OutOfPages.

        Those that do not allow all tokens are drafted apart, and waited for.
        """
        parts: list[tuple[list[int], Callable[[], list[RoundOutput]]]] = []
        branched = False
        kinds = [
            (item.announce is not None, item.allowed is not None, item.gamma or self.settings.gamma)
            for item in requests
        ]
        for kind in sorted(set(kinds)):
            announces, asks, gamma = kind
            places = [i for i, of_request in enumerate(kinds) if of_request == kind]
            chosen = [requests[i] for i in places]
            for item in chosen:
                self._kv.grow(item.kv, item.kv.length + item.tokens_written(self.settings.gamma))
            shape = self._shape_of(chosen, announces, gamma)
            round_ = self._round_of(shape, chosen if asks else None)
            lay_out_round(round_.buffers, shape, chosen)
            bring_rules(round_.buffers, chosen)
            round_.run()
            parts.append((places, self._sent_back(round_.buffers.results, shape, chosen)))
            branched |= shape.branches > 1
        one = len(parts) == 1 and not branched
        return RoundsUnderWay(one, lambda: in_order((places, end()) for places, end in parts))

    def _sent_back(
        self, results: Staging, shape: RoundShape, requests: list[RoundRequest]
    ) -> Callable[[], list[RoundOutput]]:
        done = results.send_back()
        return lambda: read_round(results.wait(done), shape, requests, self.settings)

    def _shape_of(self, requests: list[RoundRequest], announces: bool, gamma: int) -> RoundShape:
        ruled = any(item.rules is not None for item in requests)
        # Rounds with rules are sampled ones: a graph serves both, and greedy sessions are greedy in any.
        sampled = ruled or any(item.temperature > 0 for item in requests)
        # KV is moved by rounds with branches; those of one branch need not know how.
        branched = any(len(item.branches) > 1 or item.moved is not None for item in requests)
        if self._graphs.captures:
            branches = branches_of(len(requests), self.settings.branches) if branched else 1
            return self._captured_shape(power_of_two(len(requests)), branches, announces, gamma, sampled, ruled)
        branches = max(2, *(len(item.branches) for item in requests), 2) if branched else 1
        return RoundShape(
            sequences=len(requests),
            queries=max(1, *(len(item.tokens) for item in requests), 1),
            pages=max(len(item.kv.pages) for item in requests),
            sampled=sampled,
            announces=announces,
            gamma=gamma,
            branches=branches,
            ruled=ruled,
            chained=self.chain is not None and branches == 1,
        )

    def _captured_shape(
        self, sequences: int, branches: int, announces: bool, gamma: int, sampled: bool, ruled: bool
    ) -> RoundShape:
        # One graph serves rounds that follow a step and others.
        chained, pages = self.chain is not None and branches == 1, self._max_pages
        return RoundShape(sequences, self.settings.queries, pages, sampled, announces, gamma, branches, ruled, chained)

    def _round_of(
        self, shape: RoundShape, asking: list[RoundRequest] | None = None, prepared: bool = False
    ) -> Captured:
        """Return what runs a shape. asking: the requests, where the host is asked which tokens they allow. prepared: as
        of `Graphs.of`.
        """
        graphs = self._graphs if asking is None else self._one_by_one
        return graphs.of(shape, partial(self._make_buffers, shape), partial(self._launch, shape, asking), prepared)

    def _make_buffers(self, shape: RoundShape) -> Buffers:
        buffers = make_round_buffers(shape, self.settings, self._vocab_size, self._kv.device)
        if shape.ruled:
            buffers.tensors["rules"] = self._rules_of(shape.sequences)
        return buffers

    def _launch(self, shape: RoundShape, asking: list[RoundRequest] | None, buffers: Buffers) -> None:
        forbid = None if asking is None else partial(_forbid, asking, shape.branches)
        run_round(self._model, self.settings, shape, buffers, forbid, self.chain)

    def _launches_of(self, shape: RoundShape) -> Callable[[], None]:
        """Return a function that launches a round of a shape in buffers of its own, but for passes after the second,
        which launch the same kernels.
        """
        shape = replace(shape, gamma=min(2, self.settings.gamma))
        return partial(self._launch, shape, None, self._make_buffers(shape))

    def _rules_of(self, sequences: int) -> Tensor:
        """Return room for what changes logits, [3, sequences, vocab] float32: the same for all shapes that fit."""
        if sequences > self._rules.shape[1]:
            self._rules = torch.zeros(3, sequences, self._vocab_size, device=self._kv.device)
        return self._rules[:, :sequences]


def _forbid(requests: list[RoundRequest], branches: int, logits: Tensor, tokens: list[Tensor]) -> None:
    """Set to -inf, in place, the tokens that requests do not allow after those drafted so far. logits: [rows,
    vocab].
    """
    drafted = torch.stack(tokens, 1).tolist() if tokens else [[]] * len(logits)
    masks = np.full((len(logits), -(-logits.shape[1] // WORD)), -1, dtype=np.int32)
    for i, item in enumerate(requests):
        assert item.allowed is not None
        for j in range(len(item.branches) or 1):
            masks[i * branches + j] = item.allowed(j, drafted[i * branches + j])
    logits.masked_fill_(~unpack_mask(torch.from_numpy(masks).to(logits.device), logits.shape[1]), -torch.inf)
