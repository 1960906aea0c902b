"""What draft and target share to run a model: loading, attention hook, paged KV, batches, sampling.

Knows nothing of gRPC or Ray.
"""
