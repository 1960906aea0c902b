"""A rank that follows rank 0: it runs the passes that it is told of, on its own pages, until rank 0 is gone."""

from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np
import torch

from specahead.engine.kv.tiered import TieredKV
from specahead.engine.parallel.commands import Command, decode
from specahead.engine.parallel.ranks import leave
from specahead.engine.steps.model_runner import ModelRunner


@torch.inference_mode()
def follow(runner: ModelRunner, commands: Connection) -> None:
    """Do what rank 0 says, in its order, until it says to leave or closes the pipe."""
    while True:
        try:
            message = np.frombuffer(commands.recv_bytes(), np.int64)
        except (EOFError, OSError):
            return
        command = Command(int(message[0]))
        if command is Command.LEAVE:
            leave()
            return
        _run(runner, command, message[1:], commands)


def _run(runner: ModelRunner, command: Command, numbers: np.ndarray, commands: Connection) -> None:
    passes, kv, given = runner.passes, runner.kv, tuple(numbers.tolist())
    match command:
        case Command.STEP:
            passes.step_of(decode(given)).run()
        case Command.EXACT:
            logits_rows, sequences = given[:2]
            ends = 2 + sequences + np.cumsum([0, *given[2 : 2 + sequences]])
            pages = [numbers[start:end].astype(np.int32) for start, end in pairwise(ends)]
            passes.follow_exact(decode(given[ends[-1] :]), logits_rows, pages, commands.recv_bytes_into)
        case Command.CAPTURE:
            passes.step_of(decode(given[1:]), prepared=bool(given[0]))
        case Command.PLAN_PROMPT:
            passes.plan_prompt(*given)
        case Command.CAPTURE_PROMPT:
            passes.capture_prompt(*given)
        case Command.MAKE_MEANS:
            kv.make_means_on_gpu(*_pages_and_slots(numbers))
        case Command.KEEP_MEANS:
            group_size, slots, thousandths = given
            kv.keep_group_means(group_size, slots, thousandths / 1000)
        case Command.KEEP_MEMORIES:
            runner.keep_memories(*given)
        case Command.CLEAR_MEMORY:
            passes.memories.clear(*given)
        case Command.SCRUB:
            kv.zero_pages(numbers)
        case Command.IMPOSE:
            passes.chain.impose([(given[i], given[i + 1], given[i + 2]) for i in range(0, len(given), 3)])
        case _:
            assert isinstance(kv, TieredKV)
            _run_in_tiers(kv, command, numbers)


def _run_in_tiers(kv: TieredKV, command: Command, numbers: np.ndarray) -> None:
    given, memory = numbers.tolist(), kv.memory
    match command:
        case Command.CLEAR_TABLES:
            memory.clear_tables()
        case Command.PIN_PAGES:
            memory.pin_pages(*_halves(given[1:]), given[0])
        case Command.LEAVE_TO_CLOCK:
            memory.leave_to_clock(given)
        case Command.DROP_PAGES:
            memory.drop_pages(given)
        case Command.STORE_PAGES:
            kv.store.copy(*_halves(given))
        case Command.END_COPY:
            kv.store.end_copy()
        case Command.MAKE_STAGED_MEANS:
            kv.make_staged_means(*_pages_and_slots(numbers))


def _halves(numbers: list[int]) -> tuple[list[int], list[int]]:
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


def _pages_and_slots(numbers: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the pages of groups, int32 [groups, pages of a group], and the slots of their means."""
    of_group = int(numbers[0])
    groups = (len(numbers) - 1) // (1 + of_group)
    return numbers[1 + groups :].astype(np.int32).reshape(groups, of_group), numbers[1 : 1 + groups].tolist()
