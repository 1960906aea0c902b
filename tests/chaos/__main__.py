"""Break the real services under steady traffic, and check that no client gets a wrong token: `make chaos MINUTES=N`.

python -m tests.chaos --minutes N [--seed S] [--pause SECONDS] [--recovery SECONDS] [--keep-ray] [PART…]

There are two parts. `processes`: a launch of two targets and two drafts, whose processes are killed and stopped and
whose raylet dies. `services`: the same number without Ray; they are killed, their lines are slow, stand still or are
cut, and their gateway dies. The exit status is 1 if an answer was wrong or lost, or if something is left at the end.
"""

import argparse
import sys
import time
from collections import Counter

from tests.chaos import broken_processes, broken_services
from tests.chaos.setting import Pace

PARTS = {"processes": 0.6, "services": 0.4}  # each part's share of the time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; all of them by default")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of all parts together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=6, help="most seconds between two faults")
    parser.add_argument("--recovery", type=float, default=120, help="seconds within which everything must work again")
    parser.add_argument(
        "--keep-ray", action="store_true", help="never kill the raylet, for machines too busy to start Ray"
    )
    flags = parser.parse_args()
    parts = flags.parts or [*PARTS]
    violations: list[str] = []
    faults, begin = Counter[str](), time.monotonic()
    for part in parts:
        seconds = 60 * flags.minutes * PARTS[part] / sum(PARTS[each] for each in parts)
        pace = Pace(seconds, flags.pause, flags.recovery)
        if part == "processes":
            outcome = broken_processes.run(pace, flags.seed, flags.clients, flags.keep_ray)
        else:
            outcome = broken_services.run(pace, flags.seed, flags.clients)
        violations += outcome.violations
        faults += outcome.faults
    for violation in violations:
        print(f"VIOLATION {violation}")
    kills = sum(count for name, count in faults.items() if name.startswith("kill"))
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{kills} kills, {faults.total() - kills} other faults in {minutes:.0f} minutes: {len(violations)} violations"
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
