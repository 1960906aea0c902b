"""Making a runner ready before the first request: kernels are compiled, and graphs captured, some of them later."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.engine.sampling.judging import WIDE_SUPPORT, Drafted, judge_by_rules, launches_of_rules
from specahead.engine.steps.graphs import LEAST_FREE_BEFORE, Graphs, free_memory, tell_captures
from specahead.engine.steps.grouping import MAX_OVERHANG, StepLimits
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.pass_runner import PassRunner
from specahead.engine.steps.runner import COMPILED_SESSIONS, WARM_SESSIONS
from specahead.engine.steps.shapes import PassShape
from specahead.engine.steps.step_shapes import CapturedShapes
from specahead.kernels.backends import power_of_two
from specahead.kernels.compiling import compile_ahead

SAMPLINGS = Sampling(0.0), Sampling(1.0), Sampling(1.0, top_k=1)  # each has graphs of its own
_WIDE = Support(np.zeros(WIDE_SUPPORT, np.int64), np.zeros(WIDE_SUPPORT, np.float32))  # of a screened token

log = logging.getLogger(__name__)


class WarmUp:
    """Captures the steps that requests take: those of few sequences at once, others, and rare ones, later.

    widest: the queries of the widest steps, where rounds may be wider than most; else empty.
    """

    def __init__(self, passes: PassRunner, limits: StepLimits, widest: list[int], shapes: CapturedShapes) -> None:
        self._passes, self._limits, self._widest, self._shapes = passes, limits, widest, shapes
        self.later: deque[Callable[[], object]] = deque()  # what captures each kind of step that is unprepared

    @property
    def _device(self) -> torch.device:
        return self._passes.model.kv.device

    def more(self) -> None:
        """Capture one more kind of step; none any more where the GPU's memory is short."""
        if self._device.type == "cuda" and free_memory() < LEAST_FREE_BEFORE:
            log.warning(
                "no more CUDA graphs are captured before requests: the GPU's memory is short",
                extra={"kinds_of_steps": len(self.later), "least_free_gib": LEAST_FREE_BEFORE / 2**30},
            )
            self.later.clear()
            return
        self.later.popleft()()
        if not self.later:
            log.info("all CUDA graphs are captured", extra={"graphs": Graphs.made})

    def kinds(
        self,
        reads: list[SparseRead | None],
        gammas: Sequence[int],
        screened: Sequence[SparseRead | None],
        lightly: bool,
    ) -> list[SequenceInput]:
        """Return an input of each kind of step that a target takes (TargetRunner.warm_up)."""
        kinds = self.ends_of_prompts()
        every = [(read, False, False) for read in reads]
        every += itertools.product(screened, (True,), (False, True)[: 1 + lightly])
        for (read, screens, light), sampling in itertools.product(every, SAMPLINGS):
            for queries in self._queries_of(read, gammas):
                for supports in self._supports_of(queries, sampling, read):
                    drafted = Drafted([0] * (queries - 1), supports, sampling, 0, screens=screens)
                    kinds.append(SequenceInput(SequenceKV(), [0] * queries, "all", read, drafted, light=light))
        return kinds

    def _queries_of(self, read: SparseRead | None, gammas: Sequence[int]) -> list[int]:
        """Return the sizes of the steps that judge rounds which read so.

        The widest ones confirm held tokens, or judge what a text proposes, maybe beside others that read sparsely.
        """
        if read is None:
            return [1, self._limits.step_queries, *self._widest]
        if read.drafts:
            return [1, *(gamma + 1 for gamma in gammas)]
        sizes = [self._limits.step_queries, *self._widest]
        return [1, *sizes] if read.budget.everything else sizes

    def _supports_of(self, queries: int, sampling: Sampling, read: SparseRead | None) -> list[list[Support]]:
        """Return the supports that tokens of such steps may have: wide ones where some are held (step_shape)."""
        if sampling.greedy or queries not in self._widest or self._limits.pinned:
            return [[]]
        return [[], [_WIDE]] if read is None else [[_WIDE]]

    def ends_of_prompts(self) -> list[SequenceInput]:
        """Return an input of each kind of step that reads the last few tokens of a prompt."""
        sizes = 1, self._limits.step_queries, self._limits.queries
        ends = [SequenceInput(SequenceKV(), [0] * queries) for queries in sizes]
        return [item for item in ends if not self._limits.is_prompt(item)]

    def capture(self, kinds: list[SequenceInput], sequences: int) -> None:
        """Capture the steps of inputs of these kinds, in batches of up to `sequences`: the large ones later, and those
        that few requests take.
        """
        counts = [1 << i for i in range(power_of_two(sequences).bit_length())]
        sized = [(item, count) for item in kinds for count in counts]
        compiled = [(item, count) for item, count in sized if count <= COMPILED_SESSIONS]
        shapes = dict.fromkeys(itertools.chain.from_iterable(self._shapes_of(item, count) for item, count in compiled))
        judged = [(item.drafted, count) for item, count in compiled if item.drafted and item.read is None]
        by_rules = [
            partial(launches_of_rules, [drafted] * count, self._limits.vocab, self._device, self._limits.pinned)
            for drafted, count in judged
        ]
        compile_ahead([*(partial(self._passes.launches_of, shape) for shape in shapes), *by_rules])
        now = [(item, count) for item, count in sized if count <= WARM_SESSIONS and not _is_rare(item)]
        with tell_captures(self._passes.graphs, "steps"):
            for item, count in tqdm(now, desc="capturing CUDA graphs of steps", disable=None):
                self._capture_step(item, count)
        later = [(item, count) for item, count in sized if count > WARM_SESSIONS or _is_rare(item)]
        later.sort(key=lambda each: (_is_rare(each[0]), each[1]))
        self.later += [partial(self._capture_step, item, count) for item, count in later]

    def _shapes_of(self, item: SequenceInput, count: int) -> list[PassShape]:
        """Return the shapes of the steps of `count` inputs like this one, the one that fetches pages among them."""
        shapes = self._shapes.of_all_like(item, count)
        shape = shapes[0]
        if item.drafted and (shape.drafts or not shape.read.weighs) and self._passes.can_fetch(shape):
            shapes.append(shape.reading(fetches=True))
        return shapes

    def _capture_step(self, item: SequenceInput, count: int) -> None:
        """Capture the steps of `count` inputs like this one."""
        for shape in self._shapes_of(item, count):
            self._passes.step_of(shape, prepared=True)
        if item.drafted and item.read is None:
            logits = torch.zeros(count, len(item.tokens), self._limits.vocab, device=self._device)
            judge_by_rules(logits, [item.drafted] * count, self._limits.pinned)

    def prompts(self, tokens: int, forward: Callable[[list[SequenceInput]], list[SequenceOutput]]) -> None:
        """Make ready for prompts that are read up to `tokens` tokens at once. forward: runs inputs."""
        kv = self._passes.model.kv
        log.info("reading a prompt to be ready", extra={"tokens": tokens})
        compile_ahead(self._passes.launches_of_prompts(tokens))
        room = min(tokens, kv.pool.available * PAGE_SIZE, self._limits.pages * PAGE_SIZE - MAX_OVERHANG)
        odd = SequenceKV(), SequenceKV()  # Triton compiles anew for numbers that are no multiples of 16
        forward([SequenceInput(each, [0] * max(1, room // 2 - 17 - index)) for index, each in enumerate(odd)])
        for sequence in odd:
            kv.release(sequence)
        scratch = SequenceKV()
        forward([SequenceInput(scratch, [0] * room)])
        if kv.means is not None:
            kv.extend_group_means([scratch], [min(room, kv.means.group_size)])
        torch.cuda.synchronize()
        kv.release(scratch)
        self.later += self._passes.captures_of_prompts(tokens)
        self.later += self._passes.shapes_of_prompts(tokens)


def _is_rare(item: SequenceInput) -> bool:
    """Return whether few requests take such a step: tokens are cut by top_k or min_p."""
    return item.drafted is not None and item.drafted.sampling.cuts
