"""I0: a case inside the declaration runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation


class Runs(Invariant):
    """Everything that the kernel declares to support is drawn, so an exception, a wild access, a crash or a hang
    there is a fault of the kernel, or of its declaration."""

    id = "I0"
    statement = "a case inside the declaration runs"
    rank = 95
    of_ended_runs = True

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        right = "it runs; if the kernel is not meant to support this, declare so (README, 'Your own kernel')"
        if run.raised is not None:
            return Violation(f"raised {run.raised}", right)
        if run.ended:
            return Violation(run.ended, right)
        if run.wild is not None:
            return Violation(str(run.wild), "every access lies inside a tensor of the launch")
        return Violation(run.misreturned, "what the contract says") if run.misreturned else None
