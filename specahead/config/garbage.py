"""Python's garbage collector, which holds a process up while it looks at all objects.

Services make hardly any garbage of its kind (objects that refer to each other), but many objects that live for long:
models, compiled kernels, captured graphs.
"""

import atexit
import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 10_000  # new objects that a collection waits for; Python's default of 700 are there after two busy steps


def collect_seldom() -> None:
    """Collect after many new objects only. Call this first: imports of a service then take a fifth less time."""
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


@contextlib.contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Collect nothing in this context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_loaded() -> None:
    """Keep all present objects out of garbage collections, since scanning them stops a process for a quarter of a
    second. Objects that are loaded or captured later need another call.
    """
    collect_seldom()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # else Python reports the remaining objects as leaks at exit
