"""Every finished output is of its schema: random schemas, random logits; the real grammar, draft masks and judging.

So many as the variable SCHEMAS says; `make schemas` takes a thousand.
"""

import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import numpy as np
import torch

from orchestrator.text.compile_grammar import find_error, make_source
from orchestrator.text.structured_outputs import ANY_SPACE, COMPACT
from specahead.engine.loading.tokenizer import count_token_ids
from specahead.engine.sampling.distributions import USE_DRAFT, Sampling, Support, uniforms
from specahead.engine.sampling.grammars import LIMITS, Grammars, GrammarState, unpack_mask
from specahead.engine.sampling.judging import Drafted, judge_by_rules
from specahead.kernels.rejection import draw
from tests.unit.inline import Inline
from tests.unit.random_schemas import random_schema

GAMMA, MOST, AT_ONCE = 3, 160, 32
SCHEMAS = int(os.environ.get("SCHEMAS", "24"))
END = 0


@dataclass
class Writer:
    """A session in the making. tokens: those generated."""

    schema: dict[str, Any]
    state: GrammarState
    sampling: Sampling
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.tokens[-1:] == [END]

    @property
    def over(self) -> bool:
        return self.finished or len(self.tokens) >= MOST


def random_logits(writer: Writer, closing: np.ndarray, rows: int) -> torch.Tensor:
    """Noise, and what closes a string, an array or an object is the likelier the longer the text is."""
    noise = writer.rng.standard_normal((rows, len(closing)), np.float32) * 3
    return torch.from_numpy(noise + closing * np.float32(2 + len(writer.tokens) / 20))


def draft(writer: Writer, closing: np.ndarray) -> tuple[list[int], list[Support]]:
    """Draw tokens from other logits than the target's, of what the grammar allows, as a draft's round does."""
    tokens, supports = list[int](), list[Support]()
    numbers = uniforms(writer.sampling.seed, len(writer.tokens), GAMMA, USE_DRAFT)
    for row, number in zip(random_logits(writer, closing, GAMMA), numbers, strict=True):
        mask = torch.from_numpy(writer.state.mask_behind(tokens))
        row.masked_fill_(~unpack_mask(mask, len(row)), -torch.inf)
        probs, ids = row.softmax(-1).topk(8)
        if writer.sampling.greedy:
            tokens.append(int(ids[0]))
            continue
        probs = probs / probs.sum()
        tokens.append(int(ids[draw(probs[None], torch.tensor([number]))[0]]))
        held = probs > 0
        supports.append(Support(ids[held].numpy(), probs[held].numpy()))
    return tokens, supports


def write_round(writers: list[Writer], closing: np.ndarray) -> None:
    """Draft and judge one round of each session."""
    rounds = []
    for writer in writers:
        writer.state.follow(writer.tokens)
        tokens, supports = draft(writer, closing)
        base = len(writer.tokens)
        rounds.append(Drafted(tokens, supports, writer.sampling, base, (writer.state,), list(writer.tokens)))
    logits = torch.stack([random_logits(writer, closing, GAMMA + 1) for writer in writers])
    for writer, item, judged in zip(writers, rounds, judge_by_rules(logits, rounds), strict=True):
        assert not writer.state.error
        assert judged.finite
        accepted, following = judged.verdict
        for token in [*item.tokens[:accepted], following]:
            if not writer.over:
                writer.tokens.append(token)


def check_outputs(tokenizer: Any, schemas: int, seeds: int) -> Counter[str]:
    """Write a text for each schema and seed, and check those that came to an end. Returns how they ended."""
    vocab = count_token_ids(tokenizer)
    grammars = Grammars(tokenizer, vocab, [END], Inline())
    closing = np.array([any(each in tokenizer.decode([i]) for each in '"]}') for i in range(vocab)], np.float32)
    closing[END] = 1
    ends: Counter[str] = Counter()
    waiting: list[Writer] = []
    for number in range(schemas):
        schema = random_schema(random.Random(number))
        source = make_source("json", json.dumps(schema), COMPACT if number % 2 else ANY_SPACE, "")
        if find_error(source, LIMITS):
            ends["not compiled"] += 1
            continue
        for seed in range(seeds):
            sampling = Sampling(0.0 if seed % 2 else 1.0, seed=number)
            rng = np.random.default_rng([number, seed])
            waiting.append(Writer(schema, grammars.start(source, [], 0), replace(sampling, seed=seed), rng))
    running: list[Writer] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop())
        write_round(running, closing)
        for writer in running:
            if writer.finished:
                text = tokenizer.decode(writer.tokens[:-1])
                jsonschema.validate(json.loads(text), writer.schema)
            if writer.over:
                ends["stop" if writer.finished else "length"] += 1
        running = [writer for writer in running if not writer.over]
    return ends


def test_every_finished_output_is_of_its_schema(tokenizer: Any) -> None:
    ends = check_outputs(tokenizer, SCHEMAS, 2)
    assert sum(ends.values()) >= SCHEMAS and ends["not compiled"] < SCHEMAS / 5
    assert ends["stop"] > 0.6 * (2 * SCHEMAS - ends["not compiled"])
