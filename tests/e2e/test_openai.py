"""The HTTP endpoint through the real `openai` package, and what it refuses."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.client import metric, wait_for, wait_until_idle
from tests.stack import Stack

MODEL = "tiny-target"
PROMPT = "The old man looked at the sea and"


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def _complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | fields)
    )


def test_completion(client: OpenAI) -> None:
    answer = _complete(client)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.model == MODEL


def test_streamed_text_equals_plain_text(client: OpenAI) -> None:
    plain = _complete(client).choices[0].text
    chunks = list(_complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_token_prompt_seed_and_approximate(client: OpenAI, tokenizer: Any) -> None:
    plain = _complete(client).choices[0].text
    assert _complete(client, prompt=tokenizer.encode(PROMPT)).choices[0].text == plain
    sampled = [_complete(client, temperature=0.9, top_p=0.9, seed=5).choices[0].text for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert sampled[0] != _complete(client, temperature=0.9, top_p=0.9, seed=6).choices[0].text
    assert _complete(client, extra_body={"exactness": "approximate"}).choices[0].text


def test_a_stop_string_is_cut_off_and_never_shown(client: OpenAI) -> None:
    plain = _complete(client, max_tokens=48).choices[0].text
    stop = plain[20:26]
    answer = _complete(client, max_tokens=48, stop=[stop])
    assert answer.choices[0].text == plain[: plain.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = list(_complete(client, max_tokens=48, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain[: plain.index(stop)]


def test_chat(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me of the sea."}]
    plain = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=20
    )
    assert plain.choices[0].message.role == "assistant"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 20
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    )


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        _complete(client, model="gpt-9")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", 3),
        ("echo", True),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("best_of", 4),
        ("suffix", "x"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(client: OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        _complete(client, **{field: value})


def test_unsupported_chat_fields_are_refused_by_name(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for field, value in (("tools", [tool]), ("response_format", {"type": "json_object"}), ("surprise", 1)):
        with pytest.raises(openai.BadRequestError, match=field):
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body={field: value}
            )


def test_fields_that_ask_for_nothing_are_accepted(client: OpenAI) -> None:
    assert _complete(client, n=1, presence_penalty=0, frequency_penalty=0.0, echo=False, max_tokens=1)


def _post(stack: Stack, body: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    request = urllib.request.Request(stack.http + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2} | fields).encode()


BAD_BODIES = {
    "not JSON": (b"{", "JSON"),
    "not an object": (b"[1]", "object"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', "JSON"),
    "lone surrogate": (b'{"prompt": "\\ud800", "max_tokens": 1}', "Unicode"),
    "lone surrogate in stop": (b'{"prompt": "a", "stop": "\\ud800"}', "Unicode"),
    "NaN temperature": (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    "negative temperature": (_body(temperature=-1), "temperature"),
    "top_p 0": (_body(top_p=0), "top_p"),
    "top_p 1.5": (_body(top_p=1.5), "top_p"),
    "no prompt": (b'{"max_tokens": 1}', "prompt"),
    "empty prompt": (_body(prompt=""), "empty"),
    "empty token prompt": (_body(prompt=[]), "empty"),
    "over-long prompt": (_body(prompt=[5] * 40_000), "context"),
    "over-long text": (_body(prompt="a " * 2_000_000), "context"),
    "token out of range": (_body(prompt=[4096]), "vocabulary"),
    "negative token": (_body(prompt=[-1]), "vocabulary"),
    "several prompts": (_body(prompt=["a", "b"]), "prompt"),
    "max_tokens 0": (_body(max_tokens=0), "max_tokens"),
    "max_tokens negative": (_body(max_tokens=-5), "max_tokens"),
    "max_tokens 2^31": (_body(max_tokens=2**31), "max_tokens"),
    "max_tokens text": (_body(max_tokens="many"), "max_tokens"),
    "seed 2^64": (_body(seed=2**64), "seed"),
    "stop of numbers": (_body(stop=[1]), "stop"),
    "too many stops": (_body(stop=["a"] * 17), "stop"),
    "exactness": (_body(exactness="roughly"), "exactness"),
    "stream text": (_body(stream="yes"), "stream"),
    "stream_options without stream": (_body(stream_options={"include_usage": True}), "stream_options"),
    "unknown stream option": (_body(stream=True, stream_options={"x": 1}), "stream_options"),
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_bad_input_is_refused_with_the_reason(stack: Stack, what: str) -> None:
    body, reason = BAD_BODIES[what]
    status, answer = _post(stack, body)
    assert status == 400, answer
    assert reason in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages", [None, [], "x", [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_bad_messages_are_refused(stack: Stack, messages: Any) -> None:
    status, answer = _post(stack, _body(prompt=None, messages=messages), "/v1/chat/completions")
    assert status == 400
    assert "messages" in answer["error"]["message"]


def test_paths_and_methods(stack: Stack) -> None:
    assert _post(stack, b"{}", "/v1/embeddings")[0] == 404
    assert _post(stack, b"{}", "/v1/models")[0] == 405
    with urllib.request.urlopen(f"{stack.http}/health", timeout=10) as response:
        assert response.status == 200


def test_metrics_count_speculation(client: OpenAI, stack: Stack) -> None:
    names = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
    before = [metric(stack.http, f"{name}_total") for name in names]
    first = metric(stack.http, "spec_decode_num_accepted_tokens_per_pos_total", position="0")
    _complete(client, max_tokens=60)
    after = [metric(stack.http, f"{name}_total") for name in names]
    assert all(b > a for a, b in zip(before, after, strict=True))
    assert after[2] - before[2] <= after[1] - before[1]
    assert metric(stack.http, "spec_decode_num_accepted_tokens_per_pos_total", position="0") > first


def test_a_client_that_leaves_ends_its_session(client: OpenAI, stack: Stack) -> None:
    stream = _complete(client, max_tokens=20_000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert metric(stack.http, "num_requests_running") == 1
    stream.close()
    wait_for(lambda: metric(stack.http, "num_requests_running") == 0, 10, "the request ends")
    wait_until_idle(stack.http)


def test_the_service_is_none_the_worse(client: OpenAI) -> None:
    assert _complete(client).usage.completion_tokens == 24
