"""What a model writes in a chat, split into content, reasoning and tool calls while it comes.

The work is done by transformers' response parser, which a template of fields tells what opens and closes each; here
are the templates of the usual families, for tokenizers that bring none.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from orchestrator.response_templates import closing_tag
from orchestrator.xml_calls import meant_properties

# A call that is no JSON is given back as text.
_CALLS = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
TOOL_FORMATS: dict[str, dict[str, Any]] = {
    "hermes": {"tool_calls": {"open_pattern": r"\s*<tool_call>", "close_pattern": r"</tool_call>\s*", **_CALLS}},
    "llama3_json": {
        "tool_calls": {
            "open_pattern": r"\s*(?:<\|python_tag\|>)?\s*(?=\{\s*\"(?:name|type)\")",
            "close_pattern": r"(?<=\})\s*;\s*(?=\{\s*\"(?:name|type)\")",
            **_CALLS,
        }
    },
    "mistral": {
        "tool_calls": {
            "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\s*\{)",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            **_CALLS,
            "transform": _NAMED,
        },
        "tool_call_lists": {"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **_CALLS},
    },
    "qwen3_coder": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "repeats": True,
            "transform": _NAMED,
        }
    },
}
# What the chat template of a model that writes a format has in it; the first that is found counts.
_SHOWN_BY = {
    "qwen3_coder": r"<function=",
    "hermes": r"(?s)^(?!.*<arg_key>).*<tool_call>",  # GLM's calls have other insides
    "mistral": r"\[TOOL_CALLS\]",
    "llama3_json": r"Environment: ipython",
}
_THINKING = {
    "reasoning_content": {
        "open_pattern": r"\s*<think>\s*",
        "close_pattern": r"\s*</think>\s*",
        "content": "text",
        "content_args": {"strip": False},
    }
}
_CONTENT = {"content": {"content": "text", "content_args": {"strip": False}}}


# A call as JSON, whose name is complete and whose arguments begin; what stands between two of them.
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BETWEEN = re.compile(r"\s*\}?\s*[,;]?")


@dataclass(frozen=True)
class CalledTool:
    """A call of a tool. arguments: JSON, so far as it has come."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds to a message. arguments: what the last call's go on with."""

    content: str = ""
    reasoning: str = ""
    call: CalledTool | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes: the names of a tool format and of a reasoning format, each empty if there is none.

    own: the response template that the model's tokenizer brings, which goes before both.
    """

    tools: str = ""
    reasoning: str = ""
    own: dict[str, Any] | None = None

    @property
    def has_tools(self) -> bool:
        """Whether tool calls can be told from text."""
        if self.own is not None:
            return any(name.startswith("tool_call") for name in self.own["fields"])
        return self.tools != ""

    def thinks(self, prompt: str) -> bool:
        """Return whether what follows a prompt begins with reasoning that was opened in it."""
        return self.reasoning == "deepseek_r1" or (self.reasoning != "" and prompt.rstrip().endswith("<think>"))

    def parser(
        self, prompt: str, tools: list[dict[str, Any]], stream: bool = False, only_calls: bool = False
    ) -> "ReplyParser":
        """Return a parser of what follows a prompt.

        stream: whether calls are told as they come, where they are JSON, and not only when they are complete.
        only_calls: whether there is no content, since calls are forced.
        """
        typed = [{**tool, "function": _with_types(tool["function"])} for tool in tools]
        if self.own is not None:
            own = ResponseParser(self.own, prefix=prompt, tools=typed)
            return ReplyParser(own, only_calls=only_calls, closing=closing_tag(self.own))
        fields = (TOOL_FORMATS.get(self.tools, {}) if tools else {}) | (_THINKING if self.reasoning else {})
        if not fields:
            return ReplyParser(None)
        template = {"start_anchor_pattern": "^", "fields": fields | _CONTENT}
        if self.tools == "qwen3_coder":  # whose parameters get their types from the schema
            tools = typed
        parser = ResponseParser(template, prefix="<think>" if self.thinks(prompt) else "", tools=tools)
        closing = "</tool_call>" if self.tools == "qwen3_coder" else ""
        return ReplyParser(parser, self.tools == "mistral", stream, only_calls, closing)


def _with_types(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function whose parameters say themselves of which types they are."""
    parameters = function.get("parameters") or {}
    return function | {"parameters": parameters | {"properties": meant_properties(parameters)}}


def find_format(tokenizer: Any, tools: str, reasoning: str) -> ReplyFormat:
    """Return the format of a model by the settings' names.

    `auto` stands for the response template that its tokenizer brings, else for what its chat template shows.
    """
    template = str(tokenizer.chat_template or "")
    own = getattr(tokenizer, "response_template", None) if tools == reasoning == "auto" else None
    if tools == "auto":
        tools = next((name for name, sign in _SHOWN_BY.items() if re.search(sign, template)), "none")
    if reasoning == "auto":
        reasoning = "qwen3" if "<think>" in template else "none"
    return ReplyFormat("" if tools == "none" else tools, "" if reasoning == "none" else reasoning, own)


