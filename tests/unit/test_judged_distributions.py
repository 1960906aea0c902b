"""What judges keep of drafted tokens has the target's distribution: 50,000 rows would show a twentieth of it moved.

Rounds of two drafted tokens, three rows each, by strong rules, behind texts of several lengths. As in
test_session_distributions, which says how power is computed, but without sessions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import Drafted, RuledVerdict, judge_by_rules
from specahead.engine.sampling.logit_rules import LogitRule, rules_of
from tests.unit.distributions import ALPHA, BIASES, Draws, bias_judges, changed_logits, check, cut_probs
from tests.unit.fake_models import VOCAB
from tests.unit.many_sessions import DENSE, DRAFT, SPARSE, behind, draws_of
from tests.unit.test_grammar_sessions import GRAMMARS
from tests.unit.test_session_distributions import DIGITS, LETTERS, PROMPT, RULED, STOPS, in_triples, together

GAMMA = 2
LENGTHS = 0, 1, 30, 57, 58, 59, 60, 63  # of the texts: with and without 60 tokens, which min_tokens asks for
EACH = {2: 300, 3: 160}  # rounds of each kind behind each text, by levels
TRIPLES = LLMatcher.grammar_from_regex(f"([{LETTERS}][{DIGITS}]{{2}}){{50}}")


def allowed(place: int) -> list[int]:
    return [token for token in in_triples(place) if token]


def text_of(kind: str, length: int, rng: np.random.Generator) -> list[int]:
    return [int(rng.choice(allowed(n) if kind == "grammar" else VOCAB)) for n in range(length)]


def drafted_behind(kind: str, text: list[int], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return tokens [count, GAMMA] that a draft draws by the same rules, and what it draws each from."""
    tokens, drawn_from = torch.empty(count, 0, dtype=torch.int64), list[torch.Tensor]()
    in_prompt = torch.isin(torch.arange(VOCAB), torch.tensor(PROMPT))
    counts = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=VOCAB).repeat(count, 1)
    last = torch.full((count,), [*PROMPT, *text][-1])
    for place in range(len(text), len(text) + GAMMA):
        logits = changed_logits(behind(last, DRAFT), counts, in_prompt, RULED[kind], STOPS)
        if kind == "grammar":
            logits[:, ~torch.isin(torch.arange(VOCAB), torch.tensor(allowed(place)))] = -torch.inf
        drawn_from.append(cut_probs(logits, RULED[kind]))
        last = torch.multinomial(drawn_from[-1], 1)[:, 0]
        counts = counts + torch.nn.functional.one_hot(last, VOCAB)
        tokens = torch.cat((tokens, last[:, None]), 1)
    return tokens, drawn_from


def rounds_behind(kind: str, text: list[int], count: int, first_seed: int, screens: bool) -> list[Drafted]:
    tokens, drawn_from = drafted_behind(kind, text, count)
    committed, sampling = [*PROMPT, *text], RULED[kind]
    rules: tuple[LogitRule, ...] = rules_of(sampling, len(PROMPT), STOPS)
    if kind == "grammar":
        rules = (GRAMMARS.start(TRIPLES, committed, len(PROMPT)), *rules)
    every, probs = np.arange(VOCAB), torch.stack(drawn_from, 1).float().numpy()
    return [
        Drafted(
            drafted,
            [Support(every, each) for each in of_round],
            *(replace(sampling, seed=seed), len(committed), rules, committed),
            screens=screens,
        )
        for seed, (drafted, of_round) in enumerate(zip(tokens.tolist(), probs, strict=True), first_seed)
    ]


def judge_at(level: int, rounds: Sequence[Drafted]) -> list[RuledVerdict]:
    """Judge rounds by the logits of a level."""
    places = max(len(item.tokens) for item in rounds) + 1
    tokens = torch.zeros(len(rounds), places, dtype=torch.int64)
    for row, item in zip(tokens, rounds, strict=True):
        row[: len(item.tokens) + 1] = torch.tensor([item.committed[-1], *item.tokens])
    verdicts = judge_by_rules(behind(tokens, level), list(rounds))
    assert all(verdict.finite for verdict in verdicts)
    return verdicts


def kept(item: Drafted, verdict: RuledVerdict) -> list[int]:
    accepted, following = verdict.verdict
    return [*item.tokens[:accepted], following]


def judged(levels: int, each: int) -> tuple[dict[str, Draws], int]:
    """Return what is left of rounds of each kind, and how many rows of logits decided that.

    levels: 2: the target judges what was drafted. 3: another level screens it, and the target judges what that leaves.
    each: rounds of each kind behind each text.
    """
    torch.manual_seed(0)
    rng, rows, left = np.random.default_rng(0), 0, dict[str, list[Draws]]()
    for number, kind in enumerate(RULED):
        for at, length in enumerate(LENGTHS):
            text = text_of(kind, length, rng)
            rounds = rounds_behind(kind, text, each, each * (at + len(LENGTHS) * number), screens=levels == 3)
            rows += sum(len(item.tokens) + 1 for item in rounds)
            if levels == 3:
                screened = zip(rounds, judge_at(SPARSE, rounds), strict=True)
                rounds = [
                    replace(item, tokens=kept(item, verdict), supports=verdict.supports, screens=False)
                    for item, verdict in screened
                ]
                rows += sum(len(item.tokens) + 1 for item in rounds)
            verdicts = judge_at(DENSE, rounds)
            assert 0.2 < np.mean([v.verdict[0] / len(r.tokens) for r, v in zip(rounds, verdicts, strict=True)]) < 0.98
            texts = [[*text, *kept(item, verdict)] for item, verdict in zip(rounds, verdicts, strict=True)]
            grammar = allowed if kind == "grammar" else None
            left.setdefault(kind, []).append(draws_of(texts, PROMPT, RULED[kind], STOPS, grammar, known=length))
    return {kind: together(dict(enumerate(each))) for kind, each in left.items()}, rows


@pytest.mark.parametrize("levels", [2, 3])
def test_judges_keep_the_targets_distribution(levels: int) -> None:
    """Whatever was drafted, and screened between: each kind of rule by itself, and all of them together."""
    left, rows = judged(levels, EACH[levels])
    assert rows >= 50_000
    check(together(left))
    for kind, draws in left.items():
        assert draws.p_value() > ALPHA, kind


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "bias"), [*zip([2, 3], BIASES, strict=True)])
def test_a_judge_that_moves_a_twentieth_is_found(monkeypatch: pytest.MonkeyPatch, levels: int, bias: str) -> None:
    bias_judges(monkeypatch, BIASES[bias])
    assert together(judged(levels, 100)[0]).p_value() < ALPHA


def test_a_screened_token_was_drawn_from_what_its_rules_leave() -> None:
    """What is told of each token of the verdict, by each kind of rule."""
    for number, kind in enumerate(RULED):
        text = text_of(kind, 30, np.random.default_rng(1))
        rounds = rounds_behind(kind, text, 20, number, screens=True)
        for item, verdict in zip(rounds, judge_at(SPARSE, rounds), strict=True):
            tokens = kept(item, verdict)
            how = STOPS, allowed if kind == "grammar" else None, len(text)
            wanted = draws_of([[*text, *tokens]], PROMPT, item.sampling, *how, level=SPARSE).probs
            assert len(verdict.supports) == len(tokens)
            for support, probs in zip(verdict.supports, wanted, strict=True):
                told = torch.zeros(VOCAB, dtype=torch.float64)
                told[support.ids] = torch.from_numpy(support.probs).double()
                torch.testing.assert_close(told, probs, atol=1e-5, rtol=1e-4)
