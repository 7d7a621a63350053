"""I7: physical placement is invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation

TWIN, COPIES = "other blocks", "copies of shared pages"
RANK_OF_SHARING = 33  # where the blocks do not matter and sharing does, that is the cause, and no neighbour


class PlacementIsInvisible(Invariant):
    """The same tokens in other blocks of a larger pool give the same bits (attention-gym#189, flashinfer#3022), and so
    do copies of pages that sequences share. Slots and copies follow their blocks, which I4 and I6 hold bit for bit
    already."""

    id = "I7"
    statement = "physical placement is invisible"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 60

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.owned)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        twins = {TWIN: case.elsewhere(case.in_pool()[::-1], free=3)}
        copies = case.unshared()
        return twins if copies is None else {**twins, COPIES: copies}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        found = bits_differ(case, run, observations[TWIN], declared, "with the tokens in other blocks", "in these")
        if found or COPIES not in observations:
            return found
        what, otherwise = "with a copy of its own of each shared page", "with the pages shared"
        found = bits_differ(case, run, observations[COPIES], declared, what, otherwise)
        return replace(found, rank=RANK_OF_SHARING) if found else None
