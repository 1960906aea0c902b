"""Rounds of the draft without a dense first pass: what they read, what they keep, and who decides."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specahead.engine.steps.rounds.launches
from specahead import models
from specahead.config import DraftSettings
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.announcing import Announcer
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.rounds.buffers import RoundShape, make_round_buffers
from specahead.engine.steps.rounds.requests import RoundMemory, RoundOutput, RoundRequest, RoundSettings
from specahead.kernels.paged_attention import BlockLists
from specahead.lab.evaluation.rounds import prefill
from specahead.sparsity.methods import method_named
from specahead.sparsity.rounds import announcement_request, round_settings
from tests.plans import bundled_plan
from tests.unit.test_draft_rounds import tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = bundled_plan()
ALL_LISTED = 1 - 1e-9  # a share below 1 that leaves nothing out
GAMMA = DraftSettings.gamma
LENGTH = 500


@pytest.fixture(scope="module")
def loaded() -> ModelRunner:
    # In bfloat16 a row alone and one of several round differently.
    return make_runner(load_model(str(models.DRAFT), torch.float32, DEVICE), 2000)


@pytest.fixture
def runner(loaded: ModelRunner) -> Iterator[ModelRunner]:
    yield loaded
    assert loaded.kv.pool.held == 0, "a test released what it held"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """[sequences, layers, heads, blocks] of each round that announces."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU rounds are captured once, and what they hold is not seen again")
    seen: list[Tensor] = []
    predict = specahead.engine.steps.rounds.launches.predict_weights

    def look(announcer: Announcer, weights: Tensor, *others: Tensor) -> Tensor:
        seen.append(weights.clone())
        return predict(announcer, weights, *others)

    monkeypatch.setattr(specahead.engine.steps.rounds.launches, "predict_weights", look)
    return seen


class Drafting:
    """One session at a runner: what a Drafter keeps of it."""

    def __init__(self, runner: ModelRunner, seed: int = 1, length: int = LENGTH) -> None:
        self.runner, self.kv, self.memory = runner, SequenceKV(), RoundMemory()
        self.tokens = tokens(length, seed)
        prefill(runner, self.kv, self.tokens[:-1])

    def request(self, refresh: bool) -> RoundRequest:
        base = len(self.tokens)
        announce = announcement_request(method_named("ahead"), PLAN, base, None)
        pending = self.tokens[self.kv.length :]
        return RoundRequest(self.kv, pending, 0.0, 1.0, np.zeros(GAMMA + 1), announce, self.memory, refresh)

    def take(self, output: RoundOutput) -> None:
        """All that was drafted is accepted, and the guess with it."""
        self.kv.length = len(self.tokens) + GAMMA
        self.tokens += output.tokens

    def round(self, refresh: bool) -> RoundOutput:
        (output,) = self.runner.draft_rounds([self.request(refresh)])
        self.take(output)
        return output

    def release(self) -> None:
        self.runner.kv.release(self.kv)


def settings(read_share: float, refresh_every: int) -> RoundSettings:
    return round_settings(PLAN, DraftSettings.gamma, DraftSettings.support, read_share, refresh_every)


def test_a_round_that_always_refreshes_is_dense_first_and_keeps_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_: Any) -> None:
        raise AssertionError("the first pass is dense")

    monkeypatch.setattr(specahead.engine.steps.rounds.launches, "_lists_of_first_pass", unexpected)
    runner.prepare_rounds(settings(0.1, 1))
    session = Drafting(runner)
    first = session.round(True)
    assert session.memory.index is None
    blocks = PLAN.num_blocks(LENGTH)
    heads = PLAN.draft_layers * runner.kv.kv_heads
    assert first.blocks_read is not None
    assert heads * blocks < first.blocks_read < heads * blocks * 2.5
    session.release()


def test_with_everything_listed_rounds_are_dense_ones(runner: ModelRunner, evidence: list[Tensor]) -> None:
    drafted, bitmaps = [], []
    for read_share, refresh_every in ((1.0, 1), (ALL_LISTED, 2)):
        runner.prepare_rounds(settings(read_share, refresh_every))
        session = Drafting(runner)
        outputs = [session.round(session.memory.refresh_due(refresh_every)) for _ in range(4)]
        drafted.append([output.tokens for output in outputs])
        bitmaps.append([output.bitmap for output in outputs])
        session.release()
    assert drafted[0] == drafted[1]
    for dense, listed in zip(evidence[:4], evidence[4:], strict=True):
        torch.testing.assert_close(listed, dense, rtol=1e-4, atol=1e-6)
    changed = sum(int(np.bitwise_count(a ^ b).sum()) for a, b in zip(*bitmaps, strict=True))  # type: ignore[arg-type]
    assert changed <= 0.02 * sum(int(np.bitwise_count(a).sum()) for a in bitmaps[0])  # type: ignore[arg-type]


def test_rounds_between_read_less(runner: ModelRunner) -> None:
    runner.prepare_rounds(settings(0.2, 2))
    session = Drafting(runner)
    read = [session.round(refresh).blocks_read for refresh in (True, False, True, False)]
    heads = PLAN.draft_layers * runner.kv.kv_heads
    for i, count in enumerate(read):
        length = LENGTH + i * (GAMMA + 1)
        listed = int(0.2 * PLAN.num_blocks(length + GAMMA))
        assert count == heads * ((PLAN.num_blocks(length) if i % 2 == 0 else listed) + GAMMA * listed)
    session.release()


