"""openai-agents: an agent with a tool, by way of chats and of responses."""

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from conftest import MODEL
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
CALLS: list[bool] = []


@function_tool
def note_sun(sunny: bool) -> str:
    """Note whether it is sunny."""
    CALLS.append(sunny)
    return "noted"


def make_agent(url: str, kind: type, **settings: object) -> Agent:
    model = kind(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    limits = ModelSettings(max_tokens=60, temperature=0, **settings)
    return Agent(name="keeper", instructions="Be brief.", model=model, model_settings=limits)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_an_agent_answers(url: str, kind: type) -> None:
    result = await Runner.run(make_agent(url, kind), "Tell me of the sea.")
    assert result.final_output
    streamed = Runner.run_streamed(make_agent(url, kind), "Tell me of the sea.")
    events = [event async for event in streamed.stream_events()]
    assert streamed.final_output == result.final_output and len(events) > 3


async def test_an_agent_calls_its_tool_and_goes_on(url: str) -> None:
    """It must call it at first; what it says then is up to the model."""
    CALLS.clear()
    agent = make_agent(url, OpenAIChatCompletionsModel, tool_choice="required").clone(tools=[note_sun])
    result = await Runner.run(agent, "Is it sunny?", max_turns=3)
    assert CALLS and result.final_output is not None
