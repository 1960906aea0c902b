"""Random JSON schemas, of what llguidance knows of JSON Schema."""

import random
from typing import Any

_NAMES = ["a", "b", "name", "x y", 'say "hi"', "é", "日本", "back\\slash", "$ref", "tab\t", ""]
_PATTERNS = ["^[a-z]{2,5}$", "^(ab|cd)+$", "[0-9]", r"^\d{3}-\d{4}$", "^$", "^.{0,8}$"]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema of an object, with definitions that may refer to themselves."""
    names = [f"d{i}" for i in range(rng.randrange(3))]
    schema = _object(rng, 3, names)
    if names:
        # What refers to itself must be able to end: in an array that may be empty, or where it is not required.
        schema["$defs"] = {name: _object(rng, 2, names) | {"required": []} for name in names}
    return schema


def _any(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    plain = [_string, _integer, _number, _choice]
    deep = [_object, _array, _either] if depth else []
    if names and depth and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    return rng.choice([*plain, *deep, *deep])(rng, depth - 1, names)


def _object(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = rng.sample(_NAMES, rng.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _any(rng, depth, names) for key in keys},
        "required": rng.sample(keys, rng.randrange(len(keys) + 1)),
    }
    more = rng.random()
    if more < 0.7:
        schema["additionalProperties"] = False
    elif more < 0.9:
        schema["additionalProperties"] = _any(rng, 0, names)
    return schema


def _array(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth, names)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_any(rng, 0, names) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.7:
        schema["maxItems"] = rng.randrange(3, 6)
    if rng.random() < 0.4 and "$ref" not in schema["items"]:
        schema["minItems"] = rng.randrange(3)
    return schema


def _either(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth, []) for _ in range(rng.randrange(1, 4))]}


def _choice(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    values = [True, None, 3, -2.5, "yes", "né", 'q"', [], {"k": [1]}, ""]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return rng.choice([{"enum": rng.sample(values, 3)}, {"type": "boolean"}, {"type": ["null", "boolean"]}])


def _string(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}


def _integer(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    least = rng.randrange(-1000, 1000)
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(500)}
    if kind == 1:
        return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 2 + rng.randrange(9)}
    return {"type": "integer", "multipleOf": rng.choice([2, 5, 7])} if kind == 2 else {"type": "integer"}


def _number(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    least = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": least + 10} if rng.random() < 0.5 else {"type": "number"}
