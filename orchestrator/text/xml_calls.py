"""Calls whose parameters stand one by one between tags, as Qwen3-Coder writes them: their grammar and their types.

Between its tags a string is any plain text; every other value is JSON that follows its schema.
"""

import json
from typing import Any

from orchestrator.text.lark import Lark, escaped, literal
from specahead.wire.errors import InvalidArgument

Schema = dict[str, Any]

_CLOSING = "\n</parameter>\n"
_TEXT = 'text "\\n"'  # any text with its closing tag
# The Lark rules that parameter_terms refers to: `text` ends at its closing tag, `any_parameter` has any name.
PARAMETER_RULES = (
    f'text[lazy]: /(?s:.*){escaped(_CLOSING.strip())}/\nany_parameter: "<parameter=" /[^>\\n]+/ ">\\n" {_TEXT}\n'
)
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}


def parameter_terms(parameters: Schema | None, lark: Lark) -> str:
    """Return the Lark term of a call's parameters.

    parameters: their JSON schema, None for any. Raises InvalidArgument for names that cannot stand in a tag.
    """
    if parameters is None or ("properties" not in parameters and parameters.get("additionalProperties") is not False):
        return "any_parameter*"
    required = parameters.get("required") or []
    definitions: Schema = {each: parameters[each] for each in ("$defs", "definitions") if each in parameters}
    terms = []
    properties = meant_properties(parameters)
    for key, schema in (properties | {key: {} for key in required if key not in properties}).items():
        tag = literal(f"<parameter={tag_name(key)}>\n")
        terms.append(f"({tag} {_value(schema, definitions, lark)}){'' if key in required else '?'}")
    return " ".join(terms)


def meant_properties(parameters: Schema) -> dict[str, Schema]:
    """Return the schema of each parameter by name, with references replaced and the types of listed values added."""
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
    """Return the values that a schema lists, empty if it lists none."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or [])


def _value(schema: Schema, definitions: Schema, lark: Lark) -> str:
    """Return the term of a parameter's value with its closing tag."""
    if listed := _listed(schema):
        texts = (each if isinstance(each, str) else json.dumps(each) for each in listed)
        return f"({' | '.join(map(literal, texts))}) {literal(_CLOSING)}"
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return f"({' | '.join(_value(each, definitions, lark) for each in schema[union])})"
    if "string" in schema.get("type", "string"):
        return _TEXT
    return f"{lark.json(schema | definitions)} {literal(_CLOSING)}"


def tag_name(name: str) -> str:
    """Return a name that may stand in a tag. Raises InvalidArgument for any other."""
    if not name or set(name) & set(">\n"):
        raise InvalidArgument(f"tools: {name[:80]!r} cannot be a name in the model's format of calls", "tools")
    return name
