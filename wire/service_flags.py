"""The flags that the command lines of both services share."""

import argparse

from engine.attention_backends import ATTENTION_BACKENDS, ATTENTION_HELP
from engine.loading import LOAD_FORMATS, ModelSettings
from wire.handshake import SideSettings

TIER_FLAGS = ("host_kv_memory",)


def add_side_flags(parser: argparse.ArgumentParser, port: int, gamma: int) -> None:
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--plan", required=True, help="plan file (specahead calibrate)")
    parser.add_argument("--budget", type=float, help="share of the KV blocks to read, instead of the plan's")
    parser.add_argument("--method", help="default sparsity method, instead of the plan's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--gamma", type=int, default=gamma)
    parser.add_argument("--max-context", type=int, default=32768)
    parser.add_argument("--prefill-chunk", type=int, default=512, help="prompt tokens that one step may run")
    parser.add_argument("--max-sessions", type=int, default=ModelSettings.max_sessions)
    parser.add_argument("--kv-tokens", type=int, default=0, help="KV room; 0: by memory")
    parser.add_argument("--kv-memory", type=float, default=0.0, metavar="GIB", help="KV room in GiB")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=ModelSettings.gpu_memory_utilization, metavar="SHARE"
    )
    parser.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights")
    parser.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="tokens do not depend on the batch, at some cost (GPU only)",
    )
    parser.add_argument(
        "--attention-backend", choices=ATTENTION_BACKENDS, default="auto", help=ATTENTION_HELP
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)


def side_settings(name: str, flags: argparse.Namespace) -> SideSettings:
    model = ModelSettings(
        flags.model,
        flags.device,
        flags.dtype,
        flags.kv_tokens,
        flags.threads,
        flags.max_context,
        flags.max_sessions,
        flags.kv_memory,
        flags.gpu_memory_utilization,
        flags.load_format,
        flags.enforce_eager,
        deterministic=flags.deterministic,
        attention_backend=flags.attention_backend,
        **{name: vars(flags)[name] for name in TIER_FLAGS if name in flags},  # a target's
    )
    return SideSettings(name, model, flags.plan, flags.gamma, flags.budget, flags.method)
