"""What the bundled target reads behind the real services, put together to the shape of an 8B target.

Recording. Target and draft service and the client endpoints are started as any deployment would, on a CPU; passages of
held-out books, evenly spread, are prompts of 4,076 tokens to `approximate` sessions of method `ahead`, four at once,
which generate 64 tokens each (temperature 1, the passage's number as seed: greedy text repeats itself sooner,
and what is read changes less). The target writes what each round read (lab/benchmarks/recording.py). Kept of a session
are its first 20 rounds, and sessions without 20 rounds in a row are left out, so rounds that accept all are a little
rarer than they were. Of a round 250 blocks are kept for each of the 40 (layer, KV head) pairs: those that lie between
the sink block and the plan's window of four when the first round is chosen. A run of its own is made for each share.

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
What is not there is as in lab/benchmarks/selection_trace.py: agreement beyond a group, decay of attention beyond 4,096
tokens, and the blocks that a context gains. Sink and window are not there either.
"""

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import numpy as np
from tqdm import tqdm

from protos import inference_pb2, inference_pb2_grpc
from specahead import models
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.benchmarks.processes import children, free_addresses, port_of, start_endpoints, wait_for_service
from specahead.lab.benchmarks.recording import SessionReads
from specahead.lab.benchmarks.recording import load_reads as load_recording
from specahead.lab.benchmarks.selection_trace import ROWS, open_traces
from specahead.lab.evaluation.cases import held_out_files
from specahead.lab.evaluation.models import model_hash
from specahead.lab.evaluation.plans import save_plan
from specahead.sparsity.plan import load_plan
from specahead.sparsity.selection import BlockSelection
from specahead.wire.options import OPTIONS

SERVICE = "specahead.lab.benchmarks.serving.service"  # records what a target reads
READS = Path(__file__).parent / "traces" / "reads.npz"
PROMPT, GENERATED, ROUNDS, AT_ONCE = 4076, 64, 20, 4
FIRST, BLOCKS = 1, 250
BLOCKS_AT_100K, MOST_BLOCKS = 6250, 32768  # of 16 tokens: 100,000 and 524,288
PASSAGES = 32  # recorded for each share
BUDGETS = {"1/8": 0.152, "1/10": 0.1265, "1/16": 0.09, "1/32": 0.059}  # --budget of the services for each share


@dataclass(frozen=True)
class ReadTrace:
    """What one session of an 8B target reads, round by round, at a share of its blocks.

    Churn counts blocks of a round that were not read before; selected and churn are means from the fifth round on.
    """

    name: str
    """The share, as in BUDGETS."""
    budget: float
    """The services' --budget."""
    selected: float
    """Share of the 250 blocks kept that a round reads."""
    churn: float
    """Share of a round's blocks that the last round did not read."""
    churn4: float
    """Share of a round's blocks that none of the last four rounds read."""
    history: np.ndarray
    """uint32 [passages, heads, BLOCKS]; bit t is set if round t read the block."""
    rounds: int = ROUNDS
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

    def selections(self) -> list[BlockSelection]:
        """Return what each round reads, over all rows, at 100K."""
        return [BlockSelection.from_matrix(self.matrix(i)) for i in range(self.rounds)]


def save_reads(traces: list[ReadTrace], file: Path, about: dict[str, str]) -> None:
    """Write each trace under its name: the history packed, and all other fields as `facts`."""
    arrays = {"about": _text(about)}
    for trace in traces:
        facts = {key: value for key, value in vars(trace).items() if not isinstance(value, np.ndarray)}
        arrays[f"{trace.name} facts"] = _text(facts | {"shape": trace.history.shape})
        packed = lzma.compress(trace.history.astype("<u4").tobytes(), preset=9)
        arrays[trace.name] = np.frombuffer(packed, np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]


def load_reads(file: Path = READS) -> list[ReadTrace]:
    """Return the traces of a file, the widest share first. Raises FileNotFoundError."""
    with open_traces(file) as content:
        traces = []
        for name in content.files:
            if f"{name} facts" in content.files:
                facts = json.loads(content[f"{name} facts"].tobytes())
                history = np.frombuffer(lzma.decompress(content[name].tobytes()), "<u4")
                traces.append(ReadTrace(history=history.reshape(facts.pop("shape")), **facts))
        return traces


def about_reads(file: Path = READS) -> dict[str, str]:
    """Return how the traces of a file were made. Raises FileNotFoundError."""
    with open_traces(file) as content:
        return json.loads(content["about"].tobytes())


def _text(content: dict[str, object] | dict[str, str]) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


# Recording


