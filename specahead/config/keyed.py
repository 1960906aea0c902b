"""Settings of several keys: one frozen dataclass each, given as JSON on a command line and as a mapping in a file."""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from specahead.config.setting import SettingsError


@dataclass(frozen=True)
class Within:
    """The range of a number: from `least` to `most`, and more than `above`; None: no such end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


Positive = Annotated[int, Within(least=1)]
Share = Annotated[float, Within(above=0, most=1)]
Seconds = Annotated[float, Within(least=0)]


@dataclass(frozen=True)
class Key:
    """A field of a keyed setting: its name, its type, whether it may be None, its range or choices."""

    name: str
    kind: type
    optional: bool
    within: Within
    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        ends = (("at least", self.within.least), ("more than", self.within.above), ("at most", self.within.most))
        limits = " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)
        words = ", ".join(self.choices) or " ".join(filter(None, (_WORDS[self.kind], limits)))
        return f"{words}, or null" if self.optional else words

    def read(self, value: Any) -> Any:
        """Return a value as its type, checked. Raises ValueError; the message says what is expected."""
        if value is None and self.optional:
            return None
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        within, fits = self.within, type(value) is self.kind
        if fits and self.kind in (int, float):
            low = (within.least is None or value >= within.least) and (within.above is None or value > within.above)
            fits = low and (within.most is None or value <= within.most)
        if not fits or (self.choices and value not in self.choices):
            raise ValueError(f"expected {self.expected}")
        return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A setting of several keys, each with a default. Construction raises SettingsError for values not allowed."""

    def __post_init__(self) -> None:
        for key in keys_of(type(self)).values():
            value = getattr(self, key.name)
            try:
                object.__setattr__(self, key.name, key.read(value))
            except ValueError as error:
                raise SettingsError(f"{key.name} is {value!r}, {error}") from None

    def changed(self, given: Any) -> Self:
        """Return the setting with the keys that a mapping, or JSON text, gives. Raises SettingsError."""
        known = keys_of(type(self))
        expected = f"expected a mapping with keys among {', '.join(known)}"
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError:
                raise SettingsError(f"{given!r} is not JSON, {expected}") from None
        if not isinstance(given, Mapping):
            raise SettingsError(f"{given!r} is no mapping, {expected}")
        unknown = [str(name) for name in given if name not in known]
        if unknown:
            raise SettingsError(f"no such key: {', '.join(unknown)}; {expected}")
        return dataclasses.replace(self, **given)


@functools.cache
def _keys_of(cls: type[Keyed]) -> dict[str, Key]:
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: _key(item.name, hints[item.name]) for item in dataclasses.fields(cls)}


def keys_of(cls: type[Keyed]) -> dict[str, Key]:
    """Return the keys of a keyed setting by name."""
    return _keys_of(cls)  # type: ignore[arg-type]  # the hash of its instances is taken for the class's


def _key(name: str, hint: Any) -> Key:
    """Return a key by its type, such as `Annotated[int, Within(least=1)] | None` or Literal["a", "b"]."""
    optional = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
    within, choices = Within(), ()
    if optional:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Annotated:
        hint, within = get_args(hint)
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    return Key(name, hint, optional, within, choices)


def sentences_of(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a class, by the field's name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found
