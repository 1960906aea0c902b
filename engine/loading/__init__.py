"""From a model's name to a runner with room for KV: what is loaded, how large it is, and how it is run."""

from engine.loading.memory import DEFAULT_KV_TOKENS, backing_store_tokens, room_for_kv
from engine.loading.model import (
    default_device,
    limit_vocabulary,
    load_model,
    model_hash,
    output_projections,
    resolve_dtype,
)
from engine.loading.opening import OpenedModel, open_model
from engine.loading.runner import load_runner, make_decoder, make_runner, modules_decoder
from engine.loading.shape import ModelShape, load_shape, read_shape
from engine.loading.tokenizer import count_token_ids, load_tokenizer, stop_token_ids, tokenizer_hash

__all__ = [
    "DEFAULT_KV_TOKENS",
    "ModelShape",
    "OpenedModel",
    "backing_store_tokens",
    "count_token_ids",
    "default_device",
    "limit_vocabulary",
    "load_model",
    "load_runner",
    "load_shape",
    "load_tokenizer",
    "make_decoder",
    "make_runner",
    "model_hash",
    "modules_decoder",
    "open_model",
    "output_projections",
    "read_shape",
    "resolve_dtype",
    "room_for_kv",
    "stop_token_ids",
    "tokenizer_hash",
]
