"""Tool calls that a model writes as JSON, read while they come: the same calls however the text is cut into pieces.

Keys may come in any order; only those of the call itself count, not those of its arguments. Knows no formats.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
# What stands before the arguments of a call whose name is not in the JSON.
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")


@dataclass(frozen=True)
class CalledTool:
    """A call of a tool. arguments: JSON, as much of it as has come."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds to a message. arguments: continues the arguments of the last call."""

    content: str = ""
    reasoning: str = ""
    call: CalledTool | None = None
    arguments: str = ""


class JsonCalls:
    """Reads one object after the other, or a list of objects, each of them a call.

    A call is told as soon as its name is known and its arguments begin, then its arguments as they come. They are told
    as they were written; a string stands for the JSON in it. What is no call is told as content.

    new_id: makes the id of a call. named: whether a name precedes each object, which is then the arguments.
    """

    def __init__(self, new_id: Callable[[], str], named: bool = False) -> None:
        self._new_id, self._named = new_id, named
        self._said: list[Delta] = []  # by this piece
        self._raw: list[str] = []  # the text of what may still turn out to be no call
        self._any_call = self._is_content = False
        self._depth = 0  # of the brackets that are open
        self._outer = 0  # the depth in the open call; 0: no call is open
        self._level = 0  # the depth at which the keys of the open call stand
        self._string: list[str] = []  # the one that is open or was the last one
        self._in_string = self._escaped = False
        self._begin_call()

    def feed(self, text: str) -> list[Delta]:
        """Return what a piece of text adds."""
        self._said = []
        for at, character in enumerate(text):
            if self._is_content:
                self._add_content(text[at:])
                break
            self._take(character)
        self._tell()
        return self._said

    def finish(self) -> list[Delta]:
        """Return what the end of the text adds: all of it as content if there was no call in it."""
        self._said = []
        if not self._any_call and not self._is_content:
            self._become_content()
        return self._said

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._key: str | None = None  # of the value that comes; None where a key comes
        self._plain: list[str] = []  # a value that is neither a string, an object nor a list
        self._arguments: list[str] | None = None  # those not told yet; None before they begin
        self._arguments_depth = 0  # the depth in the open arguments; 0 before they begin and behind them
        self._is_told = False

    def _take(self, character: str) -> None:
        if not self._is_told:
            self._raw.append(character)
        if self._arguments_depth and self._arguments is not None:
            self._arguments.append(character)
        if self._in_string:
            self._take_in_string(character)
        elif character == '"' and self._depth:
            self._in_string, self._string = True, [character]
        elif character in "{[" and (self._depth or character == "{" or not self._named):
            self._open(character)
        elif character in "}]" and self._depth:
            self._close()
        elif self._outer and self._depth == self._level:
            self._take_between(character)
        elif not self._outer and not (character.isspace() or character in ",;" or self._named):
            self._reject()

    def _take_in_string(self, character: str) -> None:
        if self._depth == self._level:
            self._string.append(character)
        if self._escaped or character == "\\":
            self._escaped = not self._escaped
        elif character == '"':
            self._in_string = False
            if self._depth == self._level and self._key is not None:
                self._end_string()

    def _end_string(self) -> None:
        """Take the string that is the value of a key of the call."""
        if self._key == "name" and self._name is None:
            self._name = _decode(self._string)
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = [_decode(self._string)]

    def _take_between(self, character: str) -> None:
        """Take what stands at the keys of a call and is no part of a string, an object or a list."""
        if character == ":":
            self._key = _decode(self._string)
        elif character == ",":
            self._end_value()
        elif not character.isspace():
            self._plain.append(character)

    def _end_value(self) -> None:
        if self._plain and self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = self._plain
        self._key, self._plain = None, []

    def _open(self, bracket: str) -> None:
        at_keys = self._outer and self._depth == self._level
        self._depth += 1
        if not self._outer:
            self._open_outside(bracket)
        elif at_keys and self._key in _ARGUMENTS and self._arguments is None:
            self._arguments, self._arguments_depth = [bracket], self._depth
        elif at_keys and self._key == "function" and bracket == "{":  # OpenAI's shape: the call stands one level deeper
            self._level, self._key = self._depth, None

    def _open_outside(self, bracket: str) -> None:
        """Take a bracket that opens a call, or the list of calls."""
        if bracket == "[" and self._depth > 1:
            self._reject()
        elif bracket == "{" and not (self._named and self._any_call):
            before = "".join(self._raw[:-1])
            self._begin_call()
            self._outer = self._level = self._depth
            self._raw = [bracket] if self._any_call else self._raw
            if self._named and (named := _NAMED.fullmatch(before)) is not None:
                self._name, self._arguments, self._arguments_depth = named[1], [bracket], self._depth

    def _close(self) -> None:
        if self._depth == self._arguments_depth:
            self._arguments_depth = 0
        if self._outer and self._depth == self._level:
            self._end_value()
            self._level -= 1
        self._depth -= 1
        if self._outer > self._depth:
            self._end_call()

    def _end_call(self) -> None:
        self._outer = self._level = 0
        if self._name is None:
            self._reject()
            return
        self._arguments = ["{}"] if self._arguments is None and not self._is_told else self._arguments
        self._tell()
        self._begin_call()

    def _tell(self) -> None:
        """Tell what is new of the open call, if its name is known and its arguments have begun."""
        if self._name is None or not self._arguments:
            return
        new, self._arguments = "".join(self._arguments), []
        if self._is_told:
            self._said.append(Delta(arguments=new))
            return
        self._said.append(Delta(call=CalledTool(self._new_id(), self._name, new)))
        self._is_told = self._any_call = True
        self._raw = []

    def _reject(self) -> None:
        """Tell as content what is no call; behind a call, text that is no object is left out."""
        if not self._any_call:
            self._become_content()
        elif self._raw[:1] == ["{"]:
            self._said.append(Delta("".join(self._raw)))
        self._raw = []
        self._begin_call()

    def _become_content(self) -> None:
        """Let all of the text be content, from its beginning on."""
        self._is_content = True
        self._add_content("".join(self._raw))

    def _add_content(self, text: str) -> None:
        if text:
            self._said.append(Delta(text))


def _decode(string: list[str]) -> str:
    """Return what a JSON string says; what stands in it where it is not valid."""
    text = "".join(string)
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text.strip('"')
