"""MiniCPM4, whose own attention chooses blocks (InfLLM-v2), against a reference written from modeling_minicpm.py.

The reference runs a whole text at once. It is told for each position which position's query chooses its blocks: its own
one, as in plain decoding, or that of the first token of its round.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specahead import LLM, SamplingParams, models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.config import load_config
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.model.families import weight_shapes
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.requests import RoundSettings
from specahead.kernels.kv_scales import KVScales, keys_of_pages, keys_to_pages, values_of_pages, values_to_pages
from specahead.lab.evaluation.shared_choice import COLUMNS, Reader, ReadText, SharingRow, measure, read_choosing
from specahead.lab.results import text_table
from specahead.sparsity.announce import announced_rows
from specahead.sparsity.served_plan import load_served_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, PROMPT, LENGTH = 3, 300, 340
AT = range(LENGTH)
FLIPS = 0.0 if DEVICE == "cpu" else 0.02  # share of tokens that may choose other blocks, since a GPU sums otherwise
SPARSE = {
    **{"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 32},
    **{"window_size": 64, "topk": 4, "use_nope": False, "dense_len": 160},
}
CONFIG: dict[str, Any] = {
    **{"model_type": "minicpm", "vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "hidden_act": "silu"},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": False},
    **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "sparse_config": SPARSE},
    "rope_scaling": {
        **{"rope_type": "longrope", "original_max_position_embeddings": 512},
        **{"long_factor": [1 + i / 8 for i in range(8)], "short_factor": [1.0] * 8},
    },
}


@dataclass
class Tiny:
    """A small model of random weights."""

    folder: str
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("minicpm")
    return save(folder, CONFIG)


def save(folder: Path, config: dict[str, Any]) -> Tiny:
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in weight_shapes(load_config(str(folder))).items():
        weight = torch.randn(shape, generator=random)
        # Sharp attention, so that it matters which blocks are read.
        scale = 0.25 if name.endswith(("q_proj.weight", "k_proj.weight")) else 0.1
        weights[name] = (1 + 0.1 * weight if len(shape) == 1 else scale * weight).bfloat16().float()
    save_file(weights, folder / "model.safetensors")
    return Tiny(str(folder), weights)


@cache
def text(length: int = LENGTH) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def runner_of(tiny: Tiny, dtype: torch.dtype = torch.float32, tokens: int = 2400, **how: Any) -> ModelRunner:
    """tokens: for how many the device has room."""
    how = {"max_context": 600, "step_queries": GAMMA + 1, **how}
    return make_runner(load_model(tiny.folder, dtype, DEVICE), tokens, **how)


def some_scales(device: str = DEVICE) -> KVScales:
    centers = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(1))
    return KVScales(torch.tensor([2.0**-4, 2.0**-5], device=device).repeat(2, 2, 1), centers.to(device))


# The reference.


def reference(
    tiny: Tiny, tokens: list[int], choosers: list[int] | None = None, scales: KVScales | None = None
) -> Tensor:
    """Return the logits of all tokens. choosers: whose query chooses the blocks of each position; None: its own.

    scales: of keys and values that are rounded to 8 bits; None: they are not.
    """
    chooser = torch.arange(len(tokens)) if choosers is None else torch.tensor(choosers)
    weights, layers, hidden = tiny.weights, CONFIG["num_hidden_layers"], CONFIG["hidden_size"]
    stream = weights["model.embed_tokens.weight"][tokens] * CONFIG["scale_emb"]
    cosines, sines = rotary(len(tokens))

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (hidden,), weights[f"{name}.weight"], CONFIG["rms_norm_eps"])

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(len(tokens), count, -1).transpose(0, 1)

    for layer in range(layers):
        before = f"model.layers.{layer}"
        x = norm(stream, f"{before}.input_layernorm")
        q = heads(linear(x, f"{before}.self_attn.q_proj"), CONFIG["num_attention_heads"])
        k, v = (heads(linear(x, f"{before}.self_attn.{n}_proj"), CONFIG["num_key_value_heads"]) for n in "kv")
        q, k = (each * cosines + rotate_half(each) * sines for each in (q, k))
        if scales is not None:
            of = scales.layer(layer)
            in_pages = keys_to_pages(k.transpose(0, 1), of), values_to_pages(v.transpose(0, 1), of)
            k, v = (each.transpose(0, 1) for each in in_pages)
            k, v = keys_of_pages(k, of, torch.float32) + of.centers[0, :, None], values_of_pages(v, of, torch.float32)
        x = attend(q, k, v, chooser).transpose(0, 1).flatten(1)
        added = CONFIG["scale_depth"] / math.sqrt(layers)
        stream = stream + linear(x, f"{before}.self_attn.o_proj") * added
        x = norm(stream, f"{before}.post_attention_layernorm")
        x = F.silu(linear(x, f"{before}.mlp.gate_proj")) * linear(x, f"{before}.mlp.up_proj")
        stream = stream + linear(x, f"{before}.mlp.down_proj") * added
    return linear(norm(stream, "model.norm") / (hidden / CONFIG["dim_model_base"]), "lm_head")


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(length: int) -> tuple[Tensor, Tensor]:
    """MiniCPMLongRoPE, whose table is made for max_position_embeddings."""
    said, longest, dim = CONFIG["rope_scaling"], CONFIG["max_position_embeddings"], 16
    original = said["original_max_position_embeddings"]
    factors = torch.tensor(said["long_factor" if longest > original else "short_factor"])
    speeds = 1.0 / CONFIG["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(length).float(), 1.0 / factors) * speeds
    scale = math.sqrt(1 + math.log(longest / original) / math.log(original))
    both = torch.cat((angles, angles), -1)
    return both.cos() * scale, both.sin() * scale


def attend(q: Tensor, k: Tensor, v: Tensor, chooser: Tensor) -> Tensor:
    """MiniCPMInfLLMv2Attention, with the blocks of each row chosen by the query of its chooser."""
    count, length, dim = q.shape
    group = count // len(k)
    at = torch.arange(length)
    mask, size = (at[:, None] >= at).expand(len(k), -1, -1).clone(), SPARSE["block_size"]
    windows = k.unfold(1, SPARSE["kernel_size"], SPARSE["kernel_stride"]).mean(-1)
    coarse = k.unfold(1, 4 * SPARSE["kernel_size"], 4 * SPARSE["kernel_stride"]).mean(-1)
    for row in range(length):
        first = int(chooser[row])
        if first + 1 < SPARSE["dense_len"]:
            continue
        for head in range(len(k)):
            of_group = q[head * group : (head + 1) * group, first]
            blocks = chosen_blocks(of_group, windows[head], coarse[head], first + 1)
            blocks |= set(range(first // size + 1, row // size + 1))
            mask[head, row] &= torch.isin(at // size, torch.tensor(sorted(blocks)))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(dim)
    scores = scores.masked_fill(~mask.repeat_interleave(group, 0), -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 0)


def chosen_blocks(q: Tensor, windows: Tensor, coarse: Tensor, seen: int) -> set[int]:
    """compressed_attention for a token that sees `seen` ones, itself included.

    q: [group, dim], its queries. windows, coarse: [windows, dim], compressed keys of one KV head.
    """
    size, stride, block = SPARSE["kernel_size"], SPARSE["kernel_stride"], SPARSE["block_size"]
    scale, count, coarse_count = q.shape[1] ** -0.5, (seen - size) // stride + 1, (seen // stride - 8) // 4 + 1
    lse = (q @ coarse[:coarse_count].T * scale).logsumexp(1, keepdim=True)
    score = (q @ windows[:count].T * scale - lse).exp().sum(0)
    pooled = F.max_pool1d(score[None], block // stride + 1, block // stride, padding=1)[0]
    own, local = (seen - 1) // block, SPARSE["window_size"] // block
    score = torch.full((own + 1,), -math.inf)
    score[: len(pooled)] = pooled[: own + 1]
    score[: SPARSE["init_blocks"]] = score[max(0, own - local) :] = math.inf
    # Neighbouring blocks tie where both are touched by one window, the weightiest of either.
    return set(score.sort(descending=True, stable=True).indices[: SPARSE["topk"] + local].tolist())


# The runner.


def read(runner: ModelRunner, kv: SequenceKV, parts: Iterator[list[int]] | list[list[int]]) -> Tensor:
    """Read a text in parts, and return the logits of all its tokens."""
    logits = [runner.forward([SequenceInput(kv, part, "all")])[0].logits for part in parts]
    return torch.cat([each.float().cpu() for each in logits if each is not None])


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(tokens[at : at + size])
        at += size
    return [*parts, *([token] for token in tokens[at:])]


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> Tensor:
    """The logits of the text, whose tokens choose blocks each for itself."""
    return reference(tiny, text())


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "off", "share"), [(torch.float32, 1e-3, FLIPS), (torch.bfloat16, 0.1, 0.05)])
def test_logits_equal_the_reference(tiny: Tiny, wanted: Tensor, dtype: torch.dtype, off: float, share: float) -> None:
    """Of prompts in parts of any size, and of tokens one by one, across the length from which on blocks are chosen.

    In 16 bits a few tokens choose other blocks, whose weights are nearly the same.
    """
    got = read(runner_of(tiny, dtype), SequenceKV(), cut(text(), [7, 150, 1, 33, 120]))
    assert ((got - wanted).abs().amax(1) > off).float().mean() <= share


@torch.inference_mode()
def test_logits_over_kv_in_8_bits_equal_the_reference(tiny: Tiny, wanted: Tensor) -> None:
    """Blocks are chosen by keys in 8 bits. A number that rounds differently changes later tokens a little."""
    rounded = reference(tiny, text(), scales=some_scales("cpu"))
    got = read(runner_of(tiny, kv_scales=some_scales()), SequenceKV(), cut(text(), [7, 150, 1, 33, 120]))
    assert ((got - rounded).abs().amax(1) > 0.05).float().mean() <= 0.02
    assert ((wanted - rounded).abs().amax(1) > 0.05).float().mean() > 0.5


def test_logits_of_tokens_that_share_a_choice_equal_the_reference(tiny: Tiny, wanted: Tensor) -> None:
    """As `specahead evaluate sharing` measures them. They are others than of tokens that choose for themselves."""
    loaded, shared = load_model(tiny.folder, torch.float32, DEVICE), reference(tiny, text(), [*map(first_of, AT)])
    with torch.inference_mode():
        reading = read_choosing(loaded, loaded.decoder.block_rule, torch.tensor(text(), device=DEVICE), 4)
    got, of_choices = reading.logits.cpu(), reading.chosen[SPARSE["dense_len"] // 4 :].sum(1)
    assert set(of_choices.tolist()) == {2 * 2 * loaded.decoder.block_rule.top}
    assert ((got - shared).abs().amax(1) > 1e-3).float().mean() <= FLIPS
    is_off = (wanted - shared).abs().amax(1) > 0.05
    assert not is_off[: SPARSE["dense_len"]].any() and is_off[SPARSE["dense_len"] :].float().mean() > 0.1


def first_of(position: int) -> int:
    return position - position % 4


def test_what_sharing_changes_is_measured_against_a_choice_of_each_token(tiny: Tiny) -> None:
    loaded = load_model(tiny.folder, torch.float32, DEVICE)
    rule = loaded.decoder.block_rule
    reader = Reader("tiny", partial(read_choosing, loaded, rule), rule.dense_below, str(rule), None)
    dense, own, shared = measure([reader], [text(240), text(241)[1:]], [0, 1, 4])
    assert own == SharingRow("tiny", 1, own.nats, 0, 0, pytest.approx(0, abs=1e-6), 1.0, own.churn, own.churn4)
    assert dense.churn is None and 0 < own.churn4 < own.churn < shared.churn < 0.5
    choices = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]]).bool()
    assert ReadText(torch.empty(0), choices).churn(0) == [2 / 4, 1 / 4]
    assert shared.increase == pytest.approx(shared.nats - own.nats) and shared.standard_error > 0
    assert dense.variation > 0.001 < shared.variation and len({dense.nats, own.nats, shared.nats}) == 3
    assert text_table(COLUMNS, [dense, own, shared]).splitlines()[3].startswith("tiny   the first of 4")


def generate(runner: ModelRunner, proposals: list[list[int]], count: int) -> tuple[list[int], list[int]]:
    """Generate greedily by rounds after the prompt; return the text, and whose query chose blocks for each position.

    proposals: how far each round's drafted tokens are from `guess`, in turn.
    """
    kv, tokens, choosers = SequenceKV(), text()[:PROMPT], list(range(PROMPT - 1))
    runner.forward([SequenceInput(kv, tokens[:-1])])
    rounds = 0
    while len(tokens) < PROMPT + count:
        base, offsets = len(tokens), proposals[rounds % len(proposals)]
        drafted = [(guess(base + i) + offset) % 97 for i, offset in enumerate(offsets)]
        judged = Drafted(drafted, [], Sampling(0.0), base)
        (output,) = runner.forward([SequenceInput(kv, [tokens[-1], *drafted], "all", drafted=judged)])
        accepted, following = output.verdict
        tokens += [*drafted[:accepted], following]
        choosers += [base - 1] * (accepted + 1)
        runner.kv.truncate(kv, len(tokens) - 1)
        rounds += 1
    return tokens, choosers


_guesses: list[int] = []


def guess(position: int) -> int:
    """Return the token that plain decoding gives at a position, or any."""
    return _guesses[position] if position < len(_guesses) else 0


@pytest.fixture(scope="module")
def plainly(tiny: Tiny) -> Iterator[list[int]]:
    """The text that plain decoding gives."""
    with torch.inference_mode():
        tokens, _ = generate(runner_of(tiny), [[]], 60)
    _guesses[:] = tokens
    yield tokens
    _guesses.clear()


PROPOSALS = [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0], []]  # right ones, and some of which all or a part is wrong


def check_text(tiny: Tiny, tokens: list[int], choosers: list[int]) -> None:
    """Each generated token is the likeliest by the reference, given who chose the blocks of the positions before it."""
    logits = reference(tiny, tokens[:-1], choosers)
    assert logits[PROMPT - 1 :].argmax(-1).tolist() == tokens[PROMPT:]


def test_plain_decoding_equals_the_reference(tiny: Tiny, plainly: list[int]) -> None:
    check_text(tiny, plainly, list(range(len(plainly) - 1)))


@torch.inference_mode()
def test_rounds_in_which_each_token_chooses_equal_plain_decoding(tiny: Tiny, plainly: list[int]) -> None:
    """Rounds end anywhere in a page, and rejected tokens fill pages that others fill again."""
    tokens, _ = generate(runner_of(tiny, shares_choice=False), PROPOSALS, 50)
    assert tokens == plainly[: len(tokens)]


@torch.inference_mode()
def test_rounds_share_the_choice_of_their_first_token(tiny: Tiny, plainly: list[int]) -> None:
    tokens, choosers = generate(runner_of(tiny), PROPOSALS, 50)
    check_text(tiny, tokens, choosers)


@torch.inference_mode()
def test_several_sequences_run_in_one_step_and_share_prefixes(tiny: Tiny) -> None:
    """One sequence is so short that it reads everything. One reuses the pages and mean keys of another.

    In tiers the GPU has room for 480 of the 507 tokens.
    """
    prompt = text()[:PROMPT]
    texts = [*prompt, 5], [*prompt[:250], *text()[-40:]], prompt[:151]
    wanted = [reference(tiny, tokens)[-1] for tokens in texts]
    for runner in (runner_of(tiny), runner_of(tiny, tokens=480, backing_tokens=2400)):
        first, second, short = SequenceKV(), SequenceKV(), SequenceKV()
        read(runner, first, [prompt])
        runner.kv.index_prefix(first, prompt)
        known = runner.kv.reuse_prefix(second, texts[1])
        assert known == 240
        runner.forward([SequenceInput(second, texts[1][known:-1]), SequenceInput(short, prompt[:150])])
        each = zip((first, second, short), texts, strict=True)
        inputs = [SequenceInput(kv, tokens[-1:], "all") for kv, tokens in each]
        for output, logits in zip(runner.forward(inputs), wanted, strict=True):
            torch.testing.assert_close(output.logits[-1].float().cpu(), logits, rtol=1e-3, atol=1e-3)
    assert isinstance(runner.kv, TieredKV)
    assert runner.kv.counters.fetched_pages > 0


# Over tiers.


def rounds_of_three(runner: ModelRunner, change: Callable[[Tensor], object] = lambda _: None) -> list[Tensor]:
    """Return the verdicts of rounds of three sequences, and the logits of single tokens between the rounds.

    Each round rolls back up to two tokens, whatever its verdict. change: is given the last choices after each round.
    """
    sequences, lengths = [SequenceKV(dense=True) for _ in range(3)], (340, 300, 140)
    for start in range(0, max(lengths), 64):
        parts = [text()[i : i + length][start : start + 64] for i, length in enumerate(lengths)]
        runner.forward([SequenceInput(kv, part) for kv, part in zip(sequences, parts, strict=True) if part])
    given = []
    for turn in range(8):
        inputs = []
        for i, kv in enumerate(sequences):
            tokens = text()[20 * turn + 5 * i :][: 1 if turn % 2 else GAMMA + 1]
            drafted = None if turn % 2 else Drafted(tokens[1:], [], Sampling(0.0), kv.length + 1)
            inputs.append(SequenceInput(kv, tokens, "all", drafted=drafted))
        for i, (kv, output) in enumerate(zip(sequences, runner.forward(inputs), strict=True)):
            given.append(torch.as_tensor(output.verdict if turn % 2 == 0 else output.logits))
            runner.kv.truncate(kv, kv.length - (0 if turn % 2 else (turn + i) % 3))
        if isinstance(runner.kv, TieredKV):
            runner.kv.check_integrity()
            choices = runner.passes.memories._choices
            assert choices is not None or not runner.kv.counters.fetched_pages
            if choices is not None:
                change(choices)
    return given


@torch.inference_mode()
@pytest.mark.parametrize(
    ("tokens", "shares", "eight_bit"), [(700, True, False), (700, True, True), (480, True, False), (480, False, False)]
)
def test_rounds_over_tiers_equal_those_without(tiny: Tiny, tokens: int, shares: bool, eight_bit: bool) -> None:
    """Of 780 tokens, 700 or 480 fit on the GPU. A pass that lacks room runs in parts, which multiply fewer rows at once
    and so round differently. All others give the same bits.
    """
    how: dict[str, Any] = {"shares_choice": shares, "kv_scales": some_scales() if eight_bit else None}
    plain, tiered = rounds_of_three(runner_of(tiny, **how)), runner_of(tiny, tokens=tokens, backing_tokens=2400, **how)
    off = 0.0 if tokens == 700 and DEVICE == "cpu" else 0.02 if eight_bit else 1e-4  # prompts run in parts, too
    for wanted, got in zip(plain, rounds_of_three(tiered), strict=True):
        torch.testing.assert_close(got, wanted, atol=off, rtol=off)
    assert isinstance(tiered.kv, TieredKV)
    counters = tiered.kv.counters
    assert (counters.hit_pages > counters.fetched_pages > 0) == shares
    assert (counters.overflow_pages > 0) == (tokens == 480 and shares)


@torch.inference_mode()
def test_what_was_prefetched_changes_nothing(tiny: Tiny) -> None:
    """Whether what the layers chose last, nothing, or any blocks are prefetched, every bit stays the same.

    On a GPU copies end when they end, so that some rounds find all KV there and round otherwise.
    """

    def run(change: Callable[[Tensor], object]) -> tuple[list[Tensor], int]:
        runner = runner_of(tiny, tokens=700, backing_tokens=2400)
        given = rounds_of_three(runner, change)
        assert isinstance(runner.kv, TieredKV)
        return given, runner.kv.counters.fetched_pages

    (wanted, _), *others = run(lambda _: None), run(lambda choices: choices.fill_(-1))
    others.append(run(lambda choices: choices.random_(-1, 30)))
    off = 0.0 if DEVICE == "cpu" else 1e-4
    for given, _ in others:
        for one, other in zip(given, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=off, rtol=off)
    assert others[1][1] > others[0][1] > 0  # what is prefetched in vain counts as fetched


# Served.


def test_it_is_served_with_a_draft_and_without(tmp_path: Path) -> None:
    """The draft knows nothing of this model, so its tokens are rejected, and each round's first token chooses for
    itself alone. Requests that may be approximate are served by the model's own attention as well.
    """
    draft = tmp_path / "draft"
    shutil.copytree(models.DRAFT, draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.TARGET / name, tmp_path)
    tiny, prompt = save(tmp_path, CONFIG | {"vocab_size": 4096}), [100 + 7 * token for token in text(200)]
    how = {"max_model_len": 600, "kv_tokens": 2400, "dtype": "float32", "device": "cpu"}
    with LLM(tiny.folder, str(draft), placement="together", **how) as llm:
        sampling = [{"exactness": exactness} for exactness in ("exact", "approximate")]
        answers = [
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **each))[0]
            for each in sampling
        ]
    assert answers[0].speculation.drafted > 0 == answers[0].speculation.accepted
    logits = reference(tiny, [*prompt, *answers[0].token_ids[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answers[0].token_ids == answers[1].token_ids


def test_it_is_served_over_tiers(tmp_path: Path) -> None:
    """The GPU has room for 400 of 612 tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.TARGET / name, tmp_path)
    tiny = save(tmp_path, CONFIG | {"vocab_size": 4096})
    prompts = [[token + shift for token in text(300)] for shift in (100, 200)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    how = {"max_model_len": 400, "max_sessions": 2, "prefill_chunk": 64, "dtype": "float32", "device": "cpu"}
    with LLM(tiny.folder, draft="none", kv_tokens=400, host_kv_memory=0.01, **how) as llm:
        answers = llm.generate(prompts, sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference(tiny, [*prompt, *answer.token_ids[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer.token_ids
        figures = answer.speculation.figures
        assert 0 < figures.kv_tokens_fetched < figures.kv_tokens_total / 5


@pytest.mark.parametrize(("given", "named"), [({"draft": "self"}, "draft self"), ({"budget": 0.1}, "budget")])
def test_settings_that_choose_what_it_reads_are_refused_by_name(tiny: Tiny, given: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{named} is not built for a model that chooses blocks by itself"):
        LLM(tiny.folder, **{"draft": "none", **given})


def test_nothing_is_announced_to_it(tiny: Tiny) -> None:
    """An announcement has a row for each head that does not choose by itself, and without rows none is taken."""
    assert announced_rows(load_served_plan("", 0.0, tiny.folder, str(models.DRAFT))) == 0


# What is not built.


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"use_nope": True}, "use_nope"),
        ({"kernel_size": 64}, "windows of 64 tokens"),
        ({"block_size": 48}, "blocks of 48 tokens"),
        ({"topk": 1}, "topk of 1"),
        ({"dense_len": 64}, "dense_len of 64"),
    ],
)
def test_other_choices_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"sparse_config": SPARSE | changed}))
    with pytest.raises(NotImplementedError, match=named):
        load_config(str(tmp_path))


def test_it_is_no_draft(tiny: Tiny) -> None:
    with pytest.raises(NotImplementedError, match="not built as a draft"):
        runner_of(tiny).prepare_rounds(RoundSettings(GAMMA, 64, 16))
