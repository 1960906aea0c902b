"""`make demo`: launch everything on this machine, continue a real text, show what speculation did, stop.

The text is the opening of L. Frank Baum, "The Wonderful Wizard of Oz" (1900), in the public domain.
"""

import argparse
import re
import subprocess
import sys
import time

from specahead import models
from specahead.cli.generate import continue_text
from specahead.cli.server import Server

SHOWN, MAX_TOKENS = 300, 96


def main() -> None:
    command = [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", "--port", "0"]
    command += ["--logging", '{"level": "warning"}']  # so that the text stands out
    launch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        server = Server(argparse.Namespace(url=_wait_until_ready(launch), api_key="", tls_ca=None))
        prompt = models.DEMO_TEXT.read_text(encoding="utf-8")
        for exactness in ("exact", "approximate"):
            _continue(server, prompt, exactness)
    finally:
        launch.terminate()
        launch.wait(30)


def _wait_until_ready(launch: "subprocess.Popen[str]") -> str:
    """Print the launch's output up to `ready`, and return the URL of its HTTP endpoint."""
    address = ""
    assert launch.stdout is not None
    for line in launch.stdout:
        if line.strip() == "ready":
            return address
        print(line, end="", flush=True)
        found = re.match(r"HTTP endpoint: (\S+)", line)
        address = found.group(1) if found else address
    sys.exit("error: the launch ended before it was ready")


def _continue(server: Server, prompt: str, exactness: str) -> None:
    """Continue the text, and print it as it comes, then how speculation went."""
    print(f"\n--- {exactness}, greedy: … {prompt[-SHOWN:].strip()}", end=" ▶ ", flush=True)
    times: list[float] = []

    def show(text: str) -> None:
        times.append(time.perf_counter())
        print(text, end="", flush=True)

    started = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "exactness": exactness}
    answer = continue_text(server, body, show)
    speculation, usage, seconds = answer["speculation"], answer["usage"], time.perf_counter() - times[0]
    print(
        f"\n\n{usage['prompt_tokens']} prompt tokens, {usage['prompt_tokens_details']['cached_tokens']} of them found "
        f"in the KV; first token after {times[0] - started:.2f} s, then "
        f"{(usage['completion_tokens'] - 1) / seconds:.1f} tokens a second; "
        f"{speculation['accepted']} of {speculation['drafted']} drafted tokens accepted in {speculation['rounds']} "
        f"rounds, {speculation['kv_read_fraction']:.1%} of the KV read"
    )


if __name__ == "__main__":
    main()
