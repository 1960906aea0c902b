"""`python -m kernels.compiler_process SOCKET`: forks processes that compile launches (kernels.compilers).

SOCKET, a file descriptor, is one over which sockets are sent, one for each process to fork. A process reads pickles
from its socket, of what a launch is compiled for and of the launch, and answers each with one of None, or of what went
wrong, a text. It ends when the other side closes the socket, as this one does when SOCKET is closed.
"""

import os
import pickle
import socket
import sys
import traceback
from types import SimpleNamespace
from typing import Any

from triton.runtime.driver import driver

import specahead.kernels.backends  # noqa: F401  # with all that kernels import, which processes that are forked have loaded
from specahead.kernels.compilers import CompiledFor


def main() -> None:
    sockets = socket.socket(fileno=int(sys.argv[1]))
    children = []
    while received := socket.recv_fds(sockets, 1, 1)[1]:
        child = os.fork()
        if not child:
            sockets.close()
            _compile_all(socket.socket(fileno=received[0]))
            os._exit(0)  # at once: nothing is to be put in order
        children.append(child)
        os.close(received[0])
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def _compile_all(requests: socket.socket) -> None:
    """Compile what is asked for until nothing more will be."""
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
    except Exception:  # whatever Triton raises: who asked is told
        error = traceback.format_exc()
    pickle.dump(error, stream)
    return True


def _stand_in_for_a_gpu(compiled_for: CompiledFor) -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: compiled_for.target,
            utils=SimpleNamespace(launch=None),  # Triton 3.9's launchers share it, and nothing of them is compiled
        )
    )


if __name__ == "__main__":
    main()
