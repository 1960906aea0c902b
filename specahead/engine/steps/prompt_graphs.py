"""The layers of passes over prompts as CUDA graphs, one for each layer, with attention launched between them.

A pass over a few hundred to a few thousand tokens of a prompt runs on the device for 3 to 100 ms, and takes the host 10
to 30 ms to launch kernel by kernel. Attention depends on the length of each sequence, and stays out of the graphs (as
in vLLM's piecewise graphs).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from specahead.config.garbage import no_garbage_collected
from specahead.engine.kv.cache import KVCache
from specahead.engine.model.decoder import Attend, Decoder, Observe, PassTokens
from specahead.engine.model.head import StateTap
from specahead.engine.steps.graphs import Graphs
from specahead.kernels.backends import default_backend
from specahead.kernels.linear import Residual

MOST_TOKENS = 4096  # of a pass; longer ones keep the device busy for longer than the host takes to launch them
_STEPS = (1024, 128), (2048, 256), (MOST_TOKENS, 512)  # up to so many tokens, sizes are multiples of this


class PromptGraphs:
    """Runs a decoder like `Decoder.run`, by the graphs of the next larger captured size where there is one.

    Rows that fill a size up write no KV. kv: what every pass reads and writes. tap: takes states from every pass, if it
    is there.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, tap: StateTap | None = None) -> None:
        self._decoder, self._kv = decoder, kv
        device, hidden, width = kv.device, decoder.embedding.shape[1], decoder.heads * kv.k_pages[0].shape[3]
        make = partial(torch.zeros, dtype=decoder.embedding.dtype, device=device)
        self._numbers = torch.zeros(3, MOST_TOKENS, dtype=torch.int64, device=device)  # token ids, positions, slots
        self._queries, self._attended, self._total = (make(MOST_TOKENS, size) for size in (width, width, hidden))
        self._tap, self._seen = tap, make(MOST_TOKENS, 0 if tap is None else tap.fc.shape[1])
        self._backend = default_backend(device)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}  # of each layer, by the number of tokens
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, tokens: int) -> None:
        """Capture the graphs of passes over a number of tokens."""
        of_pass = PassTokens(*self._numbers[:, :tokens])
        attended, graphs, stream = self._attended[:tokens], list[torch.cuda.CUDAGraph](), None
        of_pass.slots.fill_(-1)
        observe = None if self._tap is None else self._tap.observer(of_pass.slots, self._seen[:tokens])
        for index in range(self._decoder.num_layers):
            graph = torch.cuda.CUDAGraph()
            with no_garbage_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                if stream is None:
                    stream = self._decoder.embed(of_pass.ids)
                else:
                    stream = self._decoder.after_attention(index - 1, stream, attended, self._backend)
                queries, stream = self._decoder.before_attention(index, stream, of_pass, self._kv, self._backend)
                if observe is not None:
                    observe(index, stream.total)
                # Only what is copied out lasts: the pool gives the memory of all else to the graphs that follow.
                self._queries[:tokens].copy_(queries.flatten(1))
                if index == self._decoder.num_layers - 1:
                    self._total[:tokens].copy_(stream.total)
            graphs.append(graph)
        self._graphs[tokens] = graphs
        Graphs.made += 1

    def run(
        self,
        tokens: PassTokens,
        kv: KVCache,
        attend: Attend,
        logits_rows: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Run one pass; arguments and result as for `Decoder.run`. `kv` must be the one that was captured.

        observe: for passes without graphs; in graphs `tap` observes.
        """
        count = len(tokens.ids)
        size = next((size for size in sizes_up_to(MOST_TOKENS) if size >= count), 0)
        if size not in self._graphs or logits_rows is None:
            return self._decoder.run(tokens, kv, attend, logits_rows, observe)
        assert kv is self._kv
        for row, numbers in zip(self._numbers, (tokens.ids, tokens.positions, tokens.slots), strict=True):
            row[:count].copy_(numbers)
        self._numbers[2, count:size].fill_(-1)
        queries, attended = self._queries[:count].unflatten(1, (self._decoder.heads, -1)), self._attended[:count]
        *before, last = self._graphs[size]
        for index, graph in enumerate(before):
            graph.replay()
            attended.copy_(attend(index, queries).flatten(1))
        last.replay()
        stream = Residual(self._total[:count], scale=self._decoder.residual_scale)
        of_last = attend(len(before), queries).flatten(1)
        return self._decoder.last_logits(stream, of_last, logits_rows, self._backend)


def sizes_up_to(most: int) -> Iterator[int]:
    """Yield the numbers of tokens that graphs are captured for, up to the first that holds `most`, in their order."""
    size = 0
    while size < most:
        size += next(step for end, step in _STEPS if size < end)
        yield size
