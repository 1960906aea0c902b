"""guidellm: it measures a load, and its figures count the requests that it sent."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import TOKENIZER


def test_a_benchmark_of_chats(url: str, tmp_path: Path) -> None:
    guidellm = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    load = ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    sizes = ["--data", "kind=synthetic_text,prompt_tokens=60,output_tokens=12"]
    done = subprocess.run(
        [*guidellm, *load, *sizes, "--backend", f"kind=openai_http,target={url}",
         "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--output", "kind=json,path=report.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["output_token_count"]["successful"]["mean"] == 12
