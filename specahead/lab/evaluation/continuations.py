"""Passages continued by a draft and its target: whole rounds of the draft, each verified densely by the target.

The target reads everything, so all ways of drafting lead to the same text, and its weights at the γ + 1 queries of a
round say how good the round's announcement was. Plain text is continued greedily by both; a case that asks for
something goes on in its own words to the end of the answer, and the answer counts: that is where what matters changes
from one round to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import RoundRequest
from specahead.lab.evaluation.attending import forward_weighing
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.choice import mandatory
from specahead.lab.evaluation.forks import fork
from specahead.lab.evaluation.rounds import prefill
from specahead.lab.evaluation.workers import note_rounds
from specahead.sparsity.announce import LEAST_WINDOW
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import announced_selection, announcement_request, round_settings
from specahead.sparsity.selection import BlockSelection

GAMMA = 4


@dataclass
class DraftSums:
    """Sums over rounds and passages for one read share. In an answer only tokens behind right ones count."""

    rounds: int = 0
    """Rounds with a token that counts."""
    drafted: int = 0
    """Proposed tokens."""
    accepted: int = 0
    mass: float = 0.0
    """Sum over rounds of the share of the target's attention on announced and mandatory blocks."""
    mandatory: float = 0.0
    """The same on mandatory blocks alone."""
    read: int = 0
    """Blocks that the draft's passes read, over layers and KV heads."""
    present: int = 0
    """Blocks that dense passes would have read."""

    def add(self, other: "DraftSums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def measure_case(
    draft: ModelRunner,
    target: ModelRunner,
    plan: Plan,
    case: Case,
    shares: Sequence[float],
    generated: int,
    gamma: int = GAMMA,
) -> list[DraftSums]:
    """Continue the case from its start, once for each read share: by `generated` tokens or more, or to its answer."""
    prompts = SequenceKV(), SequenceKV()
    try:
        for runner, prompt in zip((draft, target), prompts, strict=True):
            prefill(runner, prompt, case.tokens[: case.start - 1])
        results = []
        for share in shares:
            draft.prepare_rounds(round_settings(plan, gamma, 1, share))
            results.append(Continuation(draft, target, plan, case, gamma, share).run(*prompts, generated))
        return results
    finally:
        for runner, prompt in zip((draft, target), prompts, strict=True):
            runner.kv.release(prompt)


class Continuation:
    """One passage, continued by a draft whose rounds are prepared with a read share."""

    def __init__(
        self, draft: ModelRunner, target: ModelRunner, plan: Plan, case: Case, gamma: int, share: float
    ) -> None:
        self.draft, self.target, self.plan = draft, target, plan
        self.gamma, self.case, self.share = gamma, case, share
        self.tokens = case.tokens[: case.start]
        self.last: BlockSelection | None = None
        """The selection that the last round announced."""
        self.sums = DraftSums()

    def run(self, draft_prompt: SequenceKV, target_prompt: SequenceKV, generated: int) -> DraftSums:
        end = len(self.case.tokens) if self.case.asked else len(self.tokens) + generated
        draft_kv, target_kv = fork(self.draft.kv, draft_prompt), fork(self.target.kv, target_prompt)
        try:
            while len(self.tokens) < end:
                self._round(draft_kv, target_kv)
        finally:
            self.draft.kv.release(draft_kv)
            self.target.kv.release(target_kv)
        return self.sums

    def _round(self, draft_kv: SequenceKV, target_kv: SequenceKV) -> None:
        base = len(self.tokens)
        drafted = self._draft(draft_kv, base)
        wanted, weights = self._verify(target_kv, drafted)
        if self.case.asked:
            wanted = self.case.tokens[base : base + self.gamma + 1]
        # zip: the answer may end within the round.
        right = [token == other for token, other in zip(drafted, wanted, strict=False)]
        accepted = next((i for i, same in enumerate(right) if not same), len(right))
        self.tokens += wanted[: accepted + 1]
        for runner, kv in ((self.draft, draft_kv), (self.target, target_kv)):
            runner.kv.truncate(kv, base + accepted)
        self._count(base, accepted, len(right), weights)
        note_rounds(1)

    def _verify(self, kv: SequenceKV, drafted: list[int]) -> tuple[list[int], Tensor]:
        """Return the target's likeliest tokens [γ + 1] and its weights on blocks [layers, γ + 1, heads, blocks]."""
        tokens, size = [self.tokens[-1], *drafted], self.plan.block_size
        logits, weights = forward_weighing(self.target, kv, tokens, size, len(tokens))
        return logits.argmax(-1).tolist(), weights

    def _count(self, base: int, accepted: int, compared: int, weights: Tensor) -> None:
        """Add a round to the sums; of an answer's rounds only tokens that stood on right ones count."""
        positions = range(self.gamma)
        if self.case.asked:
            positions = range(self.case.asked[0] - base, min(accepted + 1, compared))
        counted = [i < accepted for i in positions if i >= 0]
        if counted:
            assert self.last is not None
            self.sums.rounds += 1
            self.sums.drafted += len(counted)
            self.sums.accepted += sum(counted)
            mass, of_mandatory = announced_mass(weights, self.last, self.plan, base)
            self.sums.mass += mass
            self.sums.mandatory += of_mandatory

    def _draft(self, kv: SequenceKV, base: int) -> list[int]:
        """Return γ tokens; what the round announces is the `last` selection from now on."""
        plan = self.plan
        request = RoundRequest(
            kv,
            self.tokens[kv.length :],
            temperature=0.0,
            top_p=1.0,
            uniforms=np.zeros(self.gamma + 1),
            announce=announcement_request(plan, base, self.last),
        )
        (output,) = self.draft.draft_rounds([request])
        assert output.bitmap is not None
        self.last = announced_selection(output.bitmap, plan, base)
        kv.length = base + self.gamma
        heads = plan.draft_layers * self.draft.kv.kv_heads
        dense = sum(plan.num_blocks(base + i) for i in range(self.gamma + 1))
        self.sums.present += heads * dense
        self.sums.read += heads * (dense if self.share == 1 else self._blocks_read(base))
        return output.tokens[: self.gamma]

    def _blocks_read(self, base: int) -> int:
        """Return how many blocks of a KV head a round reads: all in its first pass, in others a share, and no less than
        the first and the newest blocks.
        """
        plan, first, last = self.plan, self.plan.num_blocks(base), self.plan.num_blocks(base + self.gamma)
        chosen = max(0, first - plan.window_blocks - plan.sink_blocks)
        return first + self.gamma * max(int(last * self.share), last - chosen)


def announced_mass(weights: Tensor, announced: BlockSelection, plan: Plan, base: int) -> tuple[float, float]:
    """Return the share of a target's attention on announced and mandatory blocks, and on mandatory ones alone.

    weights: [layers, queries, heads, blocks] float32, of dense attention; sparse layers count.
    """
    blocks = weights.shape[3]
    rows = torch.from_numpy(announced.resized(blocks).matrix()).unflatten(0, (-1, plan.target_kv_heads))
    always = mandatory(plan, base, blocks, LEAST_WINDOW)
    chosen = rows | always  # [sparse layers, kv_heads, blocks]
    by_kv_head = weights[plan.sparse_layers].cpu().unflatten(2, (plan.target_kv_heads, -1))
    mass = (by_kv_head * chosen[:, None, :, None]).sum(-1).mean()
    return float(mass), float(by_kv_head[..., always].sum(-1).mean())
