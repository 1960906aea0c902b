"""One pass of a model over several sequences: its shape, its buffers, what goes in, the launches, and what comes out.

Lengths, tables, lists and what is to be judged are tensors that the launches read, so one CUDA graph serves all passes
of a shape. The same launches run without a graph, on a CPU too, in buffers of the exact size.
"""
