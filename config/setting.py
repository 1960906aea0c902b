"""How a setting is declared: once, as a field of a section, with all that a command line needs to know of it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and, if it was read from somewhere, where."""


@dataclass(frozen=True)
class Declaration:
    """What is known of a setting beside its field's name, type and default.

    group: the heading of --help that lists it. least, most: the ends of its range; above: less than all of it; choices:
    all its values. name: what a launch, the environment and a file call it; "{side}" stands for target or draft; "":
    only a service's own command line has it. flag: what a service's own command line calls it.
    """

    help: str
    group: str
    name: str
    flag: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type lies in the range; NaN lies in none."""
        if self.choices:
            return value in self.choices
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    @property
    def expected(self) -> str:
        """The range in words."""
        if self.choices:
            return ", ".join(self.choices)
        ends = (("at least", self.least), ("more than", self.above), ("at most", self.most))
        return " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)


def setting(default: Any, help: str, *, group: str, name: str = "{field}", flag: str = "", **rules: Any) -> Any:
    """A dataclass field with its declaration; the other arguments are Declaration's."""
    declared = Declaration(help, group, name, flag, **rules)
    return dataclasses.field(default=default, metadata={"declaration": declared})


@dataclass(frozen=True)
class Declared:
    """A setting of one section. name: its unique name, "" if only a service's own command line has it."""

    field: str
    kind: Any
    name: str
    flag: str
    rule: Declaration

    def check(self, value: Any, shown: str) -> None:
        """Raises SettingsError for a value out of its range; `shown` is what the message calls the setting."""
        if not self.rule.allows(value):
            raise SettingsError(f"{shown} is {value!r}, expected {self.rule.expected}")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings with one owner. Whatever exists holds allowed values: construction raises SettingsError.

    side: "target" or "draft" for the settings of a service.
    """

    side: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in declared_in(type(self)):
            item.check(getattr(self, item.field), item.name or item.field)


def declared_in(section: type[Section]) -> Iterator[Declared]:
    """The settings of a section in the order of their declarations; fields without a declaration are no settings."""
    for item in dataclasses.fields(section):
        rule = item.metadata.get("declaration")
        if rule is not None:
            name = rule.name.format(side=section.side, field=item.name)
            yield Declared(item.name, item.type, name, rule.flag or item.name, rule)
