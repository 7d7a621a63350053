"""I4: equal to the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import first_difference
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation


class EqualToOracle(Invariant):
    """Attention within the bound of the declared precision (oracles/tolerance.py); slots and copies bit for bit. The
    dense and the loop oracle agree on every case before anything is judged."""

    id = "I4"
    statement = "the result equals the oracle's"
    rank = 90

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if not run.finished:
            return None
        difference = first_difference(case, run, declared)
        return difference.violation() if difference else None
