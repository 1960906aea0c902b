"""A rank that follows rank 0: it runs the passes that it is told of, on its own pages, until rank 0 is gone."""

from multiprocessing.connection import Connection

import numpy as np
import torch

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
        _do(runner, command, message[1:], commands)


def _do(runner: ModelRunner, command: Command, numbers: np.ndarray, commands: Connection) -> None:
    passes, kv, given = runner.passes, runner.kv, tuple(numbers.tolist())
    match command:
        case Command.STEP:
            passes.step_of(decode(given)).run()
        case Command.EXACT:
            passes.follow_exact(decode(given[1:]), given[0], commands.recv_bytes_into)
        case Command.CAPTURE:
            passes.step_of(decode(given[1:]), prepared=bool(given[0]))
        case Command.PLAN_PROMPT:
            passes.plan_prompt(*given)
        case Command.CAPTURE_PROMPT:
            passes.capture_prompt(*given)
        case Command.MAKE_MEANS:
            of_group = given[0]
            groups = (len(given) - 1) // (1 + of_group)
            pages = numbers[1 + groups :].astype(np.int32).reshape(groups, of_group)
            assert kv.means is not None
            kv.make_means(pages, torch.tensor(given[1 : 1 + groups]).to(kv.device), kv.means)
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
