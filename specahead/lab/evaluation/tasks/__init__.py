"""Tasks that are asked of a running server: their samples, the asking, scores, and acceptance."""
