"""How many sessions a KV memory holds without tiers, and how much of it frames get when KV lies in tiers."""

from specahead.lab.benchmarks.offload_steps import Case
from specahead.lab.benchmarks.shapes import GROUP

TABLE_BYTES = 14  # of the residency tables, for a page of a layer and head at home and, at most, its slot


def sessions_that_fit(memory: int, case: Case) -> int:
    """Whose KV lies in so many bytes as a whole; `case` says what sessions are like, not how many."""
    return memory // (case.pages_each * frame_bytes(case))


def frame_bytes(case: Case) -> int:
    """A page of all layers and heads."""
    return case.rows * case.page_bytes


def hot_share(memory: int, case: Case) -> float:
    """Frames that so many bytes have room for beside what tiers take of it, as a share of all pages.

    Raises ValueError if a step has no room to write.
    """
    frames = (memory - beside_frames(case)) // frame_bytes(case)
    least = case.frames(0.0)
    if frames < least:
        raise ValueError(
            f"{memory / 2**30:.4g} GiB have room for {max(0, frames)} pages beside the tables of {case.batch} sessions "
            f"of {case.context} tokens, which write {least} at once: raise --kv-memory or lower --sessions-factor"
        )
    return min(1.0, frames / case.pages)


def beside_frames(case: Case) -> int:
    """Bytes, as the services count them (engine.loading): two layers of one sequence, which passes that read everything
    are brought together in; the residency tables; group means."""
    staged = 2 * case.pages_each * case.shape.num_key_value_heads * case.page_bytes
    means = 3 * 4 * case.batch * (case.context // GROUP) * case.rows * case.shape.head_dim
    return staged + TABLE_BYTES * case.pages * case.rows + means
