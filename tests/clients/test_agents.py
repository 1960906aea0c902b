"""openai-agents: an agent with a tool, over chats and over responses."""

from collections.abc import AsyncIterator
from typing import Any

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from conftest import ENOUGH, MODEL
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
CALLS: list[bool] = []


@function_tool
def note_sun(sunny: bool) -> str:
    """Note whether it is sunny."""
    CALLS.append(sunny)
    return "noted"


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def make_agent(model: Any, **settings: Any) -> Agent:
    limits = ModelSettings(temperature=0, **settings)
    return Agent(name="keeper", instructions="Be brief.", model=model, model_settings=limits)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_an_agent_answers(client: AsyncOpenAI, kind: Any) -> None:
    """The answer stops at its first e, since the framework ignores a response that is cut off."""
    agent = make_agent(kind(MODEL, client), extra_body={"stop": ["e"]})
    result = await Runner.run(agent, "Tell me of the sea.")
    assert result.final_output
    streamed = Runner.run_streamed(agent, "Tell me of the sea.")
    events = [event async for event in streamed.stream_events()]
    assert streamed.final_output == result.final_output and len(events) > 3


async def test_an_agent_calls_its_tool_and_goes_on(client: AsyncOpenAI) -> None:
    """The agent must call its tool first; the model chooses what it says then."""
    CALLS.clear()
    settings: Any = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": ENOUGH}
    agent = make_agent(OpenAIChatCompletionsModel(MODEL, client), **settings).clone(tools=[note_sun])
    result = await Runner.run(agent, "Is it sunny?", max_turns=3)
    assert CALLS and result.final_output is not None
