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
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.rounds.behind_steps import Imposed, LeftVerdicts, take_left_verdicts
from specahead.engine.steps.rounds.buffers import RoundShape
from specahead.engine.steps.rounds.requests import Branch, RoundMemory, RoundOutput, RoundRequest, StepBefore
from specahead.sparsity.methods import METHODS
from specahead.sparsity.reader import Reader
from specahead.sparsity.rounds import announced_selection, announcement_request, round_settings
from specahead.sparsity.selection import BlockSelection
from tests.plans import bundled_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, SUPPORT = 4, 64
PLAN, METHOD = bundled_plan(budget=0.25, group_size=0), METHODS["ahead"]


def made_pair(refresh_every: int) -> tuple[ModelRunner, ModelRunner]:
    """Return a target, and its draft, whose rounds run behind its steps."""
    target, draft = (
        make_runner(load_model(str(path), torch.float32, DEVICE), 4096, max_context=400, step_queries=GAMMA + 1)
        for path in (models.TARGET, models.DRAFT)
    )
    target.make_room_for_rounds(8, GAMMA, SUPPORT, Reader(METHOD, PLAN).announced_rows, PLAN.block_size)
    rounds = round_settings(PLAN, GAMMA, SUPPORT, 0.3 if refresh_every > 1 else 1.0, refresh_every)
    draft.prepare_rounds(replace(rounds, runs_last=False))
    draft.make_room_for_verdicts(8)
    return target, draft


def read(runner: ModelRunner, texts: list[list[int]]) -> list[SequenceKV]:
    """Return KV of all tokens of the texts but the last."""
    kvs = [SequenceKV() for _ in texts]
    for kv, text in zip(kvs, texts, strict=True):
        for start in range(0, len(text) - 1, 64):
            runner.forward([SequenceInput(kv, text[start : min(start + 64, len(text) - 1)])])
    return kvs


def request_of(
    kv: SequenceKV,
    tokens: list[int],
    base: int,
    sampling: Sampling,
    memory: RoundMemory,
    announced: BlockSelection | None,
) -> RoundRequest:
    """Return a round that begins at `base`, behind `tokens`, and announces if blocks were announced before."""
    announce = None if announced is None else announcement_request(METHOD, PLAN, base, announced)
    draws = uniforms(sampling.seed, base, GAMMA + 1, USE_DRAFT)
    how = {"top_k": sampling.top_k, "min_p": sampling.min_p}
    refresh = memory.index is None
    return RoundRequest(kv, tokens, sampling.temperature, sampling.top_p, draws, announce, memory, refresh, **how)  # type: ignore[arg-type]


def behind(kv: SequenceKV, place: int, tokens: list[int], judged: int, *how: object) -> RoundRequest:
    """Return the round behind a step that judges the last so many of these tokens."""
    bases = range(len(tokens) + 1, len(tokens) - judged, -1)
    outcomes = [request_of(kv, [tokens[-1], 0], base, *how) for base in bases]  # type: ignore[arg-type]
    previous = [tokens[base - 2] for base in bases]
    before = StepBefore(place, previous, [each.uniforms for each in outcomes], [each.announce for each in outcomes])
    return replace(outcomes[0], behind=before)


