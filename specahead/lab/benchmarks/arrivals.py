"""`specahead bench agents --arrivals`: requests that come at random, at any server with OpenAI's completions API.

They come by a Poisson process, whether or not earlier ones are answered. Lengths are drawn from those of a trace of
conversations, and a fifth of the requests is sampled. Prompts share nothing. Times are the client's own.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specahead.lab.benchmarks.completions import Answered, TokenSource, endpoint_of, plot_latency, warm_up
from specahead.lab.endpoint import Endpoint
from specahead.lab.results import Columns, describe_run, live_head, live_line, processor, write_json

# Quantiles of the 12,031 requests of Mooncake's trace of conversations (FAST25-release/traces/conversation_trace.jsonl,
# kvcache-ai/Mooncake, Apache-2.0): tokens of prompts and of answers, which hardly go together (correlation 0.05).
_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
_PROMPTS = (891, 901, 964, 1662, 3263, 4993, 6909, 9570, 13_196, 17_869, 27_367, 39_550, 85_400, 126_195)
_ANSWERS = (1, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1118, 2000)
MOST_ANSWER = _ANSWERS[-1]
LEAST_PROMPT, MOST_PROMPT = 2048, 65_536  # what shorter and longer prompts are cut to
SAMPLED, TEMPERATURE = 0.2, 0.8  # share of the requests that is sampled, and how; the others are greedy


@dataclass(frozen=True)
class Arrival:
    """A request of the load."""

    at: float
    """Seconds after the first one."""
    prompt: int
    answer: int
    """Tokens of both."""
    temperature: float


@dataclass(frozen=True)
class ArrivalsRow:
    """What clients saw at one rate; times in seconds from a request, of answered requests."""

    rate: float
    """Requests that come a second, on average."""
    requests: int
    refused: int
    tokens_a_second: float
    """Generated from the first request to the last answer."""
    first_token_p50: float
    first_token_p99: float
    turn_p50: float
    """To the end of the answer."""
    turn_p99: float


def load_of(rate: float, requests: int, seed: int, scale: float = 1.0) -> list[Arrival]:
    """Return requests in the order of their arrival: the same ones at every rate, closer together at higher ones.

    scale: what all lengths are divided by, for small models.
    """
    random = np.random.default_rng(seed)
    at = np.cumsum(random.exponential(1.0, requests)) / rate
    prompts = np.clip(_lengths(random, _PROMPTS, requests), LEAST_PROMPT, MOST_PROMPT) / scale
    answers = _lengths(random, _ANSWERS, requests) / scale
    sampled = random.random(requests) < SAMPLED
    return [
        Arrival(float(when - at[0]), max(1, round(prompt)), max(1, round(answer)), TEMPERATURE if warm else 0.0)
        for when, prompt, answer, warm in zip(at, prompts, answers, sampled, strict=True)
    ]


def _lengths(random: np.random.Generator, quantiles: Sequence[int], count: int) -> np.ndarray:
    """Draw lengths, by their logarithms between two quantiles."""
    return np.exp(np.interp(random.random(count), _SHARES, np.log(quantiles)))


def run(flags: argparse.Namespace) -> list[ArrivalsRow]:
    """Measure and print a row for each rate, and write them to the JSON file if one is named. Raises as `measure`."""
    rows = measure(flags)
    write_json(flags.json, describe_run(flags, processor()) | {"rows": rows})
    if flags.plot:
        lines = {
            "whole turn, median": [row.turn_p50 for row in rows],
            "whole turn, 99 % within": [row.turn_p99 for row in rows],
            "first token, median": [row.first_token_p50 for row in rows],
            "first token, 99 % within": [row.first_token_p99 for row in rows],
        }
        plot_latency(flags.arrivals, lines, "requests a second", Path(flags.plot))
    return rows


def measure(flags: argparse.Namespace) -> list[ArrivalsRow]:
    """Return a row for each rate, and print each as it comes.

    Raises ValueError for flags that give nothing to measure and where a server refuses every request, OSError if it
    does not answer.
    """
    if min(flags.arrivals) <= 0 or flags.requests < 2 or flags.scale < 1:
        raise ValueError("--arrivals must be positive, --requests at least 2, --scale at least 1")
    client, source = endpoint_of(flags), TokenSource(flags)
    warm_up(client, source, flags.seed)
    warm_up(client, source, flags.seed, TEMPERATURE)
    rows = []
    print(live_head(_COLUMNS))
    for number, rate in enumerate(flags.arrivals):
        asked = load_of(rate, flags.requests, flags.seed, flags.scale)
        rows.append(row_of(rate, _ask_all(client, source, asked, (flags.seed, number))))
        print(live_line(_COLUMNS, rows[-1]), flush=True)
    return rows


_COLUMNS: Columns[ArrivalsRow] = {
    "   rate": lambda row: f"{row.rate:g}/s",
    "tokens/s": lambda row: f"{row.tokens_a_second:.1f}",
    "first p50": lambda row: f"{row.first_token_p50:.3f} s",
    "first p99": lambda row: f"{row.first_token_p99:.3f} s",
    "turn p50": lambda row: f"{row.turn_p50:.2f} s",
    "turn p99": lambda row: f"{row.turn_p99:.2f} s",
    "refused": lambda row: str(row.refused),
}


def _ask_all(client: Endpoint, source: TokenSource, load: list[Arrival], seed: tuple[int, int]) -> list[Answered]:
    """Send each request when it is due. seed: of the run's own, so that it does not find another run's prompts."""
    random = np.random.default_rng(seed)
    prompts = [source.draw(random, each.prompt) for each in load]
    began = time.perf_counter() + 0.1

    def ask(asked: Arrival, prompt: list[int]) -> Answered:
        due = began + asked.at
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            answer = client.generate(prompt, asked.answer, asked.temperature)
        except ValueError:
            return Answered(due, 0.0, time.perf_counter(), 0)
        return Answered(due, answer.first, time.perf_counter(), len(answer.tokens))

    with ThreadPoolExecutor(len(load)) as pool:
        return list(pool.map(ask, load, prompts))


def row_of(rate: float, answers: Sequence[Answered]) -> ArrivalsRow:
    """Return what these requests come to. Raises ValueError if none was answered."""
    done = [each for each in answers if each.first]
    if not done:
        raise ValueError(f"at {rate:g} requests a second the server refused all {len(answers)}")
    seconds = max(each.ended for each in done) - min(each.due for each in answers)
    firsts = np.percentile([each.first - each.due for each in done], [50, 99])
    turns = np.percentile([each.ended - each.due for each in done], [50, 99])
    tokens = sum(each.generated for each in done) / seconds
    return ArrivalsRow(rate, len(answers), len(answers) - len(done), tokens, *map(float, (*firsts, *turns)))
