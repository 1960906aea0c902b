"""The engine's logits equal eager transformers' for several architectures, over ragged batches and chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import SequenceInput
from engine.loading import load_model, load_runner, read_shape
from engine.paged_kv import SequenceKV

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**SIZES, num_key_value_heads=4, pad_token_id=0),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, num_key_value_heads=4),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
}


@pytest.fixture
def folder(request: Any, tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_logits_equal_eager_transformers(folder: str) -> None:
    reference = load_model(folder, torch.float32, "cpu", "eager")
    runner = load_runner(folder, torch.float32, "cpu", 512)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (1, 17, 40, 75)]
    sequences = [SequenceKV() for _ in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    at = [0] * len(prompts)
    while any(a < len(p) for a, p in zip(at, prompts, strict=True)):
        live = [i for i, prompt in enumerate(prompts) if at[i] < len(prompt)]
        chunks = [prompts[i][at[i] : at[i] + 5 + 6 * i] for i in live]
        inputs = [SequenceInput(sequences[i], chunk, "all") for i, chunk in zip(live, chunks, strict=True)]
        for i, chunk, output in zip(live, chunks, runner.forward(inputs), strict=True):
            rows[i].append(output.logits)  # type: ignore[arg-type]
            at[i] += len(chunk)
    for prompt, mine in zip(prompts, rows, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.cat(mine), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8), "sliding_attention"),
        (lambda: transformers.Qwen3NextConfig(**SIZES, num_key_value_heads=2), "linear_attention"),
    ],
)
def test_attention_that_is_not_built_is_refused(config: Any, kind: str) -> None:
    with pytest.raises(NotImplementedError, match=kind):
        read_shape(config())


def test_a_sliding_window_is_refused_in_the_step(tmp_path: Path) -> None:
    """A model that asks attention for something by keyword must not be answered as if it had not."""
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=8)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    runner = load_runner(str(tmp_path), torch.float32, "cpu", 64)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        runner.forward([SequenceInput(SequenceKV(), [1, 2, 3], "all")])


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Safetensors only: a pickle could run code."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(str(tmp_path), torch.float32, "cpu")
