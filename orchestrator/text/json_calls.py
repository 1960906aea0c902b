"""Tool calls that a model writes as JSON, read while they arrive: the same calls however the text is cut into pieces.

A call that begins as models write it, {"name": ..., "arguments": ..., is passed on as soon as its arguments begin. One
with its keys in another order is passed on when it is complete. Knows nothing of the marks around calls.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BETWEEN = re.compile(r"[\s,;]*")
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\{{\s*(?P<nested>"type"\s*:\s*"function"\s*,\s*"function"\s*:\s*\{{\s*)?'
    rf'"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{{\[])',
    re.DOTALL,
)
_NAMED_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True)
class CalledTool:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON, as much of it as has arrived."""


@dataclass(frozen=True)
class Delta:
    """The addition of a piece of text to a message."""

    content: str = ""
    reasoning: str = ""
    call: CalledTool | None = None
    arguments: str = ""
    """Continues the arguments of the last call."""


class JsonCalls:
    """Reads JSON objects that follow each other, or a list of objects, each of them a call.

    Text without calls is content; after a call, text that is not an object is left out.
    """

    def __init__(self, new_id: Callable[[], str], named: bool = False) -> None:
        """new_id: makes the id of a call. named: whether the text is a call's name and an object of its arguments."""
        self._new_id = new_id
        self._text = ""  # not passed on yet
        self._at = 0  # where reading goes on in it
        self._begin = 0  # of the object that is open
        self._depth = 0  # of open brackets
        self._outer = 0  # brackets that are open around the arguments
        self._in_string = self._in_list = self._any_call = False
        self._deltas: list[Delta] = []
        self._step: Callable[[], bool] = self._read_name if named else self._read_between  # returns whether to go on

    def feed(self, text: str) -> list[Delta]:
        """Return the additions of a piece of text."""
        self._text += text
        self._deltas = []
        while self._step():
            pass
        return self._deltas

    def finish(self) -> list[Delta]:
        """Return the additions of the end of the text: the rest of arguments, or all text if it has no call."""
        if self._step == self._read_arguments:
            return [Delta(arguments=self._text)] if self._text else []
        return [Delta(self._text)] if self._text and not self._any_call else []

    def _read_name(self) -> bool:
        head = _NAMED_HEAD.match(self._text)
        if head is None:
            return False
        self._add_call(head[1])
        self._drop(head.end())
        self._step = self._read_arguments
        return True

    def _read_between(self) -> bool:
        found = _BETWEEN.match(self._text, self._at)
        self._at = found.end() if found else self._at
        mark = self._text[self._at : self._at + 1]
        if mark == "{":
            if self._any_call:
                self._drop(self._at)
            self._begin, self._depth, self._step = self._at, 0, self._read_object
        elif self._any_call or (mark == "]" and self._in_list):
            self._at += len(mark)
        elif mark == "[" and not self._in_list:
            self._in_list, self._at = True, self._at + 1
        elif mark:
            self._step = self._read_content
        return bool(mark)

    def _read_object(self) -> bool:
        head = _HEAD.match(self._text, self._begin)
        if head is not None:
            self._add_call(json.loads(head["name"], strict=False))
            self._outer = 2 if head["nested"] else 1
            self._drop(head.end())
            self._step = self._read_arguments
            return True
        if not self._find_end():
            return False
        written = self._text[self._begin : self._at]
        call = call_of(_value_of(written))
        if call is not None:
            self._add_call(*call)
        elif self._any_call:
            self._deltas.append(Delta(written))
        else:
            self._step = self._read_content
            return True
        self._drop(self._at)
        self._step = self._read_between
        return True

    def _read_arguments(self) -> bool:
        is_closed = self._find_end()
        if self._at:
            self._deltas.append(Delta(arguments=self._text[: self._at]))
        self._drop(self._at)
        if is_closed:
            self._depth, self._step = self._outer, self._read_rest if self._outer else self._read_between
        return is_closed

    def _read_rest(self) -> bool:
        """Leave out the keys after the arguments."""
        is_closed = self._find_end()
        self._drop(self._at)
        self._step = self._read_between if is_closed else self._step
        return is_closed

    def _read_content(self) -> bool:
        if self._text:
            self._deltas.append(Delta(self._text))
        self._drop(len(self._text))
        return False

    def _find_end(self) -> bool:
        """Go on to the end of the open object or list; return whether it is there."""
        while found := (_ESCAPE_OR_QUOTE if self._in_string else _BRACKET_OR_QUOTE).search(self._text, self._at):
            self._at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if found[0] in "{[" else -1
                if not self._depth:
                    return True
        half_escape = self._in_string and self._text.endswith("\\") and self._at < len(self._text)
        self._at = len(self._text) - half_escape
        return False

    def _add_call(self, name: str, arguments: str = "") -> None:
        self._deltas.append(Delta(call=CalledTool(self._new_id(), name, arguments)))
        self._any_call, self._in_string, self._depth = True, False, 0

    def _drop(self, end: int) -> None:
        self._text, self._at = self._text[end:], 0


def call_of(value: Any) -> tuple[str, str] | None:
    """Return the name and the arguments of a parsed call, None for a value that is not a call.

    Arguments that are a string are taken as the JSON in it.
    """
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _value_of(written: str) -> Any:
    """Return the value of a JSON text, None if it is not valid."""
    try:
        return json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return None
