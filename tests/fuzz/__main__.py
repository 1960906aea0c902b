"""Give strange inputs to all code that reads bytes of others: `make fuzz N=…`.

python -m tests.fuzz [--inputs N] [--seed S] [--jobs J] [--keep] [TARGET…]

Inputs are mutated seeds and mutated inputs of tests/fuzz/corpus, each of which was once taken in a new way. An input
may raise only refusals; 100 inputs may take MOST_SECONDS of processor time, and none MOST_MEMORY. An input that fails
is written to a file, whose name is printed. The same seed gives the same inputs.
"""

import argparse
import base64
import logging
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.targets import Target, all_targets

CORPUS = Path(__file__).resolve().parent / "corpus"
MOST_SECONDS = 5.0
MOST_MEMORY = 256 << 20  # bytes beyond the memory that the process has at first
PART = 50_000  # inputs that a process tries at a time; slow targets get a share
MOST_KEPT = 1024  # bytes; longer inputs are not kept


class TooLong(Exception):
    """Inputs took more than MOST_SECONDS."""


class Reported(Exception):
    """An input failed, and the failure has been printed."""


def read_corpus(target: Target) -> list[bytes]:
    """Return the inputs kept for a target. Its file has an input a line, in base64."""
    file = CORPUS / target.name
    return [base64.b64decode(line) for line in file.read_text().split()] if file.exists() else []


def how(taken: str) -> str:
    """Return how an input was taken, without its own numbers and words."""
    return re.sub(r"'.*?'|\".*?\"|\d+", "", taken)[:60]


def report(target: Target, data: bytes, error: BaseException) -> NoReturn:
    with tempfile.NamedTemporaryFile("wb", prefix=f"specahead-fuzz-{target.name}-", delete=False) as file:
        file.write(data)
    print(f"{target.name}: {type(error).__name__}: {error}\nthe input: {file.name}", flush=True)
    raise Reported from error


def fuzz(target: Target, inputs: int, seed: str) -> dict[str, bytes]:
    """Try inputs, and return those that were taken in a new way, by that way."""
    rng = random.Random(f"{target.name} {seed}")
    pool = [*target.seeds, *read_corpus(target)]
    seen = {how(target.take(data)) for data in pool}
    kept: dict[str, bytes] = {}
    for number in range(inputs):
        if number % 100 == 0:
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        data = rng.choice(pool)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = target.mutate(data, rng)
        try:
            taken = how(target.take(data))
        except BaseException as error:
            report(target, data, error)
        if taken not in seen and len(data) <= MOST_KEPT:
            seen.add(taken)
            kept[taken] = data
            pool.append(data)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return kept


def limit_resources() -> None:
    """Make inputs raise that take too long or too much memory."""

    def alarm(*_: Any) -> None:
        raise TooLong(f"100 inputs took {MOST_SECONDS:g} s of processor time")

    signal.signal(signal.SIGVTALRM, alarm)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, resource.RLIM_INFINITY))


@cache
def prepared() -> dict[str, Target]:
    """Return this process's targets by name, after their first use, whose loading no limit may count."""
    logging.disable(logging.ERROR)  # refusals are logged
    targets = {target.name: target for target in all_targets()}
    for target in targets.values():
        for data in target.seeds:
            target.take(data)
    limit_resources()
    return targets


@dataclass(frozen=True)
class Part:
    """The inputs that a process tries at a time."""

    name: str
    inputs: int
    seed: str


def parts(names: list[str], inputs: int, seed: int) -> list[Part]:
    """Return the parts of a run, target by target, the slowest targets first."""
    found = []
    for target in sorted(all_targets(), key=lambda target: target.share):
        if not names or target.name in names:
            for place, at in enumerate(range(0, inputs, PART)):
                count = max(1, round(min(PART, inputs - at) * target.share))
                found.append(Part(target.name, count, f"{seed} {place}"))
    return found


def run(part: Part) -> dict[str, bytes] | None:
    """Try a part in this process. Return None if an input failed; that has been printed."""
    try:
        return fuzz(prepared()[part.name], part.inputs, part.seed)
    except Reported:
        return None
    except BaseException:  # an error of the run itself, between two inputs
        print(f"{part}: {traceback.format_exc()}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help="all targets by default")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of each target; slow targets get a share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--keep", action="store_true", help="add inputs that were taken in a new way to the corpus")
    flags = parser.parse_args()
    started, failed = time.monotonic(), 0
    counts: Counter[str] = Counter()
    kept: dict[str, dict[str, bytes]] = defaultdict(dict)
    chosen = parts(flags.targets, flags.inputs, flags.seed)
    with ProcessPoolExecutor(flags.jobs) as pool:
        for part, found in zip(chosen, pool.map(run, chosen), strict=True):
            counts[part.name] += part.inputs
            kept[part.name] |= found or {}
            failed += found is None
    for name, count in counts.items():
        print(f"{name}: {count} inputs, {len(kept[name])} of a new kind")
        if flags.keep and kept[name]:
            with (CORPUS / name).open("a") as file:
                file.writelines(base64.b64encode(data).decode() + "\n" for data in kept[name].values())
    print(f"{counts.total()} inputs in {time.monotonic() - started:.0f} s, {failed} parts failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
