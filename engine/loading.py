"""Loading a causal LM and its tokenizer from a folder or a Hugging Face id, and what identifies them."""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine import attention
from engine.attention_backends import check_attention_backend
from engine.families import read_decoder, sliding_window, unbuilt_feature
from engine.graphs import MAX_OVERHANG, GraphRunner
from engine.kv.cache import KVCache
from engine.kv.paged import PagedKV
from engine.kv.pages import PAGE_SIZE, pages_for
from engine.kv.tiered import TieredKV
from engine.runner import ModelRunner, Runner
from kernels.backends import AttentionBackend
from kernels.flashinfer_attention import check_flashinfer

DEFAULT_KV_TOKENS = 131072  # on a CPU
ACTIVATION_BYTES = 2 << 30  # left free on a GPU beside weights and KV
LOAD_FORMATS = ("auto", "dummy")


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
    window = sliding_window(config)
    if window is not None:
        raise NotImplementedError(
            f"{config.model_type}: a sliding window of {window} tokens; only attention to all tokens is built, with "
            "--enforce-eager too"
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
    model: str,
    dtype: torch.dtype,
    device: str,
    attention_name: str = attention.NAME,
    load_format: str = "auto",
) -> nn.Module:
    """Safetensors only, shard by shard straight to the device; code from the hub is never run.

    load_format "dummy": random weights in the shape of the model's config, for measurements.
    """
    attention.register()
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r}: expected {' or '.join(LOAD_FORMATS)}")
    options = {"dtype": dtype, "attn_implementation": attention_name, "trust_remote_code": False}
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, **options).eval()
    if device != "cpu":
        options["device_map"] = device
    return AutoModelForCausalLM.from_pretrained(model, use_safetensors=True, **options).eval()


def load_runner(model: str, dtype: torch.dtype, device: str, kv_tokens: int) -> ModelRunner:
    """A model with KV room for `kv_tokens` tokens in all, run through transformers' own modules."""
    return make_runner(load_model(model, dtype, device), kv_tokens)


