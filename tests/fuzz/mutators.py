"""Random changes of an input: of its bytes, of the fields of a protobuf message, of a JSON value."""

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MOST_BYTES = 1 << 16
_BYTES = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 8, b"\xff\xff\xff\xff\x0f", b"{", b'"', b"[" * 50, b"\\ud800"]
_POWERS = [2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
_INTEGERS = [0, 1, -1, 2, 127, 128, 255, *_POWERS]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-40, 1e38, 0.5, 2.0, float("nan"), float("inf"), float("-inf")]
_TEXTS = ["", "a", "\x00", "é", "🙂", "a" * 129, "x" * 3000, "exact", "user", "<|endoftext|>", "{{ 1 }}", "\ud800"]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the input with some bytes changed, removed, inserted or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted((rng.randint(0, len(changed)), rng.randint(0, len(changed))))
        match rng.randrange(6):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : min(end, at + 16)]
            case 2:
                changed[at:at] = rng.choice(_BYTES)
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                changed[at:at] = changed[at:end] * rng.choice((1, 1, 8))
            case _:
                del changed[end:]
    return bytes(changed[:MOST_BYTES])


def mutate_message(data: bytes, kind: type[Message], rng: random.Random) -> bytes:
    """Return a serialized message with one field changed, its own or that of a message within."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return mutate_bytes(data, rng)
    _mutate_field(message, rng)
    return message.SerializeToString()[:MOST_BYTES]


def _mutate_field(message: Message, rng: random.Random) -> None:
    """Change a field of a message, mostly one of a message within it."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field: FieldDescriptor = rng.choice(fields)
    held = getattr(message, field.name)
    is_message, is_list = field.type == FieldDescriptor.TYPE_MESSAGE, field.is_repeated
    if is_message and field.message_type.GetOptions().map_entry:
        return
    if not is_list:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        elif is_message:
            held.SetInParent()
            _mutate_field(held, rng)
        else:
            setattr(message, field.name, _value(field, rng))
    elif held and rng.random() < 0.3:
        del held[rng.randrange(len(held))]
    elif is_message:
        _mutate_field(rng.choice(held) if held and rng.random() < 0.7 else held.add(), rng)
    else:
        held.extend([_value(field, rng)] * rng.choice((1, 1, 3, 200)))


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice([*_FLOATS, rng.random()])
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 40, 300)))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(_TEXTS[:-1])
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99, -1))
        case FieldDescriptor.CPPTYPE_INT32:
            return _within(rng, -(2**31), 2**31)
        case FieldDescriptor.CPPTYPE_UINT32:
            return _within(rng, 0, 2**32)
        case FieldDescriptor.CPPTYPE_INT64:
            return _within(rng, -(2**63), 2**63)
        case _:
            return _within(rng, 0, 2**64)


def _within(rng: random.Random, least: int, end: int) -> int:
    return rng.choice([number for number in _INTEGERS if least <= number < end] + [rng.randrange(5000)])


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON text with one of its values changed, left out, said twice or wrapped."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    return json.dumps(_mutate_value(value, rng), allow_nan=True).encode()[:MOST_BYTES]


def _mutate_value(value: Any, rng: random.Random, may_grow: bool = True) -> Any:
    """may_grow: whether an element may be said fifty times, which lists within lists would multiply."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = value | {key: _mutate_value(value[key], rng, may_grow)}
        if rng.random() < 0.1:
            changed.pop(key)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at, times = rng.randrange(len(value)), rng.choice((0, 1, 1, 1, 2, 50 if may_grow else 1))
        changed = _mutate_value(value[at], rng, may_grow and times < 50)
        return [*value[:at], *[changed] * times, *value[at + 1 :]]
    wrapped = [[value], {"a": value}, [value] * 3, str(value)[:100]]
    return rng.choice([*_INTEGERS, *_FLOATS, *_TEXTS, None, True, False, {}, [], *wrapped])
