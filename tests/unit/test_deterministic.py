"""A deterministic target: the same tokens, to the last bit of what they come from, whatever is drafted and screened.

The torch references on a CPU round by their shapes and by where a row stands; there the ways are tested, and that
numbers are near. On a GPU they are the same.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_service.drafter import Drafter
from specahead import models
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.graphs import Captured
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.model_runner import STEP_QUERIES, ModelRunner
from specahead.engine.steps.outputs import StepUnderWay
from specahead.engine.steps.shapes import PassShape
from specahead.sparsity.reader import Reader
from specahead.wire import messages as m
from target_service.draft_in_target import StepsByTurns
from target_service.screening import screening_reader
from target_service.verifier import Verifier
from tests.plans import bundled_plan
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import GREEDY, PinnedFakeRunner
from tests.unit.steps import run_steps
from tests.unit.test_grammar_sessions import END, GRAMMARS, WORDS
from tests.unit.test_screening import Blurs, ScreeningRunner, Screens, check_kv
from tests.unit.world import Faults, World

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SEQUENCES = 8 if ON_GPU else 4  # of every step; a CPU computes all their rows one after the other
GAMMA, PROMPT = 4, 200
PLAN = bundled_plan(group_size=64)
SETTINGS = target_settings(hold=8, self_read_share=0.1)
SAMPLED = Sampling(0.9, 0.95, seed=3)
TEXT = torch.randint(4, 4000, (400,), generator=torch.Generator().manual_seed(1)).tolist()
in_bits = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: elsewhere numbers depend on shapes and places")


@pytest.fixture(autouse=True, scope="module")
def _sequences() -> Iterator[None]:
    with patch("specahead.engine.steps.model_runner.PINNED_SEQUENCES", SEQUENCES):
        yield


def runner_of(dtype: torch.dtype = torch.float32, **how: Any) -> ModelRunner:
    model = load_model(str(models.TARGET), dtype, DEVICE)
    how = {"max_context": 1000, "step_queries": GAMMA + 1, "deterministic": True, **how}
    runner = make_runner(model, 16000, **how)
    runner.kv.keep_group_means(PLAN.group_size, 1000)
    return runner


def judged(tokens: list[int], base: int, sampling: Sampling = GREEDY, **how: Any) -> Drafted:
    return Drafted(tokens[1:], [], sampling, base, **how)


def round_of(kv: SequenceKV, tokens: list[int], sampling: Sampling = GREEDY, **how: Any) -> SequenceInput:
    return SequenceInput(kv, tokens, "all", drafted=judged(tokens, kv.length + 1, sampling), **how)


class Ran(NamedTuple):
    """A step that has run."""

    inputs: list[SequenceInput]
    shape: PassShape
    step: Captured


@dataclass
class Probe:
    """A runner whose steps are noted. ran: those of the last call."""

    runner: ModelRunner
    ran: list[Ran] = field(default_factory=list)

    def __post_init__(self) -> None:
        passes = self.runner.passes
        start, step_of = passes.start_step, passes.step_of
        last: list[Captured] = []

        def noted_step(shape: PassShape) -> Captured:
            last[:] = [step_of(shape)]
            return last[0]

        def noted_start(inputs: list[SequenceInput], shape: PassShape) -> StepUnderWay:
            started = start(inputs, shape)
            self.ran.append(Ran(inputs, shape, last[0]))
            return started

        passes.step_of, passes.start_step = noted_step, noted_start

    def read(self, tokens: list[int], cut: int = 0) -> SequenceKV:
        """Read a prompt, in two parts if `cut` is a place within it."""
        kv = SequenceKV()
        for part in filter(None, (tokens[:cut], tokens[cut:])):
            self.runner.forward([SequenceInput(kv, part)])
        return kv

    def run(self, item: SequenceInput, beside: list[SequenceInput]) -> tuple[Tensor, SequenceOutput]:
        """Return the logits of an item's rows, and what it gives. It stands in the step that runs last."""
        self.ran.clear()
        output = self.runner.forward([*beside, item])[-1]
        inputs, shape, step = self.ran[-1]
        assert any(each is item for each in inputs)
        place = next(i for i, each in enumerate(inputs) if each is item)
        of_all = step.buffers.tensors["logits"].view(shape.sequences, shape.queries, -1)
        return of_all[place, : len(item.tokens)].float().cpu(), output

    def kv_of(self, kv: SequenceKV, start: int, end: int) -> Tensor:
        """Keys and values of some positions in all layers."""
        at = torch.arange(start, end)
        pages, rows = torch.tensor(kv.pages)[at // PAGE_SIZE].to(DEVICE), (at % PAGE_SIZE).to(DEVICE)
        every = (*self.runner.kv.k_pages, *self.runner.kv.v_pages)
        return torch.stack([part[pages, :, rows].float().cpu() for part in every])

    def release(self, *kvs: SequenceKV) -> None:
        for kv in kvs:
            self.runner.kv.release(kv)


def read_by(reader: Reader, base: int, tokens: int, everything: bool) -> SparseRead:
    read = reader.read(None, base, base + tokens, everything)
    reader.finish(SequenceOutput())
    assert read is not None
    return read


def screening(probe: Probe, number: int, proposed: int) -> SequenceInput:
    """A round that screens, of a session that has weighed what it read."""
    kv, reader = (probe.read(TEXT[number : number + 150]), screening_reader(PLAN, SETTINGS.self_read_share))
    probe.runner.forward([round_of(kv, TEXT[:1], read=read_by(reader, 151, 0, everything=True))])
    tokens = TEXT[50 : 51 + proposed]
    read = read_by(reader, 152, proposed, everything=False)
    assert not read.reads_all
    return SequenceInput(kv, tokens, "all", read, judged(tokens, 152, screens=True))


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found, wanted) if ON_GPU else torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)