def check_same(given: RoundOutput, expected: RoundOutput) -> None:
    (drafted,), (right,) = given.branches, expected.branches
    assert drafted.tokens == right.tokens
    assert given.coded == expected.coded and given.blocks_read == expected.blocks_read
    for name in ("ids", "probs"):
        ours, theirs = getattr(drafted, name), getattr(right, name)
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs)
    assert (given.bitmap is None) == (expected.bitmap is None)
    assert given.bitmap is None or np.array_equal(given.bitmap, expected.bitmap)  # type: ignore[arg-type]


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize(
    "imposed", [None, [(4, 17, -1), (0, 18, -1), (2, 19, 7), (2, 20, 8)]], ids=["judged", "imposed"]
)
def test_they_go_on_behind_what_the_step_accepts(
    refresh_every: int, announces: bool, imposed: list[Imposed] | None
) -> None:
    """Steps and rounds hold their sequences in other orders, and judge as many tokens as were proposed of each. Of two
    of the imposed verdicts the last accepted token is an alternative.
    """
    target, draft = made_pair(refresh_every)
    random = torch.Generator().manual_seed(refresh_every)
    texts = [torch.randint(0, 4000, (length,), generator=random).tolist() for length in (300, 47, 217, 126)]
    proposed, order = [4, 3, 4, 2], [2, 0, 3, 1]
    samplings = [Sampling(0.0), Sampling(1.0, seed=6), Sampling(0.7, top_k=7, min_p=0.01, seed=9), Sampling(0.0)]
    kvs = {runner: read(runner, texts) for runner in (target, draft)}
    memories = [RoundMemory() for _ in texts]
    nothing = [BlockSelection.of_nothing(Reader(METHOD, PLAN).announced_rows, PLAN.num_blocks(40)) for _ in texts]

    def how(i: int, announced: BlockSelection) -> tuple[Sampling, RoundMemory, BlockSelection | None]:
        return samplings[i], memories[i], announced if announces else None

    rounds = draft.launch_rounds(
        [request_of(kvs[draft][i], texts[i][-1:], len(texts[i]), *how(i, nothing[i])) for i in range(len(texts))]
    )
    target.take_rounds(rounds)
    inputs = []
    for i in order:
        judged = Drafted([0] * proposed[i], [], samplings[i], len(texts[i]))
        inputs.append(SequenceInput(kvs[target][i], [texts[i][-1], *judged.tokens], "all", drafted=judged, behind=i))
    step = target.launch(inputs)
    drafted = rounds.outputs()
    draft.take_verdicts(step, [0] * len(order), None if imposed is None else [imposed[i] for i in order])
    requests, announced = [], list(nothing)
    for i, text in enumerate(texts):
        bitmap = drafted[i].bitmap
        if bitmap is not None:
            announced[i] = announced_selection(bitmap, PLAN, len(text))
        known = [*text, *drafted[i].tokens[: proposed[i]]]
        kvs[draft][i].length = len(known) - 1
        requests.append(behind(kvs[draft][i], order.index(i), known, proposed[i], *how(i, announced[i])))
    kept = [(memory.length, memory.rounds) for memory in memories]
    given = draft.launch_rounds(requests).outputs()

    judged_as = [step.outputs()[order.index(i)].verdict for i in range(len(texts))]
    verdicts = [(*verdict, -1) for verdict in judged_as if verdict] if imposed is None else imposed
    seen = []
    for i, (text, verdict) in enumerate(zip(texts, verdicts, strict=True)):
        accepted, token, alternative = verdict
        assert given[i].began_behind == (accepted, token)
        assert given[i].alternative == (alternative if alternative >= 0 else None)
        memories[i].length, memories[i].rounds = kept[i]
        kvs[draft][i].length = len(text) + accepted - 1
        before = [*text, *drafted[i].tokens][kvs[draft][i].length] if alternative < 0 else alternative
        seen.append(request_of(kvs[draft][i], [before, token], len(text) + accepted + 1, *how(i, announced[i])))
    for ours, theirs in zip(given, draft.draft_rounds(seen), strict=True):
        check_same(ours, theirs)


