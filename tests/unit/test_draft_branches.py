"""Rounds with several branches against rounds that draft each of them alone, with the bundled draft.

Without a GPU rounds run launch by launch through the torch kernels; on a GPU they are captured.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import USE_DRAFT, Sampling, uniforms
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import Branch, MovedKV, RoundOutput, RoundRequest, RoundSettings
from specahead.engine.steps.rules import RoundRules, session_rules
from specahead.kernels.kv_write import move_kv, page_addresses
from specahead.sparsity.rounds import announcement_request, round_settings
from tests.books import random_tokens as tokens
from tests.plans import bundled_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = bundled_plan(budget=0.25)
GAMMA, BRANCHES = 4, 4


def settings(read_share: float = 1.0) -> RoundSettings:
    every = round_settings(PLAN, GAMMA, 16, read_share)
    return replace(every, branches=BRANCHES, alternatives=3)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(load_model(str(models.DRAFT), torch.float32, DEVICE), 16384, max_context=1000)


def read(runner: ModelRunner, text: list[int]) -> SequenceKV:
    kv = SequenceKV()
    runner.forward([SequenceInput(kv, text, "none")])
    return kv


def alone(
    runner: ModelRunner, text: list[int], temperature: float = 0.0, announces: bool = False, seed: int = 0
) -> RoundOutput:
    """Draft a round behind `text` as its session's only branch."""
    kv = read(runner, text[:-1])
    announce = announcement_request(PLAN, len(text), None) if announces else None
    draws = uniforms(seed, len(text), GAMMA + 1, USE_DRAFT)
    (output,) = runner.draft_rounds([RoundRequest(kv, text[-1:], temperature, 0.9, draws, announce)])
    runner.kv.release(kv)
    return output


def branch(length: int, token: int, seed: int = 0) -> Branch:
    return Branch(length, token, uniforms(seed, length + 1, GAMMA + 1, USE_DRAFT))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_branch_drafts_what_it_would_alone(runner: ModelRunner, temperature: float) -> None:
    runner.prepare_rounds(settings())
    requests, expected = [], []
    for seed, length in ((1, 37), (2, 150), (3, 64)):
        text = tokens(length, seed)
        leaves = [(length, 5), (length - 1, 77), (length - GAMMA, 9), (length, 1234)][: 1 + seed]
        branches = tuple(branch(at, token, seed) for at, token in leaves)
        requests.append(RoundRequest(read(runner, text), [], temperature, 0.9, np.empty(0), None, branches=branches))
        expected.append([alone(runner, [*text[:at], token], temperature, seed=seed) for at, token in leaves])
    text = tokens(90, 9)  # a session with one branch, given as a pending token, beside the others
    draws = uniforms(9, 90, GAMMA + 1, USE_DRAFT)
    requests.append(RoundRequest(read(runner, text[:-1]), text[-1:], temperature, 0.9, draws, None))
    expected.append([alone(runner, text, temperature, seed=9)])
    for output, wanted in zip(runner.draft_rounds(requests), expected, strict=True):
        assert [drafted.tokens for drafted in output.branches] == [each.tokens for each in wanted]
        for drafted, single in zip(output.branches, wanted, strict=True):
            assert drafted.alternatives is not None
            np.testing.assert_array_equal(drafted.alternatives, single.branches[0].alternatives)
            if temperature:
                np.testing.assert_allclose(drafted.probs, single.branches[0].probs, atol=1e-4)
    for item in requests:
        runner.kv.release(item.kv)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_branch_counts_the_tokens_before_it(runner: ModelRunner, temperature: float) -> None:
    """A session with penalties beside one without: what is guessed before a branch counts as if it were committed."""
    runner.prepare_rounds(settings())
    sampling = Sampling(temperature, 0.9, 0, 0, 0.0, 1.0, 2.0, 1.4, {7: 4.0}, 50)
    text, committed = tokens(70, 3), 66
    leaves = [(70, 5), (67, 77), (66, 9)]

    def ruled(tokens: list[int], guessed: list[list[int]]) -> RoundRules:
        session = session_rules(sampling, 40, [7, 12])
        assert session is not None
        return RoundRules(session, tokens, guessed)

    guessed = [[*text[committed:at], token] for at, token in leaves]
    branches = tuple(branch(*each) for each in leaves)
    request = RoundRequest(read(runner, text), [], temperature, 0.9, np.empty(0), None, branches=branches)
    request = replace(request, rules=ruled(text[:committed], guessed))
    plain = replace(request, kv=read(runner, text), rules=None)
    with_rules, without = runner.draft_rounds([request, plain])
    for (at, token), drafted, other in zip(leaves, with_rules.branches, without.branches, strict=True):
        whole = [*text[:at], token]
        kv, draws = read(runner, whole[:-1]), uniforms(0, at + 1, GAMMA + 1, USE_DRAFT)
        alone_ruled = RoundRequest(kv, [token], temperature, 0.9, draws, None, rules=ruled(whole, []))
        (expected,) = runner.draft_rounds([alone_ruled])
        runner.kv.release(kv)
        assert drafted.tokens == expected.tokens
        if temperature:
            np.testing.assert_allclose(drafted.probs, expected.branches[0].probs, atol=1e-4)
        assert other.tokens == alone(runner, whole, temperature).tokens
    assert [each.tokens for each in with_rules.branches] != [each.tokens for each in without.branches]
    for item in (request, plain):
        runner.kv.release(item.kv)


