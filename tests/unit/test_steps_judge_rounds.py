"""A step that judges rounds while they run, by what they leave, judges as if the host had brought it.

Without a GPU both run at once through the torch kernels; on a GPU they are captured, and the step is launched before
the rounds have ended.
"""

from dataclasses import replace

import pytest
import torch

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import USE_DRAFT, Sampling, Support, uniforms
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.grouping import StepLimits
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import Branch, RoundRequest, RoundSettings
from specahead.engine.steps.step_shapes import alternatives_beside
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.reader import Reader
from specahead.sparsity.rounds import announced_selection, announcement_request, round_settings
from specahead.sparsity.selection import BlockSelection
from tests.plans import bundled_plan
from tests.unit.steps import read_prompt

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
    draft.prepare_rounds(RoundSettings(GAMMA, SUPPORT, 16, branches=2))
    draft.join_chain(target.make_chain(8, GAMMA, SUPPORT, 4, 16))
    return target, draft


def request_of(kv: SequenceKV, text: list[int], sampling: Sampling) -> RoundRequest:
    draws = uniforms(sampling.seed, len(text), GAMMA + 1, USE_DRAFT)
    how = {"top_k": sampling.top_k, "min_p": sampling.min_p}
    return RoundRequest(kv, text[-1:], sampling.temperature, sampling.top_p, draws, None, **how)


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    ("proposed", "beside"),
    [([4], []), ([4, 4, 4], []), ([2, 4, 1, 3, 4], []), ([4], [[]]), ([3, 4], [[9, 8, 7], [], [5] * 9])],
)
def test_it_judges_what_the_rounds_leave(
    pair: tuple[ModelRunner, ModelRunner], proposed: list[int], beside: list[list[int]], samplings: list[Sampling]
) -> None:
    """It judges as many tokens of each as are proposed; steps and rounds hold their sequences in other orders. Between
    these come sequences whose tokens the host knows.

    beside: these tokens.
    """
    target, draft = pair
    random = torch.Generator().manual_seed(len(proposed))
    texts = [torch.randint(0, 4000, (20 + 7 * i,), generator=random).tolist() for i in range(len(proposed))]
    others = [torch.randint(0, 4000, (30 + 9 * i,), generator=random).tolist() for i in range(len(beside))]
    chosen = [samplings[i % len(samplings)] for i in range(len(proposed))]
    kvs = {}
    for runner in pair:
        kvs[runner] = [SequenceKV() for _ in texts]
        runner.forward([SequenceInput(kv, text[:-1]) for kv, text in zip(kvs[runner], texts, strict=True)])
    requests = [request_of(*of) for of in zip(kvs[draft], texts, chosen, strict=True)]
    order = list(reversed(range(len(texts))))
    rounds = draft.launch_rounds([requests[i] for i in order])
    judged = [Drafted([0] * count, [], chosen[i], len(texts[i])) for i, count in enumerate(proposed)]
    behind = [
        SequenceInput(kv, [text[-1], *drafted.tokens], "all", drafted=drafted, draft_row=order.index(i))
        for i, (kv, text, drafted) in enumerate(zip(kvs[target], texts, judged, strict=True))
    ]
    of_host = [
        SequenceInput(
            read_prompt(target, text[:-1]),
            [text[-1], *tokens],
            "all",
            drafted=Drafted(tokens, [], samplings[i % len(samplings)], len(text)),
        )
        for i, (text, tokens) in enumerate(zip(others, beside, strict=True))
    ]
    given = target.launch([*behind[:1], *of_host, *behind[1:]])()
    drafts = [rounds.outputs()[order.index(i)].branches[0] for i in range(len(texts))]
    known = []
    for i, (item, count) in enumerate(zip(behind, proposed, strict=True)):
        assert item.kv.length == len(texts[i]) + count
        target.kv.truncate(item.kv, len(texts[i]) - 1)
        tokens, supports = drafts[i].tokens[:count], list[Support]()
        ids, probs = drafts[i].ids, drafts[i].probs
        if not chosen[i].greedy:
            supports = [Support(*of_token) for of_token in zip(ids[:count], probs[:count], strict=True)]
        drafted = replace(judged[i], tokens=tokens, supports=supports)
        known.append(replace(item, tokens=[texts[i][-1], *tokens], drafted=drafted, draft_row=None))
    for item, text, tokens in zip(of_host, others, beside, strict=True):
        assert item.kv.length == len(text) + len(tokens)
        target.kv.truncate(item.kv, len(text) - 1)
    expected = target.forward([*known[:1], *of_host, *known[1:]])
    assert [output.verdict for output in given] == [output.verdict for output in expected]
    assert all(output.finite for output in given)
    for item in of_host:
        target.kv.release(item.kv)
    release(kvs)


