"""A process that makes a grammar's source for the services and checks that it compiles.

`orchestrator.text.grammar_compiler` runs it and can end it, since some grammars take minutes or gigabytes to compile.
It imports llguidance alone, so that it starts in 50 ms. It reads a JSON object {kind, text, white_space, main} and
writes {source} or {error}.
"""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

MOST_IN_A_ROW = 10_000  # prescribed characters: each mask takes time in proportion to them


def make_source(kind: str, text: str, white_space: dict[str, Any], main: str) -> str:
    """Return the source of a grammar in llguidance's JSON. Raises ValueError.

    kind, text, white_space: as in structured_outputs; an empty kind is no structure. main: a Lark grammar that refers
    to the structure as @body; if it is empty, the structure is the whole grammar.
    """
    grammars: list[dict[str, Any]] = [{"lark_grammar": main}] if main else []
    if kind:
        grammars.append(_grammar(kind, text, white_space) | {"name": "body"})
    return json.dumps({"grammars": grammars})


def _grammar(kind: str, text: str, white_space: dict[str, Any]) -> dict[str, Any]:
    if kind == "json":
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
        return {"json_schema": {**schema, "x-guidance": white_space}}
    if kind == "choice":
        choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        return {"lark_grammar": f"start: {' | '.join(choices)}"}
    if kind == "regex":
        return json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
    return {"lark_grammar": text if kind == "lark" else any_to_lark(text)}


def find_error(source: str) -> str:
    """Return why a grammar does not compile, empty if it does. Tokens of the model are replaced by a byte."""
    by_byte = re.sub(r"<\[[0-9]+\]>", "<[1]>", source)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), by_byte, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()).strip()


# The size of a grammar: repetitions count by their lower bounds. Upper bounds cost llguidance nothing.


def find_excess(source: str) -> str:
    """Return how a grammar is too large, empty if it is not."""
    for grammar in json.loads(source)["grammars"]:
        schema = grammar.get("json_schema") or {}
        in_a_row = max(_row_of_json(schema), _row_of_lark(grammar.get("lark_grammar") or ""))
        if in_a_row > MOST_IN_A_ROW:
            return f"it prescribes {in_a_row} characters in a row; at most {MOST_IN_A_ROW} may be"
    return ""


_Part = tuple[str, Any]  # open, close, or; times with a count; size with characters; name with a rule's
_COUNT = r"\{\s*(?P<times>\d+)\s*(?:,\s*\d*\s*)?\}|~\s*(?P<times_too>\d+)"
_REGEX = re.compile(
    rf"(?P<open>\((?:\?(?:P?<\w+>|[\w-]*:))?)|(?P<close>\))|(?P<or>\|)|{_COUNT}|[*+?]"
    r"|(?P<size>\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|.)",
    re.DOTALL,
)
_LARK = re.compile(
    r"//[^\n]*|\s+|(?P<json>%json\b\s*)|(?P<string>\"(?:\\.|[^\"\\])*\")|/(?P<regex>(?:\\.|[^/\\])+)/"
    rf"|(?P<rule>[?!]?[\w-]+(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:)|(?P<name>[\w-]+)|(?P<or>\|)|{_COUNT}|[*+?]"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|.",
    re.DOTALL,
)


def _row_of_regex(pattern: str) -> int:
    return _row((_part(found) for found in _REGEX.finditer(pattern)), {})


def _part(found: re.Match[str]) -> _Part:
    times = found["times"] or found.groupdict().get("times_too")
    return ("times", int(times)) if times else (found.lastgroup or "", 1)


def _row(parts: Iterable[_Part], known: dict[str, int]) -> int:
    """Return the most characters that parts prescribe in a row. known: those of rules, by name."""
    outer = list[tuple[int, int]]()  # `most` and `row` before each open group
    most = row = last = 0  # of all alternatives, of this one, of its last part
    for kind, value in parts:
        if kind == "open":
            outer.append((most, row))
            most = row = last = 0
        elif kind == "close" and outer:
            last = max(most, row)
            most, row = outer.pop()
            row += last
        elif kind == "or":
            most, row, last = max(most, row), 0, 0
        elif kind == "times":
            more = last * (max(value, 1) - 1)
            last, row = min(last + more, 1 << 60), min(row + more, 1 << 60)
        elif kind in ("size", "name"):
            last = known.get(value, 1) if kind == "name" else value
            row += last
    return max(most, row, *(each for pair in outer for each in pair), 0)


def _row_of_lark(text: str) -> int:
    rules = _rules_of(text)
    known, opened = dict[str, int](), set[str]()
    for name in rules:
        waiting = [name]
        while waiting:  # a rule comes after the rules in it; within itself it counts once
            rule = waiting[-1]
            opened.add(rule)
            others = [value for kind, value in rules[rule] if kind == "name" and value in rules and value not in opened]
            waiting += others[:1]
            if not others:
                known[rule] = _row(rules[rule], known)
                waiting.pop()
    return max(known.values(), default=0)


def _rules_of(text: str) -> dict[str, list[_Part]]:
    """Return the parts of the rules of a Lark grammar, by name."""
    rules: dict[str, list[_Part]] = {"": []}
    parts, at = rules[""], 0
    while (found := _LARK.match(text, at)) is not None:
        at, kind = found.end(), found.lastgroup
        if kind == "rule":
            parts = rules.setdefault(re.split(r"[\[.:\s]", found["rule"].lstrip("?!"))[0], [])
        elif kind == "json":
            schema, at = json.JSONDecoder().raw_decode(text, at)
            parts.append(("size", _row_of_json(schema)))
        elif kind == "string":
            parts.append(("size", len(found["string"]) - 2))
        elif kind == "regex":
            parts.append(("size", _row_of_regex(found["regex"])))
        elif kind == "name":
            parts.append(("name", found["name"]))
        elif kind is not None:
            parts.append(_part(found))
    return rules


_NO_SCHEMAS = ("default", "examples", "description", "title", "$comment", "x-guidance")


def _row_of_json(schema: Any) -> int:
    """Return the length of the longest text that a schema prescribes: a constant, a name, or a pattern's."""
    if isinstance(schema, list):
        return max(map(_row_of_json, schema), default=0)
    rows = [0]
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in ("const", "enum"):
            rows += [len(json.dumps(each)) for each in (value if isinstance(value, list) else [value])]
        elif key == "pattern" and isinstance(value, str):
            rows.append(_row_of_regex(value))
        elif key not in _NO_SCHEMAS:
            rows += [len(key), _row_of_json(value)]
    return max(rows)


def main() -> None:
    try:
        import resource  # POSIX alone

        given = json.load(sys.stdin)
        resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
        resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
        source = make_source(given["kind"], given["text"], given["white_space"], given["main"])
        error = find_excess(source) or find_error(source)
    except BaseException as exception:  # conversions raise any error, and panics of Rust are not Exceptions
        source, error = "", str(exception)
    json.dump({"error": error} if error else {"source": source}, sys.stdout)


if __name__ == "__main__":
    main()
