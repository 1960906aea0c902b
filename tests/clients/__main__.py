"""`make test-clients`: real clients, each in its own virtual environment, against one launch of the bundled pair.

`python -m tests.clients DIR [NAME …]`: DIR holds an environment for each file of environments/; without names all run.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.stack import ROOT, start_stack

HERE = Path(__file__).parent
# The tests of each environment.
TESTS = {
    "openai3": ("openai", "langchain", "litellm", "agents", "schema"),
    "openai2": ("openai", "instructor"),
    "anthropic": ("anthropic",),
    "examples": ("examples",),
    "aiperf": ("aiperf",),
    "tools": ("guidellm", "lm_eval"),
}


def main() -> None:
    """Run the named environments, and exit with 1 if a test fails in any of them."""
    folder, *names = sys.argv[1:]
    unknown = set(names) - set(TESTS)
    if unknown:
        sys.exit(f"error: no such environment: {', '.join(unknown)}; there are {', '.join(TESTS)}")
    flags = ("--namespace", "clients", "--timeouts", '{"shutdown": 1}')
    stack = start_stack(*flags, "--logging", '{"level": "warning"}')
    try:
        failed = [name for name in names or TESTS if not _run(Path(folder) / name, TESTS[name], stack.http)]
    finally:
        stack.stop(60)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(environment: Path, tests: tuple[str, ...], url: str) -> bool:
    """Return whether the tests pass in a virtual environment against the launch at this address."""
    print(f"\n{environment.name}: {', '.join(tests)}", flush=True)
    files = [str(HERE / f"test_{name}.py") for name in tests]
    # The conftest of all tests needs packages that only the project's own environment has.
    pytest = ["pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE), "--confcutdir", str(HERE)]
    command = [str((environment / "bin" / "python").absolute()), "-m", *pytest, *files]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"CLIENTS_URL": url}).returncode == 0


if __name__ == "__main__":
    main()
