"""Verdicts from logits: the Triton kernels against the torch reference, and that against the rule by hand."""

import pytest
import torch
from torch import Tensor

import specahead.kernels.rejection.positions
import specahead.kernels.rejection.verdicts
from specahead.engine.sampling.judging import judge
from specahead.kernels.rejection import DraftedRows, judge_greedy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(
    rows: int, gamma: int, vocab: int, support: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random rows, of which some are greedy, some have top_p 1, and drafted tokens are mostly likely ones."""
    random = torch.Generator().manual_seed(seed)
    spread = 0.5 + 4 * torch.rand(rows, 1, 1, generator=random)  # from flat to peaked
    logits = (spread * torch.randn(rows, gamma + 1, vocab, generator=random)).to(dtype)
    probs, ids = (
        (logits[:, :gamma].float() + torch.randn(rows, gamma, vocab, generator=random))
        .softmax(-1)
        .topk(min(support, vocab), dim=-1)
    )
    probs = probs / probs.sum(-1, keepdim=True)
    place = torch.randint(0, min(3, ids.shape[2]), (rows, gamma, 1), generator=random)
    temperature = 0.3 + torch.rand(rows, generator=random)
    top_p = 0.2 + 0.8 * torch.rand(rows, generator=random)
    temperature[::3], top_p[1::4] = 0.0, 1.0
    given = {
        "logits": logits,
        "draft_tokens": ids.gather(2, place)[..., 0].int(),
        "draft_counts": torch.randint(0, gamma + 1, (rows,), generator=random).int(),
        "support_ids": ids.int(),
        "support_probs": probs,
        "temperature": temperature,
        "top_p": top_p,
        "accept_uniforms": torch.rand(rows, gamma, generator=random, dtype=torch.float64),
        "draw_uniforms": torch.rand(rows, gamma + 1, generator=random, dtype=torch.float64),
    }
    return {name: tensor.contiguous() for name, tensor in given.items()}


def judge_sampled(logits: Tensor, backend: str = "torch", **drafted: Tensor) -> tuple[Tensor, Tensor]:
    return specahead.kernels.rejection.judge_sampled(logits, DraftedRows(**drafted), backend)


def on_both(judge: object, given: dict[str, Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    expected = judge(**given)
    got = judge(**{name: tensor.to(DEVICE) for name, tensor in given.items()}, backend="triton")
    assert all(t.dtype == torch.int32 for t in (*expected, *got))
    return [t.tolist() for t in expected], [t.tolist() for t in got]


@pytest.mark.parametrize(
    ("rows", "gamma", "vocab"),
    [(1, 4, 5000), (5, 4, 9001), (3, 0, 300), (7, 1, 4096), (2, 8, 4097), (0, 4, 100), (4, 3, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(rows: int, gamma: int, vocab: int, dtype: torch.dtype) -> None:
    """bfloat16 logits have many ties: the lowest index counts."""
    given = batch(rows, gamma, vocab, 4, seed=rows + gamma, dtype=dtype)
    names = ("logits", "draft_tokens", "draft_counts")
    expected, got = on_both(judge_greedy, {name: given[name] for name in names})
    assert got == expected


@pytest.mark.parametrize(("chunk", "dtype"), [(64, torch.bfloat16), (4096, torch.float32)])
@pytest.mark.parametrize(
    ("rows", "gamma", "vocab", "support"),
    [(6, 4, 200, 16), (5, 1, 300, 64), (5, 0, 77, 1), (9, 3, 2, 2), (3, 6, 129, 130), (0, 2, 50, 4)],
)
def test_sampled(
    rows: int, gamma: int, vocab: int, support: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabularies may take several programs, and lists of ties may be longer than a program holds at once."""
    monkeypatch.setattr(specahead.kernels.rejection.positions, "CHUNK", chunk)
    monkeypatch.setattr(specahead.kernels.rejection.verdicts, "CANDIDATES", 16)
    expected, got = on_both(judge_sampled, batch(rows, gamma, vocab, support, chunk, dtype))
    assert got == expected


def test_a_real_vocabulary() -> None:
    expected, got = on_both(judge_sampled, batch(3, 2, 40_000, 64, seed=5))
    assert got == expected


def test_equal_logits_keep_the_lowest_indices() -> None:
    """A nucleus among 100 equal logits is its first half, from which the draw comes."""
    given = batch(8, 1, 100, 4, seed=1)
    given["logits"] = torch.zeros(8, 2, 100)
    given["temperature"], given["top_p"] = torch.ones(8), torch.full((8,), 0.495)
    given["draft_counts"] = torch.zeros(8, dtype=torch.int32)
    expected, got = on_both(judge_sampled, given)
    assert got == expected
    assert max(expected[1]) < 50


def test_uniforms_of_both_ends() -> None:
    given = batch(6, 2, 500, 8, seed=2)
    for value in (0.0, 1 - 2.0**-53):
        given["draw_uniforms"] = torch.full((6, 3), value, dtype=torch.float64)
        expected, got = on_both(judge_sampled, given)
        assert got == expected


def test_a_draft_equal_to_its_target_is_always_kept() -> None:
    """Whatever is drawn, as long as it is not rejected; and an empty residual falls back to the target."""
    given = batch(6, 2, 8, 8, seed=3)
    given["temperature"], given["top_p"] = torch.ones(6), torch.ones(6)
    probs = given["logits"][:, :2].softmax(-1)
    given["support_ids"] = torch.arange(8).int().expand(6, 2, 8).contiguous()
    given["support_probs"] = probs
    given["draft_counts"] = torch.full((6,), 2, dtype=torch.int32)
    given["accept_uniforms"] *= 0.999
    expected, got = on_both(judge_sampled, given)
    assert got == expected
    assert expected[0] == [2] * 6


def test_the_targets_own_draws() -> None:
    """What is judged whatever is drafted (specahead.engine.sampling.judging) has rows without drafted tokens."""
    given = batch(4, 3, 700, 4, seed=8)
    logits = given.pop("logits")
    expected = judge(logits, given, "torch", draws_own=True)
    on_device = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    got = judge(logits.to(DEVICE), on_device, "triton", draws_own=True)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributions_cut_by_top_k_and_min_p(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks of the vocabulary are left out."""
    monkeypatch.setattr(specahead.kernels.rejection.positions, "CHUNK", 64)
    given = batch(8, 3, 500, 6, seed=9, dtype=dtype)
    given["top_k"] = torch.tensor([0, 1, 3, 20, 7, 0, 64, 2]).int()
    given["min_p"] = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.02, 1.0, 0.001, 0.5])
    logits = given.pop("logits")
    expected = judge(logits, given, "torch", cuts=64)
    got = judge(logits.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in given.items()}, "triton", cuts=64)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected]
    best, count = logits.float().topk(64).indices, given["draft_counts"].long()
    for row, (accepted, following) in enumerate(zip(*expected, strict=True)):
        kept = best[row, int(accepted), : int(given["top_k"][row]) or 64]
        if given["temperature"][row] > 0 and given["top_k"][row] and dtype == torch.float32:
            assert int(following) in kept.tolist()
            drafted = given["draft_tokens"][row, : int(accepted)].tolist()
            assert all(token in best[row, i, : given["top_k"][row]].tolist() for i, token in enumerate(drafted))
    assert (expected[0] <= count).all()
