"""NVIDIA's aiperf: it measures a load, and its figures count the requests that it sent."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import MODEL, TOKENIZER


def test_a_profile_of_chats(url: str, tmp_path: Path) -> None:
    aiperf = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", url]
    load = ["--endpoint-type", "chat", "--streaming", "--request-count", "8", "--concurrency", "2"]
    sizes = ["--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "12", "--tokenizer", str(TOKENIZER)]
    done = subprocess.run(
        [*aiperf, *load, *sizes, "--output-artifact-dir", str(tmp_path), "--ui", "none"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == 8 and figures["time_to_first_token"]["avg"] > 0
    assert not figures.get("error_summary")