def test_what_is_not_read_keeps_the_weights_of_the_last_refresh(
    runner: ModelRunner, evidence: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    own = specahead.engine.steps.rounds.launches._own_lists

    def look(*arguments: Any, **keywords: Any) -> Any:
        lists = own(*arguments, **keywords)
        made.append(listed_blocks(lists.blocks)[:, 0])
        return lists

    monkeypatch.setattr(specahead.engine.steps.rounds.launches, "_own_lists", look)
    runner.prepare_rounds(settings(0.2, 4))
    session = Drafting(runner)
    session.round(True)
    assert session.memory.length == LENGTH
    before = weights_of(runner, session.memory)[..., : PLAN.num_blocks(LENGTH)].clone()
    for round_ in (1, 2):
        session.round(False)
        first, later = made[-2:]
        read = (first | later).repeat_interleave(PLAN.draft_heads // runner.kv.kv_heads, 1)
        fresh = evidence[-1][0]
        n = before.shape[-1]
        unread = ~read[..., :n]
        assert unread.sum() > 0.5 * unread.numel()
        assert torch.equal(fresh[..., :n][unread], before[unread])
        assert not torch.equal(fresh[..., :n][~unread], before[~unread])
        assert session.memory.rounds == round_
        assert torch.equal(weights_of(runner, session.memory)[..., :n], before)
    session.release()


def listed_blocks(blocks: BlockLists) -> Tensor:
    """Return lists as bools [layers, sequences, kv_heads, blocks]."""
    listed = torch.zeros_like(blocks.lists, dtype=torch.bool)
    for place in np.ndindex(*blocks.counts.shape):
        listed[place][blocks.lists[place][: blocks.counts[place]].long()] = True
    return listed


def weights_of(runner: ModelRunner, memory: RoundMemory) -> Tensor:
    """What is remembered of a session: [layers, heads, blocks]."""
    assert runner._rounds is not None and memory.index is not None
    return runner._rounds._weights()[memory.index].unflatten(0, (PLAN.draft_layers, -1))


@torch.inference_mode()
def test_weights_of_what_was_taken_back_do_not_matter(runner: ModelRunner, evidence: list[Tensor]) -> None:
    """Nor what another session left behind them."""
    runner.prepare_rounds(settings(0.2, 4))
    outputs = []
    for stale in (0.0, torch.nan, 1e9):
        session = Drafting(runner)
        session.round(True)
        session.memory.cut(LENGTH - 100)
        weights_of(runner, session.memory)[..., (LENGTH - 100) // PLAN.block_size :] = stale
        outputs.append(session.round(False))
        session.release()
    for evidence_of, output in zip(evidence[3::2], outputs[1:], strict=True):
        assert torch.equal(evidence_of, evidence[1])
        assert output.tokens == outputs[0].tokens
        assert output.blocks_read == outputs[0].blocks_read


def test_what_has_come_since_the_refresh_is_read(runner: ModelRunner) -> None:
    """Also beyond the window: nothing is known of it."""
    runner.prepare_rounds(settings(0.1, 4))
    session = Drafting(runner)
    session.round(True)
    few = session.round(False).blocks_read
    session.memory.cut(LENGTH - 300)
    many = session.round(False).blocks_read
    blocks = PLAN.num_blocks(len(session.tokens)) - (LENGTH - 300) // PLAN.block_size
    assert few is not None and many is not None
    assert many - few > PLAN.draft_layers * runner.kv.kv_heads * (blocks - 10)
    session.release()


def test_a_mixed_batch_is_each_session_alone(runner: ModelRunner) -> None:
    runner.prepare_rounds(settings(0.2, 2))
    results: list[list[RoundOutput]] = []
    memories = []
    for together in (False, True):
        sessions = [Drafting(runner, seed, length) for seed, length in ((1, 500), (2, 340), (3, 420))]
        for session in sessions:
            session.round(True)
        requests = [session.request(i == 1) for i, session in enumerate(sessions)]
        batches = [requests] if together else [[request] for request in requests]
        results.append([output for batch in batches for output in runner.draft_rounds(batch)])
        memories.append([session.memory for session in sessions])
        for session in sessions:
            session.release()
    for alone, mixed in zip(*results, strict=True):
        assert (alone.tokens, alone.blocks_read) == (mixed.tokens, mixed.blocks_read)
        assert alone.bitmap is not None and mixed.bitmap is not None
        assert np.array_equal(alone.bitmap, mixed.bitmap)
    for alone_memory, mixed_memory in zip(*memories, strict=True):
        blocks = -(-alone_memory.length // PLAN.block_size)
        assert (alone_memory.length, alone_memory.rounds) == (mixed_memory.length, mixed_memory.rounds)
        ours, theirs = (weights_of(runner, memory)[..., :blocks] for memory in (alone_memory, mixed_memory))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [memory.rounds for memory in memories[0]] == [1, 0, 1]


def test_an_interval_that_cannot_be_drafted_with_is_refused() -> None:
    for refused in ({"refresh_every": 0}, {"refresh_every": 2}, {"refresh_every": 2, "read_share": 1.0}):
        with pytest.raises(ValueError, match=f"refresh_every is {refused['refresh_every']}"):
            RoundSettings(4, 64, 16, **refused)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"refresh_every is 2 and read_share 1\.0"):
        RoundSettings(4, 64, 16, refresh_every=2)


def test_a_round_without_anything_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="refresh the session's first round"):
        RoundRequest(SequenceKV(), [1], 0.0, 1.0, np.zeros(5), None, RoundMemory(), refresh=False)


def test_buffers_hold_what_is_kept_only_where_it_is_used() -> None:
    shape = RoundShape(1, 2, 4, False, "")
    for every, refreshes in ((1, True), (2, True), (2, False)):
        of_shape = replace(shape, refreshes=refreshes)
        buffers = make_round_buffers(of_shape, settings(0.5, every), 4096, torch.device("cpu"))
        assert ("places" in buffers.tensors) == (every > 1)
        assert ("known" in buffers.tensors) == (not refreshes)
