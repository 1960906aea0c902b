"""Grammars: which tokens may come, followed over rounds of which some tokens are taken back."""

import json
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from specahead.engine.loading.tokenizer import count_token_ids, load_tokenizer
from specahead.engine.sampling.grammars import KEPT_GRAMMARS, Grammars, GrammarState, unpack_mask
from specahead.models import TARGET
from tests.unit.inline import Inline

TOKENIZER = load_tokenizer(str(TARGET))
VOCAB, END = count_token_ids(TOKENIZER), TOKENIZER.eos_token_id
PROMPT = [5, 6, 7]
SOURCES = {
    "schema": LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}})
    ),
    "regex": LLMatcher.grammar_from_regex(r"(ab|cd)+\d{2,3}"),
    "nested": LLMatcher.grammar_from_lark('start: "[" start* "]" | "x"'),
    "choice": LLMatcher.grammar_from_lark('start: "yes" | "no" | "not at all"'),
}


GRAMMARS = Grammars(TOKENIZER, VOCAB, [END], executor=Inline())


def start(source: str, generated: list[int] | None = None) -> GrammarState:
    return GRAMMARS.start(source, PROMPT + (generated or []), len(PROMPT))


def allowed(mask: np.ndarray) -> list[int]:
    return unpack_mask(torch.from_numpy(mask), VOCAB).nonzero()[:, 0].tolist()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rounds_leave_the_state_where_a_new_one_stands(source: str, seed: int) -> None:
    """Proposed tokens are allowed or not, some are committed; then all masks are those of a session that is resumed."""
    rng = random.Random(seed)
    state, generated = start(source), list[int]()
    for _ in range(12):
        proposed: list[int] = []
        for _ in range(rng.randrange(5)):
            may = allowed(state.mask_behind(proposed)) if rng.random() < 0.9 else list(range(VOCAB))
            proposed.append(rng.choice(may))
        masks = state.masks(proposed)
        again = start(source, generated)
        assert not again.error
        np.testing.assert_array_equal(masks, again.masks(proposed))
        assert len(masks) == 1 + next(
            (i for i, token in enumerate(proposed) if token == END or token not in allowed(masks[i])), len(proposed)
        )
        for i in range(len(masks)):
            np.testing.assert_array_equal(masks[i], state.mask_behind(proposed[:i]))
        accepted = rng.randrange(len(masks))
        generated += [*proposed[:accepted], rng.choice(allowed(masks[accepted]))]
        state.follow(PROMPT + generated)
        if generated[-1] == END:
            break
        assert not state.error


@pytest.mark.parametrize(
    ("source", "text", "ends"),
    [("choice", "no", True), ("choice", "ye", False), ("nested", "[[x]x]", True), ("schema", '{"a": 1}', True)],
)
def test_the_end_is_allowed_only_where_the_text_is_complete(source: str, text: str, ends: bool) -> None:
    state = start(SOURCES[source], ids(text))
    assert (END in allowed(state.masks([])[0])) is ends
    assert not state.error


def test_behind_the_end_nothing_is_judged() -> None:
    state = start(SOURCES["regex"], [*ids("ab12"), END])
    assert not state.error
    assert len(allowed(state.masks([1, 2])[0])) == VOCAB
    assert len(start(SOURCES["regex"], ids("ab12")).masks([END, 9, 9])) == 1


def test_a_rule_forbids_at_each_position_what_the_proposed_tokens_before_it_leave() -> None:
    state, proposed = start(SOURCES["choice"]), [*ids("no"), *ids("t"), 99, 100]
    logits = torch.randn(len(proposed) + 1, VOCAB)
    changed = logits.clone()
    state.apply(changed, PROMPT, proposed)
    masks = state.masks(proposed)
    for row, mask in zip(changed, masks, strict=False):
        assert row.isfinite().nonzero()[:, 0].tolist() == allowed(mask)
    torch.testing.assert_close(changed[len(masks) :], logits[len(masks) :])  # behind a token that is not allowed


def test_what_the_grammar_does_not_allow_ends_the_session_with_a_reason() -> None:
    state = start(SOURCES["choice"], ids("yet"))
    assert "is not what the grammar allows" in state.error
    logits = torch.zeros(3, VOCAB)
    state.apply(logits, PROMPT + ids("yet"), [1, 2])
    assert logits[0].isneginf().all()
    assert len(allowed(state.mask_behind([]))) == VOCAB


def test_a_grammar_that_does_not_compile_says_why() -> None:
    state = start("start: nothing")
    assert state.ready
    assert "unknown name" in state.error


def test_a_grammar_too_wide_to_follow_says_why() -> None:
    def choices(i: int) -> list[dict[str, Any]]:
        inner = {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i * 7 % 300}"}}}
        return [{"$ref": f"#/$defs/d{(i + 1) % 300}"}, inner]

    wide = {f"d{i}": {"anyOf": choices(i)} for i in range(300)}
    state = start(LLMatcher.grammar_from_json_schema(json.dumps({"$defs": wide, "$ref": "#/$defs/d0"})))
    masks = state.masks(ids('{"x": {"x": {"x": '))
    assert "max is 2000" in state.error
    assert not masks.any()


def test_a_grammar_that_is_too_large_to_follow_says_so_and_blames_no_token() -> None:
    state = start(json.dumps({"grammars": [{"lark_grammar": 'start: "a"{100000}'}]}))
    state.masks([])
    state.follow([*PROMPT, *ids("a")])
    assert "Too many items" in state.error


def test_compiling_leaves_the_thread_that_asks_and_says_when_it_is_done() -> None:
    compiled = threading.Event()
    grammars = Grammars(TOKENIZER, VOCAB, [END])
    grammars.on_compiled = compiled.set
    state = grammars.start(SOURCES["schema"], PROMPT, len(PROMPT))
    assert compiled.wait(30)
    assert state.ready
    assert allowed(state.masks([])[0])


def test_compiled_grammars_are_kept_up_to_a_bound() -> None:
    grammars = Grammars(TOKENIZER, VOCAB, [END], executor=Inline())
    for number in range(KEPT_GRAMMARS + 5):
        assert not grammars.start(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"), PROMPT, 3).error
    assert len(grammars._compiled) == KEPT_GRAMMARS
