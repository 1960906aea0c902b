"""The `specahead` command, above all other rooms: it may import any of them, and none imports it."""
