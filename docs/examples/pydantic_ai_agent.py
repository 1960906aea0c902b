"""An agent of Pydantic AI calls its tool and answers in a form: pip install "pydantic-ai-slim[openai]".

Start the server first: specahead serve
"""

import os
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ.get("SPECAHEAD_URL", "http://127.0.0.1:8000")
MODEL = "tiny-target"


class Report(BaseModel):
    """The answer."""

    sunny: bool


class CallFirst(AbstractCapability):
    """The bundled model is too small to decide for a call by itself: the first step asks for the tool."""

    def get_model_settings(self) -> Callable[[RunContext], ModelSettings]:
        return lambda context: ModelSettings(tool_choice=["weather"] if context.run_step == 1 else "none")


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = ModelSettings(max_tokens=128, parallel_tool_calls=False)
agent = Agent(model, output_type=Report, model_settings=settings, capabilities=[CallFirst()])


@agent.tool_plain(strict=True)
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    print(f"tool: the weather of {city}")
    return f"It is sunny in {city}."


print(f"answer: {agent.run_sync('Is it sunny in Rome?').output}")
