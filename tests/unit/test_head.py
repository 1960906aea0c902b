"""EAGLE-3 heads: what they draft against their forward in plain torch, and the service with one."""

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draft_service.drafter import Drafter
from orchestrator.cluster.choice import Machine, with_choice
from specahead import LLM, SamplingParams, models
from specahead.config import Config, SettingsError
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.loading.config import load_config
from specahead.engine.loading.head import load_head, with_states
from specahead.engine.loading.model import load_model
from specahead.engine.loading.opening import open_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.model.head import StateTap
from specahead.engine.parallel.processes import RankProcesses
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import RoundRequest, RoundSettings
from specahead.kernels import compiling
from specahead.kernels.linear import linear
from specahead.lab.benchmarks.serving.imposed import ImposedVerdicts
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service.draft_in_target import StepsByTurns
from target_service.hooks import NO_HOOKS, Hooks
from target_service.service import open_models
from target_service.verifier import Verifier
from tests.settings import draft_settings, target_settings
from tests.unit.eagle import PlainHead, save_head
from tests.unit.late_device import run_late
from tests.unit.steps import decode, read_prompt, run_steps
from tests.unit.tiny_models import save_tiny, sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, TOKENS = 4, 2048
CONFIG = transformers.LlamaConfig(**sizes(4, 2, head_dim=16, hidden_size=64) | {"num_hidden_layers": 8})
LAYERS = 2, 4, 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A target's folder, and its model of transformers.

    It mostly generates one of two tokens, the first ones of a head's vocabulary, so that chance accepts many proposals
    and alternatives. Its weights do not depend on the version of transformers, and cause no near-ties in these tests.
    """
    folder = tmp_path_factory.mktemp("target") / "model"
    model, random = save_tiny(CONFIG, folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.copy_(0.2 * torch.randn(weight.shape, generator=random) + (weight.dim() == 1))
        likely = model.lm_head.weight[1].clone()
        model.lm_head.weight *= 0.01
        model.lm_head.weight[1], model.lm_head.weight[3] = likely, -likely
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.TARGET / name, folder)
    return folder, model


def made_pair(target: Path, head: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelRunner, ModelRunner]:
    """Return the runner of a target and that of its head."""
    loaded = load_model(str(target), dtype, DEVICE)
    of_head, tap = with_states(*load_head(str(head), loaded), pages_for(TOKENS) * PAGE_SIZE)
    how: dict[str, Any] = {"max_context": 200, "step_queries": GAMMA + 1}
    return make_runner(loaded, TOKENS, tap=tap, **how), make_runner(of_head, TOKENS, **how)


def texts_of(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, CONFIG.vocab_size, (length,), generator=random).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("dtype", "embeds", "config", "layers"),
    [
        (torch.float32, True, {}, LAYERS),
        (torch.float32, False, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
        (torch.bfloat16, True, {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
    ],
    ids=["float32", "the target's embedding", "bfloat16"],
)
def test_a_round_is_that_of_the_checkpoint(
    target: tuple[Path, Any], tmp_path: Path, dtype: torch.dtype, embeds: bool, config: Any, layers: tuple[int, ...]
) -> None:
    """Texts are read in parts, and rounds begin with one token or with several."""
    weights = save_head(tmp_path / "head", CONFIG, embeds=embeds, **config)
    runner, drafting = made_pair(target[0], tmp_path / "head", dtype)
    drafting.prepare_rounds(RoundSettings(GAMMA, 64, PAGE_SIZE, alternatives=2, runs_last=False, reads_states=True))
    plain = PlainHead(weights, deepcopy(target[1]).to(dtype), layers)
    texts, requests, random = texts_of(45, 3, 120), list[RoundRequest](), np.random.default_rng(3)
    for text, pending in zip(texts, (1, 2, 8), strict=True):
        kv = SequenceKV(target=read_prompt(runner, text[:-1], 32))
        for start in range(1, len(text) - pending, 48):
            drafting.forward([SequenceInput(kv, text[start : min(start + 48, len(text) - pending)])])
        requests.append(RoundRequest(kv, text[-pending:], 1.0, 1.0, random.random(GAMMA), None))
    tolerance = 0.15 if dtype is torch.bfloat16 else 1e-4 if DEVICE == "cpu" else 2e-3
    for text, output in zip(texts, drafting.draft_rounds(requests), strict=True):
        (drafted,) = output.branches
        logits = plain.logits(text, drafted.tokens)
        assert drafted.ids is not None and drafted.probs is not None and drafted.alternatives is not None
        found = torch.zeros(logits.shape).scatter(1, torch.from_numpy(drafted.ids), torch.from_numpy(drafted.probs))
        torch.testing.assert_close(found, logits.softmax(1), rtol=0, atol=tolerance)
        assert dtype is not torch.float32 or drafted.alternatives.tolist() == logits.topk(2).indices.tolist()


class Service:
    """A target and its head, which run step by step.

    proposed: the head's proposals, each with its session and its position. opens: whether to open both as services do.
    """

    def __init__(self, target: Path, head: Path, hooks: Hooks = NO_HOOKS, opens: bool = False, **settings: Any) -> None:
        self.proposed: list[tuple[str, int, list[int]]] = []
        self.texts: dict[str, list[int]] = {}
        self.commits: list[m.Commit] = []
        plan = uniform_plan(8, 2, 1, 1, block_size=PAGE_SIZE, least_tokens=32, group_size=0, budget=0.3)
        given: dict[str, Any] = {"max_context": 200, "prefill_chunk": 32, "kv_tokens": TOKENS, "dtype": "float32"}
        given |= {"device": DEVICE, **settings}
        common = target_settings(model=str(target), draft=str(head), placement="together", plan="p", **given)
        if opens:
            runner, drafting = (each.runner for each in open_models(common, 0) if each is not None)
        else:
            runner, drafting = made_pair(target, head)
        self.verifier = Verifier(runner, plan, common, replace(hooks, on_draft_event=self._note))
        self.drafter = Drafter(drafting, plan, common.own_draft)
        self.steps = StepsByTurns(self.verifier, self.drafter)

    def _note(self, event: m.DraftEvent) -> None:
        if isinstance(event, m.Proposals):
            (count,), (offset,) = event.counts, event.offsets
            self.proposed.append((event.at.session, event.at.base + offset, list(event.tokens[:count])))

    def open(self, text: list[int], tokens: int, sampling: Sampling = Sampling(0.0), exact: bool = True) -> str:  # noqa: B008 (frozen)
        name = f"s{len(self.texts)}"
        self.texts[name] = list(text)
        kind = m.Exactness.EXACT if exact else m.Exactness.APPROXIMATE
        self.verifier.admission.open(m.Open(name, text, len(text), tokens, [], sampling, kind), self._emit)
        return name

    def _emit(self, event: m.ServedEvent) -> None:
        assert isinstance(event, m.Commit), event
        self.texts[event.at.session] += event.tokens
        self.commits.append(event)

    def run(self) -> None:
        run_steps(self.steps, 2000)

    def check_proposals(self, plain: PlainHead) -> None:
        """Each proposal is what the head finds likeliest after the text there."""
        states = {name: plain.states(text) for name, text in self.texts.items()}
        for name, base, tokens in self.proposed:
            if base <= len(self.texts[name]):
                logits = plain.logits(self.texts[name][:base], tokens, states[name])
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert (chosen > logits.amax(1) - 0.01).all(), (name, base)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the ranks that `open_models` starts, since a process can be in only one group of ranks at a time."""
    started: list[RankProcesses] = []

    def start(*given: Any) -> RankProcesses:
        started.append(RankProcesses(*given))
        return started[-1]

    monkeypatch.setattr("target_service.service.RankProcesses", start)
    yield
    for each in started:
        each.stop()


