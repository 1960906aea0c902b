"""`make demo`: launch everything on this machine, continue a real text, show what speculation did, stop.

The text is the opening of L. Frank Baum, "The Wonderful Wizard of Oz" (1900), in the public domain.
"""

import re
import subprocess
import sys
import time

from orchestrator.api.client import generate
from specahead import models

SHOWN, MAX_TOKENS = 300, 96


def main() -> None:
    command = [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", "--http-port", "0"]
    command += ["--logging", '{"level": "warning"}']  # so that the text stands out
    launch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = _wait_until_ready(launch)
        prompt = models.DEMO_TEXT.read_text(encoding="utf-8")
        for exactness in ("exact", "approximate"):
            _continue(address, prompt, exactness)
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


def _continue(address: str, prompt: str, exactness: str) -> None:
    """Continue the text, and print it as it comes, then how speculation went."""
    print(f"\n--- {exactness}, greedy: … {prompt[-SHOWN:].strip()}", end=" ▶ ", flush=True)
    times: list[float] = []

    def show(text: str) -> None:
        times.append(time.perf_counter())
        print(text, end="", flush=True)

    started = time.perf_counter()
    result = generate(address, prompt, max_tokens=MAX_TOKENS, temperature=0.0, exactness=exactness, on_text=show)
    speculation, seconds = result.speculation, time.perf_counter() - times[0]
    print(
        f"\n\n{result.prompt_tokens} prompt tokens, {result.cached_tokens} of them found in the KV; first token after "
        f"{times[0] - started:.2f} s, then {(len(result.token_ids) - 1) / seconds:.1f} tokens a second; "
        f"{speculation['accepted']} of {speculation['drafted']} drafted tokens accepted in {speculation['rounds']} "
        f"rounds, {speculation['kv_read_fraction']:.1%} of the KV read"
    )


if __name__ == "__main__":
    main()
