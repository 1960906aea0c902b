"""A decoder-only model and its attention over paged KV. It knows no sessions."""
