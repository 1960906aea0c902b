"""Recorded announcements of the bundled draft, put together to the shape of an 8B target at 100K context.

They were recorded at commit c55eeadb by `bench codec --record`, which is no more. Passages of held-out books, evenly
spread, were read by the draft: 4,076 tokens, then ten rounds of four. A round's scores are its four queries' mean block
weights (blocks of 16), over 250 blocks: those that lie between the sink block and the window of four when the first
round is chosen. The plan blends the weights of draft heads for each of the 40 target heads, what the last round chose
is weighed `stickiness` times, and the heaviest tenth is chosen, 1,000 blocks of all heads together.

A row of 6,250 blocks is 25 passages side by side; rows that belong to the same heads' passages are a group, so 40 rows
agree with each other as far as one model's heads do on one text. 256 rows are six groups and 16 evenly spread heads of
a seventh. No passage is used twice, and nothing is added: churn, runs along the context and agreement in a group are
those of the recording. What is not there: agreement beyond a group, decay of attention beyond 4,096 tokens, and the
block that a context gains every fourth round.
"""

import json
import lzma
from pathlib import Path

import numpy as np

from specahead.sparsity.selection import BlockSelection

ANNOUNCED = Path(__file__).parent / "traces" / "announced.npz"
ROUNDS, ROWS, BLOCKS = 10, 256, 6250


def open_traces(file: Path) -> "np.lib.npyio.NpzFile":
    """Open a file of traces. Raises FileNotFoundError where the package was installed, since that leaves them out."""
    if not file.exists():
        message = f"{file} is not there: an installed specahead comes without recordings; run this from its sources"
        raise FileNotFoundError(message)
    return np.load(file, allow_pickle=False)


def load_trace(file: Path) -> tuple[list[BlockSelection], dict[str, str]]:
    """Return the selection of each round over all rows, and how the trace was made. Raises FileNotFoundError.

    The file's history is uint16 [ROWS, BLOCKS], in which bit t is set if round t chose the block.
    """
    with open_traces(file) as content:
        history = np.frombuffer(lzma.decompress(content["history"].tobytes()), "<u2").reshape(ROWS, BLOCKS)
        rounds = [BlockSelection.from_matrix((history >> i & 1).astype(bool)) for i in range(ROUNDS)]
        return rounds, json.loads(content["about"].tobytes())
