"""The scripts of docs/examples, each as it stands, against a launch of the bundled pair."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def output_of(url: str, *command: str) -> str:
    """Return what a script prints."""
    variables = os.environ | {"SPECAHEAD_URL": url}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_an_agent_calls_its_tool_and_answers(url: str, script: Path) -> None:
    output = output_of(url, sys.executable, str(script))
    assert re.match(r"tool: the weather of (Rome|Oslo)\nanswer: .", output), output


@pytest.mark.skipif(shutil.which("npx") is None, reason="no npx on this machine (apt-get install npm)")
def test_claude_code_calls_a_tool(url: str) -> None:
    answer = json.loads(output_of(url, str(EXAMPLES / "claude_code.sh")))
    assert answer in ({"calm": True}, {"calm": False})
