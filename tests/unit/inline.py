"""An executor that runs at once what it is given."""

from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    """In the place of a thread, where a test wants what is asked for to be there."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
        done: Future = Future()
        done.set_result(fn(*args, **kwargs))
        return done
