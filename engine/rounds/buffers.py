"""The buffers of a draft round: what goes in from the host, and what comes back."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.kv.pages import PAGE_SIZE
from engine.passes.buffers import rows_layout
from engine.passes.layout import lay_out_rows
from engine.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from engine.staging import Buffers, Layout, Staging
from kernels.shared_top_k import WORD


@dataclass(frozen=True)
class RoundShape:
    """All that the launches of a round are specialised for.

    sequences: how many there is room for. queries: pending tokens of a sequence, at most. pages: of a sequence, at
    most. sampled: whether tokens may be drawn, not only greedy. method: the announcer of the round, empty: it
    announces nothing.
    """

    sequences: int
    queries: int
    pages: int
    sampled: bool
    method: str

    def blocks(self, settings: RoundSettings) -> int:
        """Return how many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // settings.block_size)


def make_round_buffers(shape: RoundShape, settings: RoundSettings, vocab: int, device: torch.device) -> Buffers:
    """Return the buffers of a shape, filled as for a round without sessions.

    limits: of AnnouncementRequest. before, bitmaps: blocks announced last round and to announce, a bit each. known:
    tokens that `kept` is of; 0: this round refreshes.

    The caller adds to the tensors, where settings.refresh_every > 1, kept [sequences, layers, heads, blocks] float32:
    RoundMemory's weights, then this round's.
    """
    count, passes = shape.sequences, settings.gamma + 1
    layout = rows_layout(count, count * shape.queries, shape.pages) | {
        "temperature": ((count,), torch.float32),
        "top_p": ((count,), torch.float32),
        "uniforms": ((passes, count), torch.float64),
        "limits": ((3, count), torch.int32),
    }
    results: Layout = {"tokens": ((passes, count), torch.int32)}
    if shape.sampled:
        support = min(settings.support, vocab)
        results["ids"] = (passes, count, support), torch.int32
        results["probs"] = (passes, count, support), torch.float32
    if shape.method:
        rows = len(settings.announcers[shape.method].projection)
        layout["before"] = results["bitmaps"] = (count, rows, -(-shape.blocks(settings) // WORD)), torch.int64
    if settings.read_share < 1:
        results["blocks_read"] = (count,), torch.int64
    if settings.refresh_every > 1:
        layout["known"] = (count,), torch.int32
    buffers = Buffers(Staging(layout, device), Staging(results, device))
    lay_out_rows(buffers.inputs.host, [])
    buffers.inputs.send()
    return buffers


def lay_out_round(buffers: Buffers, requests: list[RoundRequest]) -> None:
    """Bring the inputs of a round to the device."""
    buffers.inputs.begin()
    host = buffers.inputs.host
    lay_out_rows(host, [(item.kv, item.tokens) for item in requests])
    host["temperature"][:], host["top_p"][:], host["uniforms"][:], host["limits"][:] = 0, 1, 0, 0
    if "known" in host:
        host["known"][:] = 0
    for i, item in enumerate(requests):
        host["temperature"][i], host["top_p"][i] = item.temperature, item.top_p
        host["uniforms"][:, i] = item.uniforms
        if "known" in host and not item.refresh:
            assert item.memory is not None
            host["known"][i] = item.memory.length
        if item.announce is not None:
            host["limits"][:, i] = item.announce.first, item.announce.last, max(0, item.announce.count)
            host["before"][i] = 0
            if item.announce.before is not None:
                host["before"][i, :, : item.announce.before.shape[1]] = item.announce.before.view(np.int64)
    buffers.inputs.send()


def read_round(buffers: Buffers, requests: list[RoundRequest]) -> list[RoundOutput]:
    """Wait for a round and return its results, in the order of the requests."""
    results = buffers.results.fetch()
    tokens = results["tokens"].T.tolist()
    outputs = []
    for i, item in enumerate(requests):
        drawn = item.temperature > 0
        outputs.append(
            RoundOutput(
                tokens[i],
                results["ids"][:, i].copy() if drawn else None,
                results["probs"][:, i].copy() if drawn else None,
                None if item.announce is None else results["bitmaps"][i].view(np.uint64).copy(),
                int(results["blocks_read"][i]) if "blocks_read" in results else None,
            )
        )
    return outputs


def bring_kept(buffers: Buffers, requests: list[RoundRequest]) -> None:
    """Before a round: bring what sessions that do not refresh remember."""
    if "kept" not in buffers.tensors:
        return
    for i, item in enumerate(requests):
        if not item.refresh:
            assert item.memory is not None and item.memory.weights is not None
            weights, kept = item.memory.weights, buffers.tensors["kept"]
            blocks = min(weights.shape[2], kept.shape[3])
            kept[i, :, :, :blocks].copy_(weights[:, :, :blocks])


def take_kept(buffers: Buffers, settings: RoundSettings, requests: list[RoundRequest]) -> None:
    """After it, before the lengths of their KV move: take what sessions that refreshed remember from now on."""
    if "kept" not in buffers.tensors:
        return
    for i, item in enumerate(requests):
        memory = item.memory
        if memory is not None and item.refresh:
            memory.length, memory.rounds = item.kv.length + len(item.tokens), 0
            blocks = -(-memory.length // settings.block_size)
            memory.weights = buffers.tensors["kept"][i, :, :, :blocks].clone()
        elif memory is not None:
            memory.rounds += 1