def release(kvs: dict[ModelRunner, list[SequenceKV]]) -> None:
    for runner, held in kvs.items():
        for kv in held:
            runner.kv.release(kv)


def test_it_reads_what_the_rounds_announce(pair: tuple[ModelRunner, ModelRunner]) -> None:
    """The same blocks, and the same verdicts, as where the host brings the announcement."""
    target, draft = pair
    plan = bundled_plan(budget=0.25, group_size=0)
    rows = announced_rows(plan)
    draft.prepare_rounds(replace(round_settings(plan, GAMMA, SUPPORT, 1.0), branches=2))
    draft.join_chain(target.make_chain(8, GAMMA, SUPPORT, rows, plan.block_size))
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 4000, (length,), generator=random).tolist() for length in (300, 40, 217)]
    kvs = {}
    for runner in pair:
        kvs[runner] = [read_prompt(runner, text[:-1]) for text in texts]
    requests = [
        replace(request_of(kv, text, Sampling(0.0)), announce=announcement_request(plan, len(text), None))
        for kv, text in zip(kvs[draft], texts, strict=True)
    ]
    rounds = draft.launch_rounds(requests)
    judged = [Drafted([0] * GAMMA, [], Sampling(0.0), len(text)) for text in texts]

    def input_of(i: int, announced: BlockSelection) -> SequenceInput:
        """Each time with a memory of its own: of nothing."""
        read = Reader(plan).read(announced, len(texts[i]), len(texts[i]) + GAMMA)
        return SequenceInput(kvs[target][i], [texts[i][-1], *judged[i].tokens], "all", read, judged[i])

    nothing = [BlockSelection.of_nothing(rows, plan.num_blocks(len(text))) for text in texts]
    behind = [replace(input_of(i, nothing[i]), draft_row=i) for i in range(len(texts))]
    given = target.launch(behind)()
    known = []
    for i, (output, text) in enumerate(zip(rounds.outputs(), texts, strict=True)):
        target.kv.truncate(kvs[target][i], len(text) - 1)
        assert output.bitmap is not None and output.bitmap.any() == (len(text) > 100)
        judged[i] = replace(judged[i], tokens=output.tokens[:GAMMA])
        known.append(input_of(i, announced_selection(output.bitmap, plan, len(text))))
    expected = target.forward(known)
    assert [output.verdict for output in given] == [output.verdict for output in expected]
    assert [output.blocks_read for output in given] == [output.blocks_read for output in expected]
    release(kvs)


def test_rounds_of_branches_or_of_several_kinds_have_to_be_waited_for(pair: tuple[ModelRunner, ModelRunner]) -> None:
    _, draft = pair
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
        assert len(rounds.outputs()) == len(requests)


