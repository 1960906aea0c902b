"""Acceptance of drafted tokens, by tables that are worked out by hand."""

import pytest
import torch
from torch import Tensor

from specahead.kernels.rejection import accept_greedy, accept_sampled, draw

JUST_BELOW_ONE = 1 - 2.0**-53


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)


@pytest.mark.parametrize(
    ("drafted", "count", "target", "accepted", "following"),
    [
        ([5, 6, 7], 3, [5, 6, 7, 8], 3, 8),  # all kept, the bonus token follows
        ([5, 6, 7], 3, [5, 6, 9, 8], 2, 9),
        ([5, 6, 7], 3, [9, 6, 7, 8], 0, 9),  # agreement behind the first difference counts for nothing
        ([5, 6, 7], 2, [5, 6, 7, 8], 2, 7),  # a shorter proposal: its padding is no proposal
        ([0, 0, 0], 0, [0, 0, 0, 0], 0, 0),  # plain decoding in a padded batch
        ([5, 6, 7], 1, [4, 6, 7, 8], 0, 4),
    ],
)
def test_greedy_by_hand(drafted: list[int], count: int, target: list[int], accepted: int, following: int) -> None:
    got = accept_greedy(ints(drafted), torch.tensor([count]), ints(target))
    assert [t.tolist() for t in got] == [[accepted], [following]]


def test_greedy_rows_do_not_mix_and_gamma_may_be_0() -> None:
    got = accept_greedy(ints([1, 2], [1, 2]), torch.tensor([2, 2]), ints([1, 2, 3], [2, 2, 3]))
    assert [t.tolist() for t in got] == [[2, 0], [3, 2]]
    got = accept_greedy(torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0]), ints([4], [5]))
    assert [t.tolist() for t in got] == [[0, 0], [4, 5]]


def sampled(
    drafted: list[int],
    count: int,
    q: list[list[float]],
    p: list[list[float]],
    accept: list[float],
    recover: list[float],
) -> tuple[int, int]:
    accepted, following = accept_sampled(
        ints(drafted),
        torch.tensor([count]),
        torch.tensor([q]),
        torch.tensor([p]),
        torch.tensor([accept], dtype=torch.float64),
        torch.tensor([recover], dtype=torch.float64),
    )
    return int(accepted), int(following)


Q, P, END = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("drafted", "count", "accept", "recover", "accepted", "following"),
    [
        # Token 0 is kept if u < 0.25 / 0.5; else the residual (0, 0, 0.25) leaves token 2 alone.
        ([0, 0], 2, [0.49, 0.0], [0.9, 0.9, 0.9], 2, 1),
        ([0, 0], 2, [0.5, 0.0], [0.0, 0.0, 0.0], 0, 2),
        ([0, 0], 2, [0.49, 0.5], [0.9, 0.0, 0.9], 1, 2),
        ([2, 1], 2, [JUST_BELOW_ONE, JUST_BELOW_ONE], [0.9, 0.9, 0.9], 2, 1),  # p >= q: always kept
        # With one token proposed, the bonus token comes from P at position 1: 0.25, 0.5, 1.0.
        ([1, 0], 1, [0.9, 0.0], [0.0, 0.24, 0.0], 1, 0),
        ([1, 0], 1, [0.9, 0.0], [0.0, 0.25, 0.0], 1, 1),
        ([1, 0], 1, [0.9, 0.0], [0.0, 0.5, 0.0], 1, 2),
        ([0, 0], 0, [0.0, 0.0], [0.3, 0.9, 0.9], 0, 1),  # nothing proposed: drawn from P
    ],
)
def test_sampled_by_hand(
    drafted: list[int], count: int, accept: list[float], recover: list[float], accepted: int, following: int
) -> None:
    assert sampled(drafted, count, [Q, Q], [P, P, END], accept, recover) == (accepted, following)


def test_a_token_the_target_excludes_is_never_kept() -> None:
    assert sampled([0], 1, [[1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]], [0.0], [0.0, 0.0]) == (0, 1)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """A token without any probability in either can be rejected where p = q; then p is drawn from."""
    q = [[0.0, 0.25, 0.75]]
    assert sampled([0], 1, q, [*q, END], [0.5], [0.2, 0.0]) == (0, 1)


@pytest.mark.parametrize("gamma", [1, 3])
def test_identical_distributions_accept_always(gamma: int) -> None:
    torch.manual_seed(gamma)
    probs = torch.randn(500, gamma + 1, 7).softmax(-1)
    tokens = draw(probs[:, :-1].flatten(0, 1), torch.rand(500 * gamma, dtype=torch.float64)).view(500, gamma)
    counts = torch.full((500,), gamma)
    uniforms = torch.full((500, gamma), JUST_BELOW_ONE, dtype=torch.float64)
    last = torch.rand(500, gamma + 1, dtype=torch.float64)
    accepted, following = accept_sampled(tokens, counts, probs[:, :-1], probs, uniforms, last)
    assert torch.equal(accepted, counts)
    assert torch.equal(following, draw(probs[:, gamma], last[:, gamma]))


# Drawing


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, JUST_BELOW_ONE, 1.0])  # 1.0: rounded up
def test_draw_never_returns_an_entry_of_weight_0(u: float) -> None:
    rows = torch.tensor(
        [
            [0.0, 0.3, 0.0, 0.7, 0.0],
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [1e-30, 0.0, 0.0, 0.0, 0.0],
            [0.1, 0.1, 0.1, 0.1, 0.0],
            [3.0, 0.0, 5.0, 0.0, 0.0],
            [1.0, 1e-20, 0.0, 0.0, 0.0],
        ]
    )
    drawn = draw(rows, torch.full((len(rows),), u, dtype=torch.float64))
    assert (rows.gather(1, drawn[:, None]) > 0).all()


def test_draw_inverts_the_cdf() -> None:
    row = torch.tensor([[0.125, 0.0, 0.375, 0.5]])
    for u, token in [(0.0, 0), (0.1249, 0), (0.125, 2), (0.4999, 2), (0.5, 3), (JUST_BELOW_ONE, 3)]:
        assert int(draw(row, torch.tensor([u], dtype=torch.float64))) == token
        assert int(draw(row * 7, torch.tensor([u], dtype=torch.float64))) == token