def check_a_pass_over_many_tokens(probe: Probe, count: int, weighs: bool, beside: bool) -> None:
    """Tokens give in one pass what they give one by one, and leave the same KV; also sampled ones, and however the
    prompt was cut.
    """
    one, many = probe.read(TEXT[:PROMPT]), probe.read(TEXT[:PROMPT], cut=77)
    tokens, rows = [TEXT[PROMPT]], []
    for _ in range(count):
        row, output = probe.run(round_of(one, tokens[-1:], SAMPLED), [])
        rows.append(row)
        tokens.append(output.verdict[1])
    others = [screening(probe, number, 1 + number) for number in range(3)] if beside else []
    others += [round_of(probe.read(TEXT[n : n + 90]), TEXT[: 1 + n], SAMPLED) for n in range(9)] if beside else []
    wrong = [*tokens[: count - 2], tokens[count - 2] ^ 1, *tokens[count - 1 : count]]
    read = read_by(screening_reader(PLAN, SETTINGS.self_read_share), PROMPT, count, True) if weighs else None
    given, output = probe.run(round_of(many, wrong, SAMPLED, read=read), others)
    assert output.verdict == (count - 3, tokens[count - 2]), "as far as the tokens are those that it draws by itself"
    assert same(given[: count - 2], torch.cat(rows)[: count - 2])
    assert same(probe.kv_of(many, 0, PROMPT + count - 2), probe.kv_of(one, 0, PROMPT + count - 2))
    probe.release(one, many, *(item.kv for item in others))


def test_a_pass_over_many_tokens_gives_what_steps_of_one_give() -> None:
    check_a_pass_over_many_tokens(Probe(runner_of()), 16, weighs=True, beside=True)


@in_bits
@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighs"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("count", [5, 13, 16])
def test_in_sixteen_bits_too(count: int, weighs: bool, beside: bool) -> None:
    """By the matrix products that are served."""
    check_a_pass_over_many_tokens(Probe(runner_of(torch.bfloat16)), count, weighs, beside)