class Judging:
    """Texts of which a target judges drafted tokens that rounds leave. reads: whether by a budget, else densely."""

    def __init__(self, samplings: list[Sampling], reads: bool) -> None:
        model = load_model(str(models.TARGET), torch.float32, DEVICE)
        target = make_runner(model, 4096, max_context=400, step_queries=GAMMA + 1)
        self.target, self.reads = target, reads
        self.plan = bundled_plan(budget=0.25, group_size=0)
        self.rows = announced_rows(self.plan)
        self.chain = target.make_chain(8, GAMMA, SUPPORT, self.rows, self.plan.block_size)
        random = torch.Generator().manual_seed(3)
        self.texts = [torch.randint(0, 4000, (length,), generator=random).tolist() for length in (90, 41, 137, 60, 75)]
        self.samplings = [samplings[i % len(samplings)] for i in range(len(self.texts))]
        self.kvs: list[SequenceKV] = []

    def begin(self) -> None:
        """Have KV of all tokens of each text but the last."""
        for kv in self.kvs:
            self.target.kv.release(kv)
        self.kvs = [read_prompt(self.target, text[:-1], 400) for text in self.texts]

    def go_on(self, tokens: list[list[int]]) -> list[int]:
        """Return the token that follows these of each text, of which the last has no KV yet."""
        inputs = []
        for kv, text, sampling, behind in zip(self.kvs, self.texts, self.samplings, tokens, strict=True):
            judged = Drafted([], [], sampling, len(text) + len(behind))
            inputs.append(SequenceInput(kv, [*text, *behind][-1:], "all", drafted=judged))
        return [output.verdict[1] for output in self.target.forward(inputs) if output.verdict]

    def judge(self, tokens: list[list[int]], likeliest: list[list[list[int]]]) -> list[SequenceOutput]:
        """Return what a step gives behind rounds that leave so many tokens, and what was likeliest beside each."""
        self.begin()
        drafted, beside = torch.tensor(tokens, dtype=torch.int32), self.target.alternatives_beside(GAMMA)
        left = {"tokens": drafted, "ids": drafted[..., None], "probs": torch.ones(*drafted.shape, 1)}
        left["alternatives"] = torch.tensor(likeliest, dtype=torch.int32)
        with torch.inference_mode():
            self.chain.leave_drafts({name: tensor.transpose(0, 1).to(DEVICE) for name, tensor in left.items()}, GAMMA)
        inputs = []
        for i, (kv, text) in enumerate(zip(self.kvs, self.texts, strict=True)):
            judged, read = Drafted([0] * GAMMA, [], self.samplings[i], len(text)), None
            if self.reads:
                nothing = BlockSelection.of_nothing(self.rows, self.plan.num_blocks(len(text)))
                read = Reader(self.plan).read(nothing, len(text), len(text) + GAMMA + beside)
            behind = SequenceInput(
                kv, [text[-1], *judged.tokens], "all", read, judged, draft_row=i, alternatives=beside
            )
            inputs.append(behind)
        outputs = self.target.launch(inputs)()
        assert [kv.length for kv in self.kvs] == [len(text) + GAMMA + beside for text in self.texts]
        return outputs


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
def test_what_follows_an_alternative_is_what_a_step_of_its_own_gives(samplings: list[Sampling]) -> None:
    """Token by token, also behind the round, by the KV that it has left; where there are no more, as without."""
    of = Judging(samplings, reads=False)
    beside, nobody = of.target.alternatives_beside(GAMMA), [[4095, 4094]] * GAMMA
    assert beside == 3
    of.begin()
    says: list[list[int]] = [[] for _ in of.texts]
    for _ in range(GAMMA):
        for told, token in zip(says, of.go_on(says), strict=True):
            told.append(token)
    right = [0, 2, 1, 3, 2]
    proposed = [[*told[:n], (told[n] + 1) % 4096, 5, 5, 5][:GAMMA] for told, n in zip(says, right, strict=True)]
    without = of.judge(proposed, [nobody] * len(of.texts))
    verdicts = [output.verdict for output in without if output.verdict]
    likeliest = [
        [[told, following] if n == accepted else [told, 4095] for n, told in enumerate(tokens)]
        for tokens, (accepted, following) in zip(proposed, verdicts, strict=True)
    ]
    given = of.judge(proposed, likeliest)
    texts = []
    for i, (output, (accepted, following)) in enumerate(zip(given, verdicts, strict=True)):
        assert output.verdict is not None and output.finite and without[i].alternative is None
        hit = accepted < beside
        assert output.alternative == (following if hit else None)
        assert output.verdict[0] == accepted + hit
        assert hit or output.verdict[1] == following
        texts.append([*proposed[i][:accepted], following, *([output.verdict[1]] if hit else [])])
        of.target.kv.truncate(of.kvs[i], len(of.texts[i]) + len(texts[i]) - 1)
    assert sum(output.alternative is not None for output in given) >= 3
    behind = [list(text) for text in texts]
    for _ in range(3):
        for text, token in zip(behind, of.go_on(behind), strict=True):
            text.append(token)
    of.begin()
    plain: list[list[int]] = [[] for _ in texts]
    for at in range(max(map(len, behind))):
        known = [text[:at] + told[at:] for text, told in zip(behind, plain, strict=True)]
        drawn = of.go_on([each[:at] for each in known])
        for i, (told, token, (accepted, _)) in enumerate(zip(plain, drawn, verdicts, strict=True)):
            decided = at <= accepted  # by the step: what it accepts and adds need not be what plain decoding draws
            told.append(behind[i][at] if decided and at < len(behind[i]) else token)
    for text, told in zip(behind, plain, strict=True):
        assert told[: len(text)] == text


