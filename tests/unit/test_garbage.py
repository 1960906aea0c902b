"""What Python's garbage collector is kept from."""

import gc

from specahead.config.garbage import keep_loaded


def test_what_is_loaded_is_kept_out_of_garbage_collections() -> None:
    gc.unfreeze()  # services of other tests in this process
    assert len(gc.get_objects()) > 100_000
    try:
        keep_loaded()
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