WITHOUT_GPU = pytest.mark.skipif(DEVICE == "cuda", reason="a late device stands in for a GPU")
TWO_GPUS = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs more than one GPU")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("imposed", "ranks", "late"),
    [
        pytest.param(False, 1, False, id="own verdicts"),
        pytest.param(True, 1, False, id="imposed verdicts"),
        pytest.param(False, 1, True, id="own verdicts, late", marks=WITHOUT_GPU),
        pytest.param(True, 1, True, id="imposed verdicts, late", marks=WITHOUT_GPU),
        pytest.param(False, 2, False, id="two ranks", marks=TWO_GPUS),
    ],
)
def test_greedy_texts_and_proposals_at_any_verdict(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imposed: bool, ranks: int, late: bool
) -> None:
    """Rounds follow steps that accept all, some, none or an alternative; a text begins as an earlier one."""
    device = run_late(monkeypatch) if late else None
    weights = save_head(tmp_path / "head", CONFIG, own=2)
    hooks = Hooks(judge=ImposedVerdicts(0.7)) if imposed else NO_HOOKS
    service = Service(target[0], tmp_path / "head", hooks, opens=ranks > 1, tensor_parallel_size=ranks)
    if imposed:  # else steps would keep alternatives by verdicts of their own
        service.verifier.runner.alternatives_beside = lambda gamma: 0
    texts = texts_of(70, 2, 5, 33)
    names = [service.open(text, 30, Sampling(0.0, seed=index)) for index, text in enumerate(texts)]
    service.run()
    texts.append([*service.texts[names[0]][:-3], 1, 2, 3])
    names.append(service.open(texts[-1], 30))
    service.open([7], 3)  # too short for a head
    service.run()
    assert len(service.texts["s5"]) == 4
    service.check_proposals(PlainHead(weights, target[1], LAYERS))
    counters = service.verifier.counters
    assert counters["rounds_chained_to_steps"] > 5
    assert device is None or device.replayed > 40
    if not imposed:
        assert counters["accepted_alternatives"] > 10
        for name, text in zip(names, texts, strict=True):
            with torch.inference_mode():
                logits = target[1](torch.tensor([service.texts[name][:-1]])).logits[0, len(text) - 1 :]
            assert service.texts[name][len(text) :] == logits.argmax(1).tolist()


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(DEVICE == "cuda", reason="it would run two ranks on one GPU")
def test_ranks_whose_kv_is_in_8_bits_make_scales_before_a_head_is_opened(
    target: tuple[Path, Any], tmp_path: Path
) -> None:
    """The ranks must have joined by then. The texts of one rank may differ where two tokens are about as likely."""
    save_head(tmp_path / "head", CONFIG, own=2)
    service = Service(target[0], tmp_path / "head", opens=True, tensor_parallel_size=2, kv_cache_dtype="fp8")
    (prompt,) = texts_of(70)
    name = service.open(prompt, 30)
    service.run()
    assert len(service.texts[name]) == len(prompt) + 30
    assert service.proposed


