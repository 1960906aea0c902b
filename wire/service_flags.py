"""The flags that the command lines of both services share."""

import argparse

from engine.loading import ModelSettings
from wire.handshake import SideSettings


def add_side_flags(parser: argparse.ArgumentParser, port: int, gamma: int) -> None:
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--plan", required=True, help="plan file (specahead calibrate)")
    parser.add_argument("--budget", type=float, help="share of the KV blocks to read, instead of the plan's")
    parser.add_argument("--method", help="default sparsity method, instead of the plan's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--gamma", type=int, default=gamma)
    parser.add_argument("--max-context", type=int, default=32768)
    parser.add_argument("--kv-tokens", type=int, default=ModelSettings.kv_tokens)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)


def side_settings(name: str, flags: argparse.Namespace) -> SideSettings:
    model = ModelSettings(flags.model, flags.device, flags.dtype, flags.kv_tokens, flags.threads)
    return SideSettings(name, model, flags.plan, flags.gamma, flags.budget, flags.method)