class ReplyParser:
    """Splits a text that comes piece by piece. parser: None if all of it is content.

    short_ids: whether a call's id has the nine characters of Mistral's. stream: whether calls are told as they come.
    only_calls: whether content is left out: where calls are forced it is the rest of one that was cut off before its
    name was told. closing: what ends a call whose arguments are no JSON, so that one that is cut off can be told.
    splits: whether a text may have anything but content.
    """

    def __init__(
        self,
        parser: ResponseParser | None,
        short_ids: bool = False,
        stream: bool = False,
        only_calls: bool = False,
        closing: str = "",
    ) -> None:
        self._parser, self.splits = parser, parser is not None
        self._short_ids, self._stream, self._only_calls, self._closing = short_ids, stream, only_calls, closing
        # The text of the call that is open, where its arguments begin, and how much of it is told.
        self._call, self._begun, self._told = "", 0, 0
        self._tail = ""  # the last of the text

    def feed(self, text: str, last: bool, cut: bool = False) -> list[Delta]:
        """Return what a piece adds; at the last one, all that is left. cut: whether that one was cut off by a limit."""
        deltas = [Delta(text)] if text else []
        if self._parser is not None:
            self._tail = (self._tail + text)[-80:]
            deltas = self._parse(self._parser, text, last, cut)
        return [delta for delta in deltas if not (delta.content and self._only_calls)]

    def _parse(self, parser: ResponseParser, text: str, last: bool, cut: bool) -> list[Delta]:
        try:
            deltas = [delta for event in parser.feed(text) for delta in self._deltas(event)]
        except ValueError:  # the text breaks the rules of the tokenizer's own template: the rest is given as it is
            self._parser = None
            return [Delta(text)] if text else []
        if last:
            try:
                deltas += [delta for event in parser.finalize()[1] for delta in self._deltas(event, True, cut)]
            except ValueError:  # and so does a call that was cut off
                deltas += self._unfinished(self._call)
        return deltas

    def _deltas(self, event: dict[str, Any], last: bool = False, cut: bool = False) -> list[Delta]:
        field = event["field"]
        if field.startswith("tool_call"):
            if event["type"] == "region_open":
                self._call, self._told = "", 0
            elif event["type"] == "region_chunk":
                self._call += event["text"]
                # What comes last may be the beginning of what closes the call.
                return self._tell_call() if self._stream and field == "tool_calls" and not last else []
            elif self._told:
                left = self._call[self._told : _end_of_json(self._call, self._begun)]
                return [Delta(arguments=left)] if left else []
            else:
                calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
                return [delta for call in calls for delta in self._called(call, cut)]
        if event["type"] != "region_chunk" or event["dirty"] or not event["text"]:
            return []
        return [Delta(event["text"]) if field == "content" else Delta(reasoning=event["text"])]

    def _tell_call(self) -> list[Delta]:
        """Return what is new of the call that is open; braces are held back, since the last one closes it."""
        said = []
        if not self._told:
            begun = _BEGUN.match(self._call)
            if begun is None:
                return []
            self._begun = self._told = begun.end()
            said = [Delta(call=CalledTool(self._new_id(), begun[1], ""))]
        end = max(self._told, len(self._call.rstrip("} \t\r\n")))
        self._told, more = end, self._call[self._told : end]
        return [*said, Delta(arguments=more)] if more else said

    def _new_id(self) -> str:
        number = secrets.token_hex(12)
        return number[:9] if self._short_ids else f"call_{number}"

    def _called(self, value: Any, cut: bool) -> list[Delta]:
        """Return a call that was parsed, or what there is of it; text for what is no call. cut: whether it is the last
        thing in a text that was cut off."""
        if isinstance(value, str):
            return self._unfinished(value)
        function = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return [Delta(json.dumps(value))]
        arguments = function.get("arguments", function.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if cut and self._closing and not self._tail.rstrip().endswith(self._closing):
            text = text[:-1]  # nobody is to take it for complete
        return [Delta(call=CalledTool(self._new_id(), function["name"], text))]

    def _unfinished(self, text: str) -> list[Delta]:
        """Return the calls of a text that is no JSON, the last of them with its arguments so far; all of it as text if
        there is none."""
        at, deltas = len(text) - len(text.lstrip(" \t\r\n[")), list[Delta]()
        while (begun := _BEGUN.match(text, at)) is not None:
            end = _end_of_json(text, begun.end())
            deltas.append(Delta(call=CalledTool(self._new_id(), begun[1], text[begun.end() : end])))
            between = _BETWEEN.match(text, end)
            assert between is not None
            at = between.end()
        return deltas or ([Delta(text)] if text else [])


def _end_of_json(text: str, start: int) -> int:
    """Return where the JSON value ends that begins at `start`; the end of the text if it is not complete."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except ValueError:
        return len(text)
