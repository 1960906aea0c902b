"""`specahead.LLM`: the bundled pair in this process, without a server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specahead
from specahead import LLM, SamplingParams
from specahead.engine.loading.model import load_module
from specahead.models import TARGET
from target_service.draft_in_target import StepsByTurns
from tests.plans import sparse_plan_file
from tests.programs import printed_by

PROMPTS = ["The old man looked at the sea and", "It was the best of times, it was", "She opened the letter, and"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CHAT = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=4096, kv_tokens=40_000) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> list[list[int]]:
    """What transformers generates after each prompt, greedily, in float32."""
    model: Any = load_module(str(TARGET), torch.float32, "cpu", "sdpa")
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        count = {"max_new_tokens": GREEDY.max_tokens, "min_new_tokens": GREEDY.max_tokens}
        answers.append(model.generate(ids, do_sample=False, **count)[0, ids.shape[1] :].tolist())
    return answers


def test_greedy_tokens_are_those_of_transformers(llm: LLM, expected: list[list[int]], tokenizer: Any) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert [output.text for output in outputs] == [tokenizer.decode(ids) for ids in expected]
    assert {output.finish_reason for output in outputs} == {"length"}
    totals = [output.speculation for output in outputs]
    assert sum(each.accepted for each in totals) > 10 and all(each.kv_read_fraction == 1 for each in totals)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [output.token_ids for output in llm.generate(ids, GREEDY)] == expected
    assert [output.token_ids for output in llm.generate(ids[0], GREEDY)] == expected[:1]
    assert llm.generate([]) == []


def test_a_draft_service_announces_what_approximate_answers_read(books: list[str], expected: list[list[int]]) -> None:
    with LLM(plan=sparse_plan_file(), placement="apart", kv_tokens=40_000, speculation={"gamma": 4}) as apart:
        approximate = SamplingParams(temperature=0, ignore_eos=True, exactness="approximate")
        (output,) = apart.generate(books[0][4000:8000], approximate)
        assert output.prompt_tokens > 500 and output.speculation.kv_read_fraction < 1
        assert [answer.token_ids for answer in apart.generate(PROMPTS, GREEDY)] == expected


def test_more_prompts_than_sessions_come_back_in_their_order(llm: LLM) -> None:
    prompts = [[5 + number, 6, 7] for number in range(150)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(outputs) == 150
    some = llm.generate(prompts[::50], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [output.token_ids for output in outputs[::50]] == [output.token_ids for output in some]


def test_a_conversation_is_answered_by_the_template(llm: LLM, tokenizer: Any) -> None:
    (one,), two = llm.chat(CHAT, GREEDY), llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "It"}]], GREEDY)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    (same,) = llm.generate(tokenizer.encode(text, add_special_tokens=False), GREEDY)
    assert one.token_ids == two[0].token_ids == same.token_ids and len(two) == 2


def test_stop_strings_and_grammars(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, stop=("man", "sea")))
    assert output.finish_reason == "stop" and "man" not in output.text and "sea" not in output.text
    digits = SamplingParams(extra={"structured_outputs": {"regex": "[0-9]{4}"}})
    (output,) = llm.generate(PROMPTS[0], digits)
    assert output.text.isdigit() and len(output.text) == 4


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ("", {}, "the prompt is empty"),
        ([99_999], {}, "outside the vocabulary of 4096"),
        ([5] * 5000, {}, "maximum context length is 4096"),
        ("x", {"top_p": 3.0}, "top_p"),
        ("x", {"extra": {"n": 2}}, "one output for each prompt"),
    ],
)
def test_what_is_refused(llm: LLM, prompt: Any, sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.generate([prompt], SamplingParams(**sampling))


def test_settings_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_modellen \(did you mean max_model_len\?\)"):
        LLM(max_modellen=1)
    with pytest.raises(ValueError, match="there is no such folder"):
        LLM("/nonexistent")
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(max_model_len=10**9)


def test_a_failed_service_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("a broken step")

    monkeypatch.setattr(StepsByTurns, "execute", fail)
    with LLM(max_model_len=512) as broken:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="a broken step"):
                broken.generate("x")
        with pytest.raises(RuntimeError, match="a service failed: 3 model steps failed in a row"):
            broken.generate("x")
        with pytest.raises(RuntimeError, match="a service failed"):
            broken.generate("x")


def test_a_closed_one_says_so(llm: LLM) -> None:
    """It stands behind all tests that use it."""
    for _ in range(2):
        llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("x")


def test_the_package_loads_no_model_before_it_is_asked_for() -> None:
    heavy = {"torch", "ray", "grpc", "transformers"}
    printed_by(f"import sys, specahead, specahead.config; assert not {heavy} & {{*sys.modules}}")
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        specahead.LML  # noqa: B018
