"""The log of a process: one line a message, as text or as JSON, with what belongs to it as fields of its own.

A message is short and the same each time; what varies travels in `extra` and is written as name=value, or as a key.
"""

import asyncio
import json
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from specahead.config.access import ProcessSettings

_FREQUENT_SECONDS = 1.0  # between two warnings for one reason

# What every record of the standard library has; all else came with `extra`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
# Rooms of specahead, whose messages the level is meant for. Of libraries only warnings are written.
_ROOMS = ("specahead", "draft_service", "target_service", "orchestrator")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a message was given as `extra`. Names that begin with _ are Ray's."""
    given = vars(record).items()
    return {name: value for name, value in given if name not in _STANDARD and not name.startswith("_")}


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO orchestrator.launch: message name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {record.name}: {record.getMessage()}"
        fields = fields_of(record).items()
        line += "".join(f" {name}={_shown(value)}" for name, value in fields if value is not None)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the message's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str, ensure_ascii=False)


# A message that travels: its level, its logger, its text and its fields.
Said = tuple[int, str, str, dict[str, Any]]


class Recorder(logging.Handler):
    """Keeps the latest messages until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._said: deque[Said] = deque(maxlen=1000)

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append((record.levelno, record.name, record.getMessage(), fields_of(record)))

    def take(self) -> list[Said]:
        """Return what came since the last time."""
        return [self._said.popleft() for _ in range(len(self._said))]


def log_once(said: Mapping[str, Sequence[Said]], logged: set[str]) -> None:
    """Write messages of other processes, by their names, as the field `service`. Each is written once.

    logged: the messages that were written before, to which these are added. A line names every process that has sent
    its message by now.
    """
    lines: dict[str, tuple[Said, list[str]]] = {}
    for name, messages in said.items():
        for message in messages:
            if repr(message) not in logged:
                lines.setdefault(repr(message), (message, []))[1].append(name)
    for (level, logger, text, fields), names in lines.values():
        logging.getLogger(logger).log(level, text, extra=fields | {"service": ", ".join(names)})
    logged.update(lines)


class FrequentWarnings:
    """Writes warnings that anybody can cause in any number: at most one line a second for each message and reason.

    The line after the first is the latest warning of that second; its field `left_out` counts the ones before it. Used
    from one event loop. There must be few reasons: each is remembered.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._latest: dict[tuple[str, str], tuple[int, dict[str, Any]] | None] = {}  # None: none came since the line

    def warn(self, message: str, reason: str, fields: dict[str, Any]) -> None:
        """Write a warning with its fields, now or when the second is over."""
        key = message, reason
        if key not in self._latest:
            self._write(key, fields)
        else:
            waiting = self._latest[key]
            self._latest[key] = (waiting[0] + 1 if waiting else 0), fields

    def _write(self, key: tuple[str, str], fields: dict[str, Any]) -> None:
        self._latest[key] = None
        asyncio.get_running_loop().call_later(_FREQUENT_SECONDS, self._write_latest, key)
        self._log.warning(key[0], extra=fields)

    def _write_latest(self, key: tuple[str, str]) -> None:
        waiting = self._latest.pop(key)
        if waiting is not None:
            left_out, fields = waiting
            self._write(key, fields | {"left_out": left_out or None})


def configure_logs(settings: ProcessSettings) -> None:
    """Write the log of this process to standard error, as its settings say. Warnings of Python code go there too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.logging.format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    level = settings.logging.level.upper()
    for room in _ROOMS:
        logging.getLogger(room).setLevel(level)
    if level != "DEBUG":  # meant for who writes the code that is called, not for who runs it
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes to standard error itself
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # where it is imported later, and sets its own level
        warnings.simplefilter("ignore")
        for library in ("transformers", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)


def _shown(value: Any) -> str:
    """A value so that the line can be taken apart again: text with white space or quotes in it is quoted."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
