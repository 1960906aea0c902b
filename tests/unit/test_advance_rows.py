"""Sequences that are advanced by a step's verdicts: Triton (on a GPU, or interpreted) and torch against a loop."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.advance_rows import MOST_CHOICES, Choice, Followers, LaunchRows, Verdicts, advance_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 16, 6


def ints(random: torch.Generator, first: int, stop: int, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(first, stop, sizes, generator=random, dtype=dtype)


class Case:
    """Sequences with up to four rows each, some of which follow a step that judged up to γ tokens of each, and rows of
    no sequence. Of a third of the verdicts the last accepted token is an alternative. Rounds have a token before the
    one that the step added, and as choices windows of one array, and numbers by what is accepted.
    """

    def __init__(self, seed: int, sequences: int, gamma: int, count: int, rounds: bool, rows: int = 5) -> None:
        random = torch.Generator().manual_seed(seed)
        of_verdicts = sequences + 2
        alternative = ints(random, 0, 1000, of_verdicts)
        alternative[torch.rand(of_verdicts, generator=random) < 0.6] = -1
        # It may accept more than is told here: such sequences are advanced by no more than that.
        accepted = ints(random, -1, gamma + 2, of_verdicts)
        self.verdicts = Verdicts(accepted, ints(random, 0, 1000, of_verdicts), alternative)
        follows = torch.randperm(of_verdicts, generator=random)[:sequences].int()
        follows[torch.rand(sequences, generator=random) < 0.3] = -1
        self.followers = Followers(follows, ints(random, 0, gamma + 1, sequences))
        counts = torch.where(follows >= 0, 2 if rounds else 1, 0) + ints(random, 0, rows, sequences)
        starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        total = int(starts[-1]) + int(ints(random, 0, 4, 1))
        limits = (0, 999), (0, PAGE * PAGES - gamma), (-1, 9999)
        of_rows = [ints(random, *each, total, dtype=torch.int64) for each in limits]
        tables = ints(random, 0, 1000, sequences, PAGES)
        self.rows = LaunchRows(starts, ints(random, 1, 200, sequences), tables, *of_rows)
        window = torch.rand(sequences, gamma + count, generator=random, dtype=torch.float64)
        by_accepted = ints(random, 0, 99, gamma + 1, 3, sequences)
        self.sources = [window.unfold(1, count, 1), by_accepted.permute(2, 0, 1), by_accepted[:, :1].permute(2, 0, 1)]
        self.outs = [torch.zeros(count, sequences, dtype=torch.float64).T, torch.zeros(3, sequences).int().T]
        self.outs.append(torch.zeros(sequences, 1).int())
        self.previous = ints(random, 0, 999, gamma + 1, sequences, dtype=torch.int64).T if rounds else None

    def run(self, backend: str, choices: int = MOST_CHOICES) -> list[Tensor]:
        """Return what was changed or returned; the verdicts, starts and tables are checked to be as they were."""
        given_ = [type(each)(*_moved(each)) for each in (self.verdicts, self.followers, self.rows)]
        before = [*given_[0], *given_[1]]
        kept = [tensor.clone() for tensor in before]
        pairs: list[Choice] = list(zip(_moved(self.sources), _moved(self.outs), strict=True))[:choices]
        previous = None if self.previous is None else self.previous.to(DEVICE)
        taken = advance_rows(*given_, previous, pairs, PAGE, backend)
        assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
        changed = [taken, *given_[2], *(out for _, out in pairs)]
        return [tensor.cpu() for tensor in changed]

    def expected(self, choices: int = MOST_CHOICES) -> list[Tensor]:
        wanted = {name: tensor.clone() for name, tensor in self.rows._asdict().items()}
        sequences = len(self.followers.rows)
        taken, outs = torch.zeros(3, sequences, dtype=torch.int32), [out.clone() for out in self.outs[:choices]]
        for i, row in enumerate(self.followers.rows.tolist()):
            accepted, following, alternative = (int(each[max(0, row)]) for each in self.verdicts)
            taken[:, i] = torch.tensor([accepted, following, alternative])
            count = min(max(0, accepted), int(self.followers.judged[i])) if row >= 0 else 0
            for source, out in zip(self.sources, outs, strict=False):
                out[i] = source[i, count]
            if row < 0:
                continue
            wanted["lengths"][i] += count
            first, end = self.rows.starts[i : i + 2].tolist()
            if self.previous is None:
                wanted["token_ids"][first] = following
            else:
                before = alternative if alternative >= 0 else int(self.previous[i, count])
                wanted["token_ids"][end - 2 : end] = torch.tensor([before, following])
            for at in range(first, end):
                position = int(self.rows.positions[at]) + count
                wanted["positions"][at] = position
                wanted["slots"][at] = int(self.rows.tables[i, position // PAGE]) * PAGE + position % PAGE
        return [taken, *wanted.values(), *outs]


def _moved(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies on the device, of the same strides."""
    moved = []
    for tensor in tensors:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone().to(DEVICE)
        moved.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, MOST_CHOICES),
    st.integers(0, 999),
)
def test_sequences_advance_by_what_is_accepted(
    backend: str, sequences: int, gamma: int, count: int, rounds: bool, choices: int, seed: int
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    case = Case(seed, sequences, gamma, count, rounds)
    for ours, theirs in zip(case.run(backend, choices), case.expected(choices), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_a_sequence_may_have_more_rows_and_a_choice_more_numbers_than_a_program_takes_at_once() -> None:
    pytest.importorskip("triton")
    case = Case(1, 3, 4, 300, rounds=True, rows=300)
    assert int(case.rows.starts[-1]) > 300
    for ours, theirs in zip(case.run("triton"), case.expected(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_has_arguments_for_three_choices() -> None:
    case = Case(1, 3, 4, 2, rounds=True)
    case.sources, case.outs = case.sources * 2, case.outs * 2
    with pytest.raises(ValueError, match="6 choices, expected at most 3"):
        case.run("torch", 6)
