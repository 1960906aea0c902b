"""A step that is launched behind a draft's rounds judges what they leave as if the host had brought it.

Without a GPU both run at once through the torch kernels; on a GPU they are captured, and the step is launched before
the rounds have ended.
"""

from dataclasses import replace

import pytest
import torch

import models
from engine.inputs import SequenceInput
from engine.judging import Drafted
from engine.kv.pages import SequenceKV
from engine.loading.model import load_model
from engine.loading.runner import make_runner
from engine.model_runner import ModelRunner
from engine.passes.behind_rounds import LeftRounds, take_left_rounds
from engine.rounds.requests import Branch, RoundRequest, RoundSettings
from engine.sampling import USE_DRAFT, Sampling, Support, uniforms
from sparsity.methods import METHODS
from sparsity.plan import load_plan
from sparsity.reader import Reader
from sparsity.rounds import announced_selection, announcement_request, round_settings
from sparsity.selection import BlockSelection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, SUPPORT = 4, 64
SAMPLINGS = {
    "greedy": [Sampling(0.0)],
    "sampled": [Sampling(0.9, 0.8, seed=5), Sampling(1.0, seed=6)],
    "both": [Sampling(0.0), Sampling(1.0, seed=6), Sampling(0.7, top_k=7, min_p=0.01, seed=9)],
}


@pytest.fixture(scope="module")
def pair() -> tuple[ModelRunner, ModelRunner]:
    """Return a target that runs steps behind rounds, and its draft."""
    target, draft = (
        make_runner(load_model(str(path), torch.float32, DEVICE), 4096, max_context=400, step_queries=GAMMA + 1)
        for path in (models.TARGET, models.DRAFT)
    )
    target.make_room_for_rounds(8, GAMMA, SUPPORT, 4, 16)
    draft.prepare_rounds(RoundSettings(GAMMA, SUPPORT, 16, branches=2))
    return target, draft


def request_of(kv: SequenceKV, text: list[int], sampling: Sampling) -> RoundRequest:
    draws = uniforms(sampling.seed, len(text), GAMMA + 1, USE_DRAFT)
    how = {"top_k": sampling.top_k, "min_p": sampling.min_p}
    return RoundRequest(kv, text[-1:], sampling.temperature, sampling.top_p, draws, None, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("proposed", [[4], [4, 4, 4], [2, 4, 1, 3, 4]])
def test_it_judges_what_the_rounds_leave(
    pair: tuple[ModelRunner, ModelRunner], proposed: list[int], samplings: list[Sampling]
) -> None:
    """Of each as many tokens as are proposed; steps and rounds hold their sequences in other orders."""
    target, draft = pair
    random = torch.Generator().manual_seed(len(proposed))
    texts = [torch.randint(0, 4000, (20 + 7 * i,), generator=random).tolist() for i in range(len(proposed))]
    chosen = [samplings[i % len(samplings)] for i in range(len(proposed))]
    kvs = {}
    for runner in pair:
        kvs[runner] = [SequenceKV() for _ in texts]
        runner.forward([SequenceInput(kv, text[:-1]) for kv, text in zip(kvs[runner], texts, strict=True)])
    requests = [request_of(*of) for of in zip(kvs[draft], texts, chosen, strict=True)]
    order = list(reversed(range(len(texts))))
    rounds = draft.launch_rounds([requests[i] for i in order])
    target.take_rounds(rounds)
    judged = [Drafted([0] * count, [], chosen[i], len(texts[i])) for i, count in enumerate(proposed)]
    behind = [
        SequenceInput(kv, [text[-1], *drafted.tokens], "all", drafted=drafted, behind=order.index(i))
        for i, (kv, text, drafted) in enumerate(zip(kvs[target], texts, judged, strict=True))
    ]
    given = target.launch(behind).outputs()
    drafts = [rounds.outputs()[order.index(i)].branches[0] for i in range(len(texts))]
    known = []
    for i, (item, count) in enumerate(zip(behind, proposed, strict=True)):
        assert item.kv.length == len(texts[i]) + count
        target.kv.truncate(item.kv, len(texts[i]) - 1)
        tokens, supports = drafts[i].tokens[:count], list[Support]()
        ids, probs = drafts[i].ids, drafts[i].probs
        if not chosen[i].greedy:
            assert ids is not None and probs is not None
            supports = [Support(*of_token) for of_token in zip(ids[:count], probs[:count], strict=True)]
        drafted = replace(judged[i], tokens=tokens, supports=supports)
        known.append(replace(item, tokens=[texts[i][-1], *tokens], drafted=drafted, behind=None))
    expected = target.forward(known)
    assert [output.verdict for output in given] == [output.verdict for output in expected]
    assert all(output.finite for output in given)
    for runner, held in kvs.items():
        for kv in held:
            runner.kv.release(kv)


def test_it_reads_what_the_rounds_announce(pair: tuple[ModelRunner, ModelRunner]) -> None:
    """The same blocks, and the same verdicts, as where the host brings the announcement."""
    target, draft = pair
    plan, method = replace(load_plan(models.PLAN), budget=0.25, group_size=0), METHODS["ahead"]
    rows = Reader(method, plan).announced_rows
    target.make_room_for_rounds(8, GAMMA, SUPPORT, rows, plan.block_size)
    draft.prepare_rounds(replace(round_settings(plan, GAMMA, SUPPORT), branches=2))
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 4000, (length,), generator=random).tolist() for length in (300, 40, 217)]
    kvs = {}
    for runner in pair:
        kvs[runner] = [SequenceKV() for _ in texts]
        for kv, text in zip(kvs[runner], texts, strict=True):
            for start in range(0, len(text) - 1, 64):
                runner.forward([SequenceInput(kv, text[start : min(start + 64, len(text) - 1)])])
    requests = [
        replace(request_of(kv, text, Sampling(0.0)), announce=announcement_request(method, plan, len(text), None))
        for kv, text in zip(kvs[draft], texts, strict=True)
    ]
    rounds = draft.launch_rounds(requests)
    target.take_rounds(rounds)
    judged = [Drafted([0] * GAMMA, [], Sampling(0.0), len(text)) for text in texts]

    def input_of(i: int, announced: BlockSelection) -> SequenceInput:
        """Each time with a memory of its own: of nothing."""
        read = Reader(method, plan).read(announced, len(texts[i]), len(texts[i]) + GAMMA)
        return SequenceInput(kvs[target][i], [texts[i][-1], *judged[i].tokens], "all", read, judged[i])

    nothing = [BlockSelection.of_nothing(rows, plan.num_blocks(len(text))) for text in texts]
    behind = [replace(input_of(i, nothing[i]), behind=i) for i in range(len(texts))]
    given = target.launch(behind).outputs()
    known = []
    for i, (output, text) in enumerate(zip(rounds.outputs(), texts, strict=True)):
        target.kv.truncate(kvs[target][i], len(text) - 1)
        assert output.bitmap is not None and output.bitmap.any() == (len(text) > 100)
        judged[i] = replace(judged[i], tokens=output.tokens[:GAMMA])
        known.append(input_of(i, announced_selection(output.bitmap, plan, len(text))))
    expected = target.forward(known)
    assert [output.verdict for output in given] == [output.verdict for output in expected]
    assert [output.blocks_read for output in given] == [output.blocks_read for output in expected]
    for runner, held in kvs.items():
        for kv in held:
            runner.kv.release(kv)


