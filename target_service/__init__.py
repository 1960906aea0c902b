"""The verifier, its KV residency and its server. Knows nothing of the draft's model."""
