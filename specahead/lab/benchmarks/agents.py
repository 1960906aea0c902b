"""`specahead bench agents`: the load that agents make, at any server with OpenAI's completions API.

Each agent has a long context. In each of its turns it sends the context with new tokens behind it, as a tool's output
would be, generates some tokens, pauses, and goes on with both in its next turn. So a server knows most of each prompt,
and has to read the new part soon, beside what the other agents generate. Prompts are any token ids, or pieces of
texts. Times are the client's own. Knows nothing of how the server works.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from specahead.lab.benchmarks import arrivals
from specahead.lab.benchmarks.completions import Answered, TokenSource, endpoint_of, plot_latency, warm_up
from specahead.lab.endpoint import Endpoint
from specahead.lab.results import Columns, describe_run, processor, text_table, write_json


@dataclass(frozen=True)
class AgentsRow:
    """What a number of agents saw. Later turns are all but each agent's first."""

    agents: int
    turns: int
    """Turns that were answered."""
    tokens_a_second: float
    """Tokens that later turns generated, over the time from their first request to their last answer."""
    first_token_p50: float
    """Seconds from a later turn's request to its first token."""
    first_token_p95: float
    turn_p50: float
    """Seconds from a later turn's request to the end of its answer."""
    opening_first_token_p50: float
    """Seconds from a first turn's request to its first token."""


def run(flags: argparse.Namespace) -> Sequence[AgentsRow | arrivals.ArrivalsRow]:
    """Measure a row for each number of agents, print the table, and write it to the JSON file if one is named. With
    --arrivals, requests that come at random are measured in their place.

    Raises ValueError for flags that give nothing to measure and for a request that the server refuses, OSError if it
    does not answer.
    """
    if flags.arrivals:
        return arrivals.run(flags)
    if min(*flags.agents, flags.added, flags.generated) < 1 or flags.turns < 2:
        raise ValueError("--agents, --added and --generated must be positive, --turns at least 2")
    if not 1 <= flags.context[0] <= flags.context[1]:
        raise ValueError(f"--context {flags.context[0]} {flags.context[1]}: expected the least and the most tokens")
    head, (rows, told_ids) = describe_run(flags, processor()), measure(flags)
    print(report(rows))
    if not told_ids:
        print("The server returns no token ids: other tokens took the place of its answers in later prompts.")
    write_json(flags.json, head | {"server returns token ids": told_ids, "rows": rows})
    if flags.plot:
        lines = {
            "whole turn, median": [row.turn_p50 for row in rows],
            "first token, median": [row.first_token_p50 for row in rows],
            "first token, 95 % within": [row.first_token_p95 for row in rows],
        }
        plot_latency([row.agents for row in rows], lines, "agents at once", Path(flags.plot))
    return rows


def measure(flags: argparse.Namespace) -> tuple[list[AgentsRow], bool]:
    """Return the rows, and whether the server returns token ids. Raises as `run`."""
    client, source = endpoint_of(flags), TokenSource(flags)
    warm_up(client, source, flags.seed)
    rows = []
    for number, agents in enumerate(flags.agents):
        with ThreadPoolExecutor(agents) as pool:
            seeds = [(flags.seed, number, agent) for agent in range(agents)]
            rows.append(row_of(list(pool.map(partial(_play, client, source, flags), seeds))))
    return rows, client.told_ids


def _play(
    client: Endpoint, source: TokenSource, flags: argparse.Namespace, seed: tuple[int, int, int]
) -> list[Answered]:
    """Run all turns of an agent, one after another."""
    random = np.random.default_rng(seed)
    least, most = flags.context
    tokens = source.draw(random, int(random.integers(least, most + 1)))
    turns = []
    for _ in range(flags.turns):
        sent = time.perf_counter()
        answer = client.generate(tokens, flags.generated)
        turns.append(Answered(sent, answer.first, time.perf_counter(), len(answer.tokens)))
        tokens += source.as_prompt(answer.tokens) + source.draw(random, flags.added)
        time.sleep(flags.pause)
    return turns


def row_of(plays: Sequence[Sequence[Answered]]) -> AgentsRow:
    """Return what the turns of each agent come to."""
    later = [turn for play in plays for turn in play[1:]]
    seconds = max(turn.ended for turn in later) - min(turn.due for turn in later)
    firsts = [turn.first - turn.due for turn in later]
    return AgentsRow(
        agents=len(plays),
        turns=sum(map(len, plays)),
        tokens_a_second=sum(turn.generated for turn in later) / seconds,
        first_token_p50=float(np.percentile(firsts, 50)),
        first_token_p95=float(np.percentile(firsts, 95)),
        turn_p50=float(np.percentile([turn.ended - turn.due for turn in later], 50)),
        opening_first_token_p50=float(np.percentile([play[0].first - play[0].due for play in plays], 50)),
    )


_COLUMNS: Columns[AgentsRow] = {
    "agents": lambda row: str(row.agents),
    "tokens/s": lambda row: f"{row.tokens_a_second:.1f}",
    "first p50": lambda row: f"{row.first_token_p50:.3f} s",
    "p95": lambda row: f"{row.first_token_p95:.3f} s",
    "turn p50": lambda row: f"{row.turn_p50:.2f} s",
    "first turn: first p50": lambda row: f"{row.opening_first_token_p50:.2f} s",
}


def report(rows: Sequence[AgentsRow]) -> str:
    """Return the table."""
    legend = "Later turns alone, but for the last column. First: from the request to the first token."
    return f"{text_table(_COLUMNS, rows, left=0)}\n{legend}"
