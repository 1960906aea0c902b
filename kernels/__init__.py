"""Tensor operations, a file or a folder each: a torch reference, faster backends, one dispatching function.

Nothing here knows of sessions, models or gRPC.
"""

# Hugging Face's `kernels` distribution has the same import name. transformers asks this package for its
# version and must find one outside the range that it accepts (tests/test_packaging.py).
__version__ = "0.1.0"