def test_every_step_has_one_shape_but_those_that_a_later_one_judges() -> None:
    """Whatever is proposed, held, weighed or drafted in the step, and beside whatever."""
    probe = Probe(runner_of())
    weighing = read_by(screening_reader(PLAN, SETTINGS.self_read_share), PROMPT, 4, everything=True)
    kvs = [probe.read(TEXT[n : n + PROMPT]) for n in range(4)]
    items = [round_of(kv, TEXT[:count]) for kv, count in zip(kvs, (1, 5, 13, 16), strict=True)]
    items[2] = replace(items[2], read=weighing)
    screens = [screening(probe, number, GAMMA) for number in range(3)]
    sparse = replace(screens[0], drafted=judged(screens[0].tokens, 152))  # as an approximate session reads
    for step in (items, [*items, *screens], items[:1], items[1:3], [sparse, *items[1:]]):
        probe.ran.clear()
        probe.runner.forward([replace(item, tokens=list(item.tokens)) for item in step])
        pinned = [ran for ran in probe.ran if not ran.inputs[0].screens]
        for inputs, shape, _ in pinned:
            sizes = shape.sequences, shape.queries, shape.rows
            assert sizes == (SEQUENCES, STEP_QUERIES, SEQUENCES * STEP_QUERIES)
            assert shape.pinned and shape.judge is not None and shape.judge.draws_own
            assert [shape.read.weighs] * len(inputs) == [item.read is weighing for item in inputs]
            assert [shape.shares_out] * len(inputs) == [item.read is sparse.read for item in inputs]
        assert sum(len(ran.inputs) for ran in pinned) == sum(not item.screens for item in step)
        for item in step:
            probe.runner.kv.truncate(item.kv, item.kv.length - len(item.tokens))
    shape = probe.runner._shapes.of(screens)
    assert (shape.sequences, shape.queries, shape.rows) == (4, GAMMA + 1, 4 * (GAMMA + 1))
    assert shape.judge is not None and shape.judge.draws_own and not shape.pinned and not shape.read.weighs


CHAINS: dict[str, dict[str, Any]] = {
    "draft": {},
    "gamma 2": {"gamma": 2},
    "three levels": {"hold": 8},
    "three levels by auto": {"hold": None},
    "looked up first": {"lookup": True},
    "self": {"draft": "self"},
    "self by auto": {"draft": "self", "gamma": None},
    "lookup": {"draft": "lookup"},
}
SERVED = [
    (TEXT[:180], GREEDY, {}),
    (TEXT[50:60] * 25, Sampling(0.8, 0.95, seed=1), {}),
    (TEXT[20:300], Sampling(0.0, repetition_penalty=1.3), {"alternatives": 2, "wants_logprobs": True}),
    (TEXT[300:] * 2, Sampling(0.6, seed=2, top_k=40, presence_penalty=0.3), {}),
]


@dataclass
class Generated:
    """What a target makes of the texts. accepted: of all that was proposed, screened or not."""

    tokens: list[list[int]]
    accepted: int = 0
    counters: Counter[str] = field(default_factory=Counter)


