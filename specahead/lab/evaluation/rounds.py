"""One case through the engine's verify path, for many variants at once.

A variant is a method with a plan. The draft reads a case once and leaves its evidence. The target reads the dense part
once, and every variant continues from a fork of its KV, in rounds of γ + 1 tokens, reading by its own reader. All
tokens are the text's own, so that every variant sees the same rounds.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.divergence import divergence
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.attending import forward_attending, forward_weighing
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.forks import fork
from specahead.lab.evaluation.readers import LayerReader, make_reader
from specahead.lab.evaluation.workers import note_round
from specahead.sparsity.announce import announce
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection

PREFILL_CHUNK = 512
SIDE_BY_SIDE = 16  # variants that run in one pass
HOT_ROUNDS = (1, 2, 4, 8, 16, 32)  # numbers of last rounds whose blocks a hot buffer holds


@dataclass(frozen=True)
class Variant:
    """A method with a plan."""

    method: str
    budget: str
    """The row's label: a share of the KV."""
    plan: Plan
    gamma: int = 3
    """Drafted tokens a round."""
    label: str = ""
    """Stands in place of the method's name."""

    @property
    def name(self) -> str:
        return self.label or self.method


@dataclass
class VariantSums:
    """A variant's sums over rounds and cases; ratios are taken at the end."""

    nll: float = 0.0
    """Negative log likelihood of scored tokens, in nats."""
    scored: int = 0
    judged: int = 0
    """Positions whose distribution was compared with the draft's."""
    accepted: float = 0.0
    """Expected acceptances: Σ_v min(p, q) at each position."""
    varied: float = 0.0
    """Total variation from the dense distributions at these positions; 0 where the first variant is not dense."""
    recalled: int = 0
    """Right answers, of those asked."""
    asked: int = 0
    read: float = 0.0
    """Tokens of KV that were read, over layers and heads."""
    present: float = 0.0
    """Tokens of KV that there were."""
    blocks: int = 0
    """Blocks that were read."""
    rounds: int = 0
    compared: int = 0
    """Blocks of rounds after the first."""
    fresh: list[int] = field(default_factory=lambda: [0] * len(HOT_ROUNDS))
    """Of these, blocks that the last rounds did not read, for each of HOT_ROUNDS."""
    hot: list[float] = field(default_factory=lambda: [0.0] * len(HOT_ROUNDS))
    """Sum over rounds of the share of all blocks that is hot."""

    def add(self, other: "VariantSums") -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            both = [a + b for a, b in zip(mine, value, strict=True)] if isinstance(value, list) else mine + value
            setattr(self, name, both)


@dataclass
class DraftedCase:
    """The draft's view of a case."""

    evidence: list[Tensor]
    """Its weights on blocks in each round, the mean over queries: [layers, heads, blocks]."""
    log_probs: Tensor
    """[tokens from start on, vocab]."""


def rounds_of(case: Case, gamma: int) -> list[tuple[int, int]]:
    """Return the first token of each round, and the token behind its last one."""
    return [(at, min(at + gamma + 1, len(case.tokens))) for at in range(case.start, len(case.tokens), gamma + 1)]


def evaluate_case(draft: ModelRunner, target: ModelRunner, case: Case, variants: list[Variant]) -> list[VariantSums]:
    """Return the sums of each variant on one case. Variants may differ in everything but their models."""
    results = [VariantSums() for _ in variants]
    prompt = SequenceKV()
    try:
        prefill(target, prompt, case.tokens[: case.start])
        for shape in sorted({(v.gamma, v.plan.block_size) for v in variants}):
            drafted = run_draft(draft, case, *shape)
            alike = [i for i, v in enumerate(variants) if (v.gamma, v.plan.block_size) == shape]
            for group_size in sorted({variants[i].plan.group_size for i in alike}):
                chosen = [i for i in alike if variants[i].plan.group_size == group_size]
                for start in range(0, len(chosen), SIDE_BY_SIDE):
                    part = chosen[start : start + SIDE_BY_SIDE]
                    done = _run_variants(target, case, prompt, drafted, [variants[i] for i in part])
                    for i, sums in zip(part, done, strict=True):
                        results[i] = sums
    finally:
        target.kv.release(prompt)
    return results


def prefill(runner: ModelRunner, sequence: SequenceKV, tokens: list[int]) -> None:
    """Read tokens densely, some at a time."""
    for at in range(0, len(tokens), PREFILL_CHUNK):
        runner.forward([SequenceInput(sequence, tokens[at : at + PREFILL_CHUNK])])


def run_draft(draft: ModelRunner, case: Case, gamma: int, block_size: int) -> DraftedCase:
    """Have the draft read a case in rounds of gamma + 1 tokens; return its view."""
    sequence, evidence, logits = SequenceKV(), [], []
    try:
        prefill(draft, sequence, case.tokens[: case.start])
        for first, last in rounds_of(case, gamma):
            given, weights = forward_weighing(draft, sequence, case.tokens[first:last], block_size, last - first)
            evidence.append(weights.mean(1))
            logits.append(given)
    finally:
        draft.kv.release(sequence)
    return DraftedCase(evidence, torch.cat(logits).log_softmax(-1))


def asked_of(case: Case, first: int, rows: int) -> tuple[list[int], Tensor]:
    """Return which of the `rows` queries from token `first` on are scored, and the right next token of each."""
    asked = case.asked or (case.start + 1, len(case.tokens))
    inside = [i for i in range(rows) if asked[0] <= first + 1 + i < asked[1]]
    return inside, torch.tensor([case.tokens[first + 1 + i] for i in inside], dtype=torch.int64)