def test_an_alternative_reads_what_the_drafted_tokens_read() -> None:
    """By a budget: what follows it is what follows where it was drafted itself."""
    of = Judging(SAMPLINGS["greedy"], reads=True)
    nobody, proposed = [[4095, 4094]] * GAMMA, [[7, 8, 9, 10] for _ in of.texts]
    verdicts = [output.verdict for output in of.judge(proposed, [nobody] * len(of.texts)) if output.verdict]
    chains = [
        [*tokens[:accepted], following, *tokens[accepted + 1 :]][:GAMMA]
        for tokens, (accepted, following) in zip(proposed, verdicts, strict=True)
    ]
    likeliest = [[[token, 4095] for token in chain] for chain in chains]
    given = of.judge(proposed, likeliest)
    for output, (accepted, following) in zip(given, verdicts, strict=True):
        assert output.alternative == (following if accepted < 3 else None)
    expected = of.judge(chains, [nobody] * len(of.texts))
    pairs = zip(given, expected, verdicts, strict=True)
    alike = [
        output.verdict == other.verdict
        for output, other, (accepted, _) in pairs
        if other.verdict and other.verdict[0] == accepted + 1
    ]
    assert len(alike) >= 3 and all(alike)


@pytest.mark.parametrize(
    ("gamma", "queries", "group", "beside", "in_eight_bits"),
    [
        *((4, 5, 4, 3, 3), (4, 7, 4, 3, 3), (6, 7, 4, 1, 1), (1, 7, 4, 1, 1), (4, 5, 1, 4, 4), (4, 5, 3, 0, 0)),
        *((4, 5, 7, 4, 0), (2, 5, 7, 2, 2), (4, 5, 8, 3, 0), (4, 9, 4, 4, 4), (8, 9, 4, 7, 1), (8, 9, 8, 0, 0)),
    ],
)
def test_as_many_alternatives_run_as_fit_into_a_steps_tile(
    gamma: int, queries: int, group: int, beside: int, in_eight_bits: int
) -> None:
    """7 heads x 5 queries take 64 rows, which is room for 9 queries, or 40 over KV in 8 bits, which is room for 5; 72
    rows would take more than one tile.
    """
    for eight_bit, expected in ((False, beside), (True, in_eight_bits)):
        limits = StepLimits(pages=1, step_queries=queries, queries=16, vocab=8, group=group, eight_bit=eight_bit)
        assert alternatives_beside(gamma, queries, limits) == expected
