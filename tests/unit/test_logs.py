"""What a line of the log looks like, and what is left out of it."""

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from specahead.config.logs import JsonFormatter, Recorder, TextFormatter


def logged(formatter: logging.Formatter, message: str, extra: dict[str, Any] | None = None, **more: Any) -> str:
    """The line that a message becomes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("specahead.test")
    logger.addHandler(handler)
    logger.info(message, extra=extra, **more)
    return stream.getvalue()


def test_text_names_what_belongs_to_a_message() -> None:
    fields = {"key": "alice", "seconds": 0.123456, "reason": 'said "no" twice', "empty": "", "param": None, "_ray": 1}
    line = logged(TextFormatter(), "request done", fields)
    assert line.split(" ", 1)[1] == (
        'INFO specahead.test: request done key=alice seconds=0.1235 reason="said \\"no\\" twice" empty=""\n'
    )


def test_json_has_one_object_a_line() -> None:
    line = logged(JsonFormatter(), "two\nlines", {"tokens": 4, "text": "naïve\n"})
    assert line.count("\n") == 1
    content = json.loads(line)
    assert content.pop("time").endswith("Z")
    assert content == {
        "level": "info",
        "logger": "specahead.test",
        "message": "two\nlines",
        "tokens": 4,
        "text": "naïve\n",
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_exceptions_are_written(formatter: logging.Formatter) -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        assert "KeyError: 'lost'" in logged(formatter, "failed", exc_info=error)


def test_a_recorder_gives_what_came_since_the_last_time() -> None:
    logger, recorder = logging.Logger("specahead.test"), Recorder()
    logger.addHandler(recorder)
    logger.warning("first", extra={"n": 1})
    assert recorder.take() == [(logging.WARNING, "specahead.test", "first", {"n": 1})]
    assert recorder.take() == []
    for number in range(2000):
        logger.info("%d", number)
    assert len(recorder.take()) == 1000


@pytest.mark.parametrize("module", ["orchestrator.launch", "target_service", "draft_service"])
def test_help_and_version_load_no_model_code(module: str) -> None:
    program = (
        "import runpy, sys\n"
        f"try: runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "finally: print(sorted({'torch', 'ray', 'transformers', 'fastapi', 'numpy'} & set(sys.modules)))"
    )
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, timeout=120)
        assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr
        assert done.returncode == 0
