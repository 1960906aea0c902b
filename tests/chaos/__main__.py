"""Break the real services under steady traffic, and see that no client gets a wrong token: `make chaos MINUTES=N`.

python -m tests.chaos --minutes N [--seed S] [--keep-ray]

Three parts: a launch whose processes are killed and stopped and whose raylet dies; services without Ray whose lines are
slow, stand still or are cut, and whose gateway dies; ten times the requests that a launch can take. Exit status 1 if an
answer was wrong or lost, or if something is left at the end. Figures are printed as they come.
"""

import argparse
import sys

from tests.chaos import broken_lines, broken_processes, overload


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10, help="in all: 5/8 for processes, 2/8 for lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--keep-ray", action="store_true", help="kill no raylet, for a machine too busy to start Ray")
    flags = parser.parse_args()
    seconds = 60 * flags.minutes
    violations = broken_processes.run(seconds * 5 / 8, flags.seed, flags.clients, flags.keep_ray)
    violations += broken_lines.run(seconds * 2 / 8, flags.seed, flags.clients)
    violations += overload.run(seconds / 8)
    for violation in violations:
        print(f"VIOLATION {violation}")
    print(f"{len(violations)} violations")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
