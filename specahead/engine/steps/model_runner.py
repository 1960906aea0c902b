"""Running a model over paged KV: which inputs run together, in passes of which shapes.

Inputs that attend alike run in one pass (grouping.py). On a GPU short steps are CUDA graphs, one for each shape
(step_shapes.py); prompts, and everything on a CPU, run in passes of the exact size without a graph (pass_runner.py).
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.head import DraftHead, StateTap
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.parallel.commands import Command
from specahead.engine.steps.auditing import run_audited
from specahead.engine.steps.device_chain import DeviceChain, Imposed
from specahead.engine.steps.graphs import Graphs
from specahead.engine.steps.grouping import MAX_OVERHANG, StepLimits, join_rounds, kind_of
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.outputs import RoundsUnderWay, StepUnderWay, in_order
from specahead.engine.steps.pass_runner import PassRunner
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.requests import RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.round_runner import RoundRunner
from specahead.engine.steps.runner import TargetOrDraftRunner
from specahead.engine.steps.shapes import PassShape
from specahead.engine.steps.step_shapes import CapturedShapes, alternatives_beside, exact_shape
from specahead.engine.steps.tiered_steps import TieredSteps
from specahead.engine.steps.warm_up import WarmUp
from specahead.kernels.selection import WORD

STEP_QUERIES = 16  # a sequence with more tokens to run, and more than γ + 1, is reading a prompt
PINNED_SEQUENCES = 8  # of every step of a deterministic runner
PINNED_ROWS = 512  # of every pass over a prompt there
MEMORIES = 64  # of sequences that share budgets out, unless keep_memories says otherwise


class ModelRunner(TargetOrDraftRunner):
    """Runs a decoder over KV.

    max_context: tokens of a sequence, at most. step_queries: tokens of a sequence that most steps have, γ + 1 in a
    target. most_queries: that the widest of its steps has, if that is more. deterministic: what a sequence gives
    depends on its own tokens only, not on what runs beside it nor on how its rounds fell: every step has one shape,
    that of the widest, prompts are read PINNED_ROWS tokens at a time, and splits of attention are pinned. Some matrix
    products round otherwise in a step than in a prompt. Steps whose tokens a later one judges have the shapes that they
    have elsewhere. weight_bytes: of the decoder. drafting: what runs the passes that draft (SparseRead.drafts), and
    those whose tokens a later pass judges (SequenceInput.light); None: the decoder. shares_choice: whether the tokens
    of a round share the choice of its first one, in a model whose own attention chooses blocks; never in a
    deterministic runner, where what a token gives must not depend on where its round began. tap: takes the states of a
    target's tokens, which a head reads; None: nobody does.
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
        weight_bytes: int = 0,
        drafting: Decoder | None = None,
        shares_choice: bool = True,
        tap: StateTap | None = None,
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
            group=decoder.heads // kv.kv_heads,
            eight_bit=kv.scales is not None,
            pinned_sequences=PINNED_SEQUENCES if deterministic else 0,
            chosen_from=0 if decoder.block_rule is None else decoder.block_rule.dense_below,
            shares_choice=shares_choice and not deterministic,
        )
        self._captures = not enforce_eager and decoder.can_capture and self.device.type == "cuda"
        # On a CPU reading all by lists costs more than reading the weights twice. What a deterministic step gives must
        # not depend on what runs beside it.
        self._joins = self._captures and not deterministic
        # Where launches are no graphs the host is busy as long as the device.
        self.chains_steps = self._captures and not deterministic and not kv.offloads
        self.chains_rounds = not deterministic and not kv.offloads
        self._shapes = CapturedShapes(kv, self._limits, self.chains_steps)
        memories = ReadMemories(MEMORIES)
        self.passes = PassRunner(decoder, kv, self._limits, memories, self._captures, drafting, tap)
        """Runs the passes; all that a rank that follows needs of a runner."""
        self.leaves_states, self.reads_states = tap is not None, isinstance(decoder, DraftHead)
        widest = [self._limits.queries] if most_queries > step_queries else []
        self._warm_up = WarmUp(self.passes, self._limits, widest, self._shapes)
        self._rounds: RoundRunner | None = None

    @property
    def captures_made(self) -> int:  # type: ignore[override]
        return Graphs.made

    @property
    def unprepared(self) -> int:  # type: ignore[override]
        return len(self._warm_up.later)

    def read_share(self, rows: int) -> float:
        return self.decoder.read_share(rows)

    # Steps.

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        if not all(item.tokens for item in inputs):
            raise ValueError("every sequence of a batch needs at least one token")
        if any(item.audit is not None for item in inputs):
            return run_audited(inputs, self._forward)
        return self._forward(inputs)

    def _forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        # What has left the GPU would have to be fetched to be listed.
        if self._joins and all(self.kv.is_resident(item.kv) for item in inputs):
            inputs = join_rounds(inputs)
        groups: dict[Hashable, list[int]] = {}
        for i, item in enumerate(inputs):
            groups.setdefault(kind_of(item, self._limits), []).append(i)
        kinds = sorted(groups.values(), key=lambda members: self._limits.is_prompt(inputs[members[0]]))
        parts: list[tuple[list[int], list[SequenceOutput]]] = []
        started: list[tuple[list[int], StepUnderWay]] = []

        def finish() -> None:
            parts.extend((members, end()) for members, end in started)
            started.clear()

        for members in kinds:
            part = [inputs[i] for i in members]
            # Parts of prompts are launched after a step, which is waited for then: the device has work while the host
            # lays them out. Steps are waited for one by one, since they may have buffers in common.
            if not self._limits.is_prompt(part[0]):
                finish()
            started.append((members, self._start(part)))
            if not self.chains_rounds or not all(map(_gives_a_verdict_alone, part)):
                finish()
        finish()
        return in_order(parts)

    def _start(self, inputs: list[SequenceInput]) -> StepUnderWay:
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

    def _start_pass(self, inputs: list[SequenceInput], captured: bool, rows: int = 0) -> StepUnderWay:
        """Launch inputs of one kind in one pass, or run them if what they read has to be fetched.

        captured: in the shape of a step, else of the exact size. rows: of a pass of the exact size in any case.
        """

        def shape_of(part: list[SequenceInput]) -> PassShape:
            return self._shapes.of(part) if captured else exact_shape(part, self.kv, self._limits, rows)

        def start(part: list[SequenceInput]) -> StepUnderWay:
            if captured:
                return self.passes.start_step(part, self._shapes.of_started(part))
            return self.passes.start_exact(part, shape_of(part))

        tiers = TieredSteps(self.kv, self.passes, shape_of, lambda part: start(part)())
        if tiers.is_near(inputs):
            return start(inputs)
        outputs = tiers.run(inputs)
        return lambda: outputs

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

    # The device chain.

    @torch.inference_mode()
    def launch(self, inputs: list[SequenceInput], imposed: Sequence[Imposed] | None = None) -> StepUnderWay:
        self.kv.begin_pass([(item.kv, item.rows) for item in inputs])
        if imposed is not None:
            self.kv.ranks.followers.tell(Command.IMPOSE, [number for verdict in imposed for number in verdict])
            self.passes.chain.impose(imposed)
        if all(item.draft_row is None for item in inputs):
            return self.passes.launch_step(inputs, self._shapes.of_followed(inputs))
        drafts = self.passes.chain.drafts
        assert drafts is not None
        shape = self._shapes.of(inputs) if self._captures else exact_shape(inputs, self.kv, self._limits)
        if shape.judge is not None and shape.judge.support:
            shape = shape.judging(support=max(shape.judge.support, drafts.ids.shape[2]))
        return self.passes.launch_step(inputs, replace(shape, judges_drafts=True))

    def alternatives_beside(self, gamma: int) -> int:
        limits = self._limits
        # In a model that chooses blocks, the mean key of a page would miss an alternative that is moved into it.
        if limits.chosen_from or gamma >= limits.step_queries:
            return 0
        return alternatives_beside(gamma, limits.step_queries, limits)

    def make_chain(self, sequences: int, gamma: int, support: int, rows: int, block_size: int) -> DeviceChain:
        bitmap = rows, -(-self._limits.pages * PAGE_SIZE // (block_size * WORD))
        chain = DeviceChain.make(sequences, self.device)
        chain = chain.with_drafts(sequences, gamma, min(support, self.vocab_size), bitmap)
        self.passes.chain, self._shapes.judges_drafts = chain, True
        return chain

    def join_chain(self, chain: DeviceChain | None) -> None:
        assert self._rounds is not None
        self._rounds.chain = chain

    # Before the first request.

    def keep_memories(self, sequences: int) -> None:
        if self.passes.memories.made:
            raise RuntimeError("keep_memories comes before the first step that shares a budget out")
        self.kv.ranks.followers.tell(Command.KEEP_MEMORIES, [sequences])
        self.passes.memories = ReadMemories(sequences)

    @torch.inference_mode()
    def warm_up(
        self,
        reads: list[SparseRead | None],
        sequences: int,
        gammas: Sequence[int] = (),
        screened: Sequence[SparseRead | None] = (),
        lightly: bool = False,
    ) -> None:
        if self._captures:
            kinds = self._warm_up.kinds(reads, gammas, screened, lightly)
            self._warm_up.capture(kinds, sequences)

    @torch.inference_mode()
    def warm_up_more(self) -> None:
        self._warm_up.more()

    def warm_up_prompts(self, tokens: int) -> None:
        if self.device.type == "cuda":
            self._warm_up.prompts(tokens, self.forward)

    # Rounds of a draft.

    def prepare_rounds(self, settings: RoundSettings) -> None:
        if self.decoder.block_rule is not None:
            raise NotImplementedError("a model that chooses blocks by itself is not built as a draft, only as a target")
        sizes = self.vocab_size, self._limits.pages
        self._rounds = RoundRunner(self.passes.model, settings, *sizes, captures=self._captures)

    @torch.inference_mode()
    def warm_up_rounds(self, sequences: int, announces: bool, gammas: Sequence[int] = ()) -> None:
        if self._rounds is not None and self._captures:
            self._warm_up.later += self._rounds.warm_up(sequences, announces, gammas)
            self._warm_up.capture(self._warm_up.ends_of_prompts(), sequences)

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        return self.launch_rounds(requests).outputs()

    @torch.inference_mode()
    def launch_rounds(self, requests: list[RoundRequest], imposed: Sequence[Imposed] | None = None) -> RoundsUnderWay:
        if self._rounds is None:
            raise RuntimeError("rounds are drafted once prepare_rounds has said how")
        if imposed is not None and self._rounds.chain is not None:
            self._rounds.chain.impose(imposed)
        # One graph serves all rounds, and beside branches each session runs one token: what is before is read first.
        branched = any(item.branches or item.moved for item in requests)
        widest = self._rounds.settings.queries if self._captures else max(len(item.tokens) for item in requests)
        most = 1 if branched else widest
        long = [item for item in requests if len(item.tokens) > most]
        if long:
            self.forward([SequenceInput(item.kv, item.tokens[:-1]) for item in long])
            requests = [
                replace(item, tokens=item.tokens[-1:]) if len(item.tokens) > most else item for item in requests
            ]
        return self._rounds.launch(requests)


def _gives_a_verdict_alone(item: SequenceInput) -> bool:
    """Whether an input gives nothing that has to be launched for once its pass has ended."""
    reports = item.read is not None and item.read.report_blocks
    return item.drafted is not None and item.drafted.is_plain and not item.ends_prompt and not reports
