"""The bundled pair in fewer bits: greedy `exact` in bfloat16 is near float32, and in 8 bits drafting changes no token.

On a GPU, deterministic tokens do not depend on the batch.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from specahead import LLM, SamplingParams
from specahead.models import DRAFT, TARGET
from specahead.offline.sampling import Output
from tests.books import read_passages
from tests.client import generate
from tests.plans import sparse_plan_file
from tests.stack import Services, Stack, start_gateway, start_services

NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
# Between two float32 logits that are closer than this, bfloat16 with its 8 bits of precision may choose differently.
MARGIN = 0.25


@pytest.fixture(scope="module")
def prompts(books: list[str], tokenizer: Any) -> list[list[int]]:
    return read_passages(books, tokenizer, (20, 150, 400, 800), 3, 20_000)


def ask(stack: Stack, prompts: list[list[int]], at_once: int) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, and how many of them were accepted."""
    stub = stack.stub()
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda p: generate(stub, p, max_tokens=NEW_TOKENS, ignore_eos=True), prompts))
    return [result.tokens for result in results], sum(result.speculation.accepted for result in results)


def served(draft: str, **settings: Any) -> LLM:
    """Return the bundled target in this process, beside a draft service or without one."""
    return LLM(TARGET, draft, placement="apart", plan=sparse_plan_file(), kv_tokens=40_000, **settings)


def test_where_it_differs_from_float32_two_tokens_were_close(prompts: list[list[int]], target_module: Any) -> None:
    with served(str(DRAFT), dtype="bfloat16", speculation={"gamma": 4, "audit_share": 0}) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert sum(output.speculation.accepted for output in outputs) > 0
    followed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.token_ids
        with torch.inference_mode():
            logits = target_module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits, tokens, strict=True):
            best = row.topk(2)
            if token != int(best.indices[0]):  # float32 would have seen other tokens from here on
                assert float(best.values[0] - best.values[1]) < MARGIN
                break
            followed += 1
    assert followed > NEW_TOKENS * len(prompts) / 2


def test_greedy_tokens_in_8_bits_do_not_depend_on_drafting(prompts: list[list[int]]) -> None:
    """Both targets get one prompt at a time, so that they read it in the same parts, and have steps of few rows."""

    def answers(draft: str, **speculation: Any) -> list[Output]:
        with served(draft, quantization="fp8", kv_cache_dtype="fp8", speculation=speculation) as llm:
            return [output for prompt in prompts for output in llm.generate(prompt, GREEDY)]

    plain, drafted = answers("none"), answers(str(DRAFT), gamma=4, hold=8)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.speculation.accepted for output in drafted) > 0
    assert not any(output.speculation.accepted for output in plain)


def run(services: Services, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    """Return the tokens of all prompts, and end the services."""
    try:
        stack = start_gateway(services)
        tokens, accepted = ask(stack, prompts, at_once)
        stack.stop()
    finally:
        services.stop()
    assert bool(services.draft) == (accepted > 0)
    return tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: deterministic is built for its engine")
def test_deterministic_tokens_do_not_depend_on_the_batch_nor_on_drafting(prompts: list[list[int]]) -> None:
    flags = ("--dtype", "bfloat16", "--deterministic", "--gpu-memory-utilization", "0.3")
    wanted = run(start_services(*flags, drafted=False), prompts, 1)
    for levels in ((), ("--speculation", '{"gamma": 4, "hold": 8}'), ("--speculation", "{}")):
        services = start_services(*flags, target_command=("-m", "target_service", *levels))
        assert run(services, prompts[::-1], 8)[::-1] == wanted, levels
