"""Put each fault of tests/mutants/table.py into a copy of the project, and see that its tests fail: `make mutants`.

python -m tests.mutants [--jobs J] [WORD…] runs those whose file or new text has one of the words. Its status is 1 if
one survives. Each file of tests runs without a mutant first, and must pass; with one, its quickest tests run first.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant
from tests.stack import ROOT

TEST_SECONDS = 120  # a test that takes longer without a mutant has failed
FILE_SECONDS = 300  # tests of a file that take longer, or do not let go of their process once they ran, have failed
FAILED = 1  # pytest's status when tests ran and failed


@cache
def own_copy(folder: str) -> Path:
    """Copy the project into a folder of this process's own, without what begins with a dot and what Python leaves."""
    place = Path(folder) / str(os.getpid())
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info"))
    return place


def seconds_of(folder: str, test: str) -> Path:
    """Return the file that says what the tests of a file take without a mutant."""
    return Path(folder) / f"{Path(test).stem}.json"


def run_tests(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugin = "tests.mutants.fast_first"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", plugin, f"--timeout={TEST_SECONDS}", *arguments]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = partial(subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True)
    try:
        return run(timeout=FILE_SECONDS)
    except subprocess.TimeoutExpired as hung:
        said = hung.stdout.decode() if isinstance(hung.stdout, bytes) else hung.stdout or ""
        return subprocess.CompletedProcess(command, FAILED, f"{said}\ntook more than {FILE_SECONDS} s")


def is_killed(folder: str, mutant: Mutant) -> bool:
    """Return whether the tests of a mutant fail with it. Raises RuntimeError if they cannot be run."""
    path = own_copy(folder) / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied_to(before))
    try:
        seconds = [f"--read-seconds={seconds_of(folder, test)}" for test in mutant.tests]
        done = run_tests(own_copy(folder), *seconds, *mutant.tests)
    finally:
        path.write_text(before)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{mutant.file}, {mutant.new!r}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}")
    return done.returncode == FAILED


def why_not(folder: str, test: str) -> str:
    """Return what a file of tests says that fails without a mutant, or ""; write down what its tests take."""
    done = run_tests(own_copy(folder), f"--write-seconds={seconds_of(folder, test)}", test)
    return done.stdout[-3000:] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="those whose file or new text has one; else all")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with a copy of the project")
    flags = parser.parse_args()
    chosen = [m for m in MUTANTS if not flags.words or any(word in m.file or word in m.new for word in flags.words)]
    if not chosen:
        print(f"no fault is put in by {' or '.join(flags.words)}: give a part of a file's name or of the new text")
        return 2
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="specahead-mutants-") as folder, ProcessPoolExecutor(flags.jobs) as pool:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        failures = dict(zip(tests, pool.map(partial(why_not, folder), tests), strict=True))
        for test, failure in failures.items():
            if failure:
                print(f"{test} fails without a mutant, so that its mutants are not tried\n{failure}")
        tried = [mutant for mutant in chosen if not any(failures[test] for test in mutant.tests)]
        for mutant, killed in zip(tried, pool.map(partial(is_killed, folder), tried), strict=True):
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.file}: {mutant.what}", flush=True)
            survivors += not killed
    print(f"{len(tried) - survivors} of {len(tried)} mutants are killed, {len(chosen) - len(tried)} not tried")
    return bool(survivors or len(tried) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
