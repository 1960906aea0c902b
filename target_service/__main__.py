"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio

from engine.loading import ModelSettings
from target_service.service import TargetProcess, TargetServiceSettings, run
from target_service.verifier import VerifierSettings
from wire.server import serve_until_signal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m target_service", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--plan", required=True, help="plan file (specahead calibrate)")
    parser.add_argument("--budget", type=float, help="share of the KV blocks to read, instead of the plan's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=50052)
    parser.add_argument("--gamma", type=int, default=VerifierSettings.gamma)
    parser.add_argument("--max-context", type=int, default=VerifierSettings.max_context)
    parser.add_argument("--kv-tokens", type=int, default=ModelSettings.kv_tokens)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    flags = parser.parse_args()
    process = TargetProcess(
        ModelSettings(flags.model, flags.device, flags.dtype, flags.kv_tokens, flags.threads),
        flags.plan,
        TargetServiceSettings(
            flags.host, flags.port, VerifierSettings(flags.gamma, max_context=flags.max_context)
        ),
        flags.budget,
    )
    asyncio.run(serve_until_signal("target", lambda on_ready: run(process, on_ready)))


if __name__ == "__main__":
    main()