class _Run:
    """One variant as it goes through a case."""

    def __init__(self, target: ModelRunner, prompt: SequenceKV, variant: Variant) -> None:
        self.variant = variant
        self.reader = make_reader(variant.method, variant.plan)
        self.kv = fork(target.kv, prompt)
        self.sums = VariantSums()
        self.right = True
        self.last_announced: BlockSelection | None = None
        self.last_read: Tensor | None = None  # round in which each block was read last, int32

    def announced(self, evidence: Tensor, base: int) -> BlockSelection | None:
        """Return the selection that the draft announces; None where the method takes none.

        evidence: [draft_layers, draft_heads, blocks].
        """
        if self.variant.method != "ahead":
            return None
        self.last_announced = announce(evidence, self.variant.plan, base, self.last_announced)
        return self.last_announced

    def prepare(self, case: Case, first: int, last: int, evidence: Tensor) -> SequenceInput:
        """Return the input of the round from token `first` on, up to `last`."""
        read = None
        if isinstance(self.reader, LayerReader):
            self.reader.read(first + 1, last, evidence)
        else:
            read = self.reader.read(self.announced(evidence, first + 1), first + 1, last)
        return SequenceInput(self.kv, case.tokens[first:last], "all", read)

    def count(self, case: Case, first: int, logits: Tensor, draft_log_probs: Tensor) -> None:
        """Count a round from token `first` on. logits, draft_log_probs: [rows, vocab]."""
        following = case.tokens[first + 1 : first + 1 + len(logits)]
        log_probs = logits.log_softmax(-1)
        sums, rows = self.sums, len(following)
        sums.accepted += float(torch.minimum(log_probs[:rows], draft_log_probs[:rows]).exp().sum())
        sums.judged += rows
        inside, wanted = asked_of(case, first, rows)
        wanted = wanted.to(logits.device)
        sums.nll -= float(log_probs[inside].gather(1, wanted[:, None]).sum())
        sums.scored += len(inside)
        self.right &= bool((logits[inside].argmax(-1) == wanted).all())

    def count_blocks(self, round_: int) -> None:
        """Count the blocks that a round read."""
        chosen, sums = self.reader.chosen, self.sums
        assert chosen is not None
        read, present = self.reader.tokens_read
        sums.read, sums.present = sums.read + read, sums.present + present
        sums.blocks, sums.rounds = sums.blocks + int(chosen.sum()), sums.rounds + 1
        never = torch.iinfo(torch.int32).min // 2
        known = torch.full(chosen.shape, never, dtype=torch.int32)
        if self.last_read is not None:
            known[..., : self.last_read.shape[-1]] = self.last_read
            sums.compared += int(chosen.sum())
            for i, window in enumerate(HOT_ROUNDS):
                hot = known >= round_ - window
                sums.fresh[i] += int((chosen & ~hot).sum())
                sums.hot[i] += float(hot.float().mean())
        known[chosen] = round_
        self.last_read = known


def _forward(target: ModelRunner, runs: list[_Run], inputs: list[SequenceInput]) -> list[SequenceOutput]:
    """Run one round of all variants: by one call where the engine reads, one by one where layers choose."""
    outputs: dict[int, SequenceOutput] = {}
    together = []
    for i, (run, item) in enumerate(zip(runs, inputs, strict=True)):
        if isinstance(run.reader, LayerReader):
            logits = forward_attending(target, item.kv, item.tokens, run.reader.attend(target, item))
            outputs[i] = SequenceOutput(logits=logits)
            run.reader.finish()
        else:
            together.append(i)
    if together:
        outputs.update(zip(together, target.forward([inputs[i] for i in together]), strict=True))
    for i in together:
        reader = runs[i].reader
        assert not isinstance(reader, LayerReader)
        reader.finish(outputs[i])
    return [outputs[i] for i in range(len(runs))]


def _compare(runs: list[_Run], outputs: list[SequenceOutput], rows: int) -> None:
    """Add up how far a round's distributions are from those of the dense variant, whose output is the first."""
    dense, *others = (output.logits for output in outputs)
    for run, logits in zip(runs, others, strict=True):
        assert dense is not None and logits is not None
        run.sums.varied += float(divergence(logits[:rows], dense[:rows])[:, 0].sum())


def _run_variants(
    target: ModelRunner, case: Case, prompt: SequenceKV, drafted: DraftedCase, variants: list[Variant]
) -> list[VariantSums]:
    """Run variants of one γ, block size, group size and limit of variances side by side."""
    group_size, limit = variants[0].plan.group_size, variants[0].plan.variance_limit
    if group_size:
        target.kv.keep_group_means(group_size, len(variants) * (len(case.tokens) // group_size), limit)
    runs = [_Run(target, prompt, variant) for variant in variants]
    try:
        for round_, (first, last) in enumerate(rounds_of(case, variants[0].gamma)):
            inputs = [run.prepare(case, first, last, drafted.evidence[round_]) for run in runs]
            log_probs = drafted.log_probs[first - case.start : last - case.start]
            outputs = _forward(target, runs, inputs)
            for run, output in zip(runs, outputs, strict=True):
                assert output.logits is not None
                run.count(case, first, output.logits, log_probs)
                run.count_blocks(round_)
            if variants[0].method == "dense":
                _compare(runs[1:], outputs, min(last, len(case.tokens) - 1) - first)
            note_round()
    finally:
        for run in runs:
            target.kv.release(run.kv)
    for run in runs:
        run.sums.asked = int(case.asked is not None)
        run.sums.recalled = int(case.asked is not None and run.right)
    return [run.sums for run in runs]
