"""`specahead bench serve`: tokens a second of the real services, without and with speculation.

Target and draft have random weights in the shapes of real models, so that what they say means nothing: acceptance is
imposed, and what is read follows a uniform plan. A target process serves alone first, then a draft process joins it;
the prompts are read once and found again by prefix. The target's KV may lie in tiers (docs/architecture.md).
"""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import grpc
import numpy as np

import models
from benchmarks.processes import children, free_addresses, port_of, start_endpoints, wait_for_service
from benchmarks.shapes import SHAPES
from protos import inference_pb2, inference_pb2_grpc
from sparsity.plan import save_plan, uniform_plan
from wire.server import OPTIONS

PREFILL_CHUNK = 4096  # prompt tokens a step, at most


@dataclass(frozen=True)
class Row:
    """session_round_ms: between two messages of a session, the median; tokens_a_second: of all sessions together, 0 if
    at no moment all of them generated. kv_fetched: of the KV that was read, where it lies in tiers."""

    what: str
    sessions: int
    context: int
    tokens_a_second: float
    session_round_ms: float
    tokens_a_round: float
    kv_read: float
    kv_fetched: float
    draft_ms: float  # a round
    verify_ms: float  # a round
    wait_ms: float  # a round


def write_model(folder: Path, shape: str, vocab: int, context: int) -> None:
    """A config in the shape of a real model beside the bundled tokenizer."""
    shutil.copytree(models.TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **asdict(SHAPES[shape]),
    }
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))


