"""Rounds that a runner drafts by itself, on a small random model: on a GPU captured steps, elsewhere without graphs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specahead import models
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.model import load_model, load_module
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.sampling.logit_rules import rules_of
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.linear import LinearWeight
from specahead.lab.evaluation.forks import fork
from specahead.sparsity.plan import Plan, uniform_plan
from specahead.wire import messages as m
from target_service.self_drafting import DECAY, SelfDrafting
from target_service.verifier import Verifier
from tests.plans import bundled_plan
from tests.settings import target_settings
from tests.unit.distributions import chi_square, probs_of_row
from tests.unit.fake_models import GREEDY
from tests.unit.steps import decode, read_prompt, take_step
from tests.unit.test_graphs import CONFIGS, DEVICE, tokens

GAMMA = 4
PLAN = uniform_plan(3, 2, 1, 1, group_size=64, budget=1.0)
SAMPLED = Sampling(1.0, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that looks at some tokens more than at others."""
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
    with torch.no_grad():  # as it comes it looks at all tokens alike, and at its own embedding most of all
        for layer in model.model.layers:
            of = layer.self_attn
            for part in (of.q_proj, of.k_proj, of.v_proj, of.o_proj):
                part.weight *= 10
    model.save_pretrained(folder)
    return folder


def runner_of(folder: Path, gpu_pages: int = 1000, backing_pages: int = 0, **how: Any) -> ModelRunner:
    sizes = gpu_pages * PAGE_SIZE, backing_pages * PAGE_SIZE, 400
    made = make_runner(load_model(str(folder), torch.float32, DEVICE), *sizes, step_queries=GAMMA + 1, **how)
    made.kv.keep_group_means(PLAN.group_size, 1000)
    made.keep_memories(600)
    return made


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return runner_of(folder)


def tiers_of(runner: ModelRunner) -> TieredKV:
    return runner.kv


class Session:
    """One sequence that is drafted for by itself."""

    def __init__(self, runner: ModelRunner, prompt: list[int], share: float, sampling: Sampling = GREEDY) -> None:
        self.runner, self.tokens, self.sampling = runner, list(prompt), sampling
        self.drafting = SelfDrafting(replace(PLAN, budget=share), GAMMA)
        self.memory = self.drafting.new_memory()
        self.kv = read_prompt(runner, prompt[:-1])

    def plan(self, drafted: int, **how: object) -> SequenceInput:
        base = len(self.tokens)
        judged = Drafted([0] * drafted, [], self.sampling, base, committed=self.tokens, **how)
        read = self.drafting.read(self.memory, base, drafted)
        return SequenceInput(self.kv, [self.tokens[-1], *judged.tokens], "all", read, judged)

    def commit(self, item: SequenceInput, output: SequenceOutput) -> list[int]:
        accepted, following = output.verdict
        committed = [*item.tokens[1 : accepted + 1], following]
        self.tokens += committed
        self.runner.kv.truncate(self.kv, len(self.tokens) - 1)
        return committed

    def round(self, drafted: int = GAMMA, **how: object) -> list[int]:
        item = self.plan(drafted, **how)
        return self.commit(item, self.runner.forward([item])[0])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_all_is_accepted_where_drafting_passes_read_everything(runner: ModelRunner, sampling: Sampling) -> None:
    session = Session(runner, tokens(150, 1), 1.0, sampling)
    assert [len(session.round(drafted)) for drafted in (0, GAMMA, GAMMA, GAMMA)] == [1, 5, 5, 5]
    runner.kv.release(session.kv)


def drafting_wrongly(folder: Path) -> ModelRunner:
    """Return a runner whose weights for what is judged later find the unlikeliest tokens."""
    loaded = load_model(str(folder), torch.float32, DEVICE)
    decoder = loaded.decoder
    how = {"drafting": replace(decoder, lm_head=LinearWeight(-decoder.lm_head.values)), "step_queries": GAMMA + 1}
    runner = make_runner(loaded, 1000 * PAGE_SIZE, 0, 400, **how)
    runner.kv.keep_group_means(PLAN.group_size, 1000)
    return runner


