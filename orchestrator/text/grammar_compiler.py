"""Compiles the grammars of clients in processes that are ended when they take too long."""

import asyncio
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from orchestrator.text.structured_outputs import COMPACT, Structure, WhiteSpace
from specahead.engine.sampling.grammars import LIMITS
from specahead.wire.errors import InvalidArgument, ServiceError, Unavailable

_PROGRAM = Path(__file__).with_name("compile_grammar.py")
SECONDS = 5
MOST_BYTES = 2 << 30  # of memory
MOST_CHARACTERS = 256 << 10  # of a grammar
PROCESSES = 2  # at once
KEPT = 64  # answers


class GrammarCompiler:
    """Makes the sources of grammars, and keeps the latest."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], dict[str, str]] = OrderedDict()
        self._places = asyncio.Semaphore(PROCESSES)

    async def compile(self, structure: Structure | None, main: str = "", white_space: WhiteSpace = COMPACT) -> str:
        """Return the source of a structure within the Lark grammar `main`, if that is given (compile_grammar).

        white_space: allowed in the structure's JSON. Raises InvalidArgument, with llguidance's words, for a grammar
        that does not compile, or takes more than SECONDS of CPU time or MOST_BYTES; Unavailable if the process did not
        get that time. Only answers of the process are kept.
        """
        body = structure or Structure("json", "", "tools")
        key = body.kind if structure else "", body.text, json.dumps(white_space), main
        if sum(map(len, key)) > MOST_CHARACTERS:
            raise InvalidArgument(f"{body.param}: more than {MOST_CHARACTERS} characters of grammar", body.param)
        if key not in self._kept:
            async with self._places:
                self._kept[key] = await _compile(key, body.param)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        answer = self._kept[key]
        if "error" in answer:
            raise InvalidArgument(f"{body.param}: {answer['error'][:2000]}", body.param)
        return answer["source"]


async def _compile(key: tuple[str, ...], param: str) -> dict[str, str]:
    """Return the answer of a process: {source} or {error}. Raises ServiceError without an answer."""
    kind, text, white_space, main = key
    given = {"kind": kind, "text": text, "white_space": json.loads(white_space), "main": main}
    given |= {"seconds": SECONDS, "bytes": MOST_BYTES, "limits": LIMITS}
    command = sys.executable, "-P", str(_PROGRAM)  # without its folder in the path, whose modules have common names
    try:
        status, out, errors = await _run(command, json.dumps(given).encode(), 2 * SECONDS)
    except TimeoutError:
        message = f"{param}: this busy machine did not compile it within {2 * SECONDS} seconds; try again"
        raise Unavailable(message, param) from None
    if status < 0:  # a signal: of the limits of CPU time or memory
        limits = f"{SECONDS} seconds and {MOST_BYTES >> 30} GiB"
        raise InvalidArgument(f"{param}: it does not compile within {limits}", param)
    if status:
        raise ServiceError(f"grammars cannot be compiled here: {errors.decode(errors='replace')[-500:]}")
    answer: dict[str, str] = json.loads(out)
    return answer


async def _run(command: Sequence[str], given: bytes, seconds: float) -> tuple[int, bytes, bytes]:
    """Run a program with `given` as its input; return its exit status, its output and its errors.

    It is killed if the caller is cancelled, and after `seconds`; then TimeoutError is raised. A thread waits for it,
    since transports of the event loop fail in several ways where a program ends before it has read all.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: ASYNC220 (starts in a moment)
    try:
        async with asyncio.timeout(seconds):
            out, errors = await asyncio.to_thread(process.communicate, given)
    finally:
        process.kill()  # does nothing to one that has ended; the thread then ends too
    return process.returncode, out, errors
