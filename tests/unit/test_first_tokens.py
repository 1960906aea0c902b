"""First tokens: they come with the pass that reads the end of a prompt, and wait for no draft and no long prompt."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.sampling.logit_rules import rules_of
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.step_loop import oldest_first, share_prefill
from specahead.wire import messages as m
from target_service.prompts import LEAST_PART, tokens_of_step
from tests.unit.clock import Clock
from tests.unit.fake_models import FakeModel
from tests.unit.steps import take_step
from tests.unit.world import World

CHUNK = 24  # of a World
GREEDY, SAMPLED = Sampling(0.0), Sampling(0.9, 0.95, seed=3)
RULED = Sampling(0.8, seed=5, top_k=20, repetition_penalty=1.3)


# The pass of a prompt's end


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(load_model(str(models.TARGET), torch.float32, "cpu"), 4096)


def text(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 4000, count).tolist()


def judged(prompt: list[int], proposed: list[int], sampling: Sampling, logprobs: int | None = None) -> Drafted:
    rules = rules_of(sampling, len(prompt), [])
    return Drafted(proposed, [], sampling, len(prompt), tuple(rules), prompt, logprobs)


def told(outputs: list[SequenceOutput]) -> list[object]:
    return [
        (output.verdict, [(each.top_ids, round(each.logprob, 3)) for each in output.logprobs]) for output in outputs
    ]


@pytest.mark.parametrize("proposes", [False, True])
def test_the_pass_of_a_prompts_end_gives_what_a_round_after_it_gives(runner: ModelRunner, proposes: bool) -> None:
    """Whether the end is short, so that it runs in a step's shape, or long; beside others' rounds and prompts."""
    how = [(2, GREEDY, None), (4, SAMPLED, None), (5, RULED, 2), (9, GREEDY, 1), (60, SAMPLED, None), (130, RULED, 1)]
    known, prompts = 40, [text(40 + end, end) for end, _, _ in how]
    after: list[SequenceOutput] = []
    together: list[SequenceInput] = []
    for prompt, (_, sampling, logprobs) in zip(prompts, how, strict=True):
        kv = SequenceKV()
        runner.forward([SequenceInput(kv, prompt[:-1])])
        drafted = judged(prompt, [], sampling, logprobs)
        (first,) = runner.forward([SequenceInput(kv, prompt[-1:], "all", drafted=drafted)])
        proposed = [first.verdict[1], 7, 8] if proposes else []
        runner.kv.truncate(kv, len(prompt) - 1)
        drafted = judged(prompt, proposed, sampling, logprobs)
        after += runner.forward([SequenceInput(kv, [prompt[-1], *proposed], "all", drafted=drafted)])
        runner.kv.truncate(kv, known)
        drafted = judged(prompt, list(proposed), sampling, logprobs)
        together.append(SequenceInput(kv, [*prompt[known:], *proposed], "all", drafted=drafted))
    assert all(item.ends_prompt for item in together)
    other = SequenceKV()
    part = SequenceInput(other, text(70, 1))
    *outputs, _ = runner.forward([*together, part])
    assert told(outputs) == told(after)
    assert all(output.logits is None and output.finite for output in outputs)
    assert not proposes or any(output.verdict and output.verdict[0] > 0 for output in outputs)
    for item, prompt in zip(together, prompts, strict=True):
        assert item.kv.length == len(prompt) + len(item.drafted.tokens if item.drafted else [])
        runner.kv.release(item.kv)
    assert other.length == 70
    runner.kv.release(other)


# Sessions


class Steps:
    """A target alone, step by step; a draft is attached that says nothing."""

    def __init__(self, clock: Clock, exactness: m.Exactness = m.Exactness.EXACT) -> None:
        self.world = World(clock, 1, FakeModel(), max_sessions=8)
        self.link = self.world.attach()
        self.exactness = exactness

    def until_first_token(self, prompt: list[int]) -> int:
        """Return how many steps a new session's first token takes."""
        name = self.world.open(prompt, 4, exactness=self.exactness)
        for count in itertools.count(1):
            assert take_step(self.world.verifier) is not None
            if self.world.commits[name]:
                return count
        raise AssertionError


