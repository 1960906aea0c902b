"""The schema of the Helm chart's values: `python deploy/chart_schema.py` writes chart/values.schema.json.

What `settings` may hold is read off the product's own declarations, so that Helm refuses a wrong name or value.
"""

import json
from pathlib import Path
from typing import Any

from specahead.config.resolve import NAMES
from specahead.config.sections import ClientSettings, ClusterSettings, DraftSettings, TargetSettings
from specahead.config.setting import Setting, declared_in

FILE = Path(__file__).resolve().parent / "chart" / "values.schema.json"

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
# What the chart says itself, what is secret, and what is only for Ray.
_NOT_OFFERED = {
    *("target_address", "draft_address", "ray_address", "namespace", "service_token", "service_token_file", "api_key"),
    *("targets", "drafts", "target_resource", "draft_resource"),
    *("service_tls_cert", "service_tls_key", "service_tls_ca", "service_tls_name"),
    *("api_keys_file", "tls_cert", "tls_key"),
}
_PORTS = ("http_port", "grpc_port", "target_port", "draft_port")

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
    """Return the schema of one setting."""
    schema: dict[str, Any] = {"type": _TYPES[item.kind]}
    limits = {"minimum": item.least, "maximum": item.most, "exclusiveMinimum": item.above}
    schema |= {name: limit for name, limit in limits.items() if limit is not None}
    if item.choices:
        schema["enum"] = list(item.choices)
    if item.name in _PORTS:
        schema["minimum"] = 1
    return schema


def _settings() -> dict[str, Any]:
    sections = (TargetSettings, DraftSettings, ClientSettings, ClusterSettings)
    items = {item.name: item for section in sections for item in declared_in(section)}
    offered = sorted(NAMES - _NOT_OFFERED - {""})
    return _object(**{name: _setting(items[name]) for name in offered}) | {"required": list(_PORTS)}


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
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json())
