"""Every mutant dies by the invariant that it names, and its shrunk case is what a person would have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagefuzz.oracles.invariant import invariants
from pagefuzz.tests.killing import find
from pagefuzz.tests.mutants.catalogue import MUTANTS
from pagefuzz.tests.mutants.mutant import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_dies(mutant: Mutant, tmp_path: Path) -> None:
    killed = find(mutant.build(tmp_path), examples=2000, seed=1)
    assert killed is not None, "survived the examples of the quick profile"
    assert killed.verdict.named in (mutant.invariant, *mutant.also), (
        killed.verdict.violation,
        killed.verdict.also,
        killed.case.one_line(),
    )
    assert mutant.smallest(killed.case), killed.case.one_line()


def test_every_invariant_has_a_mutant() -> None:
    """A new invariant stays red until a mutant names it and dies by it: add one to tests/mutants/catalogue.py."""
    named = {mutant.invariant for mutant in MUTANTS}
    assert {item.id for item in invariants()} - named == set()