def test_sampled_texts_follow_the_targets_distribution(target: tuple[Path, Any], tmp_path: Path) -> None:
    """Two tokens after the first one, which are drafted, of many texts with one prompt."""
    save_head(tmp_path / "head", CONFIG, own=2)
    service = Service(target[0], tmp_path / "head", prefill_chunk=512)
    (prompt,), count, heat = texts_of(20), 64, 0.25
    names = [service.open(prompt, 3, Sampling(heat, seed=seed)) for seed in range(count)]
    service.run()
    found, expected = Counter[str](), defaultdict[str, float](float)
    for name in names:  # given its first token, each text's next two are as likely as the target says
        *before, second, third = service.texts[name]
        found[f"{second} {third}" if {second, third} <= {1, 3} else "others"] += 1
        for pair, probability in pair_probs(target[1], tuple(before), heat).items():
            expected[pair] += probability
    difference = sum((found[pair] - number) ** 2 / number for pair, number in expected.items())
    assert difference < 23, (found, expected)  # of chi-square with 4 degrees of freedom 1 in 8,000 lies beyond
    assert len(service.proposed) > count / 2


@cache
def pair_probs(model: Any, text: tuple[int, ...], heat: float) -> dict[str, float]:
    """Return the probability of each pair of the tokens 1 and 3 after a text, and that of all others."""
    with torch.inference_mode():
        after = model(torch.tensor([[*text, 1], [*text, 3]])).logits[:, -2:] / heat
    first, seconds = after[0, 0].softmax(0), after[:, 1].softmax(1)
    pairs = {
        f"{one} {other}": float(first[one] * seconds[row, other]) for row, one in enumerate((1, 3)) for other in (1, 3)
    }
    return pairs | {"others": 1 - sum(pairs.values())}