def make_runner(
    loaded: nn.Module,
    kv_tokens: int,
    host_kv_tokens: int = 0,
    longest: int = 0,
    dense_layers: tuple[int, ...] = (),
) -> ModelRunner:
    """host_kv_tokens: that have their home on the host, of which `kv_tokens` lie on the device at once; 0: none.

    longest: tokens of a sequence, at most, where there are any. dense_layers: as in ModelSettings.
    """
    shape = read_shape(loaded.config)
    parameter = next(loaded.parameters())
    pages = pages_for(kv_tokens)
    of_model = shape.num_layers, shape.num_kv_heads, shape.head_dim
    of_weights = parameter.dtype, parameter.device
    kv: KVCache
    if host_kv_tokens:
        at_home = host_kv_tokens // PAGE_SIZE
        rooms = min(pages, at_home), at_home, longest
        kv = TieredKV(*of_model, *rooms, *of_weights, kept_layers=dense_layers)
    else:
        kv = PagedKV(*of_model, pages, *of_weights)
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
    """What a service process needs to open its model.

    kv_tokens: room in all. 0: kv_memory GiB of it, or if that is 0 too what gpu_memory_utilization (a share of the
    GPU's whole memory) leaves beside the weights, but no more than max_sessions of max_context tokens need; on a CPU
    DEFAULT_KV_TOKENS. max_context 0: the model's. threads 0: torch's choice. enforce_eager: capture no CUDA graphs.
    step_queries: tokens of a sequence that most steps run, γ + 1. deterministic: on a GPU, tokens do not depend on
    what runs beside a sequence nor on whether it was drafted (engine.graphs.GraphRunner). attention_backend: one of
    engine.attention_backends.ATTENTION_BACKENDS. host_kv_memory: GiB of KV of all sessions in host memory, of which the
    room above is what lies on the device at once (engine.kv.tiered); 0: all KV lies on the device. dense_layers: that
    sparse sessions read wholly, whose KV then stays on the device. group_size: tokens of a group whose means are kept
    there, counted where there is a home on the host; 0: none.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int = 0
    threads: int = 0
    max_context: int = 0
    max_sessions: int = 64
    kv_memory: float = 0.0
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
    enforce_eager: bool = False
    step_queries: int = 5
    deterministic: bool = False
    attention_backend: str = "auto"
    host_kv_memory: float = 0.0
    dense_layers: tuple[int, ...] = ()
    group_size: int = 0


@dataclass(frozen=True)
class OpenedModel:
    runner: Runner
    shape: ModelShape
    tokenizer_hash: str


def open_model(settings: ModelSettings) -> OpenedModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = default_device() if settings.device == "auto" else settings.device
    dtype = resolve_dtype(settings.dtype, device)
    if settings.deterministic and device == "cpu":
        raise NotImplementedError(
            "deterministic is built for the GPU engine: leave it out, or use a CUDA device"
        )
    check_attention_backend(
        settings.attention_backend, device, settings.deterministic, settings.enforce_eager
    )
    if settings.attention_backend == "flashinfer":  # before gigabytes are read
        check_flashinfer(load_shape(settings.model).head_dim, dtype, torch.device(device))
    loaded = load_model(settings.model, dtype, device, load_format=settings.load_format)
    shape = read_shape(loaded.config)
    tokens, at_home = room_for_kv(settings, shape, dtype, device), room_at_home(settings, shape, dtype)
    if settings.host_kv_memory and at_home < max(_context(settings, shape), tokens):
        raise ValueError(
            f"{settings.model}: KV for {at_home} tokens fits on the host, the home of all of it; a context has "
            f"{_context(settings, shape)}, the device has room for {tokens}: raise host_kv_memory, or lower "
            "max_context, kv_tokens or kv_memory"
        )
    plain = make_runner(loaded, tokens, at_home, _longest(settings, shape), settings.dense_layers)
    tiered = at_home > 0
    runner = _open_graphs(plain, settings, shape, tiered) if tiered or device != "cpu" else plain
    return OpenedModel(runner, shape, tokenizer_hash(load_tokenizer(settings.model)))


def _open_graphs(plain: ModelRunner, settings: ModelSettings, shape: ModelShape, tiered: bool) -> Runner:
    """What runs on a GPU, and on a CPU where KV lies in tiers: the same way, without graphs."""
    config: Any = plain.model.config
    chosen = settings.attention_backend
    feature = unbuilt_feature(config, plain.device.type == "cuda")
    if tiered and chosen == "flashinfer":
        raise NotImplementedError(
            "attention_backend flashinfer reads KV that lies on the GPU: choose triton or auto, or leave "
            "host_kv_memory out"
        )
    if tiered and feature is not None:
        raise NotImplementedError(
            f"{settings.model}: KV in tiers is built for the fused decoder, which {config.model_type} does not run "
            f"through: it is not built for {feature}; leave host_kv_memory out"
        )
    if feature is not None:
        if settings.enforce_eager and chosen in ("triton", "flashinfer"):
            raise NotImplementedError(
                f"{settings.model}: {config.model_type} runs through transformers' own modules, whose attention is the "
                f"torch backend, not {chosen}: choose torch or auto"
            )
        if settings.enforce_eager:
            return plain
        raise NotImplementedError(
            f"{settings.model}: no CUDA graphs are built for {feature}; pass --enforce-eager to run it through "
            "transformers' own modules"
        )
    context = _context(settings, shape)
    decoder = read_decoder(plain.model)
    backend: AttentionBackend | None = None if chosen == "auto" else chosen  # type: ignore[assignment]
    steps = settings.step_queries, settings.deterministic, backend
    return GraphRunner(decoder, plain, context, settings.enforce_eager, *steps)


def room_for_kv(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype, device: str) -> int:
    """Tokens of KV to make room for, once the weights are loaded; says what takes how much memory.

    Raises ValueError if not even one sequence of max_context fits.
    """
    if settings.kv_tokens:
        return settings.kv_tokens
    a_token = _bytes_of_token(shape, dtype)
    context = _context(settings, shape)
    beside = 0.0
    if settings.host_kv_memory:
        beside = _beside_tiers(settings, shape, dtype)
        a_token = _bytes_in_tiers(settings, shape, dtype)
    if settings.kv_memory:
        tokens = max(0, int((settings.kv_memory * 2**30 - beside) / a_token))
    elif device == "cpu":
        return max(DEFAULT_KV_TOKENS, settings.max_context + PAGE_SIZE)
    else:
        free, total = torch.cuda.mem_get_info(device)
        allowed = free - (1 - settings.gpu_memory_utilization) * total - ACTIVATION_BYTES - beside
        tokens = max(0, int(allowed / a_token))
    tokens = min(tokens, settings.max_sessions * (context + 2 * PAGE_SIZE))
    if device != "cpu":
        weights = torch.cuda.memory_allocated(device)
        print(
            f"{settings.model}: weights {weights / 2**30:.1f} GiB, KV for {tokens} tokens "
            f"{tokens * a_token / 2**30:.1f} GiB",
            file=sys.stderr,
            flush=True,
        )
    if tokens < context and not settings.host_kv_memory:
        raise ValueError(
            f"{settings.model}: KV for {tokens} tokens fits, a context has {context}: lower max_context, or raise "
            "kv_memory or gpu_memory_utilization"
        )
    return tokens


def room_at_home(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> int:
    """Tokens of KV whose home is host memory; 0 without tiers."""
    memory = settings.host_kv_memory
    return int(memory * 2**30 / _bytes_in_tiers(settings, shape, dtype)) if memory else 0


def _bytes_in_tiers(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> int:
    """Of a token, in the layers whose KV does not stay on the device. Raises ValueError if there are none."""
    layers = shape.num_layers - len(settings.dense_layers)
    if layers < 1:
        raise ValueError(
            f"{settings.model}: the plan reads all {shape.num_layers} layers wholly, so their KV stays: leave "
            "host_kv_memory out"
        )
    return _bytes_of_token(shape, dtype) // shape.num_layers * layers


def _beside_tiers(settings: ModelSettings, shape: ModelShape, dtype: torch.dtype) -> float:
    """Bytes on the device beside the frames: two layers of one sequence, which passes that read everything are brought
    together in; the layers that stay; what says where each page of the others lies; group means."""
    of_layer, at_home = _bytes_of_token(shape, dtype) / shape.num_layers, room_at_home(settings, shape, dtype)
    heads = shape.num_layers * shape.num_kv_heads
    tables = at_home / PAGE_SIZE * heads * (4 + 10)  # of a page and, at most, of a slot
    means = 3 * 4 * at_home / settings.group_size * heads * shape.head_dim if settings.group_size else 0.0
    staged = 2 * _longest(settings, shape) * of_layer
    return staged + len(settings.dense_layers) * at_home * of_layer + tables + means


def _bytes_of_token(shape: ModelShape, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _context(settings: ModelSettings, shape: ModelShape) -> int:
    return settings.max_context or shape.max_position_embeddings


def _longest(settings: ModelSettings, shape: ModelShape) -> int:
    """Tokens of a sequence, at most, those that a round drafts beyond its context included."""
    return _context(settings, shape) + MAX_OVERHANG


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