@pytest.mark.parametrize(("read_share", "gamma"), [(1.0, GAMMA), (0.999, GAMMA), (1.0, 1)])
def test_a_branch_that_was_met_goes_on_from_its_moved_kv(runner: ModelRunner, read_share: float, gamma: int) -> None:
    """It may go on with fewer tokens a round than have to be moved, and beside another session."""
    runner.prepare_rounds(settings(read_share))
    requests, texts, followings = [], [], []
    for seed in (4, 5) if read_share == 1 else (4,):  # by lists one block is left out, which the other would miss
        text, leaves = tokens(120, seed), [(120, 5), (118, 77), (117, 9)]
        kv = read(runner, text)
        request = RoundRequest(kv, [], 0.0, 1.0, np.empty(0), None, branches=tuple(branch(*each) for each in leaves))
        (output,) = runner.draft_rounds([request])
        met, (length, token) = 1, leaves[1]
        drafted = output.branches[met].tokens[:GAMMA]
        texts.append([*text[:length], token, *drafted])
        moved = MovedKV(source=120 + met * (GAMMA + 1), target=length, count=GAMMA + 1)
        kv.length = length + 1 + GAMMA
        followings.append(((kv.length, 3), (kv.length - 2, 8)))
        branches = tuple(branch(*each) for each in followings[-1])
        given = kv, [], 0.0, 1.0, np.empty(0), None
        requests.append(RoundRequest(*given, branches=branches, moved=moved, gamma=gamma))
    outputs = runner.draft_rounds(requests)
    for request in requests:
        runner.kv.release(request.kv)
    runner.prepare_rounds(settings())
    for output, text, following in zip(outputs, texts, followings, strict=True):
        for drafted_now, (at, first) in zip(output.branches, following, strict=True):
            assert drafted_now.tokens == alone(runner, [*text[:at], first]).tokens[: gamma + 1]


def test_branches_announce_by_the_mean_of_all_their_queries(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    import specahead.engine.steps.round_launches as launches

    runner.prepare_rounds(settings())
    seen: list[torch.Tensor] = []
    if DEVICE == "cuda":
        pytest.skip("evidence cannot be looked at inside a round that a GPU has captured")
    original = launches.announce_blocks
    monkeypatch.setattr(launches, "announce_blocks", lambda *args: (seen.append(args[1].clone()), original(*args))[1])
    text = tokens(200, 6)
    leaves = [(200, 5), (199, 77)]
    announce = announcement_request(PLAN, 198, None)
    kv = read(runner, text)
    request = RoundRequest(kv, [], 0.0, 1.0, np.empty(0), announce, branches=tuple(branch(*each) for each in leaves))
    (output,) = runner.draft_rounds([request])
    assert output.bitmap is not None
    runner.kv.release(kv)
    for at, token in leaves:
        alone(runner, [*text[:at], token], announces=True)
    together, *singles = seen
    # Blocks before the first branch hold the same tokens in all; later ones lie elsewhere.
    blocks = 199 // PLAN.block_size
    mean = torch.stack([single[..., :blocks] for single in singles]).mean(0)
    torch.testing.assert_close(together[..., :blocks], mean, rtol=1e-4, atol=1e-6)


def test_requests_that_cannot_be_run_are_refused() -> None:
    kv = SequenceKV(length=10)
    with pytest.raises(ValueError, match="pending tokens or branches"):
        RoundRequest(kv, [1], 0.0, 1.0, np.empty(0), None, branches=(branch(10, 1),))
    with pytest.raises(ValueError, match="elsewhere"):
        RoundRequest(kv, [], 0.0, 1.0, np.empty(0), None, branches=(branch(11, 1),))
    with pytest.raises(ValueError, match="the first branch leaves after 9 tokens, expected 10"):
        RoundRequest(kv, [], 0.0, 1.0, np.empty(0), None, branches=(branch(9, 1), branch(10, 2)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_kv_is_moved(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    keys, values = ([torch.randn(4, 3, 16, 8, device=DEVICE) for _ in range(3)] for _ in range(2))
    before = [each.clone() for each in (*keys, *values)]
    source = torch.tensor([17, 18, 40, -1, 3], device=DEVICE)
    target = torch.tensor([15, 16, 40, -1, -1], device=DEVICE)
    move_kv(keys, values, page_addresses(keys, values).to(DEVICE), source, target, backend)
    for now, then in zip((*keys, *values), before, strict=True):
        expected = then.clone()
        expected[0, :, 15], expected[1, :, 0] = then[1, :, 1], then[1, :, 2]
        torch.testing.assert_close(now, expected, rtol=0, atol=0)
