"""The Helm chart: without a fault for Helm's linter, with a schema that is the product's, and strict about values."""

import runpy
from pathlib import Path

import pytest
import yaml

from tests.deploy.tools import DEPLOY, run_tool
from tests.stack import ROOT

CHART = DEPLOY / "chart"
LINT = (
    "import helm_python, sys; found = helm_python.lint(sys.argv[1]); "
    "print(found['messages']); sys.exit(bool(found['errors']))"
)


def test_lint() -> None:
    said = run_tool("python", "-c", LINT, CHART)
    assert "'severity': 2" not in said and "'severity': 3" not in said, said


def test_the_schema_is_what_the_settings_say() -> None:
    """`make deploy-files` was run after a setting was changed."""
    made = runpy.run_path(str(DEPLOY / "chart_schema.py"))
    assert made["FILE"].read_text() == made["as_json"]()


def test_the_version_is_the_products() -> None:
    import tomllib

    comes = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
    version = comes.removesuffix(".dev0")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    for file in DEPLOY.glob("**/kustomization.yaml"):
        for image in yaml.safe_load(file.read_text()).get("images", []):
            assert image["newTag"].rsplit("-", 1)[0] == version, file


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("settings: {max_contxt: 1}", "max_contxt"),
        ("settings: {speculation: {gamma: 65}}", "gamma"),
        ("settings: {api_key: secret}", "api_key"),
        ("settings: {port: 0}", "port"),
        ("target: {strategy: Sideways}", "strategy"),
        ("orchestrator: {replicas: 0}", "replicas"),
        ("secrets: {access: ''}", "access"),
    ],
)
def test_values_that_are_wrong_are_refused(values: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    assert said in run_tool("python", DEPLOY / "render_chart.py", file, fails=True)
