"""The schema of the Helm chart's values: `python deploy/chart_schema.py` writes chart/values.schema.json.

What `settings` may hold is read off the product's own declarations, so that Helm refuses a wrong name or value.
"""

import json
from pathlib import Path
from typing import Any

from specahead.config.resolve import SETTINGS
from specahead.config.setting import Setting

FILE = Path(__file__).resolve().parent / "chart" / "values.schema.json"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
# Settings that the chart states itself, secrets, and settings for Ray alone.
_NOT_OFFERED = {
    *("target_address", "draft_address", "base_port", "service_token_file", "service_tls", "api_keys_file", "tls"),
    *("api_key", "ray_address", "namespace", "targets", "drafts", "node_resources", "autoscaling", "join"),
}
_PORTS = ("port", "grpc_port")

_TEXT: dict[str, Any] = {"type": "string"}
_ANY: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {"type": "array"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _whole(least: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least}


def _setting(item: Setting) -> dict[str, Any]:
    """Return the schema of one setting, or of one key of a setting."""
    if item.keys:
        return _object(**{name: _setting(key) for name, key in item.keys.items()})
    schema: dict[str, Any] = {"type": [_TYPES[item.kind], "null"] if item.optional else _TYPES[item.kind]}
    limits = {"minimum": item.within.least, "maximum": item.within.most, "exclusiveMinimum": item.within.above}
    schema |= {name: limit for name, limit in limits.items() if limit is not None}
    if item.choices:
        schema["enum"] = list(item.choices)
    if item.name in _PORTS:
        schema["minimum"] = 1
    return schema


def _settings() -> dict[str, Any]:
    offered = sorted(SETTINGS.keys() - _NOT_OFFERED)
    return _object(**{name: _setting(SETTINGS[name]) for name in offered}) | {"required": list(_PORTS)}


def schema() -> dict[str, Any]:
    """Return the schema of all values."""
    pod = {"resources": _ANY, "nodeSelector": _ANY, "tolerations": _LIST}
    service = _object(startMinutes=_whole(1), strategy=_one_of("RollingUpdate", "Recreate"), sharedMemory=_TEXT, **pod)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the specahead chart",
        **_object(
            **{"global": _ANY},
            image=_object(
                repository=_TEXT,
                tag=_TEXT,
                variant=_one_of("cpu", "cuda"),
                pullPolicy=_one_of("Always", "IfNotPresent", "Never"),
                pullSecrets=_LIST,
            ),
            settings=_settings(),
            planConfigMap=_TEXT,
            secrets=_object(access=_TEXT | {"minLength": 1}, huggingFace=_TEXT),
            tls=_object(services=_TEXT, clients=_TEXT),
            tracing=_object(endpoint=_TEXT),
            modelCache=_object(size=_TEXT, storageClass=_TEXT),
            target=service,
            draft=service,
            orchestrator=_object(
                replicas=_whole(1), serviceType=_one_of("ClusterIP", "NodePort", "LoadBalancer"), **pod
            ),
            networkPolicy={"type": "boolean"},
        ),
    }


def as_json() -> str:
    """Return the text of values.schema.json."""
    return _in_lines(schema()) + "\n"


def _in_lines(value: Any, indent: int = 0) -> str:
    """Return JSON in which an object takes a line for each of its values, unless one line of 120 holds all of it."""
    text = json.dumps(value)
    if not isinstance(value, dict) or indent + len(text) <= 110:
        return text
    entries = (f"{json.dumps(name)}: {_in_lines(inner, indent + 1)}" for name, inner in value.items())
    between = "\n" + " " * (indent + 1)
    return "{" + between + f",{between}".join(entries) + "\n" + " " * indent + "}"


if __name__ == "__main__":
    FILE.write_text(as_json())