def record_reads(folder: str, file: Path, passages: int) -> None:
    """Record from the held-out books of a folder, with the bundled pair and its plan.

    Raises ValueError if the books or the recorded passages are too few, ChildProcessError if a service fails.
    """
    needed = -(-BLOCKS_AT_100K // BLOCKS)
    if passages < needed:
        raise ValueError(
            f"{passages} passages: a row at 100K takes {needed}, none of them twice; give at least {needed}"
        )
    plan = load_plan(models.PLAN)
    books = held_out_files(folder, plan)
    tokenizer = load_tokenizer(str(models.TARGET))
    texts = [tokenizer.encode(Path(book).read_text(encoding="utf-8")) for book in books]
    prompts = list(evenly_spread(texts, passages, PROMPT))
    traces = []
    for name, budget in BUDGETS.items():
        sessions = [session for session in _serve(prompts, budget, name) if _is_complete(session)]
        if len(sessions) < needed:
            raise ValueError(
                f"share {name}: {len(sessions)} of {passages} sessions have {ROUNDS} rounds in a row, a trace takes "
                f"{needed}; give more passages, or fewer CPUs to others"
            )
        traces.append(_trace(name, budget, sessions))
    about = {
        "recorded": datetime.now(UTC).date().isoformat(),
        "command": f"python -m specahead.lab.benchmarks.read_trace BOOKS {passages}",
        "books": ", ".join(Path(book).name for book in books),
        "target": model_hash(str(models.TARGET)),
        "draft": model_hash(str(models.DRAFT)),
        "plan": plan.hash,
    }
    save_reads(traces, file, about)


def _serve(prompts: list[list[int]], budget: float, name: str) -> list[SessionReads]:
    """One run of the services: what the target recorded of the prompts' sessions."""
    with tempfile.TemporaryDirectory() as folder:
        file, plan_file = str(Path(folder) / "reads.npz"), str(Path(folder) / "plan.json")
        save_plan(replace(load_plan(models.PLAN), budget=budget, least_tokens=0), plan_file)
        target, draft = free_addresses(2)
        room = str(2 * AT_ONCE * (PROMPT + GENERATED + 64))  # twice: prompts stay indexed while there is room
        shared = ("--plan", plan_file)
        speculation = ("--speculation", json.dumps({"gamma": 4}))  # as recorded: no policy leaves rounds out
        limits = ("--kv-tokens", room, "--device", "cpu")
        with children() as start:
            for module, model, address, *own in (
                ((SERVICE, "target"), models.TARGET, target, "--record-reads", file),
                (("draft_service",), models.DRAFT, draft, "--target", target),
            ):
                command = (*module, "--model", str(model), "--port", port_of(address), *own)
                wait_for_service(start(*command, *shared, *limits, *speculation, stdout=subprocess.PIPE))
            endpoints = start_endpoints(start, "--target-address", target, "--draft-address", draft, *shared)
            with (
                ThreadPoolExecutor(AT_ONCE) as pool,
                grpc.insecure_channel(endpoints, options=OPTIONS) as channel,  # closes first: all requests end
            ):
                stub = inference_pb2_grpc.InferenceStub(channel)
                jobs = [pool.submit(_generate, stub, i, prompt) for i, prompt in enumerate(prompts)]
                for job in tqdm(jobs, desc=f"share {name}", unit="passage"):
                    job.result()
        return sorted(load_recording(file), key=lambda session: int(session.session))


def _generate(stub: inference_pb2_grpc.InferenceStub, index: int, prompt: list[int]) -> None:
    request = inference_pb2.GenerateRequest(
        request_id=str(index),
        token_ids=inference_pb2.TokenIds(ids=prompt),
        max_tokens=GENERATED,
        temperature=1,
        seed=index,
        exactness="EXACTNESS_APPROXIMATE",
        ignore_eos=True,
    )
    for _ in stub.Generate(request):
        pass


def _is_complete(session: SessionReads) -> bool:
    """Whether it has rounds enough, none of which read everything for want of an announcement."""
    return [read.at.round for read in session.reads[:ROUNDS]] == list(range(ROUNDS))


def _trace(name: str, budget: float, sessions: list[SessionReads]) -> ReadTrace:
    kept = [
        [read.blocks.matrix()[:, FIRST : FIRST + BLOCKS] for read in session.reads[:ROUNDS]] for session in sessions
    ]
    history = np.stack([sum(b.astype(np.uint32) << np.uint32(t) for t, b in enumerate(rounds)) for rounds in kept])
    selections = [[BlockSelection.from_matrix(blocks) for blocks in rounds] for rounds in kept]
    return ReadTrace(
        name=name,
        budget=budget,
        selected=float(np.mean([blocks.mean() for rounds in kept for blocks in rounds[4:]])),
        churn=float(np.mean([churn_of(rounds, 1) for rounds in selections])),
        churn4=float(np.mean([churn_of(rounds, 4) for rounds in selections])),
        history=history,
    )


def churn_of(selections: list[BlockSelection], before: int) -> float:
    """Return the mean share of a round's blocks that none of the last `before` rounds had, from the fifth round on."""
    new = total = 0
    for i in range(4, len(selections)):
        known = selections[i - 1].words
        for other in selections[i - before : i - 1]:
            known = known | other.words
        new += int(np.bitwise_count(selections[i].words & ~known).sum())
        total += int(np.bitwise_count(selections[i].words).sum())
    return new / max(1, total)


def evenly_spread(texts: list[list[int]], count: int, length: int) -> Iterator[list[int]]:
    """Yield passages of equal length, whose starts are evenly spread over all places with room for one.

    Raises ValueError if no text is longer than a passage.
    """
    places = [max(0, len(text) - length) for text in texts]
    if not sum(places):
        raise ValueError(f"the texts are too short for a passage of {length} tokens")
    for i in range(count):
        start = sum(places) * i // count
        for text, room in zip(texts, places, strict=True):
            if start < room:
                yield text[start : start + length]
                break
            start -= room


def main() -> None:
    """Record from a folder of .txt files: `python -m specahead.lab.benchmarks.read_trace BOOKS [PASSAGES]`.

    It takes half an hour on two cores.
    """
    folder, *passages = sys.argv[1:]
    record_reads(folder, READS, int(passages[0]) if passages else PASSAGES)


if __name__ == "__main__":
    main()
