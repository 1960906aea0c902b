"""Texts and drafts that a plan is wrong for: what audits find on the bundled pair, and how the divergence is held.

A text of a book goes over into questions for what stands far back in it. The verdicts are imposed, so that all runs go
over the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
import torch

from draft_service.drafter import Drafter
from specahead import models
from specahead.engine.loading.model import LoadedModel, load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.inputs import SequenceOutput, SparseRead
from specahead.lab.evaluation.identity import take_turns
from specahead.sparsity.announce import announced_limits
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import Closed, Exactness, Open, ServedEvent
from target_service import opening, verifier
from target_service.auditing import Auditor
from target_service.hooks import Hooks
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound
from tests.books import read_books
from tests.plans import bundled_plan, selection_of
from tests.settings import draft_settings, target_settings

NAMES = ("Marlow", "Priscilla", "Hawkins", "Ottilie", "Barnabas", "Cordelia", "Ferdinand", "Rosamund")
PROMPT, BOOK = 600, 60  # tokens of the book before the session generates, and that it generates
LIMIT, SHARE = 0.2, 0.1  # of texts of a hundred rounds; 2 % of these would be two audits


@cache
def text() -> tuple[list[int], int, int]:
    """Return a text, where its generated part begins, and where the questions do."""
    tokenizer, chosen = load_tokenizer(str(models.TARGET)), Random(0)

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    book = read_books()[0]
    pages = tokens(book[len(book) // 10 :][: 10 * (PROMPT + BOOK)])[: PROMPT + BOOK]
    keys = {name: str(chosen.randrange(10_000, 100_000)) for name in NAMES}
    prompt, step = list[int](), PROMPT // len(NAMES)
    for index, (name, key) in enumerate(keys.items()):
        prompt += pages[index * step : (index + 1) * step] + tokens(f" The pass key of {name} is {key}. Remember it.")
    asked = [f" What is the pass key of {name}? The pass key of {name} is {keys[name]}." for name in reversed(NAMES)]
    generated = pages[PROMPT:]
    return [*prompt, *generated, *tokens("".join(asked))], len(prompt), len(prompt) + len(generated)


@cache
def bundled_pair() -> list[LoadedModel]:
    return [load_model(str(model), torch.float32, "cpu") for model in (models.TARGET, models.DRAFT)]


@dataclass(frozen=True)
class Round:
    """A round of the session."""

    base: int
    """Tokens before it."""
    tokens: int
    divergence: float
    """The total variation of sparse reading from dense, summed over its tokens; 0 where it reads everything."""
    audited: bool
    """Whether it was audited, so that its own verdict was exact."""
    exact: bool
    """Whether it read everything because the session could not be held."""


class Watched(Auditor):
    """Has all rounds run densely beside, to know how far each one diverges; only those that are due count as audits."""

    rounds: list[Round]
    _due = False

    def is_due(self, session: TargetSession) -> bool:
        self._due = super().is_due(session)
        audit = session.reading.audit
        return audit is not None and not audit.is_exact

    def note_round(self, item: VerifyRound, output: SequenceOutput, accepted: int) -> None:
        audit, found = item.session.reading.audit, output.divergence
        divergence = 0.0 if found is None else float(found[: accepted + 1, 0].sum())
        base = len(item.session.tokens)
        self.rounds.append(Round(base, accepted + 1, divergence, found is not None and self._due, audit.is_exact))
        super().note_round(item, output if self._due else SequenceOutput(), accepted)


class UselessReader(Reader):
    """Reads by a draft that announces as much as it may, always the blocks at the beginning."""

    since = 0
    """Tokens from which on it does; before, the draft's own announcements count."""

    def read(
        self, announced: BlockSelection | None, base: int, length: int, everything: bool = False, weighs: bool = True
    ) -> SparseRead | None:
        if announced is not None and base >= self.since:
            first, _, count = announced_limits(self.plan, base)
            blocks = list(range(first, first + count // announced.num_heads))
            announced = selection_of([blocks] * announced.num_heads, self.plan.num_blocks(base))
        return super().read(announced, base, length, everything, weighs)


def wrong(plan: Plan) -> Plan:
    """Return a plan in which half of the target's layers listen to the heads of the others, and most of the budget goes
    to the heads that matter least.
    """
    half = len(plan.blends) // 2
    importance = tuple(tuple(1 / (0.05 + value) for value in row) for row in plan.head_importance)
    return replace(plan, blends=plan.blends[half:] + plan.blends[:half], head_importance=importance)


def diverge(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[Round]:
    """Return the rounds of a session whose divergence is only measured: those of the first half of the questions."""
    tokens, _, questions = text()
    return generate(monkeypatch, plan, 1.0, tokens[: (questions + len(tokens)) // 2], questions)


def hold(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[Round]:
    """Return the rounds of a session whose divergence is held below the limit, from the book on."""
    tokens, start, _ = text()
    return generate(monkeypatch, plan, LIMIT, tokens, start)


def generate(monkeypatch: pytest.MonkeyPatch, plan: Plan, limit: float, tokens: list[int], start: int) -> list[Round]:
    """Return the rounds of a session that generates these tokens from `start` on."""
    room = {"max_context": len(tokens) + 16}

    def judge(item: VerifyRound, _vocab: int) -> tuple[int, int, int]:
        base, accepted = len(item.session.tokens), 0
        following = tokens[base : base + len(item.proposed)]
        while accepted < len(following) - 1 and item.proposed[accepted] == following[accepted]:
            accepted += 1
        return accepted, tokens[base + accepted], -1

    def emit(event: ServedEvent) -> None:
        assert not isinstance(event, Closed), event.message

    Watched.rounds = []
    monkeypatch.setattr(verifier, "Auditor", Watched)
    target, draft = bundled_pair()
    settings = target_settings(audit_share=SHARE, max_divergence=limit, max_sessions=1, draft_timeout=math.inf, **room)
    served = verifier.Verifier(make_runner(target, 2048, step_queries=5), plan, settings, Hooks(judge=judge))
    drafter = Drafter(make_runner(draft, 2048), plan, draft_settings(branches=0, **room))
    asked = Open("s", tokens[:start], start, len(tokens) - start, [], Sampling(0.0), Exactness.APPROXIMATE)
    take_turns(served, drafter, [asked], emit)
    return Watched.rounds


def served_divergence(rounds: Sequence[Round]) -> float:
    """Return the mean total variation of what the session was served; what was audited was exact."""
    return sum(each.divergence for each in rounds if not each.audited) / sum(each.tokens for each in rounds)


def read_densely(rounds: Sequence[Round]) -> float:
    """Return the share of the rounds that ran a dense pass: what holding the divergence costs."""
    return sum(each.audited or each.exact for each in rounds) / len(rounds)


def test_a_text_that_changes_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft knows where to look in the book, and not where an answer lies. In the book nothing but the usual audits
    happens. In the questions the session reads as much more as it takes.
    """
    plan, (_, _, questions) = bundled_plan(budget=0.3), text()
    monkeypatch.setattr(UselessReader, "since", questions)
    monkeypatch.setattr(opening, "Reader", UselessReader)
    free, held = (run(monkeypatch, plan) for run in (diverge, hold))
    book = [each for each in held if each.base < questions]
    assert read_densely(book) <= 0.15 and served_divergence(book) < LIMIT / 2
    assert served_divergence(free) > LIMIT
    assert served_divergence([each for each in held if each.base >= questions]) < LIMIT / 2


@pytest.mark.parametrize("case", ["wrong plan", "useless draft"])
def test_quality_is_held_whatever_is_announced(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Not held, the divergence is beyond the limit. Held, it is far below, at the cost of dense passes."""
    plan = wrong(bundled_plan()) if case == "wrong plan" else bundled_plan()
    if case == "useless draft":
        monkeypatch.setattr(opening, "Reader", UselessReader)
    free, held = (run(monkeypatch, plan) for run in (diverge, hold))
    assert served_divergence(free) > 1.2 * LIMIT and read_densely(free) < 0.15
    assert served_divergence(held) < LIMIT / 2 and served_divergence(held) < served_divergence(free) / 3
    assert held[-1].exact, "it could not be held otherwise"
