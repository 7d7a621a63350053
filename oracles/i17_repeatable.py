"""I17: a run is repeatable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation

TWIN = "again"


class Repeatable(Invariant):
    """The same case twice gives the same bits. What differs was read from memory that nobody wrote, or depends on
    timing (flashinfer#1912)."""

    id = "I17"
    statement = "a run is repeatable"
    relation = True
    rank = 10

    def applies(self, case: Any, declared: Declaration) -> bool:
        return declared.deterministic

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {TWIN: case}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        return bits_differ(case, observations["case"], observations[TWIN], declared, "in a second run")
