"""`python -m tests.simulation`: run seeds and report; or run one seed again to see what led to its violation."""

import argparse
import signal
import sys
import time

from tests.simulation.runs import Result, run_in_processes, run_seed

_SHOWN = 60  # lines of the log before a violation
_PROGRESS_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--seed", type=int, help="run this seed alone and show its log")
    parser.add_argument("--crowd", action="store_true", help="2 to 4 targets and 50 sessions in each run")
    flags = parser.parse_args()
    if flags.seed is not None:
        sys.exit(show(flags.seed, flags.crowd))
    result, started, told = Result(crowd=flags.crowd), time.monotonic(), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it with a report, as Ctrl-C
    seeds = range(flags.first, flags.first + flags.seeds)
    try:
        for part in run_in_processes(seeds, flags.jobs, flags.crowd):
            result.add(part)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"{result.seeds} seeds, {len(result.violations)} violations", flush=True)
    except KeyboardInterrupt:
        print("interrupted; the seeds so far:")
    print("\n".join(result.table()))
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    sys.exit(bool(result.violations))


def show(seed: int, crowd: bool) -> int:
    """Run a seed and print its scenario, its log up to the first violation, and all violations."""
    world = run_seed(seed, keep_log=True, crowd=crowd)
    lines = world.log.lines or []
    at = next((index for index, line in enumerate(lines) if " violation: " in line), len(lines))
    print(world.scenario)
    print("\n".join(line[:240] for line in lines[max(0, at - _SHOWN) : at + 1]))
    for violation in world.violations:
        print(f"VIOLATION: {violation}")
    print(f"{world.log.length} events, checksum {world.log.checksum:08x}")
    return int(bool(world.violations))


if __name__ == "__main__":
    main()
