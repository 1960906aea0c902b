"""How settings are declared: as fields of frozen dataclasses, with a range in the type and a sentence below."""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and, if it was read from somewhere, where."""


@dataclass(frozen=True)
class Within:
    """The range of a number: from `least` to `most`, and more than `above`; None: no such end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


@dataclass(frozen=True)
class Called:
    """The names of a setting that differ from its field's: `name` of a launch, the environment and a file, `flag` of
    the command line of a service by itself. name "": only that command line has the setting."""

    name: str | None = None
    flag: str | None = None


SECRET = "secret"  # marks a setting that is never printed

Positive = Annotated[int, Within(least=1)]
Count = Annotated[int, Within(least=0)]
Port = Annotated[int, Within(least=0, most=65535)]
Share = Annotated[float, Within(above=0, most=1)]
Seconds = Annotated[float, Within(least=0)]

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Setting:
    """A declared field: its place, its names and its allowed values."""

    section: "type[Section]"
    field: str
    kind: Any
    name: str
    flag: str
    optional: bool = False
    within: Within = Within()
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def help(self) -> str:
        """The sentence below the field."""
        return _sentences(self.section)[self.field]  # type: ignore[arg-type]  # as in declared_in

    @property
    def keys(self) -> "dict[str, Setting]":
        """The keys of a setting that has several; empty: it has one value."""
        has_keys = isinstance(self.kind, type) and issubclass(self.kind, Keyed)
        return {item.name: item for item in declared_in(self.kind)} if has_keys else {}

    @property
    def expected(self) -> str:
        """The values that it may have, in words."""
        ends = (("at least", self.within.least), ("more than", self.within.above), ("at most", self.within.most))
        limits = " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)
        words = ", ".join(self.choices) or " ".join(filter(None, (_KINDS.get(self.kind, ""), limits)))
        return f"{words}, or null" if self.optional else words

    def check(self, value: Any) -> None:
        """Raise SettingsError for a value out of its range or, for NaN, of any."""
        if value is None and self.optional:
            return
        within, allowed = self.within, value is not None and (not self.choices or value in self.choices)
        if allowed and self.kind in (int, float):
            low = (within.least is None or value >= within.least) and (within.above is None or value > within.above)
            allowed = low and (within.most is None or value <= within.most)
        if not allowed:
            raise SettingsError(f"{self.name or self.field} is {value!r}, expected {self.expected}")

    def convert(self, value: Any, before: Any) -> Any:
        """Return a value, or its spelling, as the setting's type. Raises SettingsError.

        before: the value that it replaces, whose other keys stay where a setting has several.
        """
        if isinstance(before, Keyed):
            try:
                return before.changed(value)
            except SettingsError as error:
                raise SettingsError(f"{self.name}: {error}") from None
        try:
            if value is None and self.optional:
                return None
            if get_origin(self.kind) is tuple:
                return tuple(value)
            if self.kind is bool:
                converted = value if isinstance(value, bool) else _SWITCHES[str(value).lower()]
            elif isinstance(value, str | int | float):  # by its spelling, so that 4.5 and true are no whole numbers
                converted = self.kind(str(value))
            else:
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise SettingsError(f"{self.name or self.flag} is {value!r}, expected {self.expected}") from None
        self.check(converted)
        return converted


@dataclass(frozen=True, kw_only=True)
class Section:
    """Settings with one owner. Whatever exists holds allowed values: construction raises SettingsError.

    A class with a `group` declares settings; fields of other classes are no settings.
    """

    side: ClassVar[str] = ""
    """"target" or "draft" for the settings of a service."""
    group: ClassVar[str] = ""
    """The heading of --help under which the class declares settings."""

    def __init_subclass__(cls, group: str = "") -> None:
        super().__init_subclass__()
        cls.group = group

    def __post_init__(self) -> None:
        for item in declared_in(type(self)):
            item.check(getattr(self, item.field))


@dataclass(frozen=True, kw_only=True)
class Keyed(Section):
    """A setting of several keys, each with a default: JSON on a command line, a mapping in a file."""

    def changed(self, given: Any) -> Self:
        """Return the setting with the keys that a mapping, or JSON text, gives. Raises SettingsError."""
        known = {item.name: item for item in declared_in(type(self))}
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
        return dataclasses.replace(self, **{name: known[name].convert(value, None) for name, value in given.items()})


@functools.cache
def _declared_in(section: type[Section]) -> tuple[Setting, ...]:
    classes = [each for each in reversed(section.__mro__) if issubclass(each, Section)]
    owners = {name: each for each in classes for name in inspect.get_annotations(each)}
    hints = get_type_hints(section, include_extras=True)
    fields = [item.name for item in dataclasses.fields(section) if owners[item.name].group]
    return tuple(_setting(owners[name], name, hints[name]) for name in fields)


def declared_in(section: type[Section]) -> tuple[Setting, ...]:
    """Return the settings of a section, in the order of their declarations."""
    return _declared_in(section)  # type: ignore[arg-type]  # the hash of its instances is taken for the class's


def _setting(section: type[Section], field: str, hint: Any) -> Setting:
    """Return a setting by its field's type, such as `Annotated[int, Within(least=1)] | None` or Literal["a", "b"]."""
    about: tuple[Any, ...] = ()
    if optional := get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)[0], get_args(hint)[1:]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    within = next((item for item in about if isinstance(item, Within)), Within())
    called = next((item for item in about if isinstance(item, Called)), Called())
    name, flag = (field if given is None else given for given in (called.name, called.flag))
    return Setting(section, field, str if choices else hint, name, flag, optional, within, choices, SECRET in about)


@functools.cache
def _sentences(section: type) -> dict[str, str]:
    """Return the text below each field of a class, by the field's name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found
