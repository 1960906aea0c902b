"""Fills sections from flags, the environment and a YAML file, in this order of precedence."""

import argparse
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml

from specahead import models
from specahead.config.access import check_client_listener, check_service_listener
from specahead.config.arguments import did_you_mean
from specahead.config.launch import ClientSettings, ClusterSettings, Config
from specahead.config.services import DraftSettings, ServiceSettings, TargetSettings
from specahead.config.setting import Section, Setting, SettingsError, declared_in
from specahead.config.version import running_version

log = logging.getLogger(__name__)

Service = TypeVar("Service", bound=ServiceSettings)
Filled = TypeVar("Filled", bound=Section)
Options = Mapping[str, tuple[Setting, str, Any]]  # by key: a setting, its flag, and its default

ENVIRONMENT_PREFIX = "SPECAHEAD_"
SETTINGS = {
    item.name: item
    for section in (TargetSettings, DraftSettings, ClientSettings, ClusterSettings)
    for item in declared_in(section)
    if item.name
}


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the settings of a launch, whose target may be given without its flag."""
    parser.add_argument("MODEL", nargs="?", help="the same as --target")
    _add_flags(parser, _sections_of(Config()))
    parser.usage = f"{parser.prog} [--help] [SETTING ...] [MODEL]"


def read_launch(flags: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the settings of a launch whose flags were parsed. Raises SettingsError; exits on --dry-run."""
    model = vars(flags).pop("MODEL")
    if model is not None and flags.target not in (None, model):
        raise SettingsError(f"the model is {model!r} and --target {flags.target!r}: give one of them")
    flags.target = flags.target if model is None else model
    target, draft, clients, cluster = _read(flags, _sections_of(Config()), environment, _with_draft)
    check_client_listener(clients, clients.host)
    return Config(target=target, draft=draft, clients=clients, cluster=cluster)


def read_values(values: Mapping[str, Any]) -> Config:
    """Return the settings of a target and a draft that have these values, by name. Raises SettingsError."""
    options = _options([TargetSettings(), DraftSettings()])
    unknown = [name + did_you_mean(name, options) for name in values if name not in options]
    if unknown:
        raise SettingsError(f"no such setting of the services: {', '.join(unknown)}")
    default = Config()
    given = _with_draft(_converted(_options([default.target, default.draft]), values, {}, "the arguments"))
    return Config(target=_filled(default.target, given), draft=_filled(default.draft, given))


