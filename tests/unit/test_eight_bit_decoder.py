"""A decoder whose passes of few rows read weights in 8 bits, against one whose weights are rounded so."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.loading.model import load_model, load_modules
from specahead.engine.model.decoder import Decoder, PassTokens
from specahead.engine.steps.inputs import Logits
from specahead.kernels.backends import Backend
from specahead.kernels.linear import MOST_ROWS, quantize
from tests.unit.tiny_models import logits_of_prompt, sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SIZES = sizes(8, 2, hidden_size=512, intermediate_size=1024, max_position_embeddings=512)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return str(tmp_path)


def round_weights(decoder: Decoder) -> None:
    """Round, in place, what passes of few rows read in 8 bits."""
    layers = [weight for layer in decoder.layers for weight in layer.linears]
    for weight in (*layers, decoder.lm_head):
        weight.values.copy_(quantize(weight.values).in_order())


def logits(folder: str, rounded: str, tokens: int, given: Logits = "all") -> Tensor:
    """Return the logits of a prompt of so many tokens. rounded: how weights are: not, in 8 bits, or rounded as these"""
    loaded = load_model(folder, DTYPE, DEVICE)
    decoder = loaded.decoder
    with torch.inference_mode():
        if rounded == "8 bits":
            decoder = decoder.with_eight_bit_weights()
        elif rounded:
            round_weights(decoder)
    prompt = torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    return logits_of_prompt(replace(loaded, decoder=decoder), prompt, given)


@pytest.mark.parametrize("tokens", [7, 40])
def test_passes_of_few_rows_read_weights_in_8_bits(folder: str, tokens: int) -> None:
    torch.testing.assert_close(
        logits(folder, "8 bits", tokens),
        logits(folder, "rounded", tokens),
        atol=0.03 if DEVICE == "cuda" else 1e-4,
        rtol=1e-3,
    )
    assert not torch.allclose(logits(folder, "8 bits", tokens), logits(folder, "", tokens), atol=1e-4)


@pytest.mark.parametrize("tokens", [7, 40])
def test_experts_are_read_in_8_bits(tokens: int, tmp_path: Path) -> None:
    """The mixture is rounded as it is loaded. A token has all its experts, so that no rounding changes the choice."""
    torch.manual_seed(0)
    mixture = {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 4}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | mixture)).save_pretrained(tmp_path)
    prompt, found = torch.arange(tokens).tolist(), []
    for how in ("fp8", "none"):
        loaded = load_model(str(tmp_path), DTYPE, DEVICE, quantization=how)
        decoder = loaded.decoder
        if how == "none":
            with torch.inference_mode():
                for layer in decoder.layers:
                    weights = [*(each.values for each in layer.linears), layer.experts.gate_up, layer.experts.down]
                    for weight in weights:
                        weight.copy_(quantize(weight).in_order())
        found.append(logits_of_prompt(loaded, prompt))
    torch.testing.assert_close(*found, atol=0.03 if DEVICE == "cuda" else 1e-4, rtol=1e-3)
    assert found[0].std() > 0.1


def test_prompts_read_the_weights_as_they_are(folder: str) -> None:
    assert torch.equal(logits(folder, "8 bits", MOST_ROWS + 40), logits(folder, "", MOST_ROWS + 40))


def test_the_last_token_of_a_prompt_reads_the_last_layer_and_the_head_in_8_bits(folder: str) -> None:
    as_they_are = logits(folder, "", MOST_ROWS + 40, "last")
    error = (logits(folder, "8 bits", MOST_ROWS + 40, "last") - as_they_are).norm() / as_they_are.norm()
    assert 0 < error <= 0.1


@torch.inference_mode()
def test_more_rows_may_give_logits_than_read_8_bits(folder: str) -> None:
    """The last layer then reads the weights as they are. Interpreted where there is no GPU."""
    pytest.importorskip("triton")
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no arithmetic of bfloat16
    decoder = load_model(folder, dtype, DEVICE).decoder
    decoder = decoder.with_eight_bit_weights()
    tokens = PassTokens(*torch.arange(6, device=DEVICE).view(2, 3), torch.arange(1, 4, device=DEVICE))
    giving = torch.arange(MOST_ROWS + 1, device=DEVICE) % 3

    def run(backend: Backend, rows: Tensor) -> Tensor:
        kv = KVCache(2, 2, 64, 1, dtype, DEVICE)
        with patch("specahead.engine.model.decoder.default_backend", return_value=backend):
            return decoder.run(tokens, kv, lambda _, queries: queries, rows).float()

    expected = run("torch", giving)
    assert (run("triton", giving) - expected).norm() <= 0.02 * expected.norm()
    few = run("torch", giving[:3])
    assert 0 < (expected[:3] - few).norm() <= 0.1 * few.norm()


def test_what_is_not_built_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="built for the fused decoder"):
        load_modules(folder, DTYPE, DEVICE).decoder.with_eight_bit_weights()
    transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES)).save_pretrained(tmp_path / "olmo2")
    with pytest.raises(NotImplementedError, match="norm what attention and the MLP read"):
        load_model(str(tmp_path / "olmo2"), DTYPE, DEVICE).decoder.with_eight_bit_weights()
