"""Give strangers' inputs to everything that reads them: `make fuzz N=…`.

python -m tests.fuzz [--inputs N] [--seed S] [--keep] [TARGET…]

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
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.targets import Target, all_targets

CORPUS = Path(__file__).resolve().parent / "corpus"
MOST_SECONDS = 5.0
MOST_MEMORY = 256 << 20  # bytes, beyond what the process has when it begins
MOST_KEPT = 1024  # bytes of an input that is kept


class TooLong(Exception):
    """An input takes more than MOST_SECONDS."""


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
    raise error


def fuzz(target: Target, inputs: int, seed: int) -> list[bytes]:
    """Try so many inputs. Returns those that were taken in a way that no seed and none before was."""
    rng = random.Random(f"{target.name} {seed}")
    pool = [*target.seeds, *read_corpus(target)]
    seen = {how(target.take(data)) for data in pool}
    kept: list[bytes] = []
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
            kept.append(data)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help="all, if none is named")
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target; the slow ones get a part of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add inputs that were taken in a new way to the corpus")
    flags = parser.parse_args()
    logging.disable(logging.ERROR)  # a refusal is logged
    targets = [target for target in all_targets() if not flags.targets or target.name in flags.targets]
    for target in targets:
        for data in target.seeds:  # what is loaded at the first use counts for no input
            target.take(data)
    limit_resources()
    for target in targets:
        started, count = time.monotonic(), max(1, round(flags.inputs * target.share))
        kept = fuzz(target, count, flags.seed)
        print(
            f"{target.name}: {count} inputs in {time.monotonic() - started:.0f} s, {len(kept)} of a new kind",
            flush=True,
        )
        if flags.keep and kept:
            with (CORPUS / target.name).open("a") as file:
                file.writelines(base64.b64encode(data).decode() + "\n" for data in kept)


if __name__ == "__main__":
    main()
