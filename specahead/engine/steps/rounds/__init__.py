"""A draft's whole round in one call: γ + 1 passes, sampling, the evidence, and what to announce of it.

The first pass runs the tokens that are pending and attends densely; later passes run one token each, and may read only
what the first one weighed most. The evidence is the mean over the passes of each head's weights on each block.

A session's rounds need not all begin with a dense pass. In a round without `refresh` the first pass, too, reads lists:
those that the weights of the session's last dense first pass give. What it does not read keeps these weights, by which
later passes may still list it. Sessions that refresh and sessions that do not are drafted by graphs of their own.
"""
