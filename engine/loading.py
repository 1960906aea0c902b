"""Loading a causal LM and its tokenizer from a folder or a Hugging Face id, and what identifies them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine import attention
from engine.paged_kv import PAGE_SIZE, PagedKV
from engine.runner import ModelRunner


@dataclass(frozen=True)
class ModelShape:
    """What the services need to know of an architecture."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


def read_shape(config: Any) -> ModelShape:
    """Raises NotImplementedError for attention that this engine does not honour."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise NotImplementedError(
            f"{config.model_type}: layers of kind {sorted(kinds)}; only full_attention is built"
        )
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def load_shape(model: str) -> ModelShape:
    return read_shape(AutoConfig.from_pretrained(model, trust_remote_code=False))


def load_tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def load_model(
    model: str, dtype: torch.dtype, device: str, attention_name: str = attention.NAME
) -> nn.Module:
    """Safetensors only; code from the hub is never run."""
    attention.register()
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=attention_name, use_safetensors=True, trust_remote_code=False
    )
    return loaded.to(device).eval()


def load_runner(model: str, dtype: torch.dtype, device: str, kv_tokens: int) -> ModelRunner:
    """A model with KV room for `kv_tokens` tokens in all."""
    loaded = load_model(model, dtype, device)
    shape = read_shape(loaded.config)
    pages = -(-kv_tokens // PAGE_SIZE)
    kv = PagedKV(shape.num_layers, shape.num_kv_heads, shape.head_dim, pages, dtype, device)
    return ModelRunner(loaded, kv, shape.vocab_size)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU (whose bfloat16 is slower and no smaller here)."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r}: expected auto, {', '.join(dtypes)}")
    return dtypes[name]


def tokenizer_hash(tokenizer: Any) -> str:
    """Same hash, same token ids: over the vocabulary and how a few awkward strings encode."""
    probes = ["Hello, world", " naïve café 北京 🙂\n\n", "x = 1\t# tab", "  two spaces"]
    state = [
        sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        sorted(tokenizer.all_special_ids),
        [tokenizer.encode(probe, add_special_tokens=False) for probe in probes],
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def model_hash(model: str) -> str:
    """Identifies a folder by config, file sizes and headers, without reading gigabytes; a hub id by its name."""
    folder = Path(model)
    if not folder.is_dir():
        return hashlib.sha256(f"hub:{model}".encode()).hexdigest()[:16]
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            digest.update(f"{file.name}:{file.stat().st_size}".encode() + handle.read(65536))
    return digest.hexdigest()[:16]


def stop_token_ids(model: str, tokenizer: Any) -> list[int]:
    """End-of-sequence ids by generation_config.json where there is one, else the tokenizer's."""
    file = Path(model) / "generation_config.json"
    found: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


@dataclass(frozen=True)
class ModelSettings:
    """What a service process needs to open its model. kv_tokens: room in all; threads 0: torch's choice."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int = 131072
    threads: int = 0


@dataclass(frozen=True)
class OpenedModel:
    runner: ModelRunner
    shape: ModelShape
    tokenizer_hash: str


def open_model(settings: ModelSettings) -> OpenedModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = default_device() if settings.device == "auto" else settings.device
    runner = load_runner(settings.model, resolve_dtype(settings.dtype, device), device, settings.kv_tokens)
    return OpenedModel(
        runner, read_shape(runner.model.config), tokenizer_hash(load_tokenizer(settings.model))
    )


def output_projections(model: nn.Module) -> list[torch.Tensor]:
    """Each layer's attention output projection, [hidden, heads * head_dim].

    Raises NotImplementedError for an architecture whose attention has none under a name that we know.
    """
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        names = [name for name in ("o_proj", "out_proj", "dense", "c_proj", "wo") if hasattr(module, name)]
        if layer is not None and names:
            found[layer] = getattr(module, names[0]).weight.detach()
    if sorted(found) != list(range(model.config.num_hidden_layers)):  # type: ignore[union-attr,arg-type]
        raise NotImplementedError(
            f"{type(model).__name__}: no output projection of attention found in every layer"
        )
    return [found[layer] for layer in sorted(found)]
