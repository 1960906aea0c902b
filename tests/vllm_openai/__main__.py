"""`VLLM=path make test-vllm`: vLLM's own tests of its OpenAI endpoints, run against a launch of the bundled pair.

The path is that of vLLM's sources (a checkout, or its unpacked source package), of which nothing is kept here.
`exclusions.py` lists what is run, and what of it is not, with reasons.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.stack import ROOT
from tests.vllm_openai.exclusions import FILES

INI = """[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
timeout = 600
addopts = -q -rsfE -p no:cacheprovider --import-mode=importlib -p tests.vllm_openai.adapter
"""


def main() -> None:
    """Run the tests, with further arguments as pytest's; exit as it does."""
    sources = Path(os.environ.get("VLLM", "")) / "tests" / "entrypoints"
    missing = [name for name in FILES if not (sources / name).is_file()]
    if missing:
        sys.exit(
            f"error: VLLM={os.environ.get('VLLM', '')!r} has no {sources / missing[0]}: expected the path of vLLM's "
            "sources, as of 0.33 (a checkout, or its unpacked source package)"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text(INI)
        for name in ("conftest.py", "openai/responses/conftest.py", *FILES):
            copy = Path(folder) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            # The model that is served is ours, whichever they were written for.
            text = (sources / name).read_text()
            model = re.search(r'^MODEL_NAME = "(.*)"$', text, re.M)
            text = text.replace("from ...utils import", "from tests.utils import")
            copy.write_text(text.replace(model[1], "tiny-target") if model else text)
        command = [sys.executable, "-m", "pytest", "-c", f"{folder}/pytest.ini", "--rootdir", folder]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        sys.exit(subprocess.run([*command, *(sys.argv[1:] or FILES)], cwd=folder, env=environment).returncode)


if __name__ == "__main__":
    main()
