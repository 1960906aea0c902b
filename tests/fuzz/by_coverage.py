"""Let atheris choose the inputs of one target by the lines of the product that they reach.

python -m tests.fuzz.by_coverage TARGET INPUTS
"""

import logging
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["specahead.wire", "orchestrator", "specahead.sparsity.selection", "target_service"]
):
    from tests.fuzz.__main__ import MOST_SECONDS, read_corpus
    from tests.fuzz.targets import all_targets


def main(name: str, inputs: str) -> None:
    """Begin with the target's seeds and its kept inputs. An input that fails is written to the present folder."""
    logging.disable(logging.ERROR)
    target = next(target for target in all_targets() if target.name == name)

    def take(data: bytes) -> None:
        target.take(data)

    with tempfile.TemporaryDirectory() as folder:
        for place, data in enumerate([*target.seeds, *read_corpus(target)]):
            (Path(folder) / str(place)).write_bytes(data)
        options = [f"-runs={inputs}", f"-timeout={MOST_SECONDS:g}", "-malloc_limit_mb=256", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *options, folder], take)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
