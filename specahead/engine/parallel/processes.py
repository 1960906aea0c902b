"""The processes of the ranks that follow rank 0, which starts and watches them: one unit, which ends as one."""

import atexit
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch.distributed as dist

from specahead.config import ModelSettings
from specahead.engine.loading.opening import EightBit, open_model
from specahead.engine.parallel.commands import Command, Followers
from specahead.engine.parallel.following import follow
from specahead.engine.parallel.ranks import Ranks, join, leave
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.step_loop import describe

log = logging.getLogger(__name__)

LOST_RANK = 71  # the exit status of a process whose model lost a rank
Opened = TypeVar("Opened")
_END_SECONDS = 2  # that a rank gets to end by itself
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class RankProcesses:
    """The processes of all ranks but 0, which load their parts from now on.

    There are `tensor_parallel_size` ranks. Rank r uses the r-th device after that of the settings, "cuda" being the
    first visible one; on a CPU ranks share it. Raises ValueError if there are too few GPUs.
    """

    def __init__(self, settings: ModelSettings, eight_bit: EightBit = "none") -> None:
        self._count, self._settings = settings.tensor_parallel_size, settings
        _check_devices(settings.device, self._count)
        self._store, port = serve_store()
        self._stopping = False
        self.pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
        for rank in range(1, self._count):
            ours, theirs = context.Pipe()
            of_rank = replace(settings, device=device_of(settings.device, rank))
            given = of_rank, eight_bit, rank, port, theirs
            process = context.Process(target=run_rank, args=given, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)
        atexit.register(self._end)

    def open(self, open_part: Callable[[Ranks, Callable[[], None]], Opened]) -> Opened:
        """Open this rank's part of the model, and return what `open_part` returns.

        From then on this process ends with status LOST_RANK when another rank ends, and the ranks end with it.
        open_part: opens it for rank 0 (its first argument), and calls its second once it is loaded, as `open_model`
        does. Raises what it raises, and ValueError if another rank cannot load its part.
        """
        ranks = Ranks(0, self._count, Followers(self.pipes))
        try:
            return open_part(ranks, lambda: self._meet(ranks))
        except BaseException:
            self.stop()
            raise

    def _meet(self, ranks: Ranks) -> None:
        """Wait until all ranks have loaded their parts, join them to this one, and watch them from then on.

        Raises ValueError with the words of a rank that could not.
        """
        for rank, (pipe, process) in enumerate(zip(self.pipes, self._processes, strict=True), 1):
            try:
                error = pipe.recv_bytes().decode()
            except EOFError:
                process.join()
                error = f"its process has ended with status {process.exitcode}"
            if error:
                raise ValueError(f"rank {rank} of {self._count} could not load its part of the model: {error}")
        join(ranks, self._store.port, torch.device(self._settings.device))
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def stop(self) -> None:
        """End all ranks; this process can open another model in ranks then."""
        self._stopping = True
        if dist.is_initialized():
            with contextlib.suppress(OSError):  # of a rank that has already ended
                Followers(self.pipes).tell(Command.LEAVE)
            leave()
        self._end()

    def _end(self) -> None:
        """End all ranks as this process ends, whatever state they are in."""
        self._stopping = True
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            process.kill()
            process.join()

    def _watch(self) -> None:
        """Wait for a rank to end, and end this process then: no pass can be run without it, and none may be waiting."""
        ended = wait([process.sentinel for process in self._processes])
        if self._stopping:
            return
        for rank, (pipe, process) in enumerate(zip(self.pipes, self._processes, strict=True), 1):
            if process.sentinel in ended:
                process.join()
                said = _last_words(pipe)
                log.critical(
                    "rank %d of the %d that run the model together has ended, so this process ends",
                    *(rank, self._count),
                    extra={"rank_pid": process.pid, "status": process.exitcode} | ({"reason": said} if said else {}),
                )
        logging.shutdown()
        os._exit(LOST_RANK)


def _last_words(pipe: Connection) -> str:
    """Return why a rank ended that could not open its part; empty for one that has said nothing."""
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            return pipe.recv_bytes().decode()
    return ""


def run_rank(settings: ModelSettings, eight_bit: EightBit, rank: int, port: int, pipe: Connection) -> None:
    """Load a rank's part of the model, and follow rank 0. This is the process of a rank.

    port: of rank 0's store. pipe: brings commands from rank 0; says to it first that the part is loaded, by no words,
    or why it is not, and then why it cannot be opened beside the others, if it cannot.
    """
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: rank 0 ends, and this process with it
    device, ranks = torch.device(settings.device), Ranks(rank, settings.tensor_parallel_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def meet() -> None:
        pipe.send_bytes(b"")
        join(ranks, port, device)

    try:
        runner = open_model(settings, eight_bit, ranks, meet).runner
    except Exception as error:
        pipe.send_bytes(describe(error).encode())
        sys.exit(1)
    assert isinstance(runner, ModelRunner)
    follow(runner, pipe)


def serve_store() -> tuple[dist.TCPStore, int]:
    """Return a store through which ranks find each other, and its port. It listens on this machine's loopback alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store's from now on
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def _check_devices(device: str, count: int) -> None:
    if device.startswith("cuda") and _index_of(device) + count > torch.cuda.device_count():
        raise ValueError(
            f"--tensor-parallel-size {count} takes as many GPUs from {device} on, and this process sees "
            f"{torch.cuda.device_count()}: give a smaller number, or let it see more GPUs"
        )


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank, by that of rank 0."""
    return device if device == "cpu" else f"cuda:{_index_of(device) + rank}"


def _index_of(device: str) -> int:
    return torch.device(device).index or 0


def _end_with_parent() -> None:
    """Have this process end as soon as the one that started it has, whatever it waits for then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, name="parent", daemon=True).start()
