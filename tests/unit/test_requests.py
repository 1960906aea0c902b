"""What a client may ask for: everything else is refused before anything is started."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.records import Limits, check_tokens, default_sampling, encode_text, to_records
from orchestrator.requests.requests import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    invalid_argument,
    read_request,
)
from orchestrator.requests.responses_request import ResponsesRequest, to_chat
from orchestrator.text.special_tokens import TextEncoder
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.errors import InvalidArgument
from specahead.wire.messages import Exactness

LIMITS = Limits("tiny", vocab_size=4096, max_context=100, stop_token_ids=[0, 7])
PROMPT = [5, 6, 7]


def record(tokenizer: Any = None, limits: Limits = LIMITS, **fields: Any) -> Any:
    """The record of a request; `asked` returns the session that it opens."""
    request = read_request(CompletionRequest, {"prompt": PROMPT} | fields)
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        prompt = encode_text(prompt, TextEncoder(tokenizer), limits)
    return to_records(request, [check_tokens(prompt, limits)], limits)[0]


def asked(tokenizer: Any = None, limits: Limits = LIMITS, **fields: Any) -> Any:
    return record(tokenizer, limits, **fields).asked


def test_a_request_becomes_a_record(tokenizer: Any) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
    fields = {"request_id": "mine", "model": "tiny", "max_tokens": 9, "stop": ["\n"], "exactness": "approximate"}
    got = asked(tokenizer, prompt="Hello, world", **fields, **sampling)
    assert got.tokens == tokenizer.encode("Hello, world")
    assert got.prompt_tokens == len(got.tokens)
    assert (got.session, got.max_tokens, got.stop_token_ids) == ("mine", 9, [0, 7])
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.seed) == (0.5, 0.9, 3)
    assert got.exactness is Exactness.APPROXIMATE
    assert got.tokens[got.prompt_tokens :] == []


def test_approximate_says_that_it_runs_without_calibration() -> None:
    limits = replace(LIMITS, uncalibrated=True)
    totals = record(limits=limits, exactness="approximate").totals
    assert totals.summary()["uncalibrated"] is True
    assert totals.plus(record().totals).summary()["uncalibrated"] is True, "of several choices"
    assert record(limits=limits).totals.summary()["uncalibrated"] is False, "exact needs none"
    assert record(exactness="approximate").totals.summary()["uncalibrated"] is False


def test_what_is_left_out_has_defaults() -> None:
    a, b = asked(), asked()
    assert (a.max_tokens, a.sampling.temperature, a.sampling.top_p) == (16, 1.0, 1.0)
    assert a.exactness is Exactness.EXACT
    assert a.session != b.session
    assert a.sampling.seed != b.sampling.seed
    assert asked(ignore_eos=True).stop_token_ids == []


def refused(message: str, tokenizer: Any = None, **changes: Any) -> None:
    with pytest.raises(InvalidArgument, match=message):
        record(tokenizer, **changes)


NAN, INFINITY = float("nan"), float("inf")
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.01, NAN, INFINITY, -INFINITY],
    "top_p": [0.0, -0.1, 1.01, NAN, INFINITY],
    "seed": [-(2**63) - 1, 2**64],
    "stop": [[""], ["a", ""], ["x" * 257], ["x"] * 17],
    "exactness": ["EXACTLY", "none", "0"],
    "top_k": [-2],
    "min_p": [1.5, -0.1],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0],
    "min_tokens": [-1, 17],
    "logprobs": [21, -1, True],
    "logit_bias": [{"a": 1}, {"4096": 1}, {"5": "much"}],
    "request_id": ["r" * 121, "two\nlines", "nul\0", "\ud800"],
    "prompt_logprobs": [0],
    "best_of": [2],
    "functions": [[{}]],
    "suffix": ["x"],
}


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_their_field(field: str) -> None:
    for value in OUT_OF_RANGE[field]:
        refused(f"^{field}", **{field: value})


def test_prompts_that_are_refused(tokenizer: Any) -> None:
    for prompt in ("", []):
        refused("prompt is empty", tokenizer, prompt=prompt)
    for token in (-1, 4096, 2**40):
        refused(f"prompt token {token} lies outside", prompt=[1, token])
    refused("maximum context length is 100", tokenizer, prompt="one two three " * 50)


def test_a_prompt_and_output_beyond_the_context() -> None:
    assert asked(prompt=[1] * 90, max_tokens=10).max_tokens == 10
    refused(
        "maximum context length is 100 tokens; your prompt has 90 tokens, and max_tokens is 11",
        prompt=[1] * 90,
        max_tokens=11,
    )
    refused("prompt has 100 tokens", prompt=[1] * 100, max_tokens=1)
    refused("max_tokens is 9223372036854775807", max_tokens=2**63 - 1)


def test_a_prompt_and_output_beyond_the_kv_that_there_is() -> None:
    """In the words for a context that is too short, which clients know."""
    limits = replace(LIMITS, kv_tokens=60)
    assert asked(limits=limits, prompt=[1] * 50, max_tokens=10).max_tokens == 10
    refused(
        "maximum context length is 60 tokens; your prompt has 50 tokens, and max_tokens is 11",
        limits=limits,
        prompt=[1] * 50,
        max_tokens=11,
    )


def test_a_text_that_cannot_fit_is_not_even_tokenized() -> None:
    """The tokenizer given here would raise something else."""
    refused("your prompt has 3201 characters", SimpleNamespace(added_tokens_decoder={}), prompt="x" * 3201)


def test_how_tokens_are_chosen() -> None:
    """Keys of JSON objects are strings; biases are kept within OpenAI's bounds."""
    fields = {"top_k": 5, "min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.2}
    got = asked(temperature=0.5, seed=1, min_tokens=3, logit_bias={"5": -1000, "6": 3}, **fields).sampling
    assert got == Sampling(0.5, 1.0, 1, 5, 0.1, 1.5, -1, 1.2, {5: -100.0, 6: 3.0}, 3)
    assert asked(top_k=-1, seed=1).sampling == Sampling(seed=1)


def test_a_models_generation_config_gives_defaults() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "eos_token_id": 3}
    limits = replace(LIMITS, defaults=default_sampling(config))
    assert asked(limits=limits, seed=1).sampling == Sampling(0.6, 0.8, 1, 20, repetition_penalty=1.05)
    given = {"temperature": 0, "top_k": 0, "repetition_penalty": 1, "top_p": 1}
    assert asked(limits=limits, seed=1, **given).sampling == Sampling(0.0, 1.0, 1)


