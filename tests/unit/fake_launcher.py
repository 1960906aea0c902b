"""What launches a compiled kernel, of a GPU's driver that is not there."""

from pathlib import Path
from typing import Any

import triton


class Launcher:
    """Leaves a folder in its kernel's name beside what Triton keeps, as if it had been compiled."""

    def __init__(self, source: Any, _metadata: Any) -> None:
        (Path(triton.knobs.cache.dir) / f"launcher-{source.name}").mkdir(parents=True, exist_ok=True)
