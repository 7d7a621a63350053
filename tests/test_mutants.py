"""Every mutant dies by the invariant that it names, and its shrunk case is what a person would have written.

`make test` runs one mutant for each invariant. The others: make test ARGS='-m every_mutant', or make mutants.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.oracles.invariant import invariants
from pagefuzz.strategies import CASES
from pagefuzz.strategies.case import Sequence
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.tests.killing import find
from pagefuzz.tests.mutants.catalogue import MUTANTS
from pagefuzz.tests.mutants.mutant import DECLARED, Mutant, good_kernel
from pagefuzz.tests.mutants.smallest import Smallest

PAGE = (Path(__file__).parent / "mutants" / "mutants.md").read_text()
# The published bugs, by their numbers in the project's list; 80c and 72c came later than their neighbours.
PUBLISHED = {
    "V": "1 2 3 4 5 6 9 10 12 13 14 15 17 19 20 21 23 24 25 26 27 28 29 31 32 33 35 37 40 41 42 44 45 46 48 49 51 53 "
    "54 55 57 58 60 62 63 64 65 67 68 70 71 74 75 76 79 80 81 82 84 86",
    "F": "1 2 3 5 7 8 9 10 11 12 13 14 15 16 17 19 20 21 23 24 26 28 29 30 31 32 34 35 36 38 39 40 42 43 45 47 48 49 "
    "50 52 53 55 56 57 58 60 61 62 64 65 67 68 69 71 72 72c 73 74 75 76 78 79 80c 81 83 84 85 86 87 89 90 91 93 94 96 "
    "97 99 101 102 103 105 107 108",
}
PITFALLS = 16
FIRST = {mutant.invariant: mutant.name for mutant in reversed(MUTANTS)}.values()


def table(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=() if mutant.name in FIRST else pytest.mark.every_mutant)
        for mutant in MUTANTS
    ],
)
def test_mutant_dies(mutant: Mutant, tmp_path: Path) -> None:
    killed = find(mutant.build(tmp_path), examples=2000, seed=1)
    assert killed is not None, "survived the examples of the quick profile"
    assert killed.verdict.named in (mutant.invariant, *mutant.also), (
        killed.verdict.violation,
        killed.verdict.also,
        killed.case.one_line(),
    )
    assert mutant.smallest(killed.case), f"not {mutant.smallest}: {killed.case.one_line()}"


def test_every_invariant_has_a_mutant() -> None:
    """A new invariant stays red until a mutant names it and dies by it: add one to tests/mutants/catalogue.py."""
    named = {mutant.invariant for mutant in MUTANTS}
    assert {item.id for item in invariants()} - named == set()


def test_every_edit_applies(tmp_path: Path) -> None:
    known = {item.id for item in invariants()}
    for mutant in MUTANTS:
        kernel = mutant.build(tmp_path)
        assert kernel.operation is OPERATIONS[mutant.operation], mutant.name
        assert mutant.invariant not in mutant.also and {mutant.invariant, *mutant.also} <= known, mutant.name
        assert mutant.origin, mutant.name


def test_an_edit_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant("m", "torch_slot_mapping", (("no such text", ""),), "nowhere", "I4", Smallest())
    with pytest.raises(ValueError, match=r"mutant m: 'no such text' stands 0 times in torch_slot_mapping\.py"):
        mutant.build(tmp_path)


def test_no_two_mutants_are_alike() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    edits = [(mutant.kernel, mutant.edits, mutant.partner) for mutant in MUTANTS]
    assert len(set(edits)) == len(edits), [
        m.name for m, edit in zip(MUTANTS, edits, strict=True) if edits.count(edit) > 1
    ]


@pytest.mark.parametrize("name", DECLARED)
def test_what_mutants_of_other_algorithms_are_made_of_is_right(name: str) -> None:
    assert find(good_kernel(name), examples=60, seed=1) is None


# ---- the page


def test_page_names_every_published_bug_and_pitfall() -> None:
    ids = [f"{letter}{number}" for letter, numbers in PUBLISHED.items() for number in numbers.split()]
    rows = table("Published bugs")
    assert [row[0] for row in rows] == ids and len(ids) == 143
    for row in rows:
        assert re.search(r"#\d|[0-9a-f]{10}|b/\d", row[1]), f"{row[0]}: {row[1]!r} is no report"
    pitfalls = table("Pitfalls of the tutorials")
    assert [row[0] for row in pitfalls] == [f"S{number}" for number in range(1, PITFALLS + 1)]
    for name, _, said in (*rows, *pitfalls):
        assert "`" in said or said.startswith(("later: ", "not expressible: ", "not expressible in one process: ")), (
            name
        )


def test_page_and_catalogue_name_the_same_mutants() -> None:
    tables = [row for name in ("Published bugs", "Pitfalls of the tutorials", "Further mutants") for row in table(name)]
    named = {name for row in tables for cell in row for name in re.findall(r"`(\w+)`", cell)}
    assert named == {mutant.name for mutant in MUTANTS}


# ---- the smallest case


def decode(**fields: Any) -> Any:
    row = Sequence((0,), (), 1)
    return CASES["paged_decode_attention"](**{"block_size": 1, "num_blocks": 1, "sequences": (row,), **fields})


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        (decode(sequences=(Sequence((0,), (), 1),) * 2), Smallest(sequences=2)),
        (decode(sequences=(Sequence((0, 1), (), 2),), num_blocks=2), Smallest(tokens=2)),
        (decode(sequences=(Sequence((0,), (7, 7), 1),)), Smallest(tail=2)),
        (decode(group_size=3), Smallest(heads=3)),
        (decode(num_kv_heads=2), Smallest(kv_heads=2)),
        (decode(head_dim=2), Smallest(head_dim=2)),
        (decode(block_size=2), Smallest(block_size=2)),
        (decode(dtype="float16"), Smallest(other=("dtype",))),
        (decode(num_blocks=2**31 + 1, sequences=(Sequence((2**31,), (), 1),)), Smallest(far=True)),
        (decode(num_blocks=2**31 + 1, sequences=(Sequence((2**31,), (), 1),)), Smallest(far=None)),
        (ReshapeAndCacheCase(block_size=1, num_blocks=2, slots=(0, 1)), Smallest(tokens=2)),
    ],
)
def test_smallest_is_as_large_as_it_says_and_no_larger(case: Any, needed: Smallest) -> None:
    assert needed(case)
    assert not Smallest()(case)


def test_smallest_in_words() -> None:
    assert str(Smallest()) == "up to 1 token"
    assert str(
        Smallest(sequences=2, tokens=3, heads=4, kv_heads=2, head_dim=8, block_size=2, other=("q_padding",))
    ) == ("up to 2 sequences, 3 tokens, 4 heads, 2 kv heads, D = 8, bs = 2; with q as a view")
    assert str(Smallest(far=True)) == "up to 1 token; with an offset past 2^31"
    assert str(Smallest(blocks=1, far=None)) == "up to 1 token, 1 block; with a large block id"


def test_smallest_knows_what_it_allows() -> None:
    with pytest.raises(ValueError, match="'colour' is not one of dtype"):
        Smallest(other=("colour",))
