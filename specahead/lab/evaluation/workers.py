"""Worker processes of an evaluation, each of which holds its models: as many as memory has room for."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from specahead.engine.loading.config import load_config, load_shape
from specahead.engine.loading.memory import bytes_of_token, free_memory
from specahead.engine.loading.model import default_device
from specahead.engine.model.families import count_parameters

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_BESIDE = 3 << 29  # bytes: what a process takes for itself, and the activations of a pass
_LOGITS = 4  # copies of them: by round, together, and as log probabilities of both

# Of a worker process: what makes its models, these once they are made, how many rounds all workers have run, and the
# queue of the parts that are done.
_make: Callable[[], Any] | None = None
_made: Any = None
_rounds: Any = None
_parts: Any = None


def memory_of(models: Iterable[tuple[str, int]], dtype: torch.dtype, rows: int) -> int:
    """Return about how many bytes a worker takes. models: folder or Hugging Face id of each, and the tokens of KV that
    it has room for. rows: of logits that are held at once.
    """
    total, vocab = _BESIDE, 0
    for model, tokens in models:
        shape = load_shape(model)
        total += count_parameters(load_config(model)) * dtype.itemsize + tokens * bytes_of_token(shape, dtype)
        vocab = shape.vocab_size
    return total + _LOGITS * rows * vocab * 4


def run_in_workers(
    work: Callable[..., Result],
    cases: list[tuple[Any, ...]],
    make: Callable[[], Any],
    memory: int,
    asked: int,
    name: str,
    on_part: Callable[..., object] = lambda *part: None,
) -> Iterator[Result]:
    """Yield what `work` gives of the arguments of each case, in their order, and show how far it is.

    work: a function of a module, which finds what `make` gives in its process by `held_models`. memory: bytes that a
    worker takes. asked: how many workers there are to be; 0: one a core; fewer if memory has no room for them. on_part:
    called here with what a worker gives to `report_part`, within a second. Raises ValueError if memory has no room for
    one worker, and where a worker is lost; and what `work` raises.
    """
    count = _count(asked, len(cases), memory)
    context = get_context("spawn")
    rounds, parts = context.Value("q", 0), context.SimpleQueue()
    threads = max(1, (os.cpu_count() or 1) // count)
    with ProcessPoolExecutor(count, context, _begin, (make, rounds, parts, threads)) as pool:
        try:
            futures = [pool.submit(work, *case) for case in cases]
            _follow(futures, rounds, parts, name, on_part)
            yield from (future.result() for future in futures)
        except BrokenProcessPool:
            raise ValueError(
                f"{name}: a worker process was lost; it may have been killed for its memory, about {_gib(memory)} for "
                f"each of {count}: ask for fewer --workers or a shorter --context"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def held_models() -> Any:
    """Return what this worker process holds, made by its first case."""
    global _made
    if _made is None:
        assert _make is not None
        _made = _make()
    return _made


def note_rounds(count: int) -> None:
    """Take note that rounds were run, for whoever watches."""
    if _rounds is not None:
        with _rounds.get_lock():
            _rounds.value += count


def report_part(part: tuple[Any, ...]) -> None:
    """Give a part of a case's result to the `on_part` of the process that waits for it."""
    assert _parts is not None
    _parts.put(part)


def _begin(make: Callable[[], Any], rounds: Any, parts: Any, threads: int) -> None:
    global _make, _rounds, _parts
    _make, _rounds, _parts = make, rounds, parts
    # Beside a GPU a worker has little for threads to do. Where other processes take their cores, threads that wait for
    # one another make an operation of a millisecond take hundreds.
    threads = threads if default_device() == "cpu" else 1
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS may say fewer


def _count(asked: int, cases: int, memory: int) -> int:
    """Return how many workers to run. Raises ValueError if memory has no room for one."""
    wanted, free = min(asked or os.cpu_count() or 1, cases), free_memory(default_device())
    if memory > free:
        raise ValueError(
            f"evaluating takes about {_gib(memory)} of memory, and {_gib(free)} are free: shorten --context, or "
            "evaluate smaller models"
        )
    count = min(wanted, free // memory)
    if count < wanted:
        log.warning(
            "%d workers in place of %d: each takes about %s, %s are free", count, wanted, _gib(memory), _gib(free)
        )
    return count


def _follow(futures: list[Future[Result]], rounds: Any, parts: Any, name: str, on_part: Callable[..., object]) -> None:
    """Show how many cases are done, and each second how many rounds, until the last or the first that fails."""
    waiting = set(futures)
    with tqdm(total=len(futures), desc=name, unit="case") as progress:
        while waiting:
            done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
            while not parts.empty():
                on_part(*parts.get())
            progress.set_postfix_str(f"{rounds.value} rounds" if rounds.value else "loading, reading the first prompts")
            progress.update(len(done))
            if any(future.exception() for future in done):
                return


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