def test_rounds_of_branches_or_of_several_kinds_have_to_be_waited_for(pair: tuple[ModelRunner, ModelRunner]) -> None:
    target, draft = pair
    kvs = [SequenceKV(), SequenceKV()]
    draft.forward([SequenceInput(kv, [1, 2, 3, 4]) for kv in kvs])
    first, second = (request_of(kv, [1, 2, 3, 4, 5], Sampling(0.0)) for kv in kvs)
    branches = tuple(Branch(4, token, first.uniforms) for token in (5, 6))
    for requests in (
        [replace(first, tokens=[], branches=branches)],
        [first, replace(second, gamma=2, uniforms=second.uniforms[:3])],
    ):
        rounds = draft.launch_rounds(requests)
        assert not rounds.of_one_branch
        with pytest.raises(ValueError, match="wait for them"):
            target.take_rounds(rounds)
        assert len(rounds.outputs()) == len(requests)


def test_only_sequences_behind_rounds_take_what_these_have_left() -> None:
    """Of three sequences the last one runs behind the first round, with a token before, and the first one behind the
    second.
    """
    left = LeftRounds.make(2, 3, 2, (1, 2), torch.device(DEVICE))
    left.take(
        {
            "tokens": torch.tensor([[11, 12, 13], [21, 22, 23]], dtype=torch.int32),
            "ids": torch.full((2, 3, 2), 7, dtype=torch.int32),
            "probs": torch.full((2, 3, 2), 0.5),
            "bitmaps": torch.tensor([[[5]], [[6]]]),
        }
    )
    given = {
        "behind": torch.tensor([1, -1, 0], dtype=torch.int32),
        "held": torch.tensor([0, 0, 1], dtype=torch.int32),
        "query_starts": torch.tensor([0, 3, 5, 9], dtype=torch.int32),
        "token_ids": torch.tensor([1, 0, 0, 2, 9, 3, 8, 0, 0, 0]),
        "draft_counts": torch.tensor([2, 1, 3], dtype=torch.int32),
        "draft_tokens": torch.tensor([[0, 0, 0], [9, 0, 0], [8, 0, 0]], dtype=torch.int32),
        "support_ids": torch.zeros(3, 3, 4, dtype=torch.int32),
        "support_probs": torch.zeros(3, 3, 4),
        "bitmaps": torch.tensor([[[1, 1]], [[2, 2]], [[3, 3]]]),
    }
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    take_left_rounds(given | {f"left_{name}": tensor for name, tensor in vars(left).items()})
    assert given["token_ids"].tolist() == [1, 21, 22, 2, 9, 3, 8, 11, 12, 0]
    assert given["draft_tokens"][1].tolist() == [9, 0, 0] and given["draft_tokens"][2].tolist() == [8, 11, 12]
    assert given["support_ids"].sum(2).tolist() == [[14] * 3, [0] * 3, [0, 14, 14]]
    assert given["support_probs"].sum((1, 2)).tolist() == [3, 0, 2]
    left.take({"tokens": torch.zeros(2, 3, dtype=torch.int32)})
    assert not left.bitmaps.any(), "these rounds announced nothing"
    assert given["bitmaps"].tolist() == [[[6, 0]], [[2, 2]], [[5, 0]]]
