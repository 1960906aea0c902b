"""What benchmarks that ask any server with OpenAI's completions API have in common: prompts of token ids, and plots."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.endpoint import LEAST_TOKEN, WARM_UP_PROMPT, WARM_UP_TOKENS, Endpoint
from specahead.lab.plotting import make_figure, put_legend, save_figure

_WARM_UP = (1, 4, 16)  # requests at once


@dataclass(frozen=True)
class Answered:
    """A request as its client saw it; times in seconds by time.perf_counter."""

    due: float
    """When it was to be sent. What a late client adds counts as the server's."""
    first: float
    """When the first token came; 0: the server refused the request."""
    ended: float
    generated: int


def endpoint_of(flags: argparse.Namespace) -> Endpoint:
    """Return the server that a benchmark's flags name. Raises as Endpoint."""
    fields = {"exactness": flags.exactness} if flags.exactness else {}
    return Endpoint(flags.url, flags, fields)


def warm_up(client: Endpoint, source: "TokenSource", seed: int, temperature: float = 0.0) -> None:
    """Let the server compile and capture what it does so at its first requests."""
    tokens = source.draw(np.random.default_rng(seed + 1), WARM_UP_PROMPT)
    for count in _WARM_UP:
        client.generate_at_once([tokens[start:] for start in range(count)], WARM_UP_TOKENS, temperature)


class TokenSource:
    """Where the tokens of prompts come from: texts, or any token ids."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Raises ValueError where texts or their tokenizer are missing, OSError for files that cannot be read."""
        self._vocabulary, self._of_texts = flags.vocabulary, list[int]()
        if bool(flags.text) != bool(flags.tokenizer):
            raise ValueError("--text and --tokenizer go together: the server is sent the texts' token ids")
        if flags.text:
            text = "\n".join(Path(file).read_text(encoding="utf-8") for file in flags.text)
            self._of_texts = load_tokenizer(flags.tokenizer).encode(text, add_special_tokens=False)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Return `count` tokens of the texts that follow each other from some place on, or any ids.

        Raises ValueError for texts that are shorter.
        """
        if not self._of_texts:
            return random.integers(LEAST_TOKEN, self._vocabulary, count).tolist()
        if count > len(self._of_texts):
            raise ValueError(f"--text has {len(self._of_texts)} tokens, and a prompt needs {count}: name longer files")
        start = int(random.integers(0, len(self._of_texts) - count + 1))
        return self._of_texts[start : start + count]

    def as_prompt(self, answer: Sequence[int]) -> list[int]:
        """Return an answer as later prompts have it: ids that are not drawn often end a random model's texts."""
        return list(answer) if self._of_texts else [token % self._vocabulary for token in answer]


def plot_latency(load: Sequence[float], lines: Mapping[str, Sequence[float]], what: str, path: Path) -> None:
    """Plot seconds over a load. lines: the seconds at each load, by label. what: names the load."""
    figure, (axis,) = make_figure("How long answers take as the load grows: lower is better")
    for label, seconds in lines.items():
        axis.plot(load, seconds, marker="o", label=label)
    axis.set(xlabel=what, ylabel="seconds", ylim=(0, None))
    put_legend(axis)
    save_figure(figure, path)
