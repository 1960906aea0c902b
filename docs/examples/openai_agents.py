"""An agent of openai-agents calls its tool and answers: pip install openai-agents.

Start the server first: specahead serve
"""

import os
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ.get("SPECAHEAD_URL", "http://127.0.0.1:8000")
MODEL = "tiny-target"


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    print(f"tool: the weather of {city}")
    return f"It is sunny in {city}."


set_tracing_disabled(True)  # traces would go to OpenAI
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
agent = Agent(
    name="guide",
    instructions="Be brief.",
    model=OpenAIChatCompletionsModel(MODEL, client),
    tools=[weather],
    # The bundled model is too small to decide for a call by itself, or to end its answer. The agent asks for a call in
    # its first turn alone.
    model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=64),
)
result = Runner.run_sync(agent, "Is it sunny in Rome?")
print(f"answer: {result.final_output}")
