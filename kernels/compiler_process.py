"""`python -m kernels.compiler_process`: compiles the launches that it reads, one after the other (kernels.compilers).

It reads pickles from its standard input, first of the target that it compiles for, then of launches, and answers each
with one of None, or of what went wrong, a text.
"""

import os
import pickle
import sys
import traceback
from types import SimpleNamespace
from typing import Any, BinaryIO

from triton.runtime.driver import driver


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed is no answer
    requests = sys.stdin.buffer
    _stand_in_for_a_gpu(pickle.load(requests))
    while _answer(requests, answers):
        answers.flush()


def _stand_in_for_a_gpu(target: Any) -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda _device: 0, get_current_target=lambda: target
        )
    )


def _answer(requests: BinaryIO, answers: BinaryIO) -> bool:
    """Compile the next launch, and answer; return whether there was one."""
    try:
        launch = pickle.load(requests)
    except EOFError:
        return False
    try:
        launch.compile()
        error = None
    except Exception:  # whatever Triton raises: who asked is told
        error = traceback.format_exc()
    pickle.dump(error, answers)
    return True


if __name__ == "__main__":
    main()
