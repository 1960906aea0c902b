"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio

from engine.late_kv import LATE_KV
from engine.peer_memory import NEXT
from target_service.service import TargetProcess, TargetServiceSettings, run
from target_service.verifier import VerifierSettings
from wire.server import serve_until_signal
from wire.service_flags import add_side_flags, side_settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m target_service", description=__doc__)
    add_side_flags(parser, 50052, VerifierSettings.gamma)
    parser.add_argument(
        "--synthetic-acceptance",
        type=float,
        help="keep drafted tokens with this probability (measurements only)",
    )
    parser.add_argument(
        "--host-kv-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="KV of all sessions in host memory; 0: all of it lies where the model does",
    )
    parser.add_argument(
        "--peer-kv-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="KV of all sessions in the memory of another GPU that this process sees, beside --host-kv-memory",
    )
    parser.add_argument(
        "--peer-gpu",
        type=int,
        default=NEXT,
        metavar="INDEX",
        help="that GPU; by default the one after the model's",
    )
    parser.add_argument(
        "--late-kv",
        choices=LATE_KV,
        default="fetch",
        help="KV at home that a step needs and nobody announced: fetch it, or let means stand in",
    )
    parser.add_argument(
        "--measure-kv-waits", action="store_true", help="count how long each layer waits for what is fetched"
    )
    parser.add_argument(
        "--no-kv-prefetch",
        action="store_true",
        help="fetch KV from the host when a step reads it, not when a draft announces it",
    )
    parser.add_argument(
        "--draft-timeout",
        type=float,
        default=VerifierSettings.draft_timeout,
        help="seconds to wait for a proposal before decoding plainly",
    )
    parser.add_argument(
        "--record-reads",
        metavar="FILE",
        help="write what approximate sessions read, round by round, when the service stops (CPU only)",
    )
    flags = parser.parse_args()
    if flags.no_kv_prefetch and not flags.host_kv_memory:
        parser.error("--no-kv-prefetch is of KV whose home is the host: give --host-kv-memory")
    verifier = VerifierSettings(
        flags.gamma,
        prefill_chunk=flags.prefill_chunk,
        draft_timeout=flags.draft_timeout,
        max_sessions=flags.max_sessions,
        max_context=flags.max_context,
        synthetic_acceptance=flags.synthetic_acceptance,
        kv_prefetch=not flags.no_kv_prefetch,
    )
    process = TargetProcess(
        side_settings("target", flags),
        TargetServiceSettings(flags.host, flags.port, verifier, flags.record_reads),
    )
    asyncio.run(serve_until_signal("target", lambda on_ready: run(process, on_ready)))


if __name__ == "__main__":
    main()