def test_log_probabilities_are_passed_on() -> None:
    for fields in ({}, {"logprobs": False, "echo": True}):
        assert (asked(**fields).wants_logprobs, asked(**fields).wants_prompt_logprobs) == (False, False)
    assert (asked(logprobs=0).wants_logprobs, asked(logprobs=0).alternatives) == (True, 0)
    got = asked(logprobs=3, echo=True)
    assert (got.wants_logprobs, got.wants_prompt_logprobs, got.alternatives) == (True, True, 3)
    chat = read_request(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "logprobs": True})
    assert chat.wanted_logprobs == 0


@pytest.mark.parametrize(("given", "used"), [(0.0, 0.0), (1e-9, 0.01), (0.01, 0.01), (2.0, 2.0)])
def test_a_tiny_temperature_is_raised_but_0_stays_greedy(given: float, used: float) -> None:
    sampling = asked(temperature=given).sampling
    assert sampling.temperature == used
    assert sampling.greedy == (given == 0)


@pytest.mark.parametrize(("prompts", "n"), [(3, 1), (1, 3), (2, 2)])
def test_without_a_seed_each_choice_is_drawn_by_itself(prompts: int, n: int) -> None:
    """So are the choices of several equal prompts; no choice's seed follows from another's."""
    request = read_request(CompletionRequest, {"prompt": PROMPT, "n": n})
    seeds = [record.asked.sampling.seed for record in to_records(request, [PROMPT] * prompts, LIMITS)]
    assert len(set(seeds)) == prompts * n
    assert min(abs(one - other) for one, other in combinations(seeds, 2)) > 2**20


MANY = 5000
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": ["a"] * MANY}),
        (CompletionRequest, {"prompt": ["a"] * 10 + [1] * MANY}),
        (CompletionRequest, {"prompt": [[1]] * 10 + [1] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"{token}": "" for token in range(MANY)}}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"a{token}": 1 for token in range(MANY)}}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {f"{name}": 1 for name in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [USER] * 2 * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [USER | {"tool_calls": [{}] * MANY}]}),
        (ChatRequest, {"messages": [USER], "tools": [{}] * MANY}),
        (ResponsesRequest, {"input": [{}] * MANY}),
        (ResponsesRequest, {"input": [USER | {"content": [{}] * MANY}]}),
        (ResponsesRequest, {"input": "a", "tools": [{}] * MANY}),
        (ResponsesRequest, {"input": "a", "include": [1] * MANY}),
        (TokenizeRequest, {"messages": [1] * MANY}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_a_body_of_many_faults_is_not_looked_at_for_all_of_them(model: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate(fields)
    assert error.value.error_count() <= 100
    assert len(str(invalid_argument(error.value.errors()))) < 500


def test_instructions_before_as_many_messages_as_there_may_be_are_refused() -> None:
    """The chat that serves a response has a message more than its input."""
    messages = [{"role": "user", "content": "a"}] * 8192
    assert len(to_chat(read_request(ResponsesRequest, {"input": messages})).messages) == 8192
    longer = read_request(ResponsesRequest, {"instructions": "Be brief.", "input": messages})
    with pytest.raises(InvalidArgument, match=r"^messages: List should have at most 8192 items"):
        to_chat(longer)
