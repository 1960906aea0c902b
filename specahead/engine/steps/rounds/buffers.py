"""The buffers of a draft round: what goes in from the host, and what comes back."""

from dataclasses import dataclass

import numpy as np
import torch

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.steps.passes.buffers import rows_layout
from specahead.engine.steps.passes.layout import lay_out_rows, slots_of
from specahead.engine.steps.rounds.requests import (
    Branch,
    CodedBitmap,
    DraftedTokens,
    RoundOutput,
    RoundRequest,
    RoundSettings,
)
from specahead.engine.steps.staging import Buffers, Layout, Staging
from specahead.kernels.selection import WORD


@dataclass(frozen=True)
class RoundShape:
    """All that the launches of a round are specialised for.

    sequences: how many there is room for. queries: pending tokens of a sequence, at most. pages: of a sequence, at
    most. sampled: whether tokens may be drawn, not only greedy. method: the announcer of the round, empty: it
    announces nothing. branches: of a sequence; 1: it runs pending tokens. refreshes: whether the first pass is dense.
    ruled: whether rules change logits. gamma: tokens drafted; 0: as many as the settings say. behind: whether sequences
    may go on behind a step that still runs.
    """

    sequences: int
    queries: int
    pages: int
    sampled: bool
    method: str
    branches: int = 1
    refreshes: bool = True
    ruled: bool = False
    gamma: int = 0
    behind: bool = False

    @property
    def rows(self) -> int:
        """How many tokens are drafted at once: the branches of all sequences."""
        return self.sequences * self.branches

    def passes(self, settings: RoundSettings) -> int:
        """Return how often the model runs: once for each token proposed, and once more if the last one is run."""
        return (self.gamma or settings.gamma) + settings.runs_last

    def blocks(self, settings: RoundSettings) -> int:
        """Return how many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // settings.block_size)


def make_round_buffers(
    shape: RoundShape, settings: RoundSettings, vocab: int, device: torch.device, nobody: int = 0
) -> Buffers:
    """Return the buffers of a shape, filled as for a round without sessions. nobody: a place that no session has.

    The caller adds to the tensors, where settings.refresh_every > 1, memory [places, layers * heads, blocks] float32:
    what RoundMemory says; and where rules change logits, rules [3, sequences, vocab] float32, as `ChangedLogits` has
    them.
    """
    layout = _inputs_layout(shape, settings, vocab)
    buffers = Buffers(Staging(layout, device), Staging(_results_layout(shape, settings, vocab), device))
    lay_out_rows(buffers.inputs.host, [])
    for name, value in {"behind": -1, "places": nobody, "source": -1, "target": -1}.items():
        if name in layout:
            buffers.inputs.host[name][:] = value
    buffers.inputs.send()
    return buffers


def _inputs_layout(shape: RoundShape, settings: RoundSettings, vocab: int) -> Layout:
    """Lay out what a round needs to know.

    least: the share of the likeliest token's probability that the others, in falling order, need to be drawn. limits:
    of AnnouncementRequest. announced: blocks announced last round, a bit each; words: of a row of them. places: of the
    sequences' weights in `memory`. known: tokens that these are of.

    With branches: of each of the `rows`, before: tokens of the sequence that it sees, and position of its first token;
    own: where the KV of its own tokens begins; kept_own: whether these are written (a sequence with fewer branches
    repeats its first one). totals: tokens of a sequence once the round has run. source, target: where KV is moved from
    and to before anything is read, as places in the pages, -1 for none.
    """
    count, rows, passes = shape.sequences, shape.rows, shape.passes(settings)
    layout = rows_layout(count, max(rows, count * shape.queries), shape.pages) | {
        "temperature": ((rows,), torch.float32),
        "top_p": ((rows,), torch.float32),
        "least": ((rows, min(settings.support, vocab)), torch.float32),
        "uniforms": ((passes, rows), torch.float64),
        "limits": ((3, count), torch.int32),
    }
    if shape.branches > 1:
        layout |= dict.fromkeys(("before", "own", "kept_own"), ((rows,), torch.int32))
        # What is moved was drafted in a round of its own, which may have had more passes.
        layout |= dict.fromkeys(("source", "target"), ((count * (settings.gamma + 1),), torch.int64))
        layout["totals"] = (count,), torch.int32
    if shape.method:
        layout["announced"] = _bitmaps(shape, settings)
        layout["words"] = (count,), torch.int32
    if shape.behind:
        _add_what_is_behind(layout, shape, settings)
    if settings.refresh_every > 1:
        layout["places"] = (count,), torch.int64
    if not shape.refreshes:
        layout["known"] = (count,), torch.int32
    if shape.ruled:  # see ChangedLogits
        layout["penalties"] = (3, rows), torch.float32
        # They were drafted in a round of its own, which may have had more passes.
        layout["guessed"] = (rows, settings.gamma + 1), torch.int32
    return layout


def _add_what_is_behind(layout: Layout, shape: RoundShape, settings: RoundSettings) -> None:
    """Add to the layout of a round's inputs what sequences need that may be behind a step.

    Of each, behind: its place there, or -1. judged: tokens that the step judges. previous: the token before the one
    that the step adds. previous_cut, uniforms_cut, limits_cut, words_cut: in place of the others where one of these is
    rejected, or two, and so on.
    """
    layout |= dict.fromkeys(("behind", "judged"), ((shape.sequences,), torch.int32))
    layout["previous"] = (shape.sequences,), torch.int64
    for name in ("previous", "uniforms", "limits", "words"):
        if name in layout:
            layout[f"{name}_cut"] = (settings.gamma, *layout[name][0]), layout[name][1]


def _results_layout(shape: RoundShape, settings: RoundSettings, vocab: int) -> Layout:
    """Lay out what a round leaves.

    bitmaps: blocks to announce, a bit each; their difference to `announced` is in flags, values, value_counts and
    checksums (`code_difference`).
    """
    count, of_tokens = shape.sequences, (shape.passes(settings), shape.rows)
    results: Layout = {"tokens": (of_tokens, torch.int32)}
    if settings.alternatives:
        results["alternatives"] = (*of_tokens, settings.alternatives), torch.int32
    if shape.sampled:
        support = min(settings.support, vocab)
        results["ids"] = (*of_tokens, support), torch.int32
        results["probs"] = (*of_tokens, support), torch.float32
    if shape.method:
        (_, rows, words), _ = results["bitmaps"] = _bitmaps(shape, settings)
        results["flags"] = (count, rows, words), torch.uint8
        results["values"] = (count, rows * words * 8), torch.uint8
        results["value_counts"], results["checksums"] = ((count,), torch.int32), ((count,), torch.int64)
    if settings.read_share < 1:
        results["blocks_read"] = (count,), torch.int64
    if shape.behind:
        results["began_behind"] = (3, count), torch.int32
    return results


def _bitmaps(shape: RoundShape, settings: RoundSettings) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the sizes of blocks of all sequences, a bit each."""
    rows = len(settings.announcers[shape.method].heads)
    return (shape.sequences, rows, -(-shape.blocks(settings) // WORD)), torch.int64


def lay_out_round(buffers: Buffers, shape: RoundShape, requests: list[RoundRequest], places: list[int]) -> None:
    """Bring the inputs of a round to the device. places: of the requests' memories, then one that nobody has."""
    buffers.inputs.begin()
    host = buffers.inputs.host
    host["temperature"][:], host["top_p"][:], host["uniforms"][:], host["limits"][:] = 0, 1, 0, 0
    host["least"][:] = 0
    if shape.ruled:
        _lay_out_rules(host, shape, requests)
    if shape.branches > 1:
        _lay_out_branches(host, shape, requests)
    else:
        lay_out_rows(host, [(item.kv, item.tokens) for item in requests])
    if "places" in host:
        host["places"][:] = places[-1]
        host["places"][: len(requests)] = places[:-1]
    if "known" in host:
        host["known"][:] = 0
    for i, item in enumerate(requests):
        rows = slice(i * shape.branches, (i + 1) * shape.branches)
        host["temperature"][rows], host["top_p"][rows] = item.temperature, item.top_p
        host["least"][rows] = item.min_p
        if item.top_k:
            host["least"][rows, item.top_k :] = 2  # which no token has
        if shape.branches == 1:
            host["uniforms"][:, i] = item.uniforms[: len(host["uniforms"])]
        if "known" in host:
            assert item.memory is not None
            host["known"][i] = item.memory.length
        if item.announce is not None:
            host["limits"][:, i] = item.announce.first, item.announce.last, max(0, item.announce.count)
            host["announced"][i], host["words"][i] = 0, item.announce.words
            if item.announce.before is not None:
                host["announced"][i, :, : item.announce.before.shape[1]] = item.announce.before.view(np.int64)
    if shape.behind:
        _lay_out_behind(host, requests)
    buffers.inputs.send()


def _lay_out_behind(host: dict[str, np.ndarray], requests: list[RoundRequest]) -> None:
    """Write what holds where a step rejects some of the tokens that it judges."""
    host["behind"][:], host["judged"][:] = -1, 0
    for i, item in enumerate(requests):
        if item.behind is None:
            continue
        host["behind"][i], host["judged"][i] = item.behind.place, item.behind.judged
        host["previous"][i], *cut_to = item.behind.before
        host["previous_cut"][: len(cut_to), i] = cut_to
        if item.temperature > 0:
            for cut, uniforms in enumerate(item.behind.uniforms[1:]):
                host["uniforms_cut"][cut, :, i] = uniforms[: len(host["uniforms"])]
        for cut, announce in enumerate(item.behind.announce[1:]):
            if announce is not None:
                host["limits_cut"][cut, :, i] = announce.first, announce.last, max(0, announce.count)
                host["words_cut"][cut, i] = announce.words


def _lay_out_rules(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write the penalties, and the tokens that each branch begins with beyond the committed ones."""
    host["penalties"][:] = np.array([1, 0, 0])[:, None]
    host["guessed"][:] = -1
    for i, item in enumerate(requests):
        if item.rules is None:
            continue
        sampling, first = item.rules.session.sampling, i * shape.branches
        penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        host["penalties"][:, first : first + shape.branches] = np.array(penalties)[:, None]
        for row, tokens in enumerate(item.rules.guessed, first):
            host["guessed"][row, : len(tokens)] = tokens


def bring_rules(buffers: Buffers, requests: list[RoundRequest]) -> None:
    """Before a round: bring the biases and counts of sessions with rules."""
    if "rules" not in buffers.tensors:
        return
    rules = buffers.tensors["rules"]
    for i, item in enumerate(requests):
        if item.rules is None:
            rules[:, i] = 0
        else:
            rules[0, i], rules[1:, i] = item.rules.session.update(item.rules.committed, rules.shape[2], rules.device)


def _lay_out_branches(host: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest]) -> None:
    """Write where branches leave their sequences, where their KV goes, and what is moved before."""
    lay_out_rows(host, [(item.kv, []) for item in requests])
    for name in ("before", "own", "kept_own", "totals"):
        host[name][:] = 0
    host["source"][:] = host["target"][:] = -1
    passes, movable = len(host["uniforms"]), len(host["source"]) // shape.sequences
    for i, item in enumerate(requests):
        branches = item.branches or (Branch(item.kv.length, item.tokens[0], item.uniforms),)
        rows, count = slice(i * shape.branches, (i + 1) * shape.branches), len(branches)
        # A sequence with fewer branches runs its first one again, and writes no KV of it.
        order = [*range(count), *[0] * (shape.branches - count)]
        filled = [branches[index] for index in order]
        host["token_ids"][rows] = [branch.token for branch in filled]
        host["before"][rows] = [branch.length for branch in filled]
        host["own"][rows] = item.kv.length + passes * np.array(order)
        host["kept_own"][rows] = np.arange(shape.branches) < count
        if item.temperature > 0:
            host["uniforms"][:, rows] = np.stack([branch.uniforms for branch in filled], 1)
        host["lengths"][i] = item.kv.length + 1
        host["totals"][i] = item.kv.length + count * passes
        if item.moved is not None:
            here, table = slice(i * movable, i * movable + item.moved.count), item.kv.table()
            steps = np.arange(item.moved.count)
            host["source"][here] = slots_of(table, item.moved.source + steps)
            host["target"][here] = slots_of(table, item.moved.target + steps)


def read_round(
    results: dict[str, np.ndarray], shape: RoundShape, requests: list[RoundRequest], runs_last: bool
) -> list[RoundOutput]:
    """Return the results of a round, which are on the host, in the order of the requests.

    runs_last: as of the settings.
    """
    tokens = results["tokens"].T.tolist()
    alternatives = results["alternatives"].transpose(1, 0, 2).copy() if "alternatives" in results else None

    def drafted(row: int, drawn: bool) -> DraftedTokens:
        return DraftedTokens(
            tokens[row],
            results["ids"][:, row].copy() if drawn else None,
            results["probs"][:, row].copy() if drawn else None,
            None if alternatives is None else alternatives[row],
            runs_last,
        )

    def coded(sequence: int, words: int) -> CodedBitmap:
        flags = np.ascontiguousarray(results["flags"][sequence, :, :words])
        values = results["values"][sequence, : results["value_counts"][sequence]]
        return CodedBitmap(flags.tobytes() + values.tobytes(), int(results["checksums"][sequence]) % (1 << 64))

    began = results["began_behind"].T.tolist() if "began_behind" in results else []
    outputs = []
    for i, item in enumerate(requests):
        first, announce, behind, alternative = i * shape.branches, item.announce, None, None
        if item.behind is not None:
            behind = (began[i][0], began[i][1])
            alternative = began[i][2] if began[i][2] >= 0 else None
            assert 0 <= behind[0] <= item.behind.judged, "the step accepted more tokens than it judged"
            announce = item.behind.announce[item.behind.judged - behind[0]]
        outputs.append(
            RoundOutput(
                [drafted(first + j, item.temperature > 0) for j in range(len(item.branches) or 1)],
                None if announce is None else results["bitmaps"][i].view(np.uint64).copy(),
                int(results["blocks_read"][i]) if "blocks_read" in results else None,
                None if announce is None else coded(i, announce.words),
                behind,
                alternative,
            )
        )
    return outputs
