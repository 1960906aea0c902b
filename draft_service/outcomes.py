"""Which outcomes of a verdict are likely, judged by how likely the draft finds each token at each position."""

from operator import itemgetter

from specahead.engine.steps.requests import DraftedTokens

Outcome = tuple[int, int]  # number of accepted tokens, and the token that the target adds

ALTERNATIVES = 4  # likeliest tokens at each position that are considered as the target's token
BESIDE = 2  # likeliest tokens at each position where alternatives run in the target's pass beside drafted tokens
# How often the target's token is the draft's first, second, … choice among the tokens that it did not reject, measured
# on the bundled pair.
_RANKS = (0.56, 0.12, 0.05, 0.04)


def likely_outcomes(drafted: DraftedTokens, acceptance: float, most: int) -> list[Outcome]:
    """Return up to `most` outcomes of the verdict on the drafted tokens, the likeliest first.

    The first is always that the target accepts all tokens and adds the one that the draft would have added.
    acceptance: probability that a token is accepted. An outcome that needs more accepted tokens is less likely, so most
    outcomes end at the first positions.
    """
    proposed = drafted.proposed
    first = (proposed, drafted.tokens[proposed])
    if most == 1 or drafted.alternatives is None:
        return [first]
    others: list[tuple[float, Outcome]] = []
    reached = 1 - acceptance  # probability that exactly the tokens before this position are accepted
    for accepted, likeliest in enumerate(drafted.alternatives[: proposed + 1].tolist()):
        rejected = drafted.tokens[accepted]
        tokens = [token for token in likeliest if token != rejected]
        others += [(reached * rank, (accepted, token)) for token, rank in zip(tokens, _RANKS, strict=False)]
        reached *= acceptance
    others.sort(key=itemgetter(0), reverse=True)
    return [first, *(outcome for _, outcome in others[: most - 1])]
