"""Which part of a prompt is read sparsely, where its session asks for approximate tokens and the target is set to."""

TAIL = 512  # tokens at the end of a prompt, where its question mostly is, that read everything
SHORTEST = 2048  # tokens of a prompt that is read sparsely at all


def sparse_tokens(prompt_tokens: int, tail: int = TAIL) -> int:
    """Return how many tokens of a prompt, the first ones, are read sparsely: all but the `tail` of a long one."""
    return prompt_tokens - tail if prompt_tokens >= SHORTEST else 0
