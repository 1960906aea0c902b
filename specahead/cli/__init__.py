"""The `specahead` command, above all other rooms: it may import any of them, and none imports it."""

from specahead import wire  # noqa: F401 (it says how gRPC is to be loaded, before anyone loads it)
