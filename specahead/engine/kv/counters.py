"""What KV in tiers counts."""

from dataclasses import asdict, dataclass


@dataclass
class TierCounters:
    """Pages are of one layer and KV head; of those that are stored, whole pages.

    hit_pages: listed by a step, and in a cache line already. fetched_pages: into cache lines, for a step that listed
    them. overflow_pages: had no cache line, so that the step ran again. staged_pages: from the backing store for a pass
    that reads everything; stages: such passes. stored_pages: copied to the backing store. offloads: how often the
    offload became active.
    """

    hit_pages: int = 0
    fetched_pages: int = 0
    overflow_pages: int = 0
    staged_pages: int = 0
    stages: int = 0
    stored_pages: int = 0
    offloads: int = 0

    def values(self, page_bytes: int, heads: int) -> dict[str, float]:
        """Counts and bytes by name. page_bytes: keys and values of a page of a layer and head. heads: of all layers."""
        counts = {name: float(value) for name, value in asdict(self).items()}
        counts["bytes_fetched"] = page_bytes * (self.fetched_pages + self.staged_pages)
        counts["bytes_stored"] = page_bytes * heads * self.stored_pages
        return counts
