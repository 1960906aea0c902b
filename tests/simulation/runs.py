"""Runs of many seeds, and the report of them."""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from specahead.config.garbage import no_garbage_collected
from tests.simulation.scenario import Scenario
from tests.simulation.world import World

_CHUNK = 25  # seeds that a worker process runs at a time


@dataclass
class Result:
    """The outcome of some seeds. callbacks: of the loop. seconds: of CPU. violations: the first one of each seed."""

    seeds: int = 0
    callbacks: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    crowd: bool = False

    def add(self, other: "Result") -> None:
        """Add the outcome of other seeds."""
        self.seeds += other.seeds
        self.callbacks += other.callbacks
        self.virtual_seconds += other.virtual_seconds
        self.seconds += other.seconds
        self.faults += other.faults
        self.coverage += other.coverage
        self.violations |= other.violations

    def table(self) -> Iterator[str]:
        """Yield the lines of a report."""
        rate = 2 * 3600 * self.seeds / max(self.seconds, 1e-9)
        yield f"seeds {self.seeds}, callbacks {self.callbacks}, virtual seconds {self.virtual_seconds:.0f}"
        yield f"CPU {1000 * self.seconds / max(1, self.seeds):.0f} ms a seed: {rate:.0f} seeds an hour on two cores"
        for title, counts in ("faults", self.faults), ("situations", self.coverage):
            yield f"{title}:"
            yield from (f"  {count:9d}  {name}" for name, count in sorted(counts.items()))
        for seed, violation in sorted(self.violations.items()):
            yield f"VIOLATION by seed {seed}, {violation}"
            yield f"  again: python -m tests.simulation --seed {seed}{' --crowd' * self.crowd}"


def run_seed(seed: int, keep_log: bool = False, crowd: bool = False) -> World:
    """Run a seed and return its world. crowd: as in Scenario.of."""
    world = World(Scenario.of(seed, crowd), keep_log)
    world.run()
    return world


@contextlib.contextmanager
def _collected_between_seeds() -> Iterator[Callable[[], None]]:
    """Yield a function that collects the garbage of a seed, and let nothing else collect any.

    So the objects of a world are freed while they are in the processor's caches, and imported modules are not scanned.
    """
    with no_garbage_collected():
        gc.freeze()
        try:
            yield partial(gc.collect, 0)
        finally:
            gc.unfreeze()


def run_seeds(seeds: Iterable[int], crowd: bool = False) -> Result:
    """Run seeds one after the other."""
    with _collected_between_seeds() as collect:
        result = Result(crowd=crowd)
        for seed in seeds:
            started = time.process_time()
            _add_seed(result, seed, crowd)
            collect()
            result.seconds += time.process_time() - started
        return result


def _add_seed(result: Result, seed: int, crowd: bool) -> None:
    """Run a seed and add its outcome."""
    world = run_seed(seed, crowd=crowd)
    result.seeds += 1
    result.callbacks += world.loop.events
    result.virtual_seconds += world.loop.time()
    result.faults.update(fault.kind for fault in world.faults.happened)
    result.coverage.update(world.coverage)
    if world.violations:
        result.violations[seed] = world.violations[0]


def run_in_processes(seeds: range, jobs: int, crowd: bool = False) -> Iterator[Result]:
    """Run seeds in several processes, and yield the outcome of each chunk in order."""
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    pool = ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(partial(run_seeds, crowd=crowd), chunks)
    finally:  # an interruption does not wait for running chunks
        pool.shutdown(wait=False, cancel_futures=True)
