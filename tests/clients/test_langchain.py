"""langchain-openai: messages, streams, tools and structured output."""

from typing import Any

import pytest
from conftest import ENOUGH, MODEL
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Tell me of the sea.")]


class Answer(BaseModel, extra="forbid"):
    """What is asked for."""

    sunny: bool


@tool
def sunny(city: bool) -> str:
    """Tell whether a city is sunny."""
    return "yes"


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=60, temperature=0, max_retries=0)


def test_invoke_and_stream_agree(chat: ChatOpenAI) -> None:
    answer = chat.invoke(MESSAGES)
    assert answer.content and answer.usage_metadata["output_tokens"] <= 60
    chunks = list(chat.stream(MESSAGES))
    assert len(chunks) > 3 and "".join(str(chunk.content) for chunk in chunks) == answer.content


def test_batches(chat: ChatOpenAI) -> None:
    answers = chat.batch([MESSAGES, MESSAGES[1:]])
    assert [answer.content for answer in answers] == [chat.invoke(m).content for m in (MESSAGES, MESSAGES[1:])]


def test_completions(url: str) -> None:
    model = OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=12, temperature=0)
    text = model.invoke("The old man")
    assert text and "".join(model.stream("The old man")) == text


def test_a_tool_that_must_be_called(chat: ChatOpenAI) -> None:
    chat = chat.model_copy(update={"max_tokens": ENOUGH})
    answer = chat.bind_tools([sunny], tool_choice="any", parallel_tool_calls=False, strict=True).invoke(MESSAGES)
    (call,) = answer.tool_calls
    assert call["name"] == "sunny" and set(call["args"]) == {"city"} and isinstance(call["args"]["city"], bool)
    history: list[Any] = [*MESSAGES, answer, *(ToolMessage("yes", tool_call_id=c["id"]) for c in answer.tool_calls)]
    assert isinstance(chat.bind_tools([sunny]).invoke(history, max_tokens=8), AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    chat = chat.model_copy(update={"max_tokens": ENOUGH})
    assert isinstance(chat.with_structured_output(Answer, method=method, strict=True).invoke(MESSAGES), Answer)


def test_the_responses_api(url: str) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=12, temperature=0, use_responses_api=True
    )
    assert chat.invoke(MESSAGES).text
