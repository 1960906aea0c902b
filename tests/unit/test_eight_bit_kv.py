"""KV in 8 bits: what is rounded and how far, and runners and services whose KV is held so."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specahead import models
from specahead.config import ModelSettings, TargetSettings
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading import kv_scales
from specahead.engine.loading.kv_scales import OF_TEXT, OF_VOCABULARY, check_eight_bit_kv, measure_kv_scales
from specahead.engine.loading.memory import backing_store_tokens, bytes_of_token, room_for_kv
from specahead.engine.loading.model import LoadedModel, load_model, load_modules
from specahead.engine.loading.opening import open_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.kv_scales import (
    EIGHT_BITS,
    LARGEST,
    MARGIN,
    KVScales,
    copy_keys,
    copy_values,
    keys_of_pages,
    keys_to_pages,
    scales_for,
    values_by_token,
    values_of_pages,
    values_to_pages,
)
from specahead.kernels.kv_write import move_kv, page_addresses, write_kv
from specahead.kernels.paged_attention import Batch, paged_attention
from target_service.service import open_models
from tests.unit import tiny_models

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BACKENDS = ["torch", "triton"]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(str(models.TARGET), DTYPE, DEVICE)


@pytest.fixture(scope="module")
def scales(target: LoadedModel, tokenizer: Any) -> KVScales:
    return measure_kv_scales(target, tokenizer)


def some_scales(kv_heads: int, dim: int) -> KVScales:
    random = torch.Generator().manual_seed(dim)
    exponents = torch.randint(-7, 2, (2, kv_heads), generator=random).float()
    return KVScales(exponents.exp2().to(DEVICE), torch.randn(2, kv_heads, dim, generator=random).to(DEVICE))


# Numbers


@given(st.floats(1e-20, 1e20))
def test_a_scale_is_a_power_of_two_that_leaves_a_margin(largest: float) -> None:
    scale = float(scales_for(torch.tensor(largest)))
    assert math.frexp(scale)[0] == 0.5
    assert 0.999 * MARGIN * largest <= scale * LARGEST < 2.001 * MARGIN * largest


def test_numbers_that_are_not_finite_have_no_scale() -> None:
    assert float(scales_for(torch.tensor(0.0))) > 0
    for bad in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="infinite or no numbers"):
            scales_for(torch.tensor([1.0, bad]))


@given(st.integers(0, 1000), st.floats(-9, 4))
def test_what_is_written_is_read_back_within_a_sixteenth(seed: int, size: float) -> None:
    """A difference to the center counts as far as the range of e4m3 goes."""
    random = torch.Generator().manual_seed(seed)
    of, differences = some_scales(3, 8), torch.randn(5, 3, 8, generator=random).to(DEVICE) * 2.0**size
    for which, to_pages, of_pages in ((0, keys_to_pages, keys_of_pages), (1, values_to_pages, values_of_pages)):
        scale, center = of.scales[which, :, None], of.centers[which]
        pages = to_pages(differences + center, of)
        assert pages.dtype == EIGHT_BITS
        back = of_pages(pages.transpose(0, 1), of, torch.float32).transpose(0, 1) - (center if which else 0)
        wanted = differences.clamp(-LARGEST * scale, LARGEST * scale)
        error = (back - wanted).abs()
        assert bool((error <= wanted.abs() / 16 + scale * 2.0**-10 + 1e-5).all())
        again = of_pages(to_pages(back + center, of).transpose(0, 1), of, torch.float32).transpose(0, 1)
        torch.testing.assert_close(again - (center if which else 0), back, atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_a_key_among_very_many_is_found(queries: int) -> None:
    """Sums over 131,072 tokens (fewer under the interpreter) stay as exact as 16-bit weights are: a token that has a
    fifth of the weight comes out as in float64 over the same 8-bit numbers.
    """
    tokens, heads, group, dim, size = (131_072 if DEVICE == "cuda" else 1024), 2, 4, 128, 20.0
    random = torch.Generator().manual_seed(queries)
    keys, values = ((torch.randn(tokens, heads, dim, generator=random) * size).to(DEVICE).to(EIGHT_BITS) for _ in "kv")
    k, v = keys.double() / size, values.double() / size
    found = torch.randint(0, tokens - queries, (queries,), generator=random).to(DEVICE)
    strength = 1.0 if DEVICE == "cuda" else 0.6
    q = torch.randn(queries, heads * group, dim, generator=random).to(DEVICE)
    q = (q + strength * k[found].float().repeat_interleave(group, 1)).bfloat16()
    by_page = keys.view(-1, PAGE_SIZE, heads, dim), values.view(-1, PAGE_SIZE, heads, dim)
    batch = Batch(
        q,
        by_page[0].transpose(1, 2).contiguous(),
        by_page[1].permute(0, 2, 3, 1).contiguous(),
        torch.arange(tokens // PAGE_SIZE, dtype=torch.int32, device=DEVICE)[None],
        torch.tensor([tokens], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, queries], dtype=torch.int32, device=DEVICE),
        dim**-0.5,
        queries,
        scales=KVScales(torch.full((2, heads), 1 / size, device=DEVICE), torch.zeros(2, heads, dim, device=DEVICE)),
    )
    out = paged_attention(batch, backend="triton")
    expected, shares = torch.empty(queries, heads * group, dim, dtype=torch.double, device=DEVICE), []
    for i in range(queries):
        seen = tokens - queries + i + 1
        scores = torch.einsum("hgd,nhd->hgn", q[i].double().view(heads, group, dim), k[:seen]) * dim**-0.5
        weights = scores.softmax(-1)
        shares.append(float(weights[..., found[i]].mean()))
        expected[i] = torch.einsum("hgn,nhd->hgd", weights, v[:seen]).flatten(0, 1)
    assert min(shares) > 0.02 and max(shares) < 0.9
    assert (out.double() - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copied_as_what_they_stand_for(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    of, pages = some_scales(2, 16), (3 * torch.randn(6, 2, 4, 16)).to(DEVICE, EIGHT_BITS)
    rows = torch.tensor([2 * page + head for head in range(2) for page in (4, 0, 3)], device=DEVICE)
    for copy, of_pages in ((copy_keys, keys_of_pages), (copy_values, values_of_pages)):
        wanted = of_pages(torch.stack([pages[[4, 0, 3], head].flatten(0, 1) for head in range(2)]), of, torch.float32)
        for backend in BACKENDS:
            out = torch.full((6, 4 * 16), torch.nan, dtype=dtype, device=DEVICE)
            copy(pages if copy is copy_keys else pages.transpose(2, 3).contiguous(), rows, of, out, backend)
            torch.testing.assert_close(out.float(), wanted.view(6, -1), atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_tokens_are_moved_as_they_are(backend: str) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    of, slots = some_scales(2, 16), torch.arange(24, device=DEVICE)
    pages = [torch.zeros(6, 2, *of_page, dtype=EIGHT_BITS, device=DEVICE) for of_page in ((4, 16), (16, 4))]
    write_kv(*pages, slots, *torch.randn(2, 24, 2, 16, device=DEVICE), of)
    before = [part.view(torch.uint8).clone() for part in pages]
    source, target = (torch.tensor(each, device=DEVICE) for each in ([3, 7, 9, 4], [20, 21, -1, 4]))
    move_kv([pages[0]], [pages[1]], page_addresses([pages[0]], [pages[1]]).to(DEVICE), source, target, backend)
    for part, held in zip((pages[0], values_by_token(pages[1])), (before[0], before[1].transpose(2, 3)), strict=True):
        held[5, :, 0], held[5, :, 1] = held[0, :, 3].clone(), held[1, :, 3].clone()
        assert torch.equal(part.view(torch.uint8), held)


# Models


def nll(runner: ModelRunner, tokens: list[int]) -> float:
    """The mean loss of a text that is read in parts."""
    sequence, logits = SequenceKV(), list[Tensor]()
    for start in range(0, len(tokens), 500):
        (output,) = runner.forward([SequenceInput(sequence, tokens[start : start + 500], "all")])
        logits.append(output.logits)
    runner.kv.release(sequence)
    wanted = torch.tensor(tokens[1:], device=logits[0].device)
    return -float(torch.cat(logits)[:-1].log_softmax(-1).gather(1, wanted[:, None]).mean())


def test_the_perplexity_of_the_bundled_target_stays(
    target: LoadedModel, scales: KVScales, tokenizer: Any, books: list[str]
) -> None:
    """Within 0.2 %, over a passage of each of three books."""
    passages = [tokenizer.encode(book[20_000:29_000])[:2000] for book in books[::2]]
    losses = []
    for of in (None, scales):
        runner = make_runner(target, 2048, kv_scales=of)
        losses.append(sum(nll(runner, passage) for passage in passages) / len(passages))
    assert losses[0] != losses[1]
    assert abs(math.exp(losses[1] - losses[0]) - 1) < 0.002


def test_scales_fit_what_they_are_made_from_and_centers_are_means(
    target: LoadedModel, scales: KVScales, tokenizer: Any
) -> None:
    sizes = target.shape.num_layers, 2, target.shape.num_kv_heads
    assert scales.scales.shape == sizes and scales.centers.shape == (*sizes, target.shape.head_dim)
    again = measure_kv_scales(target, tokenizer)
    assert torch.equal(again.scales, scales.scales) and torch.equal(again.centers, scales.centers)
    tokens = OF_TEXT + OF_VOCABULARY
    of = measure_kv_scales(target, tokenizer, int(tokens / kv_scales.CENTERED))  # over the positions that are read
    runner, sequence = make_runner(target, tokens + PAGE_SIZE), SequenceKV()
    text = tokenizer.encode(models.DEMO_TEXT.read_text(encoding="utf-8"))[:OF_TEXT]
    step = target.shape.vocab_size // OF_VOCABULARY
    runner.forward([SequenceInput(sequence, [*text, *range(0, target.shape.vocab_size, step)][:tokens])])
    for layer in (0, 9):
        _, values = kv_scales._of_sequence(runner.kv, layer, sequence)
        torch.testing.assert_close(of.centers[layer, 1], values.mean(0), atol=1e-3, rtol=1e-3)
        keys, _ = kv_scales._of_sequence(runner.kv, layer, sequence)
        spread = keys.std(0)
        assert bool(((of.centers[layer, 0] - keys.mean(0)).abs() < 0.35 * spread + 0.05).float().mean() > 0.9)
        assert bool((keys.abs().amax((0, 2)) * MARGIN <= of.scales[layer, 0] * LARGEST).all())


@pytest.mark.parametrize("family", ["qwen2", "phi3, partly rotary", "smollm3", "olmo2", "gpt_neox"])
def test_other_architectures_give_nearly_the_same(family: str, tmp_path: Path) -> None:
    """Fused ones, and one by transformers' own modules, of which no rotation is known: its keys have no centers."""
    tiny_models.save_tiny(tiny_models.CONFIGS[family](), tmp_path)
    loaded = (load_modules if family == "gpt_neox" else load_model)(str(tmp_path), torch.float32, DEVICE)
    tokens = torch.randint(0, 97, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    of = measure_kv_scales(loaded, SimpleNamespace(encode=lambda text: [*tokens, 97]))
    assert bool(of.centers[:, 0].any()) == (family != "gpt_neox") and bool(of.centers[:, 1].any())
    logits = []
    for each in (None, of):
        runner, sequence = make_runner(loaded, 256, enforce_eager=family == "gpt_neox", kv_scales=each), SequenceKV()
        outputs = [runner.forward([SequenceInput(sequence, tokens[a : a + 40], "all")]) for a in (0, 40, 80)]
        logits.append(torch.cat([output.logits for (output,) in outputs if output.logits is not None]))
    assert 0 < (logits[1] - logits[0]).std() < 0.1 * logits[0].std()


def test_a_prefix_is_reused_and_tokens_are_taken_back(target: LoadedModel, scales: KVScales) -> None:
    """As if each sequence had been read alone, bit by bit."""
    prompt = torch.randint(0, 4096, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    runner = make_runner(target, 2048, kv_scales=scales)
    first, second, alone = SequenceKV(), SequenceKV(), SequenceKV()
    runner.forward([SequenceInput(first, prompt[:96])])
    runner.kv.index_prefix(first, prompt[:96])
    assert runner.kv.reuse_prefix(second, prompt) == 96
    runner.forward([SequenceInput(second, [7] * 9, "all")])  # what a round proposed, which is taken back
    runner.kv.truncate(second, 96)
    outputs = [runner.forward([SequenceInput(second, prompt[96:], "all")])]
    runner.forward([SequenceInput(alone, prompt[:96])])
    outputs.append(runner.forward([SequenceInput(alone, prompt[96:], "all")]))
    (one,), (other,) = outputs
    assert torch.equal(one.logits, other.logits)
    pages = runner.kv.k_pages[3][:, :, :].view(torch.uint8)
    assert torch.equal(pages[second.pages[-1], :, :4], pages[alone.pages[-1], :, :4])
    runner.kv.scrub(second)
    assert not pages[second.pages[-1]].any()


# Settings


def test_a_target_and_its_draft_are_opened_as_the_settings_say() -> None:
    settings = TargetSettings(
        kv_cache_dtype="fp8", placement="together", device="cpu", max_context=200, kv_tokens=320, max_sessions=1
    )
    assert settings.own_draft.kv_cache_dtype == "fp8"
    target, draft = open_models(settings, 0)
    plain, _ = open_models(replace(settings, kv_cache_dtype="auto", draft="none", placement="apart"), 0)
    for opened in (target, draft):
        assert {part.dtype for part in (*opened.runner.kv.k_pages, *opened.runner.kv.v_pages)} == {EIGHT_BITS}
    assert plain.runner.kv.scales is None and plain.runner.kv.k_pages[0].dtype == torch.float32
    runners: list[Any] = [target.runner, plain.runner]
    assert runners[0].weight_tokens == 4 * runners[1].weight_tokens


def test_memory_has_room_for_as_many_more_tokens() -> None:
    plain = ModelSettings(model=str(models.TARGET), device="cpu", max_context=256, kv_memory=0.01, max_sessions=64)
    held = replace(plain, kv_cache_dtype="fp8")
    shape = load_model(str(models.TARGET), torch.float32, "cpu").shape
    assert bytes_of_token(shape, torch.bfloat16) == 2 * bytes_of_token(shape, torch.bfloat16, "fp8")
    rooms = [room_for_kv(each, shape, torch.bfloat16, "cpu") for each in (plain, held)]
    assert rooms[1] == pytest.approx(2 * rooms[0], abs=2)
    stores = [backing_store_tokens(replace(each, host_kv_memory=1.0), shape, torch.bfloat16) for each in (plain, held)]
    assert stores[1] == pytest.approx(2 * stores[0], abs=2)
    over_two = replace(plain, host_kv_memory=1.0, tensor_parallel_size=2)
    assert backing_store_tokens(over_two, shape.of_rank(2), torch.bfloat16) == stores[0]


def test_a_backing_store_holds_8_bits_too() -> None:
    sizes = {"max_context": 256, "kv_tokens": 320, "host_kv_memory": 0.01}
    kv = open_model(ModelSettings(model=str(models.DRAFT), device="cpu", kv_cache_dtype="fp8", **sizes)).runner.kv
    assert isinstance(kv, TieredKV)
    every = [*kv.memory.on_gpu, *kv.memory.stored, *kv.memory.staging]
    assert {part.dtype for pair in every for part in pair} == {EIGHT_BITS}


def test_a_gpu_that_converts_no_8_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.9 or more, this one has 8\.0: leave it out"):
        check_eight_bit_kv("a-model", "cuda")
    check_eight_bit_kv("a-model", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_eight_bit_kv("a-model", "cuda")
