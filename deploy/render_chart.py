"""Renders the Helm chart without Helm: to standard output, or as the base of the Kustomize overlays.

    python deploy/render_chart.py [VALUES.yaml ...]
    python deploy/render_chart.py --base deploy/kubernetes/base

Needs helm-python-sdk and PyYAML, not the product.
"""

import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parent / "chart"
RELEASE = "specahead"
HEADER = "# Made from the Helm chart by `make deploy-files`.\n"


def render(files: list[str]) -> list[dict[str, Any]]:
    """Return the objects of the chart with these files of values. Raises HelmError for values that it refuses."""
    values: dict[str, Any] = {}
    for file in files:
        values = merged(values, yaml.safe_load(Path(file).read_text()) or {})
    with helm_python.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name=RELEASE, namespace="default")
    texts = [text for name, text in sorted(rendered.items()) if name.endswith(".yaml")]
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return values with those of `more` laid over them, mapping by mapping, as Helm does."""
    both = values | more
    for key in values.keys() & more.keys():
        if isinstance(values[key], dict) and isinstance(more[key], dict):
            both[key] = merged(values[key], more[key])
    return both


def base_files() -> dict[str, str]:
    """Return the base by file name: the objects, and the settings that a generator makes a ConfigMap of.

    Pods are not given the settings' checksum: the generator's name for the ConfigMap changes with its content.
    """
    objects = render([])
    settings = [item for item in objects if item["kind"] == "ConfigMap"]
    for item in objects:
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]["metadata"]
            del template["annotations"]["checksum/settings"]
            template["annotations"] or template.pop("annotations")
    lines = [f"{name}={value}\n" for item in settings for name, value in item["data"].items()]
    rest = [item for item in objects if item["kind"] != "ConfigMap"]
    return {"specahead.yaml": HEADER + as_yaml(rest), "settings.env": HEADER + "".join(lines)}


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Return objects as YAML documents."""
    return yaml.safe_dump_all(objects, sort_keys=False, width=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--base"]:
        for name, content in base_files().items():
            Path(sys.argv[2], name).write_text(content)
    else:
        print(as_yaml(render(sys.argv[1:])), end="")
