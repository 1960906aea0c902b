"""Settings of services for tests: γ and what is held are stated, so that no policy chooses them unless a test asks."""

from dataclasses import fields
from typing import Any

from specahead.config import DraftSettings, Speculation, TargetSettings

_KEYS = {item.name for item in fields(Speculation)}


def target_settings(**given: Any) -> TargetSettings:
    """Return a target's settings; keys of `speculation` may stand among them.

    γ is 4, and nothing is held, looked up or audited, unless that is given. Where `hold` is None the device is a GPU,
    since a CPU holds nothing.
    """
    by_policy = {"device": "cuda"} if given.get("hold", 0) is None else {}
    return TargetSettings(**_sorted({"gamma": 4, "hold": 0, "lookup": False, "audit_share": 0.0} | by_policy | given))


def draft_settings(**given: Any) -> DraftSettings:
    """Return a draft's settings; keys of `speculation` may stand among them. γ is 4 by default."""
    return DraftSettings(**_sorted({"gamma": 4} | given))


def _sorted(given: dict[str, Any]) -> dict[str, Any]:
    keys = {name: given.pop(name) for name in _KEYS & given.keys()}
    return given | {"speculation": Speculation(**keys)}
