"""Put each fault of tests/mutants/table.py into a copy of the project, and see that its tests fail: `make mutants`.

python -m tests.mutants [WORD…] runs those whose file or new text has one of the words. Its status is 1 if one survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant
from tests.stack import ROOT

TEST_SECONDS = 60  # a test that takes longer has failed: a mutant may make it wait for ever
FAILED = 1  # pytest's status when tests ran and failed


def copy_project(folder: Path) -> None:
    """Copy the working tree, without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"--timeout={TEST_SECONDS}", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def is_killed(folder: Path, mutant: Mutant) -> bool:
    """Return whether the tests of a mutant fail with it. Raises RuntimeError if they cannot be run."""
    path = folder / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied_to(before))
    try:
        done = run_tests(folder, list(mutant.tests))
    finally:
        path.write_text(before)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{mutant.file}, {mutant.new!r}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}")
    return done.returncode == FAILED


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.file or word in m.new for word in words)]
    if not chosen:
        print(f"no fault is put in by {' or '.join(words)}: give a part of a file's name or of the new text")
        return 2
    with tempfile.TemporaryDirectory(prefix="specahead-mutants-") as name:
        folder = Path(name)
        copy_project(folder)
        clean = run_tests(folder, sorted({test for mutant in chosen for test in mutant.tests}))
        if clean.returncode:
            print(f"the tests fail without a mutant\n{clean.stdout[-3000:]}")
            return 1
        survivors = []
        for mutant in chosen:
            killed = is_killed(folder, mutant)
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.file}: {mutant.what}", flush=True)
            if not killed:
                survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
