"""A causal LM of transformers: its weights, its dtype and device, and what identifies it."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from config.sections import LOAD_FORMATS
from engine.loading.shape import load_config
from engine.modules import NAME, register


def load_model(
    model: str, dtype: torch.dtype, device: str, attention_name: str = NAME, load_format: str = "auto"
) -> nn.Module:
    """Return the causal LM in a folder or of a Hugging Face id; code from the hub is never run.

    Weights are read from safetensors only, shard by shard straight to the device. load_format "dummy": random weights
    in the shape of the model's config, for measurements. Raises ValueError for another format, and what transformers
    raises for a model that it cannot load.
    """
    register()
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r}: expected {' or '.join(LOAD_FORMATS)}")
    options = {"dtype": dtype, "attn_implementation": attention_name, "trust_remote_code": False}
    if load_format == "dummy":
        config = load_config(model)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, **options).eval()
    if device != "cpu":
        options["device_map"] = device
    return AutoModelForCausalLM.from_pretrained(model, use_safetensors=True, **options).eval()


def limit_vocabulary(model: nn.Module, count: int) -> None:
    """Cut a causal LM's output, in place, to the logits of the ids below `count`; no more than there are.

    Models of one tokenizer may differ in how far their vocabularies are padded (Qwen2.5-0.5B has 151,936 rows, 7B has
    152,064). Cut to the ids that the tokenizer has, they fit each other. What is sampled then follows the model's
    distribution over real tokens: rows of padding, which the softmax would have counted, are not computed.
    """
    config: Any = model.config
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    config.vocab_size = min(count, config.vocab_size)
    for name in ("weight", "bias"):
        values = getattr(head, name, None)
        if values is not None:
            setattr(head, name, nn.Parameter(values.data[: config.vocab_size], requires_grad=False))
    head.out_features = config.vocab_size


def default_device() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of that name. `auto`: bfloat16 on a GPU, float32 on a CPU, whose bfloat16 is slower.

    Raises ValueError for another name.
    """
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r}: expected auto, {', '.join(dtypes)}")
    return dtypes[name]
