"""Tensor operations, a file or a folder each: a torch reference, faster backends, one dispatching function.

Nothing here knows of sessions, models or gRPC. The package is imported as `specahead.kernels`, since Hugging Face's
`kernels` has the other name.
"""
