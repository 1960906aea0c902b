"""The verifier and its server. Knows nothing of the draft's model."""
