"""Tensor parallelism: one model over several processes, called ranks, each with its own GPU.

Each rank holds its own heads of attention and columns of the MLP, and the KV of its own heads, and adds up what all
ranks' layers give (ranks.py; few rows by small_sums.py). Rank 0 is the service: it alone has sessions and plans steps.
The other ranks follow it (following.py): for each pass it tells them the pass's shape (commands.py) and gives them the
arrays that the pass takes from the host. They need no sessions, no pool of pages and no policy.
"""
