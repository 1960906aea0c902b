"""How a setting is declared: once, as a field of a section, with all that a command line needs to know of it."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and, if it was read from somewhere, where."""


@dataclass(frozen=True)
class Setting:
    """All that is known of a setting beside its default.

    group: the heading of --help that lists it. name: what a launch, the environment and a file call it; "": only a
    service's own command line has it. flag: what a service's own command line calls it. least, most: the ends of its
    range; above: less than all of it; choices: all its values. words: values that have a name, by it. secret: it is
    never printed. by_model: each of several models of a launch may have its own.
    field, kind: the name and type of its section's field.
    In a declaration "{side}" stands for target or draft and "{field}" for the field's name; `declared_in` fills them.
    """

    help: str
    group: str
    name: str = "{field}"
    flag: str = "{field}"
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    secret: bool = False
    by_model: bool = False
    field: str = ""
    kind: Any = None

    def check(self, value: Any, shown: str) -> None:
        """Raises SettingsError for a value out of its range (NaN: of any); the message calls it `shown`."""
        if self.choices:
            allowed, expected = value in self.choices, ", ".join(self.choices)
        else:
            allowed = (
                (self.least is None or value >= self.least)
                and (self.most is None or value <= self.most)
                and (self.above is None or value > self.above)
            )
            ends = (("at least", self.least), ("more than", self.above), ("at most", self.most))
            expected = " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)
        if not allowed:
            raise SettingsError(f"{shown} is {value!r}, expected {expected}")


def setting(default: Any, help: str, **declared: Any) -> Any:
    """A dataclass field with its declaration; the other arguments are Setting's."""
    item = Setting(help, **declared)
    return dataclasses.field(default=default, repr=not item.secret, metadata={"setting": item})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings with one owner. Whatever exists holds allowed values: construction raises SettingsError.

    side: "target" or "draft" for the settings of a service.
    """

    side: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in declared_in(type(self)):
            item.check(getattr(self, item.field), item.name or item.field)


def declared_in(section: type[Section]) -> tuple[Setting, ...]:
    """The settings of a section in the order of their declarations; fields without a declaration are no settings."""
    return _declared_in(section)  # type: ignore[arg-type]  # the hash of its instances is taken for the class's


@functools.cache
def _declared_in(section: type[Section]) -> tuple[Setting, ...]:
    found = []
    for item in dataclasses.fields(section):
        declared: Setting | None = item.metadata.get("setting")
        if declared is not None:
            known = {"side": section.side, "field": item.name}
            words = {name: getattr(declared, name).format(**known) for name in ("help", "name", "flag")}
            found.append(dataclasses.replace(declared, field=item.name, kind=item.type, **words))
    return tuple(found)
