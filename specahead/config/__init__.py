"""The one configuration: every setting is declared once, in `sections.py`, and read by `resolve.py`.

A setting is a field of a frozen section. Flags, environment, file and --help follow from its declaration. This room
knows neither torch nor gRPC nor Ray, so that command lines open at once.
"""

from specahead.config.resolve import add_launch_flags, read_launch, resolve_service
from specahead.config.sections import (
    ClusterSettings,
    Config,
    DraftSettings,
    ModelSettings,
    ServiceSettings,
    TargetSettings,
)
from specahead.config.setting import SettingsError
from specahead.config.speculation import Speculation

__all__ = [
    "ClusterSettings",
    "Config",
    "DraftSettings",
    "ModelSettings",
    "ServiceSettings",
    "SettingsError",
    "Speculation",
    "TargetSettings",
    "add_launch_flags",
    "read_launch",
    "resolve_service",
]
