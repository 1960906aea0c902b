"""Calls whose parameters stand one by one between tags, as Qwen3-Coder writes them: their grammar, and what is meant.

Between its tags a string is plain text, which may be any; every other value is JSON of its schema.
"""

import json
from collections.abc import Callable
from typing import Any

from orchestrator.structured_outputs import SPACES
from wire.errors import InvalidArgument

Schema = dict[str, Any]
# A text up to the tag that closes it, and a parameter of any name.
RULES = r"""text[lazy]: /(?s:.*)<\/parameter>/
any_parameter: "<parameter=" /[^>\n]+/ ">\n" text "\n"
"""
_CLOSING, _END = r'"\n</parameter>\n"', r'"</function>\n"'
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}


def call_body(name: str, parameters: Schema | None, literal: Callable[[str], str]) -> str:
    """Return the Lark term, over RULES, of a function's call between the marks around it.

    parameters: its schema, None for parameters of any name and any text. literal: makes a text a term. Raises
    InvalidArgument for names that cannot stand in a tag.
    """
    head = literal(f"\n<function={_tag_name(name)}>\n")
    if parameters is None or ("properties" not in parameters and parameters.get("additionalProperties") is not False):
        return f"{head} any_parameter* {_END}"
    required = parameters.get("required") or []
    definitions: Schema = {each: parameters[each] for each in ("$defs", "definitions") if each in parameters}
    terms = [head]
    properties = meant_properties(parameters)
    for key, schema in (properties | {key: {} for key in required if key not in properties}).items():
        tag = literal(f"<parameter={_tag_name(key)}>\n")
        terms.append(f"({tag} {_value(schema, definitions)}){'' if key in required else '?'}")
    return " ".join([*terms, _END])


def meant_properties(parameters: Schema) -> dict[str, Schema]:
    """Return the schemas of a function's parameters so that each says itself of which types it is: what it refers to is
    in its place, and values that are listed have their types beside them."""
    return {key: _meant(schema, parameters, 8) for key, schema in (parameters.get("properties") or {}).items()}


def _meant(schema: Any, root: Schema, depth: int) -> Schema:
    if not isinstance(schema, dict) or not depth:
        return {}
    steps = str(schema.get("$ref", "")).split("/")
    if steps[0] == "#":
        found: Any = root
        for step in steps[1:]:
            found = found.get(step, {}) if isinstance(found, dict) else {}
        return _meant(found, root, depth - 1)
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            schema = schema | {union: [_meant(each, root, depth - 1) for each in schema[union]]}
    listed = _listed(schema)
    if listed and "type" not in schema:
        schema = schema | {"type": sorted({_JSON_TYPES.get(type(each), "object") for each in listed})}
    return schema


def _listed(schema: Schema) -> list[Any]:
    """Return the values of which a parameter is one, empty if they are not listed."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or [])


def _value(schema: Schema, definitions: Schema) -> str:
    """Return the term of a parameter's value and of the tag that closes it."""
    if listed := _listed(schema):
        texts = (each if isinstance(each, str) else json.dumps(each) for each in listed)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {_CLOSING}"
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return f"({' | '.join(_value(each, definitions) for each in schema[union])})"
    if "string" in schema.get("type", "string"):
        return 'text "\\n"'
    return f"%json {json.dumps(schema | definitions | {'x-guidance': {'whitespace_pattern': SPACES}})} {_CLOSING}"


def _tag_name(name: str) -> str:
    if not name or set(name) & set(">\n"):
        raise InvalidArgument(f"tools: {name[:80]!r} cannot be a name in the model's format of calls", "tools")
    return name
