"""Rounds launched behind a step of the target are those that the host would have asked for behind its verdicts.

Without a GPU all runs at once through the torch kernels; on a GPU the rounds are launched before the step has ended.
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
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.device_chain import Imposed
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import Branch, RoundOutput, RoundRequest, StepBefore
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.rounds import announced_selection, announcement_request, round_settings
from specahead.sparsity.selection import BlockSelection
from tests.plans import bundled_plan
from tests.unit.steps import read_prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, SUPPORT = 4, 64
PLAN = bundled_plan(budget=0.25, group_size=0)


def made_pair(read_share: float) -> tuple[ModelRunner, ModelRunner]:
    """Return a target, and its draft, whose rounds run behind its steps."""
    target, draft = (
        make_runner(load_model(str(path), torch.float32, DEVICE), 4096, max_context=400, step_queries=GAMMA + 1)
        for path in (models.TARGET, models.DRAFT)
    )
    rounds = round_settings(PLAN, GAMMA, SUPPORT, read_share)
    draft.prepare_rounds(replace(rounds, runs_last=False))
    draft.join_chain(target.make_chain(8, GAMMA, SUPPORT, announced_rows(PLAN), PLAN.block_size))
    return target, draft


def request_of(
    kv: SequenceKV, tokens: list[int], base: int, sampling: Sampling, announced: BlockSelection | None
) -> RoundRequest:
    """Return a round that begins at `base`, behind `tokens`, and announces if blocks were announced before."""
    announce = None if announced is None else announcement_request(PLAN, base, announced)
    draws = uniforms(sampling.seed, base, GAMMA + 1, USE_DRAFT)
    how = {"top_k": sampling.top_k, "min_p": sampling.min_p}
    return RoundRequest(kv, tokens, sampling.temperature, sampling.top_p, draws, announce, **how)


def following(kv: SequenceKV, row: int, tokens: list[int], judged: int, *how: object) -> RoundRequest:
    """Return the round that follows a step which judges the last so many of these tokens."""
    bases = range(len(tokens) - judged + 1, len(tokens) + 2)
    outcomes = [request_of(kv, [tokens[-1], 0], base, *how) for base in bases]
    previous = [tokens[base - 2] for base in bases]
    draws = np.concatenate([*(each.uniforms[:1] for each in outcomes[:-1]), outcomes[-1].uniforms])
    return replace(outcomes[-1], follows=StepBefore(row, previous, draws, [each.announce for each in outcomes]))


def check_same(given: RoundOutput, expected: RoundOutput) -> None:
    (drafted,), (right,) = given.branches, expected.branches
    assert drafted.tokens == right.tokens
    assert given.coded == expected.coded
    for name in ("ids", "probs"):
        ours, theirs = getattr(drafted, name), getattr(right, name)
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs)
    assert (given.bitmap is None) == (expected.bitmap is None)
    assert given.bitmap is None or np.array_equal(given.bitmap, expected.bitmap)


@pytest.mark.parametrize("read_share", [1.0, 0.3])
@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize(
    "imposed", [None, [(4, 17, -1), (0, 18, -1), (2, 19, 7), (2, 20, 8)]], ids=["judged", "imposed"]
)
def test_they_begin_where_the_step_ends(read_share: float, announces: bool, imposed: list[Imposed] | None) -> None:
    """Steps and rounds hold their sequences in other orders, and judge as many tokens as were proposed of each. Of two
    of the imposed verdicts the last accepted token is an alternative.
    """
    target, draft = made_pair(read_share)
    random = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 4000, (length,), generator=random).tolist() for length in (300, 47, 217, 126)]
    proposed, order = [4, 3, 4, 2], [2, 0, 3, 1]
    samplings = [Sampling(0.0), Sampling(1.0, seed=6), Sampling(0.7, top_k=7, min_p=0.01, seed=9), Sampling(0.0)]
    kvs = {runner: [read_prompt(runner, text[:-1]) for text in texts] for runner in (target, draft)}
    nothing = [BlockSelection.of_nothing(announced_rows(PLAN), PLAN.num_blocks(40)) for _ in texts]

    def how(i: int, announced: BlockSelection) -> tuple[Sampling, BlockSelection | None]:
        return samplings[i], announced if announces else None

    rounds = draft.launch_rounds(
        [request_of(kvs[draft][i], texts[i][-1:], len(texts[i]), *how(i, nothing[i])) for i in range(len(texts))]
    )
    inputs = []
    for i in order:
        judged = Drafted([0] * proposed[i], [], samplings[i], len(texts[i]))
        inputs.append(SequenceInput(kvs[target][i], [texts[i][-1], *judged.tokens], "all", drafted=judged, draft_row=i))
    step = target.launch(inputs)
    drafted = rounds.outputs()
    requests, announced = [], list(nothing)
    for i, text in enumerate(texts):
        bitmap = drafted[i].bitmap
        if bitmap is not None:
            announced[i] = announced_selection(bitmap, PLAN, len(text))
        known = [*text, *drafted[i].tokens[: proposed[i]]]
        kvs[draft][i].length = len(known) - 1
        requests.append(following(kvs[draft][i], order.index(i), known, proposed[i], *how(i, announced[i])))
    given = draft.launch_rounds(requests, None if imposed is None else [imposed[i] for i in order]).outputs()

    judged_as = [step()[order.index(i)].verdict for i in range(len(texts))]
    verdicts = [(*verdict, -1) for verdict in judged_as if verdict] if imposed is None else imposed
    seen = []
    for i, (text, verdict) in enumerate(zip(texts, verdicts, strict=True)):
        accepted, token, alternative = verdict
        assert given[i].began == (accepted, token)
        assert given[i].alternative == (alternative if alternative >= 0 else None)
        kvs[draft][i].length = len(text) + accepted - 1
        before = [*text, *drafted[i].tokens][kvs[draft][i].length] if alternative < 0 else alternative
        seen.append(request_of(kvs[draft][i], [before, token], len(text) + accepted + 1, *how(i, announced[i])))
    for ours, theirs in zip(given, draft.draft_rounds(seen), strict=True):
        check_same(ours, theirs)


@pytest.mark.parametrize("unread", [0, 1, 40])
@pytest.mark.parametrize("announces", [False, True])
def test_others_begin_beside_them_where_the_host_says(unread: int, announces: bool) -> None:
    """A round that follows no step is the same alone and beside one that follows; what is unread is read before.

    unread: tokens before the last one whose KV the draft lacks.
    """
    target, draft = made_pair(1.0)
    random = torch.Generator().manual_seed(4)
    text, other = (torch.randint(0, 4000, (length,), generator=random).tolist() for length in (217, 126))
    sampling = Sampling(1.0, seed=6)
    kvs = {runner: read_prompt(runner, text[:-1]) for runner in (target, draft)}
    announced = BlockSelection.of_nothing(announced_rows(PLAN), PLAN.num_blocks(40)) if announces else None

    def begin_other() -> RoundRequest:
        kv = read_prompt(draft, other[: -1 - unread])
        return request_of(kv, other[-1 - unread :], len(other), sampling, announced)

    (alone,) = draft.draft_rounds([begin_other()])
    rounds = draft.launch_rounds([request_of(kvs[draft], text[-1:], len(text), sampling, announced)])
    judged = Drafted([0] * GAMMA, [], sampling, len(text))
    step = target.launch([SequenceInput(kvs[target], [text[-1], *judged.tokens], "all", drafted=judged, draft_row=0)])
    (drafted,) = rounds.outputs()
    known = [*text, *drafted.tokens[:GAMMA]]
    kvs[draft].length = len(known) - 1
    follows = following(kvs[draft], 0, known, GAMMA, sampling, announced)
    beside, given = draft.launch_rounds([begin_other(), follows]).outputs()
    (ours,), (theirs,) = beside.branches, alone.branches
    assert ours.tokens == theirs.tokens and np.allclose(ours.probs, theirs.probs, atol=1e-5)
    assert (beside.bitmap is None) == (not announces) and np.array_equal(beside.bitmap, alone.bitmap)
    assert beside.began is None and given.began == step()[0].verdict


def test_a_round_that_follows_a_step_has_two_tokens_and_needs_no_host() -> None:
    kv, sampling = SequenceKV(length=20), Sampling(0.0)
    request = following(kv, 0, [1] * 21, 4, sampling, None)
    branch = Branch(20, 3, request.uniforms)
    others = {"tokens": [1]}, {"tokens": [], "branches": (branch,)}, {"allowed": lambda branch, drafted: np.ones(1)}
    for other in others:
        with pytest.raises(ValueError, match="runs two tokens"):
            replace(request, **other)
