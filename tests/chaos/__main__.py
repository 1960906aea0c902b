"""Kill and stop the processes of a launch under steady traffic; no client may get a wrong token: `make chaos`.

python -m tests.chaos --minutes N [--seed S] [--pause SECONDS] [--recovery SECONDS] [--keep-ray]

The exit status is 1 if an answer was wrong or lost, or if something is left at the end. The simulator has the faults of
lines and gateways (tests/simulation).
"""

import argparse
import sys

from tests.chaos import broken_processes
from tests.chaos.setting import Pace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10, help="minutes in which faults come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=6, help="most seconds between two faults")
    parser.add_argument("--recovery", type=float, default=120, help="seconds within which everything must work again")
    parser.add_argument(
        "--keep-ray", action="store_true", help="never kill the raylet, for machines too busy to start Ray"
    )
    flags = parser.parse_args()
    pace = Pace(60 * flags.minutes, flags.pause, flags.recovery)
    outcome = broken_processes.run(pace, flags.seed, flags.clients, flags.keep_ray)
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    print(f"{outcome.faults.total()} faults: {len(outcome.violations)} violations")
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
