"""Which outcomes of a verdict are likely, judged by what the draft found likely at each position."""

from operator import itemgetter

from specahead.engine.steps.rounds.requests import DraftedTokens

Outcome = tuple[int, int]  # drafted tokens that are accepted, and the token that the target adds

ALTERNATIVES = 4  # of the draft's likeliest tokens at a position, so many come into question
BESIDE = 2  # of the likeliest, so many, one of which was not drafted, where alternatives run beside drafted tokens
# How often the target's own token is the draft's first, second ... choice among those that are left, measured on the
# bundled pair (docs/performance.md, which also says what share of verdicts is met).
_RANKS = (0.56, 0.12, 0.05, 0.04)


def likely_outcomes(drafted: DraftedTokens, acceptance: float, most: int) -> list[Outcome]:
    """Return up to `most` outcomes of the verdict on the drafted tokens, the likeliest first.

    The first one is always that all are accepted and that the target adds the token that the draft would have added.
    acceptance: the chance of each token to be accepted. An outcome is the less likely the more tokens it needs to be
    accepted, so that most branches leave at the first positions (the idea is Saguaro's, arXiv 2603.03251).
    """
    proposed = drafted.proposed
    first = (proposed, drafted.tokens[proposed])
    if most == 1 or drafted.alternatives is None:
        return [first]
    others: list[tuple[float, Outcome]] = []
    left = 1 - acceptance  # the chance that so many tokens are accepted and no more
    for accepted, likeliest in enumerate(drafted.alternatives[: proposed + 1].tolist()):
        rejected = drafted.tokens[accepted]
        tokens = [token for token in likeliest if token != rejected]
        others += [(left * rank, (accepted, token)) for token, rank in zip(tokens, _RANKS, strict=False)]
        left *= acceptance
    others.sort(key=itemgetter(0), reverse=True)
    return [first, *(outcome for _, outcome in others[: most - 1])]
