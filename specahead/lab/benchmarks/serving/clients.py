"""The clients of a row: all sessions at once over gRPC, and what they saw. Knows nothing of how the services run."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np

from protos import inference_pb2, inference_pb2_grpc
from specahead.wire.options import OPTIONS

SETTLED = 5  # messages of each session that come before the window in which tokens are counted
TRIED_ROUNDS = 20  # of a session, at least, by which it is told whether the draft drafts for it already
# Share of rounds without a proposal, up to which a session counts as drafted: its first is one, and where a dense pass
# confirms what a sparse one screened, its last.
MOST_PLAIN = 0.1


@dataclass(frozen=True)
class Load:
    """What the clients of one run ask for.

    name: stands in the request ids, `name/session`. seed: of the run; verdicts that are imposed follow from it, so
    that runs of the same seed accept alike. seconds: after which a request fails. first: the number of the prompt that
    the first session has, for clients of several targets.
    """

    name: str
    sessions: int
    context: int
    tokens: int
    exactness: str
    seed: int
    seconds: float
    first: int = 0


@dataclass(frozen=True)
class Figures:
    """What the clients of one run saw; times in milliseconds unless they are named seconds.

    name: the load's. tokens_a_second: of all sessions in the window in which all generated, from the SETTLED-th message
    of the last one to the end of the first; 0 if there was none. all_seconds: from the first request to the last
    answer. first_token: from the request to the first message. gap: between two messages of a session. token: a
    session's mean time a token after its first message. plain_share: of rounds without a proposal. draft, verify, wait:
    means of a round, as the services count them.
    """

    name: str
    all_seconds: float
    tokens_a_second: float
    first_token_p50: float
    first_token_p99: float
    gap_p50: float
    gap_p99: float
    token_p50: float
    token_p99: float
    tokens_a_round: float
    plain_share: float
    kv_read: float
    kv_fetched: float
    draft: float
    verify: float
    wait: float


@dataclass(frozen=True)
class _Stream:
    """sent: when the request was; times, counts: when its messages came and how many tokens each had."""

    sent: float
    times: list[float]
    counts: list[int]
    summary: inference_pb2.SpeculationSummary


def run_clients(address: str, load: Load) -> Figures:
    """Run all sessions of a load against the endpoint. Raises grpc.RpcError if one fails or takes too long,
    grpc.FutureTimeoutError if there is no connection in that time."""
    # The channel closes before the threads are waited for, so that an interruption ends their calls.
    with ThreadPoolExecutor(load.sessions) as pool, grpc.insecure_channel(address, options=OPTIONS) as channel:
        # All sessions begin at once, and none of them waits for the connection.
        grpc.channel_ready_future(channel).result(timeout=load.seconds)
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompts = [prompt_of(load.first + i, load.context) for i in range(load.sessions)]
        jobs = [pool.submit(_stream, stub, load, prompt, i) for i, prompt in enumerate(prompts)]
        return _figures(load.name, [job.result() for job in jobs])


def prompt_of(index: int, context: int) -> list[int]:
    """Return the prompt of a session: the same in all rows of a context, and its own."""
    return np.random.default_rng((index, context)).integers(10, 4000, context).tolist()


def _stream(stub: inference_pb2_grpc.InferenceStub, load: Load, prompt: list[int], index: int) -> _Stream:
    request = inference_pb2.GenerateRequest(
        request_id=f"{load.name}/{index}",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        max_tokens=load.tokens,
        temperature=0,
        seed=1000 * load.seed + index,
        exactness=f"EXACTNESS_{load.exactness.upper()}",
        ignore_eos=True,
    )
    sent = time.perf_counter()
    times: list[float] = []
    counts: list[int] = []
    summary = inference_pb2.SpeculationSummary()
    for response in stub.Generate(request, timeout=load.seconds):
        times.append(time.perf_counter())
        counts.append(len(response.token_ids))
        summary = response.speculation
    return _Stream(sent, times, counts, summary)


def _figures(name: str, streams: list[_Stream]) -> Figures:
    began = max(stream.times[min(SETTLED, len(stream.times)) - 1] for stream in streams)
    ended = min(stream.times[-1] for stream in streams)
    messages = [message for stream in streams for message in zip(stream.times, stream.counts, strict=True)]
    counted = sum(count for at, count in messages if began < at <= ended)
    first = [1e3 * (stream.times[0] - stream.sent) for stream in streams]
    gaps = [1e3 * (b - a) for stream in streams for a, b in itertools.pairwise(stream.times)] or [0.0]
    a_token = [1e3 * (s.times[-1] - s.times[0]) / max(1, sum(s.counts[1:])) for s in streams]
    summaries = [stream.summary for stream in streams]
    rounds = sum(summary.rounds for summary in summaries)
    plain = sum(summary.plain_rounds for summary in summaries)
    # Where nothing was drafted the services' times are of the plain rounds.
    timed = max(1, rounds or plain)
    return Figures(
        name=name,
        all_seconds=max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams),
        tokens_a_second=counted / (ended - began) if ended > began else 0.0,
        first_token_p50=float(np.percentile(first, 50)),
        first_token_p99=float(np.percentile(first, 99)),
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p99=float(np.percentile(gaps, 99)),
        token_p50=float(np.percentile(a_token, 50)),
        token_p99=float(np.percentile(a_token, 99)),
        tokens_a_round=sum(sum(stream.counts) for stream in streams) / max(1, rounds + plain),
        plain_share=plain / max(1, rounds + plain),
        kv_read=sum(summary.kv_read_fraction for summary in summaries) / len(streams),
        kv_fetched=sum(summary.kv_fetched_fraction for summary in summaries) / len(streams),
        draft=1e3 * sum(summary.draft_seconds for summary in summaries) / timed,
        verify=1e3 * sum(summary.verify_seconds for summary in summaries) / timed,
        wait=1e3 * sum(summary.wait_seconds for summary in summaries) / timed,
    )
