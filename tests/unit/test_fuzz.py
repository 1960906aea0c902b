"""Forty thousand of the inputs that `make fuzz` gives, and that it would notice what it looks for."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.fuzz import __main__ as main
from tests.fuzz.targets import Target, all_targets

TARGETS = {target.name: target for target in all_targets()}
EACH = round(40_000 / sum(target.share for target in TARGETS.values()))


@pytest.mark.parametrize("name", TARGETS)
def test_a_strangers_input_is_taken_or_refused(name: str) -> None:
    target = TARGETS[name]
    main.fuzz(target, round(EACH * target.share), seed="CI")


def test_the_corpus_is_of_these_targets() -> None:
    files = {file.name for file in main.CORPUS.iterdir()}
    assert files and files <= set(TARGETS)
    assert all(main.read_corpus(TARGETS[name]) for name in files)


def spin(data: bytes) -> str:
    while data != b"seed":
        pass
    return ""


def hoard(data: bytes) -> str:
    return str(len(bytearray(4 if data == b"seed" else 1 << 30)))


def stumble(data: bytes) -> str:
    return str({b"seed": 1}[data])


def look(take: Callable[[bytes], str], folder: str) -> type | None:
    """Return the error that fuzzing reports."""
    tempfile.tempdir, main.MOST_SECONDS = folder, 0.2
    main.limit_resources()
    try:
        main.fuzz(Target("bad", [b"seed"], take), 1, seed="0")
    except main.Reported as reported:
        return type(reported.__cause__)
    return None


def test_errors_of_a_reader_are_noticed(tmp_path: Path) -> None:
    """A process of its own runs them, since its limits hold for everything that it does."""
    errors = {spin: main.TooLong, hoard: MemoryError, stumble: KeyError}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for take, error in errors.items():
            folder = tmp_path / take.__name__
            folder.mkdir()
            assert pool.submit(look, take, str(folder)).result(180) is error
            (kept,) = folder.iterdir()
            assert kept.read_bytes() != b"seed"
