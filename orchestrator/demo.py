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
    command += ["--logging", '{"level": "warning"}']  # the text is what is to be seen
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
    """Pass the launch's output on up to `ready`; returns the gRPC address."""
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
    """The result, seconds to the first token and seconds from the first to the last."""
    print(f"--- {exactness}, greedy: … {prompt[-SHOWN:].strip()}", end=" ▶ ", flush=True)
    first: list[float] = []

    def show(text: str) -> None:
        first.append(time.perf_counter())
        print(text, end="", flush=True)

    started = time.perf_counter()
    result = generate(address, prompt, max_tokens=MAX_TOKENS, temperature=0.0, exactness=exactness, on_text=show)
    print("\n")
    return result, first[0] - started, time.perf_counter() - first[0]


def _summarise(results: dict[str, tuple[Generation, float, float]]) -> None:
    def row(name: str, values: list[str]) -> None:
        print(f"{name:<34}" + "".join(f"{value:>14}" for value in values))

    generations = [result for result, _, _ in results.values()]
    speculations = [result.speculation for result in generations]
    row("", list(results))
    row("prompt tokens", [str(g.prompt_tokens) for g in generations])
    row("of them found in the KV", [str(g.cached_tokens) for g in generations])
    row("generated tokens", [str(len(g.token_ids)) for g in generations])
    row("tokens a second (after the first)", [f"{(len(g.token_ids) - 1) / s:.1f}" for g, _, s in results.values()])
    row("time to first token, s", [f"{first:.2f}" for _, first, _ in results.values()])
    row("rounds", [str(s["rounds"]) for s in speculations])
    row("drafted", [str(s["drafted"]) for s in speculations])
    row("accepted", [str(s["accepted"]) for s in speculations])
    row("mean accepted length, a round", [f"{s['accepted'] / max(1, s['rounds']):.2f}" for s in speculations])
    row("share of the KV read", [f"{s['kv_read_fraction']:.3f}" for s in speculations])
    row("bytes announced", [str(s["announced_bytes"]) for s in speculations])
    for phase in ("prefill", "draft", "wait", "verify"):
        row(f"{phase}, s", [f"{s[phase + '_seconds']:.2f}" for s in speculations])
    last = generations[-1]
    if last.cached_tokens:
        found = f"{last.cached_tokens} of its {last.prompt_tokens} prompt tokens"
        print(f"\nThe second run found the KV of {found}, which the first had left: their times to")
        print("the first token and of prefill are not to be compared.")
    print("wait: the target had nothing to verify yet. draft runs beside it, on the other process.")


if __name__ == "__main__":
    main()
