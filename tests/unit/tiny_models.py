"""Models of all architectures that are tested, as small as can be."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import LoadedModel
from specahead.engine.loading.runner import make_runner
from specahead.engine.steps.inputs import Logits, SequenceInput

HEAD = 16 if torch.cuda.is_available() else 8  # dimensions: kernels on a GPU take no fewer
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 4 * HEAD,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def sizes(heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return SIZES | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | others


# How many query heads share a KV head: 1, 2, 3, 4 or 7.
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**sizes(4, 2, head_dim=16)),
    "llama, biases, tied": lambda: transformers.LlamaConfig(
        **sizes(6, 2, hidden_size=6 * HEAD), attention_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**sizes(4, 1), sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**sizes(7, 1, hidden_size=7 * HEAD)),
    "qwen3": lambda: transformers.Qwen3Config(**sizes(6, 2, head_dim=HEAD)),
    "qwen3, groups of 7": lambda: transformers.Qwen3Config(**sizes(14, 2, head_dim=16)),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **sizes(4, 2, head_dim=16), moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "phi3": lambda: transformers.Phi3Config(**sizes(4, 4), pad_token_id=0),
    "phi3, partly rotary": lambda: transformers.Phi3Config(
        **sizes(6, 2, hidden_size=96), pad_token_id=0, partial_rotary_factor=0.75
    ),
    "granite": lambda: transformers.GraniteConfig(
        **sizes(4, 1), embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=4.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**sizes(4, 4)),
    "olmo2, groups of 4": lambda: transformers.Olmo2Config(**sizes(8, 2, hidden_size=8 * HEAD)),
    "smollm3": lambda: transformers.SmolLM3Config(
        **sizes(6, 2, hidden_size=6 * HEAD), no_rope_layer_interval=2, pad_token_id=0
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
}
FUSED = [name for name in CONFIGS if name != "gpt_neox"]


def save_tiny(config: Any, folder: Path, **how: Any) -> Any:
    """Save a model of random weights in float32 and return it. how: of save_pretrained"""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms are constants at first, which would hide them
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder, **how)
    return model.eval()


def logits_of_prompt(loaded: LoadedModel, prompt: list[int], given: Logits = "all") -> Tensor:
    """Return the logits of a prompt of at most 400 tokens, or of its last token, in float32."""
    runner = make_runner(loaded, 1024, max_context=400)
    (output,) = runner.forward([SequenceInput(SequenceKV(), prompt, given)])
    return output.logits.float()


def save_mixture(folder: Path) -> None:
    """Save a mixture of experts of random weights with the layers, heads and tokenizer of the bundled target."""
    shutil.copytree(models.TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    target = transformers.AutoConfig.from_pretrained(models.TARGET).to_dict()
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    save_tiny(transformers.Qwen3MoeConfig(**{name: target[name] for name in names} | experts), folder)
