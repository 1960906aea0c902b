"""instructor: answers that are pydantic models, in two of its modes."""

import instructor
import pytest
from conftest import ENOUGH, MODEL
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    sunny: bool
    wind: bool


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_answer_is_the_model_that_is_asked_for(url: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "How is the weather?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Weather, max_tokens=ENOUGH, temperature=0, max_retries=0
    )
    assert isinstance(answer.sunny, bool) and isinstance(answer.wind, bool)
