"""lm-eval: generated text, and the log likelihood of texts, for which it asks for echo with logprobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import MODEL, TOKENIZER

GENERATE = """task: generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{good}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["{{good}}", "{{bad}}"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""
CASES = [
    {"prompt": "The old man looked at the", "good": " sea", "bad": " xqzv"},
    {"prompt": "He said that he would", "good": " not", "bad": " ;;;"},
    {"prompt": "There was once a", "good": " man", "bad": " ))"},
]


def test_generation_and_log_likelihood(url: str, tmp_path: Path) -> None:
    """English is likelier than noise, and each generated answer has text."""
    data = tmp_path / "cases.jsonl"
    data.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    served = f"model={MODEL},base_url={url}/v1/completions,tokenizer={TOKENIZER},max_length=2048,num_concurrent=2"
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", "local-completions"]
    done = subprocess.run(
        [*command, "--model_args", served, "--tasks", "generate,choose", "--include_path", str(tmp_path),
         "--output_path", str(tmp_path / "out"), "--log_samples"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["choose"]["acc,none"] == 1.0
    (samples,) = (tmp_path / "out").rglob("samples_generate_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == len(CASES) and all(answers)
