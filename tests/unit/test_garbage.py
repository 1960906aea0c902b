"""What Python's garbage collector is kept from."""

import gc
import subprocess
import sys

import pytest

from specahead.config.garbage import collect_seldom, keep_loaded, no_garbage_collected


def test_what_is_loaded_is_kept_out_of_garbage_collections() -> None:
    gc.unfreeze()  # services of other tests in this process
    assert len(gc.get_objects()) > 100_000
    try:
        keep_loaded()
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()


def test_what_is_kept_from_collections_is_not_taken_for_leaks_at_the_end() -> None:
    """Libraries say at exit what of theirs is left."""
    program = "import triton; from triton._C import libtriton; from specahead.config.garbage import keep_loaded"
    program += "; keep_loaded()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""


def test_a_start_collects_seldom() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        collect_seldom()
        assert gc.get_threshold()[0] >= 10_000
    finally:
        gc.set_threshold(*before)


def test_nothing_is_collected_where_that_would_do_harm() -> None:
    """As while a graph is captured: not even where that fails, and afterwards as before."""

    def fail() -> None:
        with no_garbage_collected():
            assert not gc.isenabled()
            with no_garbage_collected():
                pass
            assert not gc.isenabled()
            raise ValueError("of the capture")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="of the capture"):
        fail()
    assert gc.isenabled()
