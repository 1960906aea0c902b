"""What a process of specahead sets before it imports the libraries that read it."""

import os

from specahead.config.garbage import collect_seldom

_DEFAULTS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the log reports progress
    # Each pass over prompts has another size. Segments of fixed sizes would be freed and allocated again all the time
    # beside KV that takes nearly all of a GPU: passes then take two to four times as long.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def prepare_process() -> None:
    """Call this first of all: imports of a service then take a fifth less time, and torch reads its settings at import.

    What the environment sets already stays.
    """
    collect_seldom()
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
