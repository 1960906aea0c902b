"""The engine's logits equal eager transformers' for several architectures, over ragged batches and chunks.

Through transformers' own modules and, where its description covers the architecture, through the fused decoder.
"""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.config import read_shape
from specahead.engine.loading.fused import read_decoder
from specahead.engine.loading.model import load_model, load_module, load_modules
from specahead.engine.loading.runner import make_runner
from specahead.engine.model.decoder import Decoder, PassTokens
from specahead.engine.model.families import FAMILIES, sliding_window
from specahead.engine.steps.inputs import Logits, SequenceInput
from specahead.engine.steps.runner import Runner
from specahead.kernels.backends import Backend
from specahead.lab.evaluation.models import load_runner
from tests.unit.tiny_models import CONFIGS, FUSED, HEAD, SIZES, save_tiny, sizes

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [2.0] * (HEAD // 2),
}
ALL: list[Logits] = ["all"] * 4
NONE: list[Logits] = ["none"] * 4
LAST: list[Logits] = ["last"] * 4


@pytest.fixture
def folder(request: Any, tmp_path: Path) -> str:
    save_tiny(CONFIGS[request.param](), tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_logits_of_the_modules_equal_eager_transformers(folder: str) -> None:
    check_logits(folder, make_runner(load_modules(folder, torch.float32, "cpu"), 512))


@pytest.mark.parametrize("folder", FUSED, indirect=True)
def test_logits_of_the_fused_decoder_equal_eager_transformers(folder: str) -> None:
    runner = load_runner(folder, torch.float32, "cpu", 512)
    assert isinstance(runner.decoder, Decoder)
    check_logits(folder, runner)


def check_logits(folder: str, runner: Runner) -> None:
    """Of prompts that are read in chunks, long ones and such as steps have, to a rounding of float32.

    In some passes all rows give logits, in some those of one sequence, or the last of each, or none.
    """
    reference = load_module(folder, torch.float32, "cpu", "eager")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (1, 17, 40, 75)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    sequences = [SequenceKV() for _ in prompts]
    at = [0] * len(prompts)
    asked = itertools.cycle((ALL, NONE, LAST, [*NONE[:3], "all"], ALL))
    while any(a < len(p) for a, p in zip(at, prompts, strict=True)):
        live = [i for i, prompt in enumerate(prompts) if at[i] < len(prompt)]
        kinds = next(asked)
        inputs = [SequenceInput(sequences[i], prompts[i][at[i] : at[i] + 3 + 3 * i], kinds[i]) for i in live]
        for i, item, output in zip(live, inputs, runner.forward(inputs), strict=True):
            at[i] += len(item.tokens)
            assert (output.logits is None) == (not item.logits_rows)
            if output.logits is not None:
                wanted = expected[i][at[i] - item.logits_rows : at[i]]
                torch.testing.assert_close(output.logits, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=HEAD), "sliding_attention"),
        (lambda: transformers.Qwen3NextConfig(**SIZES, num_key_value_heads=2), "linear_attention"),
    ],
)
def test_attention_that_is_not_built_is_refused(config: Any, kind: str) -> None:
    with pytest.raises(NotImplementedError, match=kind):
        read_shape(config())


def test_a_sliding_window_is_refused_where_it_hides_tokens() -> None:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=8)
    with pytest.raises(NotImplementedError, match=r"a sliding window of 8 tokens.*--enforce-eager too"):
        read_shape(config)
    assert sliding_window(config) == 8
    config.sliding_window = 256  # as long as the model's context
    assert read_shape(config).num_layers == 2
    unused = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, sliding_window=8, use_sliding_window=False)
    assert sliding_window(unused) is None


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (
            lambda: transformers.Qwen3MoeConfig(**sizes(4, 2), num_experts=4, decoder_sparse_step=2),
            "layers without a mixture",
        ),
        (lambda: transformers.MixtralConfig(**sizes(4, 2)), "a mixture of experts"),
        (lambda: transformers.Gemma2Config(**sizes(4, 2)), "softcapping"),
        (lambda: transformers.BloomConfig(hidden_size=32, n_head=4), "ALiBi"),
        (lambda: transformers.MistralConfig(**sizes(4, 1), sliding_window=8), "a sliding window of 8 tokens"),
        (lambda: transformers.GemmaConfig(**sizes(4, 2)), "the architecture gemma .*there is llama, mistral"),
        (lambda: transformers.LlamaConfig(**sizes(4, 2), hidden_act="gelu"), "the activation gelu"),
        (lambda: transformers.LlamaConfig(**sizes(4, 2), mlp_bias=True), "biases in the MLP"),
        (lambda: transformers.LlamaConfig(**sizes(4, 2), rope_parameters=DYNAMIC), "of kind dynamic"),
        (lambda: transformers.Phi3Config(**sizes(4, 2), pad_token_id=0, rope_parameters=LONG), "longrope"),
    ],
)
def test_the_fused_decoder_names_what_it_does_not_do(config: Any, feature: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{feature}.*use --enforce-eager"):
        read_decoder(config(), {}, torch.float32, "cpu")


def test_every_family_is_tested() -> None:
    own_file = {"minicpm"}  # transformers has no class of it
    assert {CONFIGS[name]().model_type for name in FUSED} == set(FAMILIES) - own_file


@pytest.mark.parametrize(
    "folder", ["llama", "qwen2", "phi3, partly rotary", "granite", "smollm3", "qwen3_moe"], indirect=True
)
def test_the_kernels_of_the_fused_decoder_give_what_torch_gives(folder: str) -> None:
    check_kernels(folder, 2, [1])


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(("rows", "giving"), [(2, [0, 1, 1, 1, 1, 1]), (6, [5, 2]), (6, [])])
def test_rows_that_give_logits_may_be_more_than_run_or_fewer(folder: str, rows: int, giving: list[int]) -> None:
    """As where the sequences of a pass have different numbers of tokens; or fewer, in any order, or none."""
    check_kernels(folder, rows, giving)


@torch.inference_mode()
def check_kernels(folder: str, rows: int, giving: list[int]) -> None:
    """Interpreted where there is no GPU; attention, which has tests of its own, gives the queries."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no arithmetic of bfloat16
    decoder = load_model(folder, dtype, device).decoder
    assert isinstance(decoder, Decoder)
    tokens = PassTokens(*torch.arange(2 * rows, device=device).view(2, rows), torch.arange(1, rows + 1, device=device))
    logits_rows = torch.tensor(giving, dtype=torch.int64, device=device)

    def run(backend: Backend) -> list[torch.Tensor]:
        head_dim = decoder.layers[0].qkv.outputs // (decoder.heads + 2 * decoder.kv_heads)
        kv = KVCache(2, decoder.kv_heads, head_dim, 2, dtype, device)
        with patch("specahead.engine.model.decoder.default_backend", return_value=backend):
            logits = decoder.run(tokens, kv, lambda _, queries: queries, logits_rows)
        return [logits.float(), *(pages.float() for pages in (*kv.k_pages, *kv.v_pages))]

    for one, other in zip(run("triton"), run("torch"), strict=True):
        assert one.shape == other.shape and (one - other).norm() <= 0.02 * other.norm()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Safetensors only: a pickle could run code."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(str(tmp_path), torch.float32, "cpu")