def test_approximate_reads_what_the_target_remembers(target: tuple[Path, Any], tmp_path: Path) -> None:
    """The head announces nothing. The first round reads everything, and the others a part."""
    save_head(tmp_path / "head", CONFIG, own=2)
    service = Service(target[0], tmp_path / "head")
    name = service.open(*texts_of(120), 40, exact=False)
    service.run()
    figures = [event.figures for event in service.commits if event.figures.kv_tokens_total]
    first, *others = [each.kv_tokens_read / each.kv_tokens_total for each in figures]
    assert len(service.texts[name]) == 160 and service.proposed
    assert first == 1 and max(others) < 0.7
    assert service.verifier.counters["rounds_chained_to_steps"] > 5


def test_a_pass_that_only_compiles_launches_what_leaves_states(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, rows = StateTap(LAYERS, torch.ones(8, 24), torch.zeros(17, 8)), list[int]()

    def noted_linear(x: Tensor, *weight: Any) -> Tensor:
        rows.append(len(x))
        return linear(x, *weight)

    def launch() -> None:
        observe = tap.observer(torch.arange(4))
        for layer in (0, CONFIG.num_hidden_layers - 1):
            observe(layer, torch.ones(4, 8))

    monkeypatch.setattr("specahead.engine.model.head.linear", noted_linear)
    compiling._trace(launch, {}, FakeTensorMode(allow_non_fake_inputs=True))
    assert rows == [4] and not tap.states.any()


def test_what_is_not_built_is_refused_by_name(target: tuple[Path, Any], tmp_path: Path) -> None:
    loaded = load_model(str(target[0]), torch.float32, DEVICE)
    for name, (config, reason) in enumerate(
        {
            "fc_norm": ({"fc_norm": True}, "fc_norm"),
            "layers": ({"num_hidden_layers": 2}, "2 layers"),
            "residual": ({"norm_before_residual": True}, "norm_before_residual"),
            "EAGLE-2": ({"architectures": ["LlamaForCausalLMEagle"]}, "an architecture other than EAGLE-3"),
        }.values()
    ):
        save_head(tmp_path / str(name), CONFIG, **config)
        with pytest.raises(NotImplementedError, match=f"heads are not built with .*{reason}"):
            load_head(str(tmp_path / str(name)), loaded)
    save_head(tmp_path / "wide", CONFIG, own=3)
    save_head(tmp_path / "layers", CONFIG, eagle_aux_hidden_state_layer_ids=[1, 4, 8])
    with pytest.raises(ValueError, match=r"layers \(1, 4, 8\): expected rising numbers below 8"):
        load_head(str(tmp_path / "layers"), loaded)
    how = {"model": str(target[0]), "draft": str(tmp_path / "wide"), "placement": "together", "plan": "p"}
    with pytest.raises(NotImplementedError, match="draft_quantization fp8"):
        open_models(target_settings(**how, draft_quantization="fp8"), 0)
    with pytest.raises(NotImplementedError, match="--placement together"):
        open_model(draft_settings(model=str(tmp_path / "wide"), target_model=str(target[0]), plan="p"))
    apart = Config(target=target_settings(**how | {"placement": "apart"}), draft=target_settings(**how).own_draft)
    with pytest.raises(SettingsError, match="placement 'apart'"):
        with_choice(apart, Machine(0))
    alone = replace(apart, target=replace(apart.target, placement="auto"))
    assert with_choice(alone, Machine(0))[1].together


def test_a_launch_takes_a_folder_with_a_head(tmp_path: Path, tokenizer: Any) -> None:
    """`specahead.LLM`, whose services are those of `specahead serve`: the texts are the target's own."""
    folder, prompts = tmp_path / "target", ["The old man looked at the sea and", "She opened the letter, and"]
    shutil.copytree(models.TARGET, folder)
    save_head(tmp_path / "head", load_config(str(folder)))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(folder, tmp_path / "head", max_model_len=1024, kv_tokens=4096, dtype="float32") as llm:
        outputs = llm.generate(prompts, greedy)
        assert sum(output.speculation.drafted for output in outputs) > 10
        (sampled,) = llm.generate(prompts[:1], SamplingParams(temperature=0.8, max_tokens=16, seed=3, ignore_eos=True))
        assert len(sampled.token_ids) == 16
    runner = make_runner(load_model(str(folder), torch.float32, DEVICE), 4096)
    for output, prompt in zip(outputs, prompts, strict=True):
        tokens = tokenizer.encode(prompt)
        assert [*tokens, *output.token_ids] == decode(runner, tokens, len(output.token_ids))
