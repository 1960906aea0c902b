"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio

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
    verifier = VerifierSettings(
        flags.gamma,
        prefill_chunk=flags.prefill_chunk,
        draft_timeout=flags.draft_timeout,
        max_sessions=flags.max_sessions,
        max_context=flags.max_context,
        synthetic_acceptance=flags.synthetic_acceptance,
    )
    process = TargetProcess(
        side_settings("target", flags),
        TargetServiceSettings(flags.host, flags.port, verifier, flags.record_reads),
    )
    asyncio.run(serve_until_signal("target", lambda on_ready: run(process, on_ready)))


if __name__ == "__main__":
    main()