@pytest.mark.parametrize("exactness", list(m.Exactness))
@pytest.mark.parametrize("length", [1, 2, 20, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 1])
def test_a_first_token_comes_with_the_last_part_of_its_prompt(
    clock: Clock, length: int, exactness: m.Exactness
) -> None:
    """Though a draft is attached; only the second token waits for it, as long as patience lasts."""
    steps = Steps(clock, exactness)
    assert steps.until_first_token([5] * length) == max(1, -(-(length - 1) // CHUNK))
    verifier = steps.world.verifier
    assert verifier.plan_step() is None and not verifier.counters["draft_timeouts"]
    clock.now += 2
    assert verifier.plan_step() is not None and verifier.counters["draft_timeouts"] == 1


def test_a_proposal_that_is_here_is_judged_with_the_prompts_end(clock: Clock) -> None:
    """So nothing that the draft has drafted is lost, and it goes on from the verdict."""
    world = World(clock, 1, FakeModel())
    link = world.attach()
    name = world.open([5] * 60, 12)
    steps = 0
    while not world.commits[name]:
        while link.to_draft:
            world._deliver(link, link.to_draft)
        for _ in range(8):  # the draft reads faster
            world.draft_side.advance(world.rng)
        while link.to_target:
            world._deliver(link, link.to_target)
        assert take_step(world.verifier) is not None
        steps += 1
    assert steps == 3 and world.commits[name][0].drafted == world.commits[name][0].accepted == 4
    world.target_side.dirty = world.draft_side.dirty = True
    world.run()
    world.check_greedy(name)
    assert world.verifier.counters["plain_rounds"] == 0


# Which prompts a step reads


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40_000)), min_size=1, max_size=12), st.booleans())
@example([(0, 36_000), (1, 1500)], True)
def test_short_prompts_are_read_at_once_and_long_ones_go_on(
    arrivals: list[tuple[int, int]], beside_rounds: bool
) -> None:
    """A prompt that fits into a quarter of a chunk is read in the next step if it is the shortest, and the oldest has
    every fourth step. arrivals: before which step each prompt comes, and how many tokens it has.
    """
    chunk, unit = 8192, 512
    waiting = sorted(arrivals, key=lambda each: each[0])
    reading: list[list[int]] = []  # tokens read, and left, of each prompt
    for step in itertools.count():
        while waiting and waiting[0][0] <= step:
            reading.append([0, waiting.pop(0)[1]])
        if not reading:
            if not waiting:
                return
            continue
        left = [tokens for _, tokens in reading]
        turn_of_oldest = oldest_first(step)
        budget = tokens_of_step(left[:1] if turn_of_oldest else left, chunk, beside_rounds)
        shares = share_prefill([read for read, _ in reading], left, budget, step)
        shortest = left.index(min(left))
        assert sum(shares) <= budget <= chunk
        if turn_of_oldest:
            assert shares[0] >= min(left[0], budget - unit)
        else:
            assert shares[shortest] == left[shortest] or left[shortest] > chunk // LEAST_PART
        assert sum(shares) >= min(sum(left), chunk // LEAST_PART - 2 * unit)
        assert all(share == tokens or not share or share >= unit for share, tokens in zip(shares, left, strict=True))
        for prompt, share in zip(reading, shares, strict=True):
            prompt[0], prompt[1] = prompt[0] + share, prompt[1] - share
        reading = [prompt for prompt in reading if prompt[1]]
        assert step < 800


def test_a_short_turn_waits_for_no_whole_chunk_of_a_long_prompt() -> None:
    assert tokens_of_step([36_000], 8192, False) == tokens_of_step([36_000, 20_000], 8192, False) == 8192
    assert tokens_of_step([36_000, 20_000], 8192, True) == 4096, "others wait for their next rounds"
    assert tokens_of_step([36_000, 1800], 8192, True) == tokens_of_step([36_000, 100], 8192, False) == 2048
