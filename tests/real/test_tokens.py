"""`exact` tokens of a real model are transformers'; `approximate` ones change nothing that is sure."""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from specahead.engine.loading.model import resolve_dtype
from tests.books import read_passages, spread
from tests.leads import LARGEST_LEAD, changed_tokens
from tests.stack import Stack

GENERATED = 24
# In 16 bits two sums of the same numbers differ by some hundredths of a nat or more: tokens as near may be swapped.
NEAR = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.1}
PROMPTS = [
    "def quick_sort(items):\n    if len(items) < 2:\n        return items\n    pivot =",
    "The capital of France is",
    "import json\n\n\ndef read_lines(path):\n    with open(path) as file:\n",
    "Once upon a time there was a king who",
    "SELECT name, count(*) FROM orders WHERE",
]


def test_exact_tokens_are_those_of_transformers(client: OpenAI, target: str, tokenizer: Any) -> None:
    """Each served token is the likeliest one of transformers, or as near as rounding can swap."""
    dtype = resolve_dtype("auto", "cuda" if torch.cuda.is_available() else "cpu", target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        how = {"model": "real", "temperature": 0, "max_tokens": GENERATED, "extra_body": {"return_token_ids": True}}
        served = client.completions.create(prompt=ids, **how).choices[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *served]])).logits[0, len(ids) - 1 : -1].float()
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(served)[:, None])[:, 0]
        assert float(behind.max()) <= NEAR[dtype], f"{prompt!r}: {behind.tolist()}"


def sources(count: int, shortest: int, longest: int, books: list[str], tokenizer: Any) -> list[list[int]]:
    """Return passages of code and of prose in turn, their lengths in tokens spread evenly on a logarithmic scale."""
    library = Path(random.__file__).parent
    code = [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "tarfile.py", "typing.py")]
    return read_passages([*code, *books[:3]], tokenizer, spread(count, shortest, longest), count)


def test_short_texts_keep_every_token_that_dense_attention_is_sure_of(
    served: Stack, books: list[str], tokenizer: Any
) -> None:
    changed = changed_tokens(served.http, "real", sources(200, 10, 1000, books, tokenizer), GENERATED)
    print(f"{len(changed)} of {200 * GENERATED} tokens changed", file=sys.stderr)
    assert [token for token in changed if token.lead > LARGEST_LEAD] == []


def test_texts_that_are_read_sparsely_keep_them_too(served: Stack, books: list[str], tokenizer: Any) -> None:
    changed = changed_tokens(served.http, "real", sources(24, 1100, 6000, books, tokenizer), GENERATED)
    print(f"{len(changed)} of {24 * GENERATED} tokens changed", file=sys.stderr)
    assert [token for token in changed if token.lead > LARGEST_LEAD] == []
