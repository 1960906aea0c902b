"""What a line of the log looks like, and what is left out of it."""

import io
import json
import logging
from typing import Any

from specahead.config.logs import JsonFormatter


def logged(formatter: logging.Formatter, message: str, extra: dict[str, Any] | None = None, **more: Any) -> str:
    """The line that a message becomes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("specahead.test")
    logger.addHandler(handler)
    logger.info(message, extra=extra, **more)
    return stream.getvalue()


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
