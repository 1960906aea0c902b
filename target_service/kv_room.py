"""What admission and status ask of KV that may lie in tiers."""

from config import TargetSettings
from engine.paged_kv import PAGE_SIZE, PagedKV, pages_for
from engine.tiered_kv import TieredKV


def offloads(kv: PagedKV) -> bool:
    """Return whether host memory is the backing store of this KV."""
    return isinstance(kv, TieredKV)


def tier_totals(kv: PagedKV) -> dict[str, float]:
    """Return the counters of KV in tiers since the start, by name; none without tiers."""
    return kv.totals if isinstance(kv, TieredKV) else {}


def tier_gauges(kv: PagedKV) -> dict[str, float]:
    """Return the gauges of KV in tiers, by name; none without tiers."""
    return kv.gauges if isinstance(kv, TieredKV) else {}


def check_writable(kv: PagedKV, settings: TargetSettings) -> None:
    """Raise ValueError unless all that a step may write has room on the GPU at once."""
    a_session = pages_for(settings.gamma + 1) + 2
    least = settings.max_sessions * a_session + pages_for(settings.prefill_chunk)
    if isinstance(kv, TieredKV) and kv.num_frames < least:
        raise ValueError(
            f"{kv.num_frames} KV pages of {PAGE_SIZE} fit on the GPU; {settings.max_sessions} sessions, and "
            f"{settings.prefill_chunk} prompt tokens a step, write up to {least} at once: raise kv_memory, or lower "
            "max_sessions or prefill_chunk"
        )