def run_serve_benchmark(
    target: str,
    draft: str,
    sessions: int,
    context: int,
    tokens: int,
    gamma: int,
    acceptance: float,
    budget: float,
    drafting: tuple[str, ...],
    target_kv: tuple[str, ...],
    gpus: tuple[int, int] | None,
    json_file: str | None,
    dense: bool = True,
) -> list[Row]:
    """Measure, print the table, and write it to `json_file` if given. Raises ChildProcessError if a service fails.

    drafting: more flags for the draft service; target_kv: for the target service, about memory. dense: False: sparse
    verification only.
    """
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "models": f"target {target}, draft {draft}, random weights, imposed acceptance {acceptance} a token",
        "command": f"specahead bench serve --target-shape {target} --draft-shape {draft} --sessions {sessions} "
        f"--context {context} --tokens {tokens} --gamma {gamma} --acceptance {acceptance} --budget {budget} "
        + " ".join((*drafting, *target_kv, *(() if dense else ("--sparse-only",)))),
    }
    rows: list[Row] = []
    expected = sum(acceptance**i for i in range(gamma + 1))  # tokens of a round that is drafted
    with tempfile.TemporaryDirectory() as folder, children() as start:
        room = context + tokens + 64
        pair = {name: Path(folder) / name for name in ("target", "draft")}
        for name, shape in (("target", target), ("draft", draft)):
            write_model(pair[name], shape, SHAPES[target].vocab_size, room + 256)
        plan = Path(folder) / "plan.json"
        big, small = SHAPES[target], SHAPES[draft]
        sizes = (big.num_hidden_layers, big.num_key_value_heads)
        heads = (small.num_hidden_layers, small.num_attention_heads)
        save_plan(uniform_plan(*sizes, *heads, method="ahead", budget=budget), plan)
        addresses = dict(zip(("target", "draft"), free_addresses(2), strict=True))

        def service(name: str, *flags: str) -> None:
            common = ("--model", str(pair[name]), "--plan", str(plan), "--port", port_of(addresses[name]))
            limits = ("--max-context", str(room), "--max-sessions", str(sessions), "--gamma", str(gamma))
            options = ("--load-format", "dummy", "--prefill-chunk", str(min(PREFILL_CHUNK, context)))
            gpu = None if gpus is None else gpus[name == "draft"]
            command = (f"{name}_service", *common, *limits, *options, *flags)
            wait_for_service(start(*command, stdout=subprocess.PIPE, gpu=gpu))
            print(f"{name} serves", file=sys.stderr, flush=True)

        named = ("--target", str(pair["target"]), "--draft", str(pair["draft"]), "--plan", str(plan))
        clients = (*named, "--target-address", addresses["target"], "--max-context", str(room))
        service("target", "--synthetic-acceptance", str(acceptance), *target_kv)
        alone = start_endpoints(start, *clients)
        _measure(alone, "reading the prompts", sessions, context, 2, "exact")
        if dense:
            rows.append(_measure(alone, "no draft, dense", sessions, context, tokens, "exact"))
        service("draft", "--target", addresses["target"], *drafting)
        both = start_endpoints(start, *clients, "--draft-address", addresses["draft"])
        ways = (("draft, dense verify", "exact"), ("draft, sparse verify", "approximate"))
        for what, exactness in ways if dense else ways[1:]:
            for _ in range(60):  # until the draft has read the prompts
                row = _measure(both, f"{what}, first rounds", sessions, context, 12 * (gamma + 1), exactness)
                if 1 < row.tokens_a_round < 1.15 * expected:  # tokens that were decoded plainly make it more
                    break
            rows.append(_measure(both, what, sessions, context, tokens, exactness))
    for row in rows:
        if not row.tokens_a_second:
            raise ValueError(f"{row.what}: at no moment did all {sessions} sessions generate; give more --tokens")
    print(_report(head, rows))
    if json_file:
        Path(json_file).write_text(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return rows


def _measure(address: str, what: str, sessions: int, context: int, tokens: int, exactness: str) -> Row:
    """All sessions at once; prompts are the same for all rows, and each session has its own."""
    started = time.perf_counter()
    with grpc.insecure_channel(address, options=OPTIONS) as channel, ThreadPoolExecutor(sessions) as pool:
        stub = inference_pb2_grpc.InferenceStub(channel)
        jobs = [pool.submit(_stream, stub, i, context, tokens, exactness) for i in range(sessions)]
        streams = [job.result() for job in jobs]
    # Once all have begun and while none has ended: prompts are not part of it.
    first, last = max(times[0][0] for times, _ in streams), min(times[-1][0] for times, _ in streams)
    counted = sum(count for times, _ in streams for at, count in times if first < at <= last)
    gaps = [b[0] - a[0] for times, _ in streams for a, b in itertools.pairwise(times)]
    rounds = sum(summary.rounds for _, summary in streams) or sessions * tokens  # none: a token each
    print(f"{what}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return Row(
        what=what,
        sessions=sessions,
        context=context,
        tokens_a_second=counted / (last - first) if last > first else 0.0,
        session_round_ms=1e3 * median(gaps) if gaps else 0.0,
        tokens_a_round=sessions * tokens / rounds,
        kv_read=sum(summary.kv_read_fraction for _, summary in streams) / sessions,
        kv_fetched=sum(summary.kv_fetched_fraction for _, summary in streams) / sessions,
        draft_ms=1e3 * sum(summary.draft_seconds for _, summary in streams) / rounds,
        verify_ms=1e3 * sum(summary.verify_seconds for _, summary in streams) / rounds,
        wait_ms=1e3 * sum(summary.wait_seconds for _, summary in streams) / rounds,
    )


def _stream(
    stub: inference_pb2_grpc.InferenceStub, index: int, context: int, tokens: int, exactness: str
) -> tuple[list[tuple[float, int]], inference_pb2.SpeculationSummary]:
    """When messages came and how many tokens each had, and how the rounds went."""
    ids = np.random.default_rng(index).integers(10, 4000, context).tolist()
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids),
        max_tokens=tokens,
        temperature=0,
        exactness=f"EXACTNESS_{exactness.upper()}",
        ignore_eos=True,
    )
    times: list[tuple[float, int]] = []
    summary = inference_pb2.SpeculationSummary()
    for response in stub.Generate(request):
        times.append((time.perf_counter(), len(response.token_ids)))
        summary = response.speculation
    return times, summary


def _report(head: dict[str, str], rows: list[Row]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    lines.append(
        f"{'':<22} {'sessions':>8} {'context':>8} {'tokens/s':>9} {'round':>10} {'tokens':>7} {'KV read':>8} "
        f"{'fetched':>8} {'draft':>9} {'verify':>9} {'wait':>9}"
    )
    for row in rows:
        lines.append(
            f"{row.what:<22} {row.sessions:>8} {row.context:>8} {row.tokens_a_second:>9.1f} "
            f"{row.session_round_ms:>7.2f} ms {row.tokens_a_round:>7.2f} {row.kv_read:>8.3f} "
            f"{row.kv_fetched:>8.2%} {row.draft_ms:>6.2f} ms "
            f"{row.verify_ms:>6.2f} ms {row.wait_ms:>6.2f} ms"
        )
    lines.append(
        "Tokens/s: of all sessions, while all generate. Round: between two messages of a session, the median. "
        "Fetched: of\nthe KV that was read, what came from the host. Draft, verify, wait: a round; draft runs beside "
        "the others, on the\nother GPU."
    )
    return "\n".join(lines)