def _with_draft(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, with a draft for a target that comes without one: it drafts for itself."""
    alone = "target" in values and "draft" not in values
    bundled = not alone or Path(values["target"]).resolve() == models.TARGET
    return values if bundled else values | {"draft": "auto"}


def _sections_of(config: Config) -> list[Section]:
    return [config.target, config.draft, config.clients, config.cluster]


def resolve_service(
    parser: argparse.ArgumentParser, default: Service, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Service, argparse.Namespace]:
    """Return the settings of a service by itself, whose flags have short names, and the parser's other flags.

    Raises SettingsError; exits on --help and --dry-run.
    """
    _add_flags(parser, [default])
    flags = parser.parse_args(arguments)
    (settings,) = _read(flags, [default], environment)
    check_service_listener(settings, settings.host)
    return settings, flags


def _read(
    flags: argparse.Namespace,
    defaults: Sequence[Section],
    environment: Mapping[str, str],
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
) -> list[Any]:
    """Return the sections as the sources fill them. Takes their flags from `flags`.

    complete: adds what follows from the values that were given.

    Settings of the same name in several sections get the same value. Raises SettingsError for an unknown key of the
    file and for a value that is not allowed, naming its source; an unknown variable of the environment is a warning.
    """
    options = _options(defaults)
    given = {key: vars(flags).pop(flag) for key, (_, flag, _) in options.items()}
    values: dict[str, Any] = {}
    for source, found in (
        (flags.config or "file", _from_file(flags.config) if flags.config else {}),
        ("environment", _from_environment(environment)),
        ("flag", {key: value for key, value in given.items() if value is not None}),
    ):
        values |= _converted(options, found, values, source)
    values = complete(values)
    filled = [_filled(section, values) for section in defaults]
    if flags.dry_run:
        print(json.dumps(describe(filled), indent=2))
        sys.exit(0)
    return filled


def _converted(options: Options, found: Mapping[str, Any], before: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values that a source gives, by key. Raises SettingsError.

    before: the values of earlier sources; a setting of several keys keeps the keys that this source leaves out.
    """
    try:
        return {
            key: options[key][0].convert(value, before.get(key, options[key][2]))
            for key, value in found.items()
            if key in options
        }
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None


def describe(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the settings by their names, as a file may give them, without secrets."""
    values = [(item, getattr(section, item.field)) for section in sections for item in declared_in(type(section))]
    given = [(item, value) for item, value in values if item.name and not item.secret]
    return {item.name: dataclasses.asdict(value) if item.keys else value for item, value in given}


def _options(defaults: Sequence[Section]) -> Options:
    """Return the settings that a command line offers; a launch calls them by their names."""
    options: dict[str, tuple[Setting, str, Any]] = {}
    alone = len(defaults) == 1
    for section in defaults:
        for item in declared_in(type(section)):
            if item.name or alone:
                options.setdefault(_key(item), (item, item.flag if alone else item.name, getattr(section, item.field)))
    return options


def _key(item: Setting) -> str:
    """Return its name, or a key that no file and no variable can name."""
    return item.name or f"--{item.flag}"


def _filled(section: Filled, values: Mapping[str, Any]) -> Filled:
    changes = {item.field: values[_key(item)] for item in declared_in(type(section)) if _key(item) in values}
    return dataclasses.replace(section, **changes)


def _add_flags(parser: argparse.ArgumentParser, defaults: Sequence[Section]) -> None:
    parser.usage = f"{parser.prog} [--help] [SETTING ...]"  # so that an error is seen, which follows the usage
    parser.add_argument("--version", action="version", version=f"specahead {running_version()}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings (keys as of --dry-run)")
    parser.add_argument("--dry-run", action="store_true", help="print the resulting settings and exit")
    groups: dict[str, Any] = {}
    for item, flag, default in _options(defaults).values():
        group = item.section.group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        about: dict[str, Any] = {"dest": flag, "metavar": "JSON" if item.keys else flag.upper()}
        if item.kind is bool:
            about = {"dest": flag, "action": argparse.BooleanOptionalAction, "default": None}
        elif get_origin(item.kind) is tuple:
            about["action"] = "append"
        groups[group].add_argument("--" + flag.replace("_", "-"), help=_help(item, default), **about)


def _help(item: Setting, default: Any) -> str:
    keys = "".join(f" [{name}: {key.help} {json.dumps(getattr(default, name))}]" for name, key in item.keys.items())
    return f"{item.help}{keys}".replace("%", "%%") if keys else f"{item.help} (default: {default!r})".replace("%", "%%")


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return settings by name. Variables that are no settings, or that Kubernetes sets, are ignored with a warning."""
    ours = {key: value for key, value in environment.items() if key.startswith(ENVIRONMENT_PREFIX)}
    injected = {key for key in ours if _is_injected(key, environment)}
    named = {key: key.removeprefix(ENVIRONMENT_PREFIX).lower() for key in ours if key not in injected}
    unknown = sorted(key for key, name in named.items() if name not in SETTINGS)
    if unknown:
        words = [
            key + did_you_mean(named[key], SETTINGS, lambda name: ENVIRONMENT_PREFIX + name.upper()) for key in unknown
        ]
        log.warning("environment: no such setting, ignored: %s", ", ".join(words))
    if injected:
        log.warning(
            "environment: set by Kubernetes for a Service, ignored: %s (to set one of these names, use its flag or "
            "--config)",
            ", ".join(sorted(injected)),
        )
    return {name: ours[key] for key, name in named.items() if name in SETTINGS}


def _is_injected(key: str, environment: Mapping[str, str]) -> bool:
    """Return whether Kubernetes sets a variable in every container, for a Service called specahead….

    For a Service x these are X_SERVICE_HOST, X_SERVICE_PORT, X_SERVICE_PORT_{NAME}, X_PORT and X_PORT_{…}. Where the
    first two are both there, the variables of that Service are Kubernetes'.
    """
    prefixes = [key[: at.start()] for at in re.finditer(r"_SERVICE_HOST$|_SERVICE_PORT(?=_|$)|_PORT(?=_|$)", key)]
    return any(
        f"{prefix}_SERVICE_HOST" in environment and f"{prefix}_SERVICE_PORT" in environment for prefix in prefixes
    )


def _from_file(path: str) -> dict[str, Any]:
    """Return the settings of a file. Raises SettingsError for a file that is no mapping of settings, and for unknown
    keys."""
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    unknown = [_with_hint(str(key)) for key in content if key not in SETTINGS]
    if unknown:
        raise SettingsError(f"{path}: no such setting: {', '.join(unknown)}")
    return content


def _with_hint(name: str) -> str:
    """Return an unknown name with the setting that was probably meant, or whose key it is."""
    owners = [item.name for item in SETTINGS.values() if name in item.keys]
    return f"{name} (a key of {owners[0]})" if owners else name + did_you_mean(name, SETTINGS)
