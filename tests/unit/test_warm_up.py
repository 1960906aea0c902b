"""What is captured before the first request is all that requests take: none of them waits for a capture.

Without a GPU a stand-in for graphs runs the launches one by one, in the shapes that a GPU would capture.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.sessions import DraftSession, TargetPeer
from specahead import models
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.parallel.ranks import Ranks
from specahead.engine.sampling.distributions import Sampling, Support
from specahead.engine.sampling.judging import WIDE_SUPPORT, Drafted
from specahead.engine.sampling.logit_rules import rules_of
from specahead.engine.staging import Buffers
from specahead.engine.steps import warm_up
from specahead.engine.steps.graphs import LEAST_FREE, Captured, Graphs, free_memory
from specahead.engine.steps.grouping import StepLimits, join_rounds, kind_of
from specahead.engine.steps.inputs import Logits, SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.shapes import JudgeShape, PassShape
from specahead.engine.steps.step_shapes import step_shape
from specahead.wire.messages import At, Begin, DraftEvent, End, Proposals, Verdict
from target_service.screening import screening_reader
from target_service.verifier import Verifier
from tests.plans import bundled_plan
from tests.settings import draft_settings, target_settings
from tests.unit.steps import run_steps

SESSIONS, GAMMA = 2, 4
STEADY = (GAMMA, 0), (0, 0), (GAMMA, 0)  # tokens accepted of a round, and how many are wanted of the next one; 0: all
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "logit_bias": {7: 2.0}, "min_tokens": 3}
SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.8, 0.9, seed=1),
    Sampling(0.8, 0.9, seed=2, top_k=20),
    Sampling(0.8, seed=3, min_p=0.1),
    Sampling(0.0, **PENALTIES),
    Sampling(0.8, 0.9, seed=4, top_k=20, **PENALTIES),
]


@dataclass
class Launches:
    """In a graph's place: runs what it would have captured."""

    captured: Captured

    def replay(self) -> None:
        self.captured.launch()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have runners on a CPU capture, before they serve only what single sessions take.

    Returns how many launches were to be compiled ahead, each time; the references that run here have no kernels.
    """
    compiled: list[int] = []

    def compile_ahead(makers: Sequence[Callable[[], Callable[[], None]]]) -> None:
        assert all(callable(make()) for make in makers)
        compiled.append(len(makers))

    for module in ("specahead.engine.steps.warm_up", "specahead.engine.steps.round_runner"):
        monkeypatch.setattr(f"{module}.WARM_SESSIONS", 1)
        if not torch.cuda.is_available():
            monkeypatch.setattr(f"{module}.compile_ahead", compile_ahead)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * LEAST_FREE, 2 * LEAST_FREE))
        monkeypatch.setattr(Graphs, "_capture", lambda self, captured: Launches(captured))
    return compiled


def runner_of(folder: Any, most_queries: int = 0, **how: Any) -> ModelRunner:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(str(folder), torch.float32, device)
    runner = make_runner(model, 4096, max_context=400, most_queries=most_queries, **how)
    runner._captures = runner.passes.graphs.captures = True
    return runner


def cuts_of(shape: Any) -> int:
    return shape.judge.cuts if shape.judge else 0


def test_no_step_of_a_target_is_captured_for_a_request(captures: list[int], caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of(models.TARGET)
    with caplog.at_level(logging.INFO):
        runner.warm_up([None], SESSIONS)
    now = set(runner.passes.graphs.by_shape)
    told = next(record for record in caplog.records if record.message == "CUDA graphs are captured")
    assert (vars(told)["of"], vars(told)["graphs"]) == ("steps", len(now)) and vars(told)["seconds"] >= 0
    assert {(shape.sequences, cuts_of(shape)) for shape in now} == {(1, 0)}  # type: ignore[attr-defined]
    prepare(runner)
    shapes = set(runner.passes.graphs.by_shape)
    rare = set(filter(cuts_of, shapes))
    assert rare and len(shapes - rare) == 2 * len(now)
    # The kernels of each are compiled before, and those that judge rounds of one token and of all by rules.
    by_rules = len(warm_up.SAMPLINGS) * 2 * SESSIONS
    assert captures == ([] if torch.cuda.is_available() else [len(shapes) + by_rules])
    for sampling, count, queries in itertools.product(SAMPLINGS, range(1, SESSIONS + 1), (1, 3, GAMMA + 1)):
        kvs, rules = [SequenceKV() for _ in range(count)], rules_of(sampling, 9, [3])
        runner.forward([SequenceInput(kv, list(range(20, 26))) for kv in kvs])  # the end of a prompt
        drafted = Drafted([5] * (queries - 1), [], sampling, 7, rules, [1, 2, 3, 4, 5, 6, 7], 2)
        outputs = runner.forward([SequenceInput(kv, [4] * queries, "all", drafted=drafted) for kv in kvs])
        assert all(output.verdict is not None for output in outputs)
        for kv in kvs:
            runner.kv.release(kv)
    (scored,) = runner.forward([SequenceInput(SequenceKV(), list(range(20, 26)), "all")])
    assert scored.logits is not None and len(scored.logits) == 6
    assert set(runner.passes.graphs.by_shape) == shapes


@pytest.mark.usefixtures("captures")
def test_captured_steps_leave_logits_in_one_memory_and_no_lists() -> None:
    runner = runner_of(models.TARGET)
    reader = screening_reader(bundled_plan(), 0.1)
    reader.read(None, 100, 105)  # everything, to be weighed
    reader.finish(SequenceOutput())
    read = replace(reader.read(None, 100, 105), group_means=False)

    def run(queries: int, count: int, read: SparseRead | None = None) -> list[SequenceOutput]:
        kvs = [SequenceKV() for _ in range(count)]
        for index, kv in enumerate(kvs):
            runner.forward([SequenceInput(kv, list(range(99 + index)))])
        outputs = runner.forward([SequenceInput(kv, [4] * queries, "last", read) for kv in kvs])
        for kv in kvs:
            runner.kv.release(kv)
        return outputs

    first, _, again = [run(*step) for step in ((GAMMA + 1, 2), (1, 1), (GAMMA + 1, 2))]
    for one, other in zip(first, again, strict=True):
        assert one.logits is not None and other.logits is not None
        torch.testing.assert_close(one.logits, other.logits)
    assert run(GAMMA + 1, 1, read)[0].blocks is None
    assert run(GAMMA + 1, 1, replace(read, report_blocks=True))[0].blocks is not None
    steps = {shape: captured.buffers.tensors for shape, captured in runner.passes.graphs.by_shape.items()}
    assert len(steps) == 4
    assert len({tensors["logits"].untyped_storage().data_ptr() for tensors in steps.values()}) == 1
    assert ["all_lists" in tensors for tensors in steps.values()].count(True) == 1


@pytest.mark.usefixtures("captures")
def test_steps_that_are_asked_for_no_logits_compute_none_and_write_the_same_kv() -> None:
    runner, tokens = runner_of(models.TARGET), list(range(20, 26))
    after = []
    asked: list[Logits] = ["none", "last"]
    for logits in asked:
        kv = SequenceKV()
        (read,) = runner.forward([SequenceInput(kv, tokens, logits)])
        assert (read.logits is None) == (logits == "none")
        after += runner.forward([SequenceInput(kv, [4], "last")])
    one, other = (output.logits for output in after)
    assert one is not None and other is not None
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    steps = [captured.buffers.tensors for captured in runner.passes.graphs.by_shape.values()]
    assert [len(tensors["logits"]) for tensors in steps] == [0, 16, 1]


@pytest.mark.parametrize("vocab", [40, 2000, 150_000])
def test_no_number_that_a_client_or_a_draft_chooses_has_more_than_three_sizes(vocab: int) -> None:
    """The room for top_k and for the distributions of drafted tokens, each of any number up to the vocabulary."""
    limits, kv = StepLimits(pages=8, step_queries=5, queries=16, vocab=vocab), KVCache(1, 1, 2, 8)

    def shape_of(top_k: int, support: int) -> PassShape:
        drafted = Drafted([0], [support_of(support)], Sampling(1.0, top_k=top_k), 7)
        return step_shape([SequenceInput(SequenceKV(), [0, 0], "all", drafted=drafted)], kv, limits)

    def judged(top_k: int, support: int) -> JudgeShape:
        return shape_of(top_k, support).judge

    counts = [min(vocab, 1 << i) for i in range(18)]
    for top_k in [*counts, 2**31 - 1]:
        assert min(top_k, vocab) <= judged(top_k, 1).cuts <= max(vocab, WIDE_SUPPORT)
    assert all(support <= judged(1, support).support <= max(vocab, WIDE_SUPPORT) for support in counts)
    shapes = {shape_of(top_k, support) for top_k in [*counts, 2**31 - 1] for support in counts}
    assert len(shapes) <= 3 * 3


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_no_mix_of_rounds_is_captured_for_a_request(deterministic: bool, quantization: str) -> None:
    """Rounds that screen run beside some that confirm, and beside long ones that a text proposes.

    quantization: of the weights by which rounds screen where no others run beside them.
    """
    chosen = {"gamma": None, "hold": None, "lookup": True, "screening_quantization": quantization}
    settings = target_settings(placement="together", max_sessions=SESSIONS, deterministic=deterministic, **chosen)
    runner = runner_of(models.TARGET, settings.widest_round, deterministic=deterministic)
    verifier = Verifier(runner, bundled_plan(), settings)
    if not deterministic:
        verifier.make_chain()
    verifier.warm_up()
    prepare(runner)
    reader = screening_reader(bundled_plan(), settings.self_read_share)
    weighing = reader.read(None, 100, 105)
    reader.finish(SequenceOutput())
    screening, drawn, of_held = reader.read(None, 100, 105), support_of(64), support_of(900)
    counts = (0, 0), (0, 1), (0, GAMMA), (0, settings.widest_round - 1), (1, 0), (1, 1), (9, GAMMA)
    rounds = []
    for read, (held, proposed), sampling in itertools.product((None, weighing, screening), counts, SAMPLINGS[:3]):
        if read is screening and (held or not proposed):
            continue
        told = not sampling.greedy and not (deterministic and held)
        supports = [of_held] * held + [drawn] * proposed if told else []
        drafted = Drafted([5] * (held + proposed), supports, sampling, 100, screens=read is screening)
        rounds.append(SequenceInput(SequenceKV(), [4, *drafted.tokens], "all", read, drafted, held=held))
    asked = set()
    light = [replace(item, light=True) for item in rounds if item.screens and settings.screens_lightly]
    for alike, count in itertools.product((rounds, light), range(1, SESSIONS + 1)):
        for step in map(list, itertools.combinations_with_replacement(alike, count)):
            items = step if deterministic else join_rounds(step)
            if len({kind_of(item, runner._limits) for item in items}) == 1:
                asked.add(runner._shapes.of(items))
    assert len(asked) > 15 and any(shape.light for shape in asked) == settings.screens_lightly
    assert asked <= set(runner.passes.graphs.by_shape)


def support_of(entries: int) -> Support:
    return Support(np.arange(entries), np.full(entries, 1 / entries, np.float32))


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    ("settings", "rows"),
    [({}, 128), ({"branches": 3}, 4), ({"draft_read_share": 0.5}, 128), ({"gamma": None, "max_gamma": GAMMA}, 128)],
)
def test_no_round_of_a_draft_is_captured_for_a_request(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], rows: int
) -> None:
    """rows: of all branches in a step, at most."""
    monkeypatch.setattr("specahead.engine.steps.requests.MOST_ROWS", rows)
    plan, runner = bundled_plan(), runner_of(models.DRAFT)
    settings = {"gamma": GAMMA, **settings}
    drafter = Drafter(runner, plan, draft_settings(max_sessions=SESSIONS, **settings))
    drafter.warm_up()
    prepare(runner)
    graphs = runner._rounds._graphs, runner.passes.graphs
    shapes = [set(each.by_shape) for each in graphs]
    sent: list[DraftEvent] = []
    peer = TargetPeer(sent.append)
    drafter.attach(peer)

    def run(*events: Any) -> None:
        for event in events:
            drafter.receive(peer, event)
        run_steps(drafter)

    for number, (one, other) in enumerate(itertools.pairwise(SAMPLINGS)):
        for name, sampling, announces in ((f"a{number}", one, True), (f"b{number}", other, False)):
            run(Begin(At(name, 0, 0, 30), list(range(40, 70)), sampling, 200, announces, 30, [3]))
        for accepted, gamma in ((GAMMA, 0), (0, 0), (GAMMA, 2), (0, 1), (1, 4)) if not settings["gamma"] else STEADY:
            run(*(_verdict(session, accepted, gamma) for session in peer.sessions.values()))
        run(*(End(name) for name in peer.sessions))
    assert any(isinstance(event, Proposals) for event in sent)
    assert [set(each.by_shape) for each in graphs] == shapes


def _verdict(session: DraftSession, accepted: int, gamma: int) -> Verdict:
    """Return the verdict that keeps so many of a round's tokens: all of them and what was foreseen, or not.

    gamma: tokens that are wanted of the next one.
    """
    *proposed, guess = session.present.drafted.tokens
    accepted = min(accepted, len(proposed))
    extra = guess if accepted == len(proposed) else (proposed[accepted] + 1) % 4096
    epoch = session.at.epoch + (accepted < len(proposed) or session.overlap is None)
    place = At(session.id, epoch, session.at.round + 1, session.committed)
    return Verdict(place, accepted, [*proposed[:accepted], extra], plain=False, gamma=gamma)


def prepare(runner: ModelRunner) -> None:
    """Make ready for all that the runner is to be ready for later."""
    assert runner.unprepared
    while runner.unprepared:
        runner.warm_up_more()


@pytest.mark.parametrize(("free", "kept"), [(LEAST_FREE, 64), (LEAST_FREE - 1, 24)], ids=["enough", "short"])
def test_graphs_that_requests_asked_for_are_few_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, free: int, kept: int
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1 << 40))
    graphs = Graphs(captures=True)
    monkeypatch.setattr(graphs, "_capture", lambda captured: None)
    for shape in range(100):
        graphs.of(shape, lambda: cast(Buffers, None), lambda buffers: None, prepared=shape < 3)
    graphs.of(100 - kept, lambda: cast(Buffers, None), lambda buffers: None)  # used now, and so not the next to go
    graphs.of(100, lambda: cast(Buffers, None), lambda buffers: None)
    assert list(graphs.by_shape) == [0, 1, 2, *range(102 - kept, 100), 100 - kept, 100]


def test_what_torch_keeps_for_later_tensors_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [LEAST_FREE]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[-1], 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1 << 39))
    assert free_memory() == 1 << 39


def test_ranks_keep_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with much memory drops graphs as well; otherwise it would replay a sum that the others capture."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(Ranks, "least", lambda self, number: min(number, LEAST_FREE - 1))
    graphs = Graphs(True, Ranks(1, 2))
    monkeypatch.setattr(graphs, "_capture", lambda captured: None)
    for shape in range(40):
        graphs.of(shape, lambda: cast(Buffers, None), lambda buffers: None)
    assert list(graphs.by_shape) == list(range(16, 40))
