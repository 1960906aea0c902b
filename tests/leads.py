"""Whether `approximate` keeps each token that dense attention is sure of, asked of a server as any client asks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from openai import OpenAI

AT_ONCE = 8  # requests
LARGEST_LEAD = 2.0  # nats by which a token that was changed may have led


@dataclass(frozen=True)
class Changed:
    """A token of an `approximate` answer that is not the likeliest one of dense attention at its place.

    prompt: the number of its prompt. tokens: how many stand before it. lead: nats by which the likeliest one led.
    """

    prompt: int
    tokens: int
    lead: float


def changed_tokens(url: str, model: str, prompts: Sequence[list[int]], generated: int) -> list[Changed]:
    """Return the tokens that greedy `approximate` answers to these prompts (token ids) have changed.

    Each answer is then given as a prompt, which is read densely, for the log probabilities of its tokens.
    """
    with (
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        jobs = [pool.submit(_changed, client, model, i, prompt, generated) for i, prompt in enumerate(prompts)]
        return [token for job in jobs for token in job.result()]


def _changed(client: OpenAI, model: str, index: int, prompt: list[int], generated: int) -> list[Changed]:
    how = {"model": model, "temperature": 0}
    only_ids = {"return_token_ids": True}
    answer = client.completions.create(
        prompt=prompt, max_tokens=generated, extra_body={"exactness": "approximate"} | only_ids, **how
    ).choices[0]
    tokens = [*prompt, *answer.token_ids]
    assert len(tokens) > len(prompt), f"prompt {index} has no answer"
    scored = client.completions.create(prompt=tokens, max_tokens=0, echo=True, logprobs=1, **how).choices[0].logprobs
    leads = [
        max(best.values()) - own
        for best, own in zip(scored.top_logprobs[len(prompt) :], scored.token_logprobs[len(prompt) :], strict=True)
    ]
    return [Changed(index, len(prompt) + i, lead) for i, lead in enumerate(leads) if lead > 0]
