"""Which part of a prompt is read sparsely, where its session and its target's settings allow that."""

TAIL = 512  # tokens at the end of a prompt, where its question mostly is, that read everything
SHORTEST = 2048  # tokens of a prompt that is read sparsely at all


def sparse_tokens(prompt_tokens: int, tail: int = TAIL) -> int:
    """Return how many of a prompt's first tokens are read sparsely: all but the `tail` of a long prompt."""
    return prompt_tokens - tail if prompt_tokens >= SHORTEST else 0
