"""`make first-hour`: what a new user does, in a fresh folder, and how long each step takes.

Installs the wheel of the last commit in a virtual environment of its own, starts `specahead serve`, sends the curl line
that it prints, and runs a first agent. Ends with 1 if a step fails, or if all together take longer than --most seconds.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
AGENT, NEEDS = ROOT / "docs" / "examples" / "openai_agents.py", "openai-agents"
START_SECONDS = 180


class Clock:
    """Measures steps that follow each other."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print how long a step takes, once it has ended."""
        began = time.monotonic()
        yield
        print(f"{time.monotonic() - began:7.1f} s  {name}", flush=True)

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return time.monotonic() - self.began


def main() -> None:
    """Play the first hour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="", help="a requirement; default: the CPU build that the project locks")
    parser.add_argument("--pip-args", default="", help="such as --find-links PLACE, where that build lies")
    parser.add_argument("--most", type=float, default=300.0, help="seconds for all steps; default: %(default)s")
    flags = parser.parse_args()
    install = ["-m", "pip", "install", "-q", "--no-cache-dir", *flags.pip_args.split()]
    torch = flags.torch or re.search(r"^torch==\S+", (ROOT / "requirements-torch-cpu.txt").read_text(), re.M)[0]
    with TemporaryDirectory(prefix="specahead-first-hour-") as name:
        here = Path(name)
        python, specahead = (here / ".venv" / "bin" / program for program in ("python", "specahead"))
        _run(here, sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", name, f"git+{ROOT.as_uri()}")
        (wheel,) = here.glob("*.whl")
        clock = Clock()
        with clock.step("python -m venv .venv"):
            _run(here, sys.executable, "-m", "venv", ".venv")
        with clock.step(f"pip install specahead ({torch})"):
            _run(here, str(python), *install, torch, str(wheel))
        with clock.step(f"pip install {NEEDS}"):
            _run(here, str(python), *install, NEEDS)
        with _serving(here, specahead, clock) as printed:
            with clock.step("the curl line that it prints"):
                answer = json.loads(_run(here, "sh", "-c", _found(r"^try: (.*)", printed)))
                assert answer["choices"][0]["message"]["content"], answer
            with clock.step(f"{AGENT.relative_to(ROOT)}, an agent that calls a tool and answers"):
                said = _run(here, str(python), str(AGENT), SPECAHEAD_URL=_found(r"^HTTP endpoint: (\S+)", printed))
                assert re.match(r"tool: .*\nanswer: .", said), said
            seconds = clock.seconds
    print(f"{seconds:7.1f} s  in all; at most {flags.most:g} are allowed")
    sys.exit(seconds > flags.most)


@contextlib.contextmanager
def _serving(here: Path, specahead: Path, clock: Clock) -> Iterator[str]:
    """Serve the bundled pair while the context lasts; yields what the launch printed until it was ready."""
    log = here / "serve.txt"
    command = [specahead, "serve", "--port", "0", "--grpc-port", "0", "--namespace", f"first-hour-{os.getpid()}"]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=here, stdout=out, stderr=subprocess.STDOUT, env=_environment())
    try:
        with clock.step("specahead serve, until it is ready"):
            deadline = time.monotonic() + START_SECONDS
            while "\nready" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"error: specahead serve did not become ready:\n{log.read_text()}")
                time.sleep(0.1)
        yield log.read_text()
    finally:
        process.terminate()
        process.wait(60)


def _found(pattern: str, text: str) -> str:
    """Return what a pattern finds in a text. Exits if it finds nothing."""
    found = re.search(pattern, text, re.M)
    return found[1] if found else sys.exit(f"error: no {pattern} in:\n{text}")


def _environment(**more: str) -> dict[str, str]:
    """Return the variables of a user, whose Python does not find the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def _run(here: Path, *command: str, **variables: str) -> str:
    """Run a command in a folder, and return its output. Exits with its errors if it fails."""
    done = subprocess.run(command, cwd=here, env=_environment(**variables), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