def generate(
    chain: dict[str, Any], dtype: torch.dtype = torch.float32, draft_model: Path = models.DRAFT, tokens: int = 20
) -> Generated:
    """Serve the texts by a deterministic target, with a draft in its process where there is one. tokens: of each
    answer.
    """
    chain = {"draft": str(models.DRAFT), "self_read_share": 0.2, **chain}
    of_target = target_settings(max_context=1000, max_sessions=4, prefill_chunk=256, deterministic=True, **chain)
    widths = {"step_queries": of_target.most_drafted + 1, "most_queries": of_target.widest_round}
    verifier = Verifier(runner_of(dtype, **widths), PLAN, of_target)
    steps: Any = verifier
    if of_target.has_draft:
        draft = make_runner(load_model(str(draft_model), dtype, DEVICE), 16000, max_context=1000)
        steps = StepsByTurns(verifier, Drafter(draft, PLAN, replace(of_target, placement="together").own_draft))
    made = Generated([[] for _ in SERVED], counters=verifier.counters)

    def emit(event: m.ServedEvent) -> None:
        made.tokens[int(event.at.session)] += event.tokens
        made.accepted += event.accepted + sum(event.screening_accepted)

    for name, (text, sampling, asked) in enumerate(SERVED):
        verifier.admission.open(
            m.Open(str(name), text, len(text), tokens, [], sampling, m.Exactness.EXACT, **asked), emit
        )
    run_steps(steps)
    return made


@pytest.fixture(scope="module")
def plainly() -> Generated:
    """What it makes of them without a draft."""
    return generate({"draft": "none"})


@pytest.mark.parametrize("chain", CHAINS if ON_GPU else ["three levels", "looked up first", "self by auto"])
def test_all_chains_give_the_tokens_of_plain_decoding(plainly: Generated, chain: str) -> None:
    found = generate(CHAINS[chain])
    assert found.tokens == plainly.tokens
    assert not plainly.accepted
    if chain == "lookup":  # answers repeat something only where they are longer
        found = generate(CHAINS[chain], tokens=40)
        assert found.tokens == generate({"draft": "none"}, tokens=40).tokens
    assert found.accepted > (0 if chain == "lookup" else 10)
    if chain == "three levels":
        assert found.counters["confirmed_tokens"] > 15


def test_a_draft_that_thinks_alike_draws_alike(plainly: Generated) -> None:
    """It draws by the same numbers as the target, which keeps nothing but what it draws itself."""
    found = generate({}, draft_model=models.TARGET)
    assert found.tokens == plainly.tokens
    assert found.accepted > 0.7 * sum(map(len, found.tokens)), "four of five could be; first tokens are not drafted"


@in_bits
@pytest.mark.parametrize("chain", CHAINS)
def test_all_chains_give_the_tokens_of_plain_decoding_in_sixteen_bits(chain: str) -> None:
    found, plain = generate(CHAINS[chain], torch.bfloat16), generate({"draft": "none"}, torch.bfloat16)
    assert found.tokens == plain.tokens


# Scripted models, whatever happens on the way


class PinnedScreeningRunner(ScreeningRunner, PinnedFakeRunner):
    """Confirms what is held whatever it was drawn from."""

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        for item in inputs:
            if item.held and item.drafted is not None:
                assert not item.drafted.supports and not item.screens
        return super().forward(inputs)


class PinnedWorld(World):
    def check_kv(self) -> None:
        """KV is what plain decoding leaves, but that of held tokens."""
        super().check_kv()
        check_kv(self)
        assert isinstance(self.target, PinnedScreeningRunner)
        if self.target_side.step is None:
            self.target.check_runs(self.sessions.values())


def world_of(clock: Clock, seed: int, model: Screens, most: int, **how: Any) -> PinnedWorld:
    world = PinnedWorld(clock, seed, model, hold=most, runner=PinnedScreeningRunner, **how)
    world.target.sparse_logits = model.sparse
    return world


ASKED: list[tuple[Sampling, dict[str, Any]]] = [
    (GREEDY, {}),
    (Sampling(1.0, seed=5), {}),
    (Sampling(0.9, 0.9, seed=6, top_k=9), {"logprobs": 2}),
    (Sampling(1.1, seed=7, repetition_penalty=1.4, logit_bias={3: 1.0}), {}),
    (Sampling(1.0, seed=8, min_tokens=12), {"grammar": WORDS}),
    (Sampling(0.0, presence_penalty=0.5), {"grammar": WORDS}),
]