def test_passes_that_draft_may_run_other_weights(folder: Path) -> None:
    """None of what these say is accepted here, and the tokens are those of plain decoding."""
    runner = drafting_wrongly(folder)
    prompt = tokens(150, 1)
    session = Session(runner, prompt, 1.0)
    committed = [token for drafted in (0, GAMMA, GAMMA, 0, GAMMA) for token in session.round(drafted)]
    assert [*prompt, *committed] == decode(runner, prompt, 5)
    runner.kv.release(session.kv)


def test_what_a_later_pass_judges_may_run_other_weights(folder: Path) -> None:
    """What no later pass judges runs in a pass of its own beside it."""
    runner = drafting_wrongly(folder)
    prompt, kvs = tokens(150, 1), [SequenceKV() for _ in range(3)]
    for kv in kvs:
        runner.forward([SequenceInput(kv, prompt[:-1])])
    judged = [Drafted([7, 8], [], GREEDY, 150) for _ in kvs]
    inputs = [
        SequenceInput(kv, [prompt[-1], 7, 8], "all", drafted=drafted, light=i == 1)
        for i, (kv, drafted) in enumerate(zip(kvs, judged, strict=True))
    ]
    first, light, last = (output.verdict for output in runner.forward(inputs))
    assert first == last == (0, decode(runner, prompt, 1)[-1])
    (output,) = runner.forward([SequenceInput(SequenceKV(), prompt, "last")])
    assert output.logits is not None and light == (0, int(output.logits.argmin()))


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_greedy_tokens_are_those_of_plain_decoding_whatever_is_read(runner: ModelRunner, share: float) -> None:
    """Sessions that weigh, sessions that draft and a plain one run in the same call."""
    prompts = [tokens(n, n) for n in (300, 131, 17)]
    sessions = [Session(runner, prompt, share) for prompt in prompts]
    lengths = Counter[int]()
    for step in range(8):
        items = [session.plan(GAMMA if step > number else 0) for number, session in enumerate(sessions[:2])]
        plain = sessions[2]
        one = Drafted([], [], GREEDY, len(plain.tokens))
        items.append(SequenceInput(plain.kv, [plain.tokens[-1]], "all", drafted=one))
        for session, item, output in zip(sessions, items, runner.forward(items), strict=True):
            lengths[len(session.commit(item, output))] += 1
    assert len(lengths) > 2, "some are accepted and some are not"
    for session, prompt in zip(sessions, prompts, strict=True):
        assert session.tokens == decode(runner, prompt, len(session.tokens) - len(prompt))
        runner.kv.release(session.kv)


