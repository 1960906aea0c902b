"""The one configuration: every setting is declared once, as a field of a frozen section, and read by `resolve.py`.

Flags, environment, file and --help follow from the declarations (setting.py). This room knows neither torch nor gRPC
nor Ray, so that command lines open at once.
"""

from specahead.config.launch import ClientSettings, ClusterSettings, Config
from specahead.config.resolve import add_launch_flags, read_launch, resolve_service
from specahead.config.services import DraftSettings, ModelSettings, ServiceSettings, TargetSettings
from specahead.config.setting import SettingsError
from specahead.config.speculation import Speculation

__all__ = [
    "ClientSettings",
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