def said(world: PinnedWorld, resumed: bool = False) -> list[tuple[list[int], list[float]]]:
    """What sessions of all kinds say, and how likely that was where it is told. resumed: each ends on its way, and is
    opened again with what it had come to, as behind the loss of a target.
    """
    texts = [[7 + n] * 40 for n in range(len(ASKED))]
    ways = [(sampling, {"stop": [END], **asked}) for sampling, asked in ASKED]
    names = [world.open(text, 60, way, **asked) for text, (way, asked) in zip(texts, ways, strict=True)]
    if resumed:
        while any(len(world.ledger.records[name].generated) < 20 and not world.ended(name) for name in names):
            assert world.happen()
        for i, name in enumerate(names):
            if not world.ended(name):
                world.abort(name)
                done, (sampling, asked) = world.ledger.records[name].generated, ways[i]
                names[i] = world.open(texts[i], 60, sampling, done=list(done), **asked)
    world.finish()
    assert world.drafter.counters["failed_sessions"] == world.verifier.counters["failed_sessions"] == 0
    records = [world.ledger.records[name] for name in names]
    told = [[each.logprob for commit in world.commits[name] for each in commit.logprobs] for name in names]
    return [(record.generated, of_each) for record, of_each in zip(records, told, strict=True)]


@pytest.mark.parametrize(("screening", "most"), [(0, 11), (2, 6), (3, None), (4, 6)])
def test_three_levels_say_what_is_said_without_a_draft(clock: Clock, screening: int, most: int) -> None:
    model = Screens(agreement=3, screening=screening)
    plain = said(world_of(clock, 1, model, 0, grammars=GRAMMARS))
    world = world_of(clock, 2, model, most, grammars=GRAMMARS, branches=1 + 2 * (screening % 2))
    world.attach()
    assert said(world) == plain
    counted = world.verifier.counters
    if most is not None:
        assert counted["screened_tokens"] > 30
        assert (counted["confirmed_tokens"] == counted["screened_tokens"]) == (screening == 4), (
            "where both levels have one distribution they draw the same"
        )


@settings(max_examples=3)
@given(
    seed=st.integers(0, 10**6),
    screening=st.integers(1, 4),
    agreement=st.integers(0, 4),
    gamma=st.integers(1, 4),
    most=st.sampled_from([None, 6, 11, 24]),
    pages=st.sampled_from([26, 40, 200]),
    faults=st.integers(0, 8),
    breaks=st.booleans(),
    resumed=st.booleans(),
    lookup=st.booleans(),
)
def test_whatever_happens_three_levels_say_what_is_said_without_a_draft(
    clock: Clock,
    seed: int,
    screening: int,
    agreement: int,
    gamma: int,
    most: int,
    pages: int,
    faults: int,
    breaks: bool,
    resumed: bool,
    lookup: bool,
) -> None:
    """Lost drafts, misplaced frames, sessions that give way or are opened again, guesses before the draft's."""
    model = Blurs(agreement=agreement, screening=screening)
    plain = said(world_of(clock, seed, model, 0, grammars=GRAMMARS))
    how: dict[str, Any] = {"gamma": gamma, "branches": 1 + seed % 3, "pages": pages, "lookup": lookup}
    world = world_of(clock, seed, model, most, grammars=GRAMMARS, faults=Faults(faults, jumps=faults), **how)
    link = world.attach()
    if breaks:
        wait = [lambda: None] * 30
        world.script = [*wait, lambda: world.detach(link), *wait, lambda: bool(world.attach())]
    found = said(world, resumed)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    assert resumed or found == plain


def test_what_is_generated_is_never_offered_to_others(clock: Clock) -> None:
    """It is not the KV that they would have who read it as a prompt."""
    world = world_of(clock, 6, Screens(screening=3), 11)
    world.attach()
    name = world.open([5] * 170, 60)
    world.run()
    assert world.verifier.counters["confirmed_tokens"] > 0
    assert world.offered(name) == 160
