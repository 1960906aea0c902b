"""`python -m specahead.kernels.compiler_process SOCKET` forks processes that compile launches for `Compilers`.

SOCKET is the file descriptor of a socket that receives further sockets, one for each process to fork. A process reads
pickled pairs of `CompiledFor` and `Launch` from its socket, and answers each with a pickled error text, or None. It
ends when the other side closes the socket, as this program does when SOCKET is closed.
"""

import os
import pickle
import socket
import sys
import traceback
from types import SimpleNamespace
from typing import Any

from triton.runtime.driver import driver

import specahead.kernels.backends  # noqa: F401  # so that forked processes have loaded all that kernels import
from specahead.kernels.compilers import CompiledFor


def main() -> None:
    sockets = socket.socket(fileno=int(sys.argv[1]))
    children = []
    while received := socket.recv_fds(sockets, 1, 1)[1]:
        child = os.fork()
        if not child:
            sockets.close()
            _compile_all(socket.socket(fileno=received[0]))
            os._exit(0)  # at once: nothing is left to clean up
        children.append(child)
        os.close(received[0])
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def _compile_all(requests: socket.socket) -> None:
    """Compile launches until the other side closes the stream."""
    with requests.makefile("rwb") as stream:
        while _answer(stream):
            stream.flush()


def _answer(stream: Any) -> bool:
    """Compile the next launch, and answer; return whether there was one."""
    try:
        compiled_for, launch = pickle.load(stream)
    except EOFError:
        return False
    error = None
    try:
        _stand_in_for_a_gpu(compiled_for)
        launch.compile(compiled_for.launcher)
    except Exception:  # whatever Triton raises goes into the answer
        error = traceback.format_exc()
    pickle.dump(error, stream)
    return True


def _stand_in_for_a_gpu(compiled_for: CompiledFor) -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: compiled_for.target,
            utils=SimpleNamespace(launch=None),  # Triton 3.9's launchers share it and are not compiled
        )
    )


if __name__ == "__main__":
    main()
