"""`python -m draft_service`: a draft process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio

from draft_service.drafter import DrafterSettings
from draft_service.service import DraftProcess, DraftServiceSettings, run
from engine.loading import ModelSettings
from wire.server import serve_until_signal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m draft_service", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face id or folder")
    parser.add_argument("--plan", required=True, help="plan file (specahead calibrate)")
    parser.add_argument(
        "--target", required=True, action="append", help="HOST:PORT of a target; may be repeated"
    )
    parser.add_argument("--budget", type=float, help="share of the KV blocks to read, instead of the plan's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=50053)
    parser.add_argument("--gamma", type=int, default=DrafterSettings.gamma)
    parser.add_argument("--no-ahead", action="store_true", help="wait for each verdict before drafting on")
    parser.add_argument("--max-context", type=int, default=DrafterSettings.max_context)
    parser.add_argument("--kv-tokens", type=int, default=ModelSettings.kv_tokens)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    flags = parser.parse_args()
    drafter = DrafterSettings(flags.gamma, ahead=not flags.no_ahead, max_context=flags.max_context)
    process = DraftProcess(
        ModelSettings(flags.model, flags.device, flags.dtype, flags.kv_tokens, flags.threads),
        flags.plan,
        DraftServiceSettings(flags.target, flags.host, flags.port, drafter),
        flags.budget,
    )
    asyncio.run(serve_until_signal("draft", lambda on_ready: run(process, on_ready)))


if __name__ == "__main__":
    main()
