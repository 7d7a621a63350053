"""I6: a write changes the addressed slots, all of each, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import stray_change, stray_store, written_difference
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation


class NothingElseChanges(Invariant):
    """The memory of the whole call, guard zones included, is compared before and after; a copy keeps every bit, the
    sign of zero and the payload of a NaN too. Operations that write nothing leave their inputs as they were. Where
    stores are traced, one that puts back what lay there counts too: it is a write that the owner of the place loses.
    """

    id = "I6"
    statement = "a write changes the addressed slots, all of each, and nothing else; inputs stay as they were"
    rank = 80

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        stray = stray_change(case, run) or stray_store(case, run)
        if stray or not case.watched() or not run.finished:
            return stray
        difference = written_difference(case, run)
        return difference.violation() if difference else None