def test_only_sequences_behind_a_step_take_what_it_has_left() -> None:
    """Of three sequences the last had the first place in the step, and held tokens; the first one the second place."""
    left = LeftVerdicts.make(3, torch.device(DEVICE))
    left.take({"accepted": torch.tensor([1, 1]), "following": torch.tensor([70, 80])}, [2, 0], None)
    assert left.accepted.tolist() == [0, 1, 0], "one of the held ones was rejected"
    assert left.alternative.tolist() == [-1, -1, -1], "this step ran none"
    left.take({"accepted": torch.tensor([5, 1]), "following": torch.tensor([70, 80])}, [2, 0], None)
    given = {
        "behind": torch.tensor([1, -1, 0, -1], dtype=torch.int32),
        "judged": torch.tensor([3, 0, 3, 0], dtype=torch.int32),
        "query_starts": torch.tensor([0, 2, 4, 6, 6], dtype=torch.int32),
        "lengths": torch.tensor([40, 12, 33, 0], dtype=torch.int32),
        "block_tables": torch.tensor([[5, 6, 7], [1, 0, 0], [2, 3, 4], [0, 0, 0]], dtype=torch.int32),
        "token_ids": torch.tensor([0, 0, 8, 9, 0, 0, 0, 0]),
        "positions": torch.tensor([38, 39, 10, 11, 31, 32, 0, 0]),
        "slots": torch.tensor([7 * 16 + 6, 7 * 16 + 7, 26, 27, 3 * 16 + 15, 4 * 16, -1, -1]),
        "previous": torch.tensor([10, 0, 20, 0]),
        "previous_cut": torch.tensor([[11, 0, 21, 0], [12, 0, 22, 0], [13, 0, 23, 0]]),
        "uniforms": torch.zeros(2, 4),
        "uniforms_cut": torch.arange(1.0, 4)[:, None, None].repeat(1, 2, 4),
        "limits": torch.zeros(3, 4),
        "limits_cut": torch.arange(1.0, 4)[:, None, None].repeat(1, 3, 4),
    }
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    taken = take_left_verdicts(given | {f"left_{name}": tensor for name, tensor in vars(left).items()})
    assert taken["token_ids"].tolist() == [12, 80, 8, 9, 20, 70, 0, 0]
    assert taken["positions"].tolist() == [36, 37, 10, 11, 31, 32, 0, 0]
    assert taken["slots"].tolist() == [7 * 16 + 4, 7 * 16 + 5, 26, 27, 3 * 16 + 15, 4 * 16, -1, -1]
    assert taken["lengths"].tolist() == [38, 12, 33, 0]
    assert taken["uniforms"].tolist() == [[2, 0, 0, 0]] * 2 and taken["limits"].tolist() == [[2, 0, 0, 0]] * 3


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("may_be_behind", [False, True])
@pytest.mark.parametrize("refreshes", [False, True])
def test_making_a_graph_leaves_all_sessions_as_they_are(sampled: bool, may_be_behind: bool, refreshes: bool) -> None:
    """Its launches run before they are captured, perhaps while sessions generate."""
    _, draft = made_pair(3)
    kvs, memory = read(draft, [[1, 2, 3] * 20, [4, 5, 6] * 30]), RoundMemory()
    draft.draft_rounds([request_of(kv, [3], kv.length + 1, Sampling(0.0), RoundMemory(), None) for kv in kvs[1:]])
    draft.draft_rounds([request_of(kvs[0], [3], kvs[0].length + 1, Sampling(0.0), memory, None)])
    assert draft._rounds is not None
    held = [*draft.kv.k_pages, *draft.kv.v_pages, draft._rounds._weights()]
    before = [tensor.clone() for tensor in held]
    shape = RoundShape(2, 2, 20, sampled, "ahead", 1, refreshes, behind=may_be_behind)
    with torch.inference_mode():
        draft._rounds._round_of(shape).launch()
    nobody = draft._rounds._nobody.index
    before[-1][nobody] = held[-1][nobody]
    assert all(torch.equal(*pair) for pair in zip(before, held, strict=True))


def test_a_round_behind_a_step_has_two_tokens_and_needs_no_host() -> None:
    kv, sampling = SequenceKV(length=20), Sampling(0.0)
    request = behind(kv, 0, [1] * 21, 4, sampling, RoundMemory(), None)
    branch = Branch(20, 3, request.uniforms)
    others = {"tokens": [1]}, {"tokens": [], "branches": (branch,)}, {"allowed": lambda branch, drafted: np.ones(1)}
    for other in others:
        with pytest.raises(ValueError, match="runs two tokens"):
            replace(request, **other)  # type: ignore[arg-type]
