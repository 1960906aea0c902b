"""The seams at which the simulator replaces parts of the product: clocks, gRPC, ports, process ids and exits."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from typing import NoReturn
from unittest.mock import patch

import grpc

from specahead.config.garbage import no_garbage_collected
from target_service.policy.lookup import FirstGuess
from tests.simulation.channels import Channel
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import guess_by_script
from tests.simulation.network import Network
from tests.simulation.process import Exited, current_process
from tests.simulation.servers import Server


@contextlib.contextmanager
def replaced(loop: VirtualLoop, network: Network) -> Iterator[None]:
    """Let the product run on this loop and network within the context."""
    log = _ErrorLog(loop)
    root = logging.getLogger()
    with contextlib.ExitStack() as stack:
        for name in ("monotonic", "perf_counter", "time"):
            stack.enter_context(patch.object(time, name, loop.time))
        stack.enter_context(patch.object(grpc.aio, "insecure_channel", lambda address, **_: Channel(network, address)))
        stack.enter_context(patch.object(grpc.aio, "server", lambda **options: Server(network, **options)))
        free = lambda host, port: network.check_free(f"{host}:{port}")  # noqa: E731
        stack.enter_context(patch("specahead.wire.server.check_free", free))
        stack.enter_context(patch.object(os, "getpid", lambda: 1))
        stack.enter_context(patch.object(FirstGuess, "guess", guess_by_script))
        stack.enter_context(patch.object(secrets, "token_hex", lambda size: loop.random.randbytes(size).hex()))
        stack.enter_context(patch.object(os, "_exit", _exit))
        stack.enter_context(patch.object(logging, "shutdown", lambda: None))
        handlers, root.handlers = root.handlers, [log]
        logging.disable(logging.WARNING)
        stack.enter_context(no_garbage_collected())  # the moment of a collection does not follow from the seed
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            root.handlers = handlers


def _exit(status: int) -> NoReturn:
    process = current_process()
    assert process is not None, "only processes exit"
    process.end()
    raise Exited


class _ErrorLog(logging.Handler):
    """Keeps unexpected errors of living processes: those logged with a traceback, and failed steps without a fault."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        process = current_process()
        if process is None or not process.alive:
            return
        message = record.getMessage()
        is_step = "step" in message and "failed" in message and "InjectedError" not in message
        if record.exc_info or is_step:
            error = record.exc_info[1] if record.exc_info else None
            self._loop.errors.append(f"{process.name} logged {message}: {error!r}")
