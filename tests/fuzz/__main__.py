"""Give strangers' inputs to everything that reads them: `make fuzz N=…`.

python -m tests.fuzz [--inputs N] [--seed S] [--jobs J] [--keep] [TARGET…]

Inputs are changed seeds, and those kept in tests/fuzz/corpus because they were taken in a way that none before was. No
input may raise anything but a refusal, take MOST_SECONDS of processor time, or need more memory than MOST_MEMORY; one
that does is written to a file that is named. The same seed gives the same inputs.
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
MOST_MEMORY = 256 << 20  # bytes, beyond what the process has when it begins
PART = 50_000  # inputs that a process tries at a time; of a slow target, its share of them
MOST_KEPT = 1024  # bytes of an input that is kept


class TooLong(Exception):
    """An input takes more than MOST_SECONDS."""


class Reported(Exception):
    """An input failed, and that has been printed."""


def read_corpus(target: Target) -> list[bytes]:
    """Return what is kept for a target: an input a line, in base64."""
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
    """Try so many inputs. Returns those that were taken in a way that no seed and none before was, by that way."""
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
    """Let what takes too long or too much memory raise."""

    def alarm(*_: Any) -> None:
        raise TooLong(f"100 inputs took {MOST_SECONDS:g} s of processor time")

    signal.signal(signal.SIGVTALRM, alarm)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, resource.RLIM_INFINITY))


@cache
def prepared() -> dict[str, Target]:
    """Return this process's targets by name. What they load at the first use counts for no input: limits begin then."""
    logging.disable(logging.ERROR)  # a refusal is logged
    targets = {target.name: target for target in all_targets()}
    for target in targets.values():
        for data in target.seeds:
            target.take(data)
    limit_resources()
    return targets


@dataclass(frozen=True)
class Part:
    """What one process tries at a time."""

    name: str
    inputs: int
    seed: str


def parts(names: list[str], inputs: int, seed: int) -> list[Part]:
    """Return the parts of a run, those of each target one after the other, the slowest targets first."""
    found = []
    for target in sorted(all_targets(), key=lambda target: target.share):
        if not names or target.name in names:
            for place, at in enumerate(range(0, inputs, PART)):
                count = max(1, round(min(PART, inputs - at) * target.share))
                found.append(Part(target.name, count, f"{seed} {place}"))
    return found


def run(part: Part) -> dict[str, bytes] | None:
    """Try a part in this process; None if an input failed, which has been reported."""
    try:
        return fuzz(prepared()[part.name], part.inputs, part.seed)
    except Reported:
        return None
    except BaseException:  # of the run itself, between two inputs
        print(f"{part}: {traceback.format_exc()}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target; the slow ones get a part of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
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
