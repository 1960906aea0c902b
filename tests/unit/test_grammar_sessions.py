"""Sessions with a grammar, drafted and verified: real grammars and real judging, random logits of 32 tokens."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import Grammars, unpack_mask
from specahead.wire import messages as m
from tests.unit.clock import Clock
from tests.unit.fake_models import GREEDY, VOCAB, FakeModel
from tests.unit.inline import Inline
from tests.unit.world import Faults, World, prompts, totals

END = 0
TOKENS = ["<end>", *'{}[]":,-.0123456789abctruefls+', 'a"']


def make_tokenizer() -> Any:
    """A token for each character that JSON needs."""
    merges = [("a", '"')]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = make_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCAB, [END], Inline())
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": [True, "a", "cab"]}}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMA = LLMatcher.grammar_from_json_schema(json.dumps(OBJECT))
WORDS = LLMatcher.grammar_from_regex("(true|false|rest|a?bc|-?[0-9]{2,4})([.,][abc]{1,3}){1,3}")


def allowed(source: str, prompt: list[int], generated: list[int]) -> np.ndarray:
    state = GRAMMARS.start(source, prompt + generated, len(prompt))
    assert not state.error
    return unpack_mask(torch.from_numpy(state.masks([])[0]), VOCAB).numpy()


def masked(logits: np.ndarray, source: str, prompt: list[int], generated: list[int]) -> np.ndarray:
    return np.where(allowed(source, prompt, generated), logits, -np.inf)


def plain(model: FakeModel, source: str, prompt: list[int], count: int, least: int = 0) -> list[int]:
    """Greedy decoding by the target alone, of what a grammar allows, which is followed anew for each token.

    least: tokens before the end may come where there is anything else; then the end is what the model likes best.
    """
    generated: list[int] = []
    while len(generated) < count and generated[-1:] != [END]:
        logits = masked(model.target(prompt + generated), source, prompt, generated)
        if least and np.isfinite(logits).sum() > 1:
            logits[END] += 100 if len(generated) >= least else -np.inf
        generated.append(int(logits.argmax()))
    return generated


@pytest.mark.parametrize("source", [SCHEMA, WORDS], ids=["schema", "regex"])
@pytest.mark.parametrize(("agreement", "branches", "faults"), [(0, 1, 0), (2, 3, 0), (4, 1, 0), (2, 4, 25)])
def test_greedy_with_a_draft_is_greedy_without(
    clock: Clock, source: str, agreement: int, branches: int, faults: int
) -> None:
    """A link may misbehave, and a session may be opened again in the middle, on another target and draft."""
    model = FakeModel(agreement=agreement)
    world = World(clock, 3, model, branches=branches, faults=Faults(left=faults), grammars=GRAMMARS)
    world.attach()
    for prompt in prompts(random.Random(agreement), 8):
        expected = plain(model, source, prompt, 30)
        names = [world.open(prompt, 30, GREEDY, [END], grammar=source)]
        names += [world.open(prompt, 30, GREEDY, [END], done=expected[:3], grammar=source)] if len(expected) > 4 else []
        names += [world.open(prompt, 30, GREEDY, [END])]  # without a grammar, in the same steps
        world.run()
        for name in names[:-1]:
            assert world.ledger.records[name].generated == expected
        if not faults:
            world.check_greedy(names[-1])
    world.check_nothing_left()
    drafted, accepted = totals(world)
    assert (accepted > drafted / 4) == (agreement > 0)


@pytest.mark.parametrize("agreement", [0, 3])
def test_a_text_goes_on_up_to_min_tokens_unless_its_grammar_ends_it(clock: Clock, agreement: int) -> None:
    model = FakeModel(agreement=agreement)
    world = World(clock, 3, model, branches=2, grammars=GRAMMARS)
    world.attach()
    sampling = replace(GREEDY, min_tokens=12, logit_bias={END: 100.0})
    lengths = set()
    for source in (LLMatcher.grammar_from_regex("[ab]{2,7}"), LLMatcher.grammar_from_regex("[ab]{2,20}")):
        expected = plain(model, source, [1, 2], 30, 12)
        name = world.open([1, 2], 30, sampling, [END], grammar=source)
        world.run()
        assert world.ledger.records[name].generated == expected
        lengths.add(len(expected))
    assert lengths == {8, 13}
    world.check_nothing_left()


def test_a_draft_that_is_as_good_as_the_target_proposes_what_is_accepted(clock: Clock) -> None:
    """So all that it proposes is allowed, at each position of its rounds and its branches."""
    world = World(clock, 4, FakeModel(agreement=4), gamma=4, branches=3, grammars=GRAMMARS)
    world.attach()
    names = [world.open([i, 3], 40, GREEDY, [END], grammar=SCHEMA) for i in range(8)]
    world.run()
    commits = [commit for name in names for commit in world.commits[name][:-1]]
    assert sum(commit.drafted for commit in commits) > 40
    assert all(commit.accepted == commit.drafted for commit in commits)


def test_every_finished_output_follows_its_grammar(clock: Clock) -> None:
    world = World(clock, 6, FakeModel(agreement=3), branches=3, faults=Faults(left=30), grammars=GRAMMARS)
    world.attach()
    names = [
        world.open([1, i % 32], 80, Sampling(1.5, seed=i), [END], grammar=[SCHEMA, WORDS][i % 2]) for i in range(16)
    ]
    link = world.links[0]
    world.script = [lambda: world.detach(link), world.attach]
    world.run()
    finished = [world.ledger.records[name] for name in names]
    ended = [record for record in finished if record.finish_reason is m.FinishReason.STOP]
    assert len(ended) > 7
    for record in ended:
        text = TOKENIZER.decode(record.generated[:-1])
        if record.asked.grammar == SCHEMA:
            value = json.loads(text)
            assert isinstance(value["a"], int)
            assert set(value) <= {"a", "b"}
        else:
            assert re.fullmatch("(true|false|rest|a?bc|-?[0-9]{2,4})([.,][abc]{1,3}){1,3}", text)
    world.check_nothing_left()


def test_a_grammar_that_does_not_compile_ends_its_session_alone(clock: Clock) -> None:
    world = World(clock, 7, FakeModel(), grammars=GRAMMARS)
    world.attach()
    bad, good = (world.open([1, 2], 20, GREEDY, [END], grammar=source) for source in ("start: nothing", WORDS))
    world.run()
    (closed,) = world.closed
    assert closed.session == bad
    assert closed.code == 3  # INVALID_ARGUMENT
    assert "unknown name" in closed.message
    assert world.ended(good)
