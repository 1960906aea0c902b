"""Splits the answer of a chat into content, reasoning and tool calls while it arrives.

transformers' response parser does the work, by a template that names what opens and closes each field; here are the
templates of the usual families.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from orchestrator.text.json_calls import CalledTool, Delta, JsonCalls, call_of
from orchestrator.text.xml_calls import meant_properties

NAMED_CALLS = "tool_calls_named"  # the field of calls with their name before their arguments
_TEXT = {"content": "text", "content_args": {"strip": False}}  # passed on as it comes, to JsonCalls if it is a call
_BEGUN = r"\{\s*\"(?:name|type|function|arguments|parameters)\""  # a call as JSON
TOOL_FORMATS: dict[str, dict[str, Any]] = {
    "hermes": {"tool_calls": {"open_pattern": r"\s*<tool_call>\s*", "close_pattern": r"\s*</tool_call>\s*", **_TEXT}},
    "llama3_json": {
        "tool_calls": {
            "open_pattern": rf"(?:\s*<\|python_tag\|>)?(?=\s*{_BEGUN})",
            "close_pattern": rf"(?<=\}})\s*;\s*(?={_BEGUN})",
            **_TEXT,
        }
    },
    "mistral": {
        NAMED_CALLS: {
            "open_pattern": r"\s*\[TOOL_CALLS\](?=[\w.-]+(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*\{)",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            **_TEXT,
        },
        "tool_call_lists": {"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **_TEXT},
    },
    "qwen3_coder": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        }
    },
}
# Patterns by which a chat template shows its format of calls; the first one found counts.
_SHOWN_BY = {
    "qwen3_coder": r"<function=",
    "hermes": r"(?s)^(?!.*<arg_key>).*<tool_call>",  # GLM writes other calls between these tags
    "mistral": r"\[TOOL_CALLS\]",
    "llama3_json": r"Environment: ipython",
}
_THINKING = {"reasoning_content": {"open_pattern": r"\s*<think>\s*", "close_pattern": r"\s*</think>\s*", **_TEXT}}


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes tool calls and reasoning."""

    tools: str = ""
    """The name of a format, empty for none."""
    reasoning: str = ""
    """The name of a format, empty for none."""

    def thinks(self, prompt: str) -> bool:
        """Return whether an answer begins with reasoning, which its prompt has opened."""
        return self.reasoning == "deepseek_r1" or (self.reasoning != "" and prompt.rstrip().endswith("<think>"))

    def parser(self, prompt: str, tools: list[dict[str, Any]], only_calls: bool = False) -> "ReplyParser":
        """Return a parser of the answer to a prompt. only_calls: whether calls are forced, so there is no content."""
        fields = (TOOL_FORMATS.get(self.tools, {}) if tools else {}) | (_THINKING if self.reasoning else {})
        if not fields:
            return ReplyParser(None)
        template = {"start_anchor_pattern": "^", "fields": fields | {"content": _TEXT}}
        typed = [{**tool, "function": _with_types(tool["function"])} for tool in tools]
        parser = _Regions(template, prefix="<think>" if self.thinks(prompt) else "", tools=typed)
        return ReplyParser(parser, self.tools == "mistral", only_calls)


def _with_types(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function with the types of its parameters in place of references."""
    parameters = function.get("parameters") or {}
    return function | {"parameters": parameters | {"properties": meant_properties(parameters)}}


def find_format(tokenizer: Any, tools: str, reasoning: str) -> ReplyFormat:
    """Return the format of a model by the names in the settings.

    `auto` is the format that the tokenizer's chat template shows.
    """
    template = str(tokenizer.chat_template or "")
    if tools == "auto":
        tools = next((name for name, sign in _SHOWN_BY.items() if re.search(sign, template)), "none")
    if reasoning == "auto":
        reasoning = "qwen3" if "<think>" in template else "none"
    return ReplyFormat("" if tools == "none" else tools, "" if reasoning == "none" else reasoning)


class _Regions(ResponseParser):
    """A response parser that takes text against its template's rules for content."""

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._start = m.start()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except (ValueError, KeyError):
            text = self._buffer[self._start : self._pos]
            events.append({"type": "region_broken", "field": self._current, "text": text})
            self._reset_to_implicit()


class ReplyParser:
    """Splits a text that arrives in pieces. The sum of its deltas does not depend on how the text is cut."""

    def __init__(self, parser: _Regions | None, short_ids: bool = False, only_calls: bool = False) -> None:
        """parser: None if all text is content. short_ids: whether ids of calls have nine characters, as Mistral's.

        only_calls: whether content is left out; where calls are forced, it is the beginning of a call that was cut off.
        """
        self._parser, self.splits = parser, parser is not None  # splits: whether there may be more than content
        self._short_ids, self._only_calls = short_ids, only_calls
        self._calls: JsonCalls | None = None  # of the region that is open
        self._tail = ""  # the last of the text

    def feed(self, text: str, last: bool, cut: bool = False) -> list[Delta]:
        """Return the additions of a piece; of the last one, all the rest. cut: whether a limit has cut the text off."""
        if self._parser is None:
            return [Delta(text)] if text else []
        self._tail = (self._tail + text)[-80:]
        deltas = [delta for event in self._parser.feed(text) for delta in self._deltas(event)]
        if last:
            deltas += [delta for event in self._parser.finalize()[1] for delta in self._deltas(event, cut)]
        return [delta for delta in deltas if not (delta.content and self._only_calls)]

    def _deltas(self, event: dict[str, Any], cut: bool = False) -> list[Delta]:
        field, kind = event["field"], event["type"]
        if field.startswith("tool_call"):
            return self._call_deltas(event, cut)
        if kind == "region_chunk" and event["text"] and not event["dirty"]:
            return [Delta(event["text"]) if field == "content" else Delta(reasoning=event["text"])]
        return []

    def _call_deltas(self, event: dict[str, Any], cut: bool) -> list[Delta]:
        """Return the additions of an event of a call: JSON is passed on as it comes, others when they are complete."""
        if event["type"] == "region_open":
            self._calls = JsonCalls(self._new_id, named=event["field"] == NAMED_CALLS)
            return []
        assert self._calls is not None
        if event["type"] == "region_broken":
            return [Delta(event["text"])]
        if event["type"] == "region_chunk":
            return [] if event["dirty"] else self._calls.feed(event["text"])
        value = event["value"]
        if isinstance(value, str):
            return self._calls.finish()
        return [self._called(value, cut)]

    def _new_id(self) -> str:
        number = secrets.token_hex(12)
        return number[:9] if self._short_ids else f"call_{number}"

    def _called(self, value: Any, cut: bool) -> Delta:
        """Return a call that was written between tags. cut: whether the text was cut off after it."""
        call = call_of(value)
        assert call is not None
        name, text = call
        if cut and not self._tail.rstrip().endswith("</tool_call>"):
            text = text[:-1]  # incomplete JSON, so that nobody takes it for complete
        return Delta(call=CalledTool(self._new_id(), name, text))
