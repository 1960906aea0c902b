"""Running a model over paged KV: which inputs run together, in passes of which shapes.

Inputs that attend alike run in one pass (engine.passes.grouping). On a GPU short steps are CUDA graphs, one for each
shape; prompts, and everything on a CPU, run in passes of the exact size without a graph (engine.pass_runner).
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from specahead.config.attention_backends import check_attention_backend
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.engine.sampling.judging import WIDE_SUPPORT, Drafted, judge_by_rules, launches_of_rules
from specahead.engine.steps.graphs import Graphs, tell_captures
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.pass_runner import PassRunner, Started
from specahead.engine.steps.passes.behind_rounds import LeftRounds
from specahead.engine.steps.passes.behind_steps import MOST_UNDER_WAY
from specahead.engine.steps.passes.grouping import (
    StepLimits,
    alternatives_beside,
    exact_shape,
    join_rounds,
    kind_of,
    step_shape,
    with_alternatives,
)
from specahead.engine.steps.passes.outputs import StepUnderWay
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.round_runner import ROUND_QUERIES, RoundRunner
from specahead.engine.steps.rounds.behind_steps import Imposed, LeftVerdicts, Verdict
from specahead.engine.steps.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.rounds.under_way import RoundsUnderWay
from specahead.engine.steps.runner import COMPILED_SESSIONS, WARM_SESSIONS, Runner
from specahead.kernels.backends import Backend, default_backend, power_of_two
from specahead.kernels.compiling import compile_ahead
from specahead.kernels.prompt_attention import merge_in_all_ways
from specahead.kernels.selection import WORD

STEP_QUERIES = 16  # a sequence with more tokens to run, and more than γ + 1, is reading a prompt
PINNED_SEQUENCES = 8  # of every step of a deterministic runner
PINNED_ROWS = 512  # of every pass over a prompt there
LEAST_FREE = 2 << 30  # bytes of a GPU that stay free of graphs that no request has asked for yet
MEMORIES = 64  # of sequences that share budgets out, unless keep_memories says otherwise
MAX_OVERHANG = 2 * 65  # tokens beyond the context: two rounds of the largest γ that is served
ShapeOf = Callable[[list[SequenceInput]], PassShape]  # the shape that some inputs run in
SAMPLINGS = Sampling(0.0), Sampling(1.0), Sampling(1.0, top_k=1)  # each has graphs of its own
_WIDE = Support(np.zeros(WIDE_SUPPORT, np.int64), np.zeros(WIDE_SUPPORT, np.float32))  # of a screened token


log = logging.getLogger(__name__)


class ModelRunner(Runner):
    """Runs a decoder over KV.

    max_context: tokens of a sequence, at most. step_queries: tokens of a sequence that most steps have, γ + 1 in a
    target. most_queries: that the widest of its steps has, if that is more. deterministic: what a sequence gives
    depends on its own tokens only, not on what runs beside it nor on how its rounds fell: every step has one shape,
    that of the widest, prompts are read PINNED_ROWS tokens at a time, and splits of attention are pinned. Some matrix
    products round otherwise in a step than in a prompt. Steps whose tokens a later one judges have the shapes that they
    have elsewhere. attention_backend: None: the device's, and in prompts cuDNN where it can; "torch" on a GPU needs
    enforce_eager. weight_bytes: of the decoder. drafting: what runs the passes that draft (SparseRead.drafts), and
    those whose tokens a later pass judges (SequenceInput.light); None: the decoder.

    Raises ValueError for an attention backend that cannot attend here.
    """

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        vocab_size: int,
        max_context: int,
        enforce_eager: bool = False,
        step_queries: int = 5,
        deterministic: bool = False,
        most_queries: int = 0,
        attention_backend: Backend | None = None,
        weight_bytes: int = 0,
        drafting: Decoder | None = None,
    ) -> None:
        self.decoder, self.kv, self.vocab_size, self.device = decoder, kv, vocab_size, kv.device
        self.deterministic = deterministic
        page = kv.k_pages[0][:1]
        self.weight_tokens = weight_bytes / (2 * kv.num_layers * page.nbytes / PAGE_SIZE)
        self._limits = StepLimits(
            pages=pages_for(max_context + MAX_OVERHANG),
            step_queries=step_queries,
            queries=max(step_queries, STEP_QUERIES, most_queries),
            vocab=vocab_size,
            pinned_sequences=PINNED_SEQUENCES if deterministic else 0,
        )
        self._widest = [self._limits.queries] if most_queries > step_queries and not deterministic else []
        self._captures = not enforce_eager and decoder.can_capture and self.device.type == "cuda"
        # On a CPU reading all by lists costs more than reading the weights twice. What a deterministic step gives must
        # not depend on what runs beside it.
        self._joins = self._captures and not deterministic
        # Where launches are no graphs the host is busy as long as the device.
        self.goes_ahead = self._captures and not deterministic and not kv.offloads
        self.chains = not deterministic and not kv.offloads
        self._turn = 1
        if attention_backend is not None:
            check_attention_backend(attention_backend, self.device.type, deterministic, not self._captures)
        memories = ReadMemories(MEMORIES)
        self._passes = PassRunner(decoder, kv, self._limits, memories, self._captures, attention_backend, drafting)
        self._rounds: RoundRunner | None = None
        self._later: deque[Callable[[], object]] = deque()  # what captures each kind of step that is unprepared

    @property
    def captures_made(self) -> int:  # type: ignore[override]
        return Graphs.made

    @property
    def unprepared(self) -> int:  # type: ignore[override]
        return len(self._later)

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        if not all(item.tokens for item in inputs):
            raise ValueError("every sequence of a batch needs at least one token")
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        # What has left the GPU would have to be fetched to be listed.
        if self._joins and all(self.kv.is_resident(item.kv) for item in inputs):
            inputs = join_rounds(inputs)
        groups: dict[Hashable, list[int]] = {}
        for i, item in enumerate(inputs):
            groups.setdefault(kind_of(item, self._limits), []).append(i)
        kinds = sorted(groups.values(), key=lambda members: self._limits.is_prompt(inputs[members[0]]))
        outputs: dict[int, SequenceOutput] = {}
        started: list[tuple[list[int], Started]] = []
        for members in kinds:
            part = [inputs[i] for i in members]
            # Parts of prompts are launched behind a step, which is waited for then: the device has work while the host
            # lays them out. Steps are waited for one by one, since they may have buffers in common.
            if not self._limits.is_prompt(part[0]):
                _finish(started, outputs)
            started.append((members, self._start(part)))
            if not self.chains or not all(map(_gives_a_verdict_alone, part)):
                _finish(started, outputs)
        _finish(started, outputs)
        return [outputs[i] for i in range(len(inputs))]

    @torch.inference_mode()
    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Verdict] | None = None) -> StepUnderWay:
        self.kv.begin_pass([(item.kv, item.rows) for item in inputs])
        if imposed is not None:
            self._passes.left_step.impose(imposed)
        if all(item.behind is None for item in inputs):
            return self._passes.launch_step(inputs, self._with_turn(step_shape(inputs, self.kv, self._limits)))
        left = self._passes.left_rounds
        assert left is not None
        shape = self._of_step(inputs) if self._captures else exact_shape(inputs, self.kv, self._limits)
        support = max(shape.support, left.ids.shape[2]) if shape.support else 0
        return self._passes.launch_step(inputs, replace(shape, behind=True, support=support))

    def _with_turn(self, shape: PassShape) -> PassShape:
        """Return the shape of a step that the next one may follow before the host has seen it."""
        self._turn = 3 - self._turn
        return replace(shape, turn=self._turn)

    def _of_step(self, inputs: list[SequenceInput]) -> PassShape:
        """Return the shape of the captured step of inputs of one kind: one that may run behind rounds serves others."""
        shape = step_shape(inputs, self.kv, self._limits)
        judges = (
            shape.judged and shape.queries > 1 and not shape.drafts and (not shape.width or shape.decay is not None)
        )
        if not judges or self._passes.left_rounds is None:
            return shape
        shape = replace(shape, behind=True)
        return with_alternatives(shape, self._group) if shape.queries == self._limits.step_queries else shape

    @property
    def _group(self) -> int:
        """Query heads of a KV head."""
        return self.decoder.heads // self.kv.kv_heads

    def alternatives_beside(self, gamma: int) -> int:
        queries = self._limits.step_queries
        return alternatives_beside(gamma, queries, self._group) if gamma < queries else 0

    def make_room_for_rounds(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> None:
        words = -(-self._limits.pages * PAGE_SIZE // (block_size * WORD))
        sizes = sequences, gamma, min(support, self.vocab_size), (rows, words)
        self._passes.left_rounds = LeftRounds.make(*sizes, self.device)

    @torch.inference_mode()
    def take_rounds(self, rounds: RoundsUnderWay) -> None:
        assert self._passes.left_rounds is not None
        self._passes.left_rounds.take(rounds.left())

    def _start(self, inputs: list[SequenceInput]) -> Started:
        """Run inputs of one kind, or launch them where they run in one pass. Returns what waits for their outputs."""
        is_prompt = self._limits.is_prompt(inputs[0])
        if not self._limits.pins(inputs[0]):
            return self._start_pass(inputs, captured=self._captures and not is_prompt)
        if is_prompt:
            outputs = [self._read_pinned(item) for item in inputs]
        else:
            parts = (inputs[i : i + PINNED_SEQUENCES] for i in range(0, len(inputs), PINNED_SEQUENCES))
            outputs = [output for part in parts for output in self._start_pass(part, captured=True)()]
        return lambda: outputs

    def _start_pass(self, inputs: list[SequenceInput], captured: bool, rows: int = 0) -> Started:
        """Launch inputs of one kind in one pass, or run them if what they read has to be fetched.

        captured: in the shape of a step, else of the exact size. rows: of a pass of the exact size in any case.
        """

        def shape_of(part: list[SequenceInput]) -> PassShape:
            return self._of_step(part) if captured else exact_shape(part, self.kv, self._limits, rows)

        shape = shape_of(inputs)
        if not all(self.kv.is_resident(item.kv) for item in inputs):
            outputs = self._run_over_tiers(inputs, shape_of)
            return lambda: outputs
        if captured and self.goes_ahead and shape.drafts and shape.sequences <= MOST_UNDER_WAY:
            # The same graphs as of steps that are launched.
            shape = self._with_turn(shape)
        return self._passes.start_step(inputs, shape) if captured else self._passes.start_exact(inputs, shape)

    def _read_pinned(self, item: SequenceInput) -> SequenceOutput:
        """Read a prompt in passes of one size."""
        if item.logits == "all" and len(item.tokens) > PINNED_ROWS:
            raise NotImplementedError(
                f"a deterministic runner gives a prompt's last logits or up to {PINNED_ROWS} rows"
            )
        for start in range(0, len(item.tokens), PINNED_ROWS):
            tokens = item.tokens[start : start + PINNED_ROWS]
            last = start + len(tokens) == len(item.tokens)
            part = replace(item, tokens=tokens, logits=item.logits if last else "none")
            (output,) = self._start_pass([part], captured=False, rows=PINNED_ROWS)()
        return output

    def _run_over_tiers(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[SequenceOutput]:
        """Run inputs whose KV has partly left the GPU. shape_of: the shape that some of them run in.

        What is listed is fetched, at once if it fits, else in halves; otherwise whole sequences are brought together,
        as those are whose lists name everything. What the model drafts by itself is drafted over fetched lists first,
        and judged by a pass of its own.
        """
        shape = shape_of(inputs)
        if not shape.weighs and any(_lists_everything(item) for item in inputs):
            return self._run_apart(inputs)
        if shape.weighs:
            fetched = self._draft_over_tiers(inputs, shape_of)
            outputs = self._run_staged(inputs, lambda part: replace(shape_of(part), drafts=0))
            for output, tokens in zip(outputs, fetched, strict=True):
                output.tokens_fetched += tokens
            return outputs
        if self.kv.can_fetch(shape.width, shape.dense_layers, shape.block_size):
            fetching = self._passes.run_fetching(inputs, replace(shape, fetches=True))
            if fetching is not None:
                return fetching
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._start(inputs[:half])() + self._start(inputs[half:])()
        return self._run_staged(inputs, shape_of)

    def _run_apart(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run inputs whose lists name everything after those that list less, with which they would be fetched: the room
        for what is fetched would not hold them, and what the others find there would be gone.
        """
        outputs: dict[int, SequenceOutput] = {}
        for everything in (False, True):
            members = [i for i, item in enumerate(inputs) if _lists_everything(item) is everything]
            outputs.update(zip(members, self._start([inputs[i] for i in members])(), strict=True))
        return [outputs[i] for i in range(len(inputs))]

    def _draft_over_tiers(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[int]:
        """Have the inputs' tokens drafted by passes that fetch what they list, at once if it fits, else in halves.

        A sequence whose lists do not fit alone, or cannot be fetched, drafts nothing: its first token alone is left.
        Returns how many (layer, KV head, token) triples were fetched for each.
        """
        shape = shape_of(inputs)
        if not shape.drafts:
            return [0] * len(inputs)
        if self.kv.can_fetch(shape.width, shape.dense_layers, shape.block_size):
            drafted = self._passes.run_fetching(inputs, replace(shape, fetches=True))
            if drafted is not None:
                return [output.tokens_fetched for output in drafted]
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._draft_over_tiers(inputs[:half], shape_of) + self._draft_over_tiers(inputs[half:], shape_of)
        for item in inputs:
            assert item.drafted is not None
            del item.tokens[1:], item.drafted.tokens[:]
        return [0] * len(inputs)

    def _run_staged(self, inputs: list[SequenceInput], shape_of: ShapeOf) -> list[SequenceOutput]:
        """Run inputs over whole sequences that are brought together, in as many passes as there must be."""
        outputs = []
        left = iter(inputs)
        for staged in self.kv.stage([item.kv for item in inputs]):
            part = list(itertools.islice(left, len(staged.tables)))
            brought = self._passes.start_exact(part, shape_of(part), staged.tables, staged.layer)()
            for output, tokens in zip(brought, staged.count_fetched(), strict=True):
                output.tokens_fetched = tokens
            outputs += brought
        return outputs

    # Before the first request.

    def check_sparse_prompts(self) -> None:
        if self.deterministic or not self._passes.reads_sparsely:
            raise ValueError(
                "prompts are read sparsely on a CPU, or on a GPU by cuDNN, which needs heads of at most 128 dimensions "
                "in 16 bits and attention_backend auto; and not with deterministic, since what they read depends on "
                "how they are cut: leave prompt_read_share at 1"
            )

    def keep_memories(self, sequences: int) -> None:
        if self._passes.memories.made:
            raise RuntimeError("keep_memories comes before the first step that shares a budget out")
        self._passes.memories = ReadMemories(sequences)

    @torch.inference_mode()
    def warm_up(
        self,
        reads: list[SparseRead | None],
        sequences: int,
        gammas: Sequence[int] = (),
        screened: Sequence[SparseRead | None] = (),
        lightly: bool = False,
    ) -> None:
        """Capture the steps that requests take, and load what judges by rules."""
        kinds = self._ends_of_prompts()
        every = [(read, False, False) for read in reads]
        every += itertools.product(screened, (True,), (False, True)[: 1 + lightly])
        for (read, screens, light), sampling in itertools.product(every, SAMPLINGS):
            for queries in self._queries_of(read, gammas):
                for supports in self._supports_of(queries, sampling):
                    drafted = Drafted([0] * (queries - 1), supports, sampling, 0, screens=screens)
                    kinds.append(SequenceInput(SequenceKV(), [0] * queries, "all", read, drafted, light=light))
        self._capture(kinds, sequences)

    def _queries_of(self, read: SparseRead | None, gammas: Sequence[int]) -> list[int]:
        """Return the sizes of the steps that judge rounds which read so: the widest ones confirm what is held back."""
        if read is None:
            return [1, self._limits.step_queries, *self._widest]
        if read.drafts:
            return [1, *(gamma + 1 for gamma in gammas)]
        confirms = read.budget is not None and read.budget.everything
        sizes = [self._limits.step_queries, *self._widest]
        return [1, *sizes] if confirms else sizes[:1]

    def _supports_of(self, queries: int, sampling: Sampling) -> list[list[Support]]:
        """Return what the tokens of steps of this size may have been drawn from: wide supports where some are held."""
        if sampling.greedy or not self._widest or queries == 1:
            return [[]]
        return [[_WIDE]] if queries in self._widest else [[], [_WIDE]]

    def _ends_of_prompts(self) -> list[SequenceInput]:
        """Return an input of each kind of step that reads the last few tokens of a prompt."""
        sizes = 1, self._limits.step_queries, self._limits.queries
        ends = [SequenceInput(SequenceKV(), [0] * queries) for queries in sizes]
        return [item for item in ends if not self._limits.is_prompt(item)]

    def _capture(self, kinds: list[SequenceInput], sequences: int) -> None:
        """Capture the steps of inputs of these kinds, in batches of up to `sequences`: the large ones later, and those
        that few requests take.
        """
        if not self._captures:
            return
        counts = [1 << i for i in range(power_of_two(sequences).bit_length())]
        sized = [(item, count) for item in kinds for count in counts]
        compiled = [(item, count) for item, count in sized if count <= COMPILED_SESSIONS]
        shapes = dict.fromkeys(itertools.chain.from_iterable(self._shapes_of(*each) for each in compiled))
        how = self.vocab_size, self.device, self.deterministic
        judged = [(item.drafted, count) for item, count in compiled if item.drafted and item.read is None]
        by_rules = [partial(launches_of_rules, [drafted] * count, *how) for drafted, count in judged]
        compile_ahead([*(partial(self._passes.launches_of, shape) for shape in shapes), *by_rules])
        now = [(item, count) for item, count in sized if count <= WARM_SESSIONS and not _is_rare(item)]
        with tell_captures(self._passes.graphs, "steps"):
            for item, count in tqdm(now, desc="capturing CUDA graphs of steps", disable=None):
                self._capture_step(item, count)
        later = [(item, count) for item, count in sized if count > WARM_SESSIONS or _is_rare(item)]
        later.sort(key=lambda each: (_is_rare(each[0]), each[1]))
        self._later += [partial(self._capture_step, item, count) for item, count in later]

    def _capture_step(self, item: SequenceInput, count: int) -> None:
        """Capture the steps of so many inputs like this one."""
        for shape in self._shapes_of(item, count):
            self._passes.step_of(shape, prepared=True)
        if item.drafted and item.read is None:
            logits = torch.zeros(count, len(item.tokens), self.vocab_size, device=self.device)
            judge_by_rules(logits, [item.drafted] * count, self.deterministic)

    def _shapes_of(self, item: SequenceInput, count: int) -> list[PassShape]:
        """Return the shapes of the steps of so many inputs like this one."""
        shape = self._of_step([item] * count)
        shapes = [replace(shape, turn=turn) for turn in self._turns_of(item, shape)]
        if (
            item.drafted
            and (shape.drafts or not shape.weighs)
            and self.kv.can_fetch(shape.width, shape.dense_layers, shape.block_size)
        ):
            shapes.append(replace(shape, fetches=True))
        return shapes

    @torch.inference_mode()
    def warm_up_more(self) -> None:
        if self.device.type == "cuda" and torch.cuda.mem_get_info(self.device)[0] < LEAST_FREE:
            log.warning(
                "no more CUDA graphs are captured before requests: the GPU's memory is short",
                extra={"kinds_of_steps": len(self._later), "least_free_gib": LEAST_FREE / 2**30},
            )
            self._later.clear()
            return
        self._later.popleft()()
        if not self._later:
            log.info("all CUDA graphs are captured", extra={"graphs": Graphs.made})

    def _turns_of(self, item: SequenceInput, shape: PassShape) -> tuple[int, ...]:
        """Return the turns (PassShape.turn) in which steps of a shape may run."""
        if not self.goes_ahead:
            return (0,)
        if shape.drafts:
            return 1, 2
        return (0, 1, 2) if item.drafted and item.read is None and len(item.tokens) == 1 else (0,)

    def warm_up_prompts(self, tokens: int) -> None:
        if self.device.type != "cuda":
            return
        log.info("reading a prompt to be ready", extra={"tokens": tokens})
        pages = self.kv.k_pages[0]
        merges = partial(merge_in_all_ways, self.decoder.heads, pages.shape[3], pages.dtype, self.device)
        layers = [partial(self._passes.launches_of_prompt, tokens)] if self.decoder.can_capture else []
        compile_ahead([lambda: merges, *layers])
        scratch = SequenceKV()
        room = min(tokens, self.kv.pool.available * PAGE_SIZE, (self._limits.pages * PAGE_SIZE) - MAX_OVERHANG)
        self.forward([SequenceInput(scratch, [0] * room)])
        if self.kv.means is not None:
            self.kv.extend_group_means([scratch], [min(room, self.kv.means.group_size)])
        torch.cuda.synchronize()
        self.kv.release(scratch)
        self._later += self._passes.shapes_of_prompts(tokens)

    # Rounds of a draft.

    def prepare_rounds(self, settings: RoundSettings) -> None:
        of_model = self.decoder, self.kv, settings, self.vocab_size
        self._rounds = RoundRunner(*of_model, self._limits.pages, default_backend(self.device), self._captures)

    @torch.inference_mode()
    def warm_up_rounds(self, sequences: int, methods: Sequence[str], gammas: Sequence[int] = ()) -> None:
        if self._rounds is not None:
            self._later += self._rounds.warm_up(sequences, methods, gammas)
            self._capture(self._ends_of_prompts(), sequences)

    def make_room_for_verdicts(self, sequences: int) -> None:
        assert self._rounds is not None
        self._rounds.left_verdicts = LeftVerdicts.make(sequences, self.device)

    @torch.inference_mode()
    def take_verdicts(self, step: StepUnderWay, held: Sequence[int], imposed: Sequence[Imposed] | None = None) -> None:
        assert self._rounds is not None
        assert self._rounds.left_verdicts is not None
        self._rounds.left_verdicts.take(step.left(), held, imposed)

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        return self.launch_rounds(requests).outputs()

    @torch.inference_mode()
    def launch_rounds(self, requests: list[RoundRequest]) -> RoundsUnderWay:
        if self._rounds is None:
            raise RuntimeError("rounds are drafted once prepare_rounds has said how")
        # One graph serves all rounds, and beside branches each session runs one token: what is before is read first.
        branched = any(item.branches or item.moved for item in requests)
        most = 1 if branched else ROUND_QUERIES if self._captures else max(len(item.tokens) for item in requests)
        behind = [item for item in requests if len(item.tokens) > most]
        if behind:
            self.forward([SequenceInput(item.kv, item.tokens[:-1]) for item in behind])
            requests = [
                replace(item, tokens=item.tokens[-1:]) if len(item.tokens) > most else item for item in requests
            ]
        return self._rounds.launch(requests)


def _finish(started: list[tuple[list[int], Started]], outputs: dict[int, SequenceOutput]) -> None:
    """Wait for all that was started, and add to the outputs what it gave, by the numbers of its inputs."""
    for members, finish in started:
        outputs.update(zip(members, finish(), strict=True))
    started.clear()


def _gives_a_verdict_alone(item: SequenceInput) -> bool:
    """Whether an input gives nothing that has to be launched for once its pass has ended."""
    read = item.read
    tells = read is not None and (read.report_blocks or (read.emit_weights and read.lists is not None))
    return item.drafted is not None and item.drafted.is_plain and not tells


def _lists_everything(item: SequenceInput) -> bool:
    """Whether an input's lists are to name all blocks, whatever the pass."""
    return item.read is not None and item.read.budget is not None and item.read.budget.everything


def _is_rare(item: SequenceInput) -> bool:
    """Return whether few requests take such a step: tokens are cut by top_k or min_p."""
    return item.drafted is not None and item.drafted.sampling.cuts
