"""The table of mutants fits the product: each can be put in, and its tests are there."""

import ast

import pytest

from tests.mutants.table import MUTANTS, Mutant
from tests.stack import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "-"))
def test_a_mutant_can_be_put_in(mutant: Mutant) -> None:
    ast.parse(mutant.applied_to((ROOT / mutant.file).read_text()))
    assert mutant.old != mutant.new
    assert all((ROOT / test).exists() for test in mutant.tests)
