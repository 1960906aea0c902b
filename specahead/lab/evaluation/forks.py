"""Sequences that go on from the same KV, so that a prompt is read once for all that is compared on it."""

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV


def fork(kv: KVCache, sequence: SequenceKV) -> SequenceKV:
    """Return another sequence with the same KV: full pages are shared, a partial last page is copied.

    Raises OutOfPages if there is no page for the copy, NotImplementedError for KV that may leave the GPU.
    """
    if kv.offloads:
        raise NotImplementedError("KV in tiers: sequences cannot be forked")
    shared = sequence.pages[: sequence.length // PAGE_SIZE]
    twin = SequenceKV(sequence.length, list(shared), sequence.serials[: len(shared)])
    if sequence.length % PAGE_SIZE:
        kv.grow(twin, sequence.length)
        for pages in (*kv.k_pages, *kv.v_pages):
            pages[twin.pages[-1]] = pages[sequence.pages[len(shared)]]
    for page in shared:
        kv.pool.references[page] += 1
    return twin
