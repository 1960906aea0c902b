"""`make demo`: launch everything on this machine, continue a real text, show what speculation did, stop.

The text is the opening of L. Frank Baum, "The Wonderful Wizard of Oz" (1900), in the public domain.
"""

import re
import subprocess
import sys
import time

from orchestrator.api.client import Generation, generate
from specahead import models

SHOWN, MAX_TOKENS = 300, 96


def main() -> None:
    started = time.perf_counter()
    command = [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", "--http-port", "0"]
    command += ["--logging", '{"level": "warning"}']  # so that the text stands out
    launch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = _wait_until_ready(launch)
        print(f"\nready after {time.perf_counter() - started:.1f} s\n")
        prompt = models.DEMO_TEXT.read_text(encoding="utf-8")
        results = {exactness: _continue(address, prompt, exactness) for exactness in ("exact", "approximate")}
        _summarise(results)
    finally:
        launch.terminate()
        launch.wait(30)


def _wait_until_ready(launch: "subprocess.Popen[str]") -> str:
    """Print the launch's output up to `ready`, and return the gRPC address."""
    address = ""
    assert launch.stdout is not None
    for line in launch.stdout:
        if line.strip() == "ready":
            return address
        print(line, end="", flush=True)
        found = re.match(r"gRPC endpoint: (\S+)", line)
        address = found.group(1) if found else address
    sys.exit("error: the launch ended before it was ready")


def _continue(address: str, prompt: str, exactness: str) -> tuple[Generation, float, float]:
    """Return the result, the seconds to the first token, and the seconds from the first to the last."""
    print(f"--- {exactness}, greedy: … {prompt[-SHOWN:].strip()}", end=" ▶ ", flush=True)
    first: list[float] = []

    def show(text: str) -> None:
        first.append(time.perf_counter())
        print(text, end="", flush=True)

    started = time.perf_counter()
    result = generate(address, prompt, max_tokens=MAX_TOKENS, temperature=0.0, exactness=exactness, on_text=show)
    print("\n")
    return result, first[0] - started, time.perf_counter() - first[0]


def _column(result: Generation, first: float, seconds: float) -> dict[str, str]:
    """Return the column of one run in the table, by the names of its rows."""
    speculation = result.speculation
    return {
        "prompt tokens": str(result.prompt_tokens),
        "of them found in the KV": str(result.cached_tokens),
        "generated tokens": str(len(result.token_ids)),
        "tokens a second (after the first)": f"{(len(result.token_ids) - 1) / seconds:.1f}",
        "time to first token, s": f"{first:.2f}",
        "rounds": str(speculation["rounds"]),
        "drafted": str(speculation["drafted"]),
        "accepted": str(speculation["accepted"]),
        "mean accepted length, a round": f"{speculation['accepted'] / max(1, speculation['rounds']):.2f}",
        "share of the KV read": f"{speculation['kv_read_fraction']:.3f}",
    }


def _summarise(results: dict[str, tuple[Generation, float, float]]) -> None:
    columns = [_column(*result) for result in results.values()]
    print(f"{'':<34}" + "".join(f"{exactness:>14}" for exactness in results))
    for name in columns[0]:
        print(f"{name:<34}" + "".join(f"{column[name]:>14}" for column in columns))
    last, _, _ = list(results.values())[-1]
    if last.cached_tokens:
        found = f"{last.cached_tokens} of its {last.prompt_tokens} prompt tokens"
        print(f"\nThe second run found the KV of {found}, from the first run, so that their")
        print("times to the first token and of prefill cannot be compared.")


if __name__ == "__main__":
    main()