def test_what_the_last_dense_pass_weighed_is_remembered(runner: ModelRunner) -> None:
    session = Session(runner, tokens(200, 5), 0.2)
    for drafted in (0, GAMMA):
        session.round(drafted)
        weights = runner.passes.memories.weights(6, 34, runner.device)[session.memory.index]
        sums = weights.sum(1).tolist()
        least, most = (2, 2) if not drafted else (2, 2 + 2 * DECAY)
        assert all(least - 1e-4 <= total <= most + 1e-4 for total in sums), (
            "both heads of a group weigh 1, the older ones less"
        )
        assert not weights[:, -(-(200 + drafted + 1) // 16) :].any()
    runner.kv.release(session.kv)


def test_the_dense_pass_writes_the_kv_of_what_it_confirms(runner: ModelRunner) -> None:
    session = Session(runner, tokens(300, 7), 0.1)
    for drafted in (0, *[GAMMA] * 6):
        session.round(drafted)
    fresh = read_prompt(runner, session.tokens[:-1], 400)
    full = len(session.tokens) // 16 - 1
    for pages in (*runner.kv.k_pages, *runner.kv.v_pages):
        torch.testing.assert_close(pages[session.kv.pages[:full]], pages[fresh.pages[:full]], atol=1e-4, rtol=1e-3)
    for kv in (session.kv, fresh):
        runner.kv.release(kv)


def test_sampled_tokens_have_the_targets_distribution(runner: ModelRunner) -> None:
    """The first two tokens of a round, the second given the first, beside the dense distribution."""
    prompt, count = tokens(180, 3), 300
    session = Session(runner, prompt, 0.5)
    session.round(0)
    del session.tokens[len(prompt) :]
    runner.kv.truncate(session.kv, len(prompt) - 1)
    outcomes, accepted = [], 0
    for seed in range(count):
        twin = fork(runner.kv, session.kv)
        sampling = Sampling(0.06, seed=seed, top_k=60)
        judged = Drafted([0] * GAMMA, [], sampling, len(prompt))
        item = SequenceInput(twin, [prompt[-1], *judged.tokens], "all", session.plan(GAMMA).read, judged)
        (output,) = runner.forward([item])
        outcomes.append([*item.tokens[1 : output.verdict[0] + 1], output.verdict[1]])
        accepted += output.verdict[0]
        runner.kv.release(twin)
        session.memory.decay = 1.0  # what this round has weighed changes little
    assert 0.1 < accepted / (count * GAMMA) < 0.95
    (first, _), *_ = Counter(outcome[0] for outcome in outcomes).most_common()
    for start in ([], [first]):
        counts = Counter(o[len(start)] for o in outcomes if o[: len(start)] == start and len(o) > len(start))
        assert chi_square(counts, dense_probs(runner, [*prompt, *start], Sampling(0.06, top_k=60))) > 1e-4
    runner.kv.release(session.kv)


def dense_probs(runner: ModelRunner, text: list[int], sampling: Sampling) -> dict[int, float]:
    kv = SequenceKV()
    (output,) = runner.forward([SequenceInput(kv, text, "last")])
    runner.kv.release(kv)
    return probs_of_row(output.logits[0].cpu().numpy().astype(np.float64), sampling)


def test_rules_and_log_probabilities_are_of_what_was_drafted(runner: ModelRunner) -> None:
    """A token that is ruled out never comes, drafted or not; each token is told with its log probability."""
    prompt = tokens(90, 9)
    likeliest = decode(runner, prompt, 3)[len(prompt) :]
    for sampling in (
        Sampling(0.0, logit_bias={likeliest[1]: -1e9}),
        Sampling(0.8, seed=3, logit_bias={likeliest[1]: -1e9}),
    ):
        session = Session(runner, prompt, 0.3, sampling)
        for drafted in (0, GAMMA, GAMMA):
            item = session.plan(drafted, rules=rules_of(sampling, len(prompt), []), logprobs=1)
            (output,) = runner.forward([item])
            committed = session.commit(item, output)
            assert len(output.logprobs) == len(committed)
        assert likeliest[1] not in session.tokens[len(prompt) :]
        runner.kv.release(session.kv)


# Over tiers


@pytest.mark.parametrize(("gpu_pages", "deterministic"), [(60, False), (24, True), (7, False)])
def test_greedy_tokens_over_tiers_are_those_of_plain_decoding_without(
    runner: ModelRunner, folder: Path, gpu_pages: int, deterministic: bool
) -> None:
    """All pages on the GPU, half of them, and as many as are written at once; one session leaves on the way."""
    tiered = runner_of(folder, gpu_pages, 100, deterministic=deterministic)
    kv = tiers_of(tiered)
    prompts = [tokens(n, n) for n in (300, 131, 17)]
    sessions = [Session(tiered, prompt, 0.2) for prompt in prompts]
    running, drafted = list(zip(sessions, prompts, strict=True)), 0
    for step in range(8):
        if step == 4:
            leaver, _ = running.pop(1)
            kv.release(leaver.kv)
        items = [session.plan(GAMMA if step else 0) for session, _ in running]
        for (session, _), item, output in zip(running, items, tiered.forward(items), strict=True):
            drafted += len(item.tokens) - 1
            session.commit(item, output)
        kv.check_integrity()
    counted = kv.counters
    assert (counted.stages > 0, counted.overflow_pages > 0) == (gpu_pages < 60, gpu_pages < 24)
    assert drafted == GAMMA * 17 or (gpu_pages < 24 and drafted > 0)
    for session, prompt in running:
        assert session.tokens == decode(runner, prompt, len(session.tokens) - len(prompt))
        check_committed(session, runner)


def check_committed(session: Session, runner: ModelRunner) -> None:
    """The KV of a session over tiers, and the group means that it has, are those of its tokens read as a prompt."""
    fresh, kv = SequenceKV(), tiers_of(session.runner)
    runner.forward([SequenceInput(fresh, session.tokens[:-1])])
    full = session.kv.length // PAGE_SIZE
    pages_of, table = kv.layer_pages, kv.gpu_pages(session.kv)
    if not kv.is_resident(session.kv):
        (staged,) = kv.stage([session.kv])
        pages_of, table = staged.layer, staged.tables[0]
    for layer in range(kv.num_layers):
        for found, wanted in zip(pages_of(layer), runner.kv.layer_pages(layer), strict=True):
            torch.testing.assert_close(found[table[:full]], wanted[fresh.pages[:full]], atol=1e-4, rtol=1e-3)
    pool = runner.kv.extend_group_means([fresh], [fresh.length])
    assert kv.means is not None and len(session.kv.groups) >= len(fresh.groups) - 1
    of_both = kv.means.k[:, session.kv.groups], pool.k[:, fresh.groups[: len(session.kv.groups)]]
    torch.testing.assert_close(*of_both, atol=1e-4, rtol=1e-3)
    runner.kv.release(fresh)


@pytest.mark.parametrize(("sampling", "ruled"), [(GREEDY, True), (Sampling(0.06, seed=1, top_k=60), False)])
def test_rounds_over_tiers_are_those_without(
    runner: ModelRunner, folder: Path, sampling: Sampling, ruled: bool
) -> None:
    """The same is drafted and, by the same draws, accepted; what came over the link is told."""
    tiered = runner_of(folder, 16, 100)
    prompt, counted, accepted = tokens(300, 4), tiers_of(tiered).counters, 0
    if ruled:
        sampling = replace(sampling, logit_bias={prompt[5]: -1e9})
    sides = [Session(each, prompt, 0.3, sampling) for each in (runner, tiered)]
    for step in range(6):
        how = {"rules": rules_of(sampling, len(prompt), []), "logprobs": 1} if ruled else {}
        before = counted.fetched_pages + counted.staged_pages
        items = [session.plan(GAMMA if step else 0, **how) for session in sides]
        outputs = [session.runner.forward([item])[0] for session, item in zip(sides, items, strict=True)]
        assert items[0].tokens == items[1].tokens and outputs[0].verdict == outputs[1].verdict
        accepted += outputs[0].verdict[0]
        assert outputs[0].tokens_fetched == 0 < outputs[1].tokens_fetched
        # Of groups that are complete now means were made, of what was brought together for that.
        assert outputs[1].tokens_fetched <= PAGE_SIZE * (counted.fetched_pages + counted.staged_pages - before)
        for session, item, output in zip(sides, items, outputs, strict=True):
            session.commit(item, output)
    assert 0 < accepted < 5 * GAMMA and counted.fetched_pages > 0
    runner.kv.release(sides[0].kv)


def test_greedy_tokens_of_the_bundled_target_are_those_of_transformers() -> None:
    """Served sessions, one of which is aborted; most of their KV leaves the device on the way."""
    model = load_model(str(models.TARGET), torch.float32, "cpu")
    texts = [[(7 * i * i + 3 * i) % 4000 + n for i in range(length)] for n, length in ((50, 300), (90, 700))]
    plan: Plan = bundled_plan(group_size=64)
    runner = make_runner(model, 640, 8000, 1000, step_queries=GAMMA + 1)
    settings = target_settings(draft="self", self_read_share=0.2, max_context=1000, max_sessions=3, prefill_chunk=128)
    verifier = Verifier(runner, plan, settings)
    served: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    fetched = 0

    def emit(event: m.ServedEvent) -> None:
        nonlocal fetched
        served[event.at.session] += event.tokens
        fetched += event.figures.kv_tokens_fetched

    for name, text in enumerate([*texts, texts[0]]):
        verifier.admission.open(m.Open(str(name), text, len(text), 48, [], GREEDY, m.Exactness.EXACT), emit)
    while (step := take_step(verifier)) is not None:
        if len(served["2"]) > 20:
            verifier.abort("2")
        for item in step.rounds:
            if item.session.id in verifier.admission.running and item.input.read is not None:
                assert item.session.kv.groups, "group means stand in for what the drafting passes leave out"
    assert verifier.counters["self_accepted_tokens"] > 20
    assert fetched > 0 and verifier.totals.get("kv_fetched_pages", 0) > 0
    reference: Any = load_module(str(models.TARGET), torch.float32, "cpu", "sdpa")
    for name, text in enumerate(texts):  # each token is the likeliest behind the text and those before it
        found = served[str(name)]
        with torch.inference_mode():
            logits = reference(torch.tensor([text + found[:-1]]), logits_to_keep=len(found)).logits[0]
        assert len(found) == 48 and found == logits.argmax(-1).tolist()
