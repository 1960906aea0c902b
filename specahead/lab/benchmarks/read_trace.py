"""What the bundled target reads behind the real services, put together to the shape of an 8B target.

Recording. The traces were recorded at commit c55eeadb by the recorder that this module was then. Target and draft
service and the client endpoints were started as any deployment would, on a CPU; passages of held-out books, evenly
spread, were prompts of 4,076 tokens to `approximate` sessions, four at once, which generated 64 tokens each
(temperature 1, the passage's number as seed: greedy text repeats itself sooner, and what is read changes less). Kept of
a session are its first 20 rounds, and sessions without 20 rounds in a row are left out, so rounds that accept all are a
little rarer than they were. Of a round 250 blocks are kept for each of the 40 (layer, KV head) pairs: those that lie
between the sink block and the plan's window of four when the first round is chosen. A run of its own was made for each
share.

Shares. Sinks, window, group means and the blocks beside the window take much of a budget at 4,096 tokens and next to
nothing at 100K. So the services are given more than the share, as much as leaves it within the 250 blocks, by trial.
As a session generates, the new blocks at its end take their part of the budget: the share falls by 5 to 20 % of itself
over the 20 rounds, most where it is least. A session's first round, before the target has weights of its own, reads
nine tenths.

Stretching. A row is passages side by side, 250 blocks each. The 40 rows of a passage stay together and are a group;
256 rows are six groups and 16 evenly spread heads of a seventh. Each group has the passages in an order of its own, by
chance but always the same; so does each session of a batch (`shifted`). No passage stands twice in a row until all
have been used (32 passages: 128K tokens). Longer rows begin again in another order: there, some blocks of a row are
read and dropped in the same rounds as others far from them. Between groups and sessions all passages are used again.
What is not there is as in lab/benchmarks/announced_trace.py: agreement beyond a group, decay of attention beyond 4,096
tokens, and the blocks that a context gains. Sink and window are not there either.
"""

import json
import lzma
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specahead.lab.benchmarks.announced_trace import ROWS, open_traces

READS = Path(__file__).parent / "traces" / "reads.npz"
BLOCKS_AT_100K, MOST_BLOCKS = 6250, 32768  # of 16 tokens: 100,000 and 524,288


@dataclass(frozen=True)
class ReadTrace:
    """What one session of an 8B target reads, round by round, at a share of its blocks.

    Churn counts blocks of a round that were not read before; selected and churn are means from the fifth round on.
    """

    name: str
    """The share: 1/8, 1/10, 1/16 or 1/32."""
    budget: float
    """The services' --budget."""
    selected: float
    """Share of the 250 blocks kept that a round reads."""
    churn: float
    """Share of a round's blocks that the last round did not read."""
    churn4: float
    """Share of a round's blocks that none of the last four rounds read."""
    history: np.ndarray
    """uint32 [passages, heads, 250]; bit t is set if round t read the block."""
    rounds: int = 20
    session: int = 0
    """Which arrangement of the passages."""

    def matrix(self, round_: int, blocks: int = BLOCKS_AT_100K) -> np.ndarray:
        """Return what a round reads: bool [ROWS, blocks]. Fewer blocks are the first ones of more.

        Rows of more blocks than all passages have (8,000 with 32 of them) repeat passages in another order.
        """
        if not 0 <= round_ < self.rounds:
            raise ValueError(f"round {round_}: the trace has rounds 0 … {self.rounds - 1}")
        if not 1 <= blocks <= MOST_BLOCKS:
            raise ValueError(f"blocks {blocks}: expected 1 … {MOST_BLOCKS}")
        heads, width = self.history.shape[1:]
        placed = self.arrangement(-(-blocks // width))
        read = (self.history >> np.uint32(round_) & 1).astype(bool)
        rows = read[placed].transpose(0, 2, 1, 3).reshape(len(placed), heads, -1)
        left = ROWS - (len(placed) - 1) * heads
        last = rows[-1, np.arange(left) * heads // left]
        return np.concatenate([rows[:-1].reshape(-1, rows.shape[2]), last])[:, :blocks]

    def arrangement(self, segments: int) -> np.ndarray:
        """Return which passage is at each place of each group: int [groups, segments]."""
        count, groups = len(self.history), -(-ROWS // self.history.shape[1])
        orders = [np.random.default_rng((self.session, group)) for group in range(groups)]
        turns = -(-segments // count)
        return np.stack(
            [np.concatenate([order.permutation(count) for _ in range(turns)])[:segments] for order in orders]
        )

    def shifted(self, session: int) -> "ReadTrace":
        """Return the same passages arranged for another session of a batch; session 0 has the trace as loaded."""
        return replace(self, session=session)


def load_reads() -> list[ReadTrace]:
    """Return the traces of READS, the widest share first. Raises FileNotFoundError."""
    with open_traces(READS) as content:
        traces = []
        for name in content.files:
            if f"{name} facts" in content.files:
                facts = json.loads(content[f"{name} facts"].tobytes())
                history = np.frombuffer(lzma.decompress(content[name].tobytes()), "<u4")
                traces.append(ReadTrace(history=history.reshape(facts.pop("shape")), **facts))
        return traces


def about_reads() -> dict[str, str]:
    """Return how the traces of READS were made. Raises FileNotFoundError."""
    with open_traces(READS) as content:
        return json.loads(content["about"].tobytes())
