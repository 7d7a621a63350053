"""I1: the value of a token with a negative slot appears nowhere in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import element_words
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.number_formats import FORMATS
from pagefuzz.strategies.values import is_sentinel


class PaddingIsSkipped(Invariant):
    """A padded token carries sentinel bits that nothing else in the case has. In PyTorch slot -1 is the last slot of
    the pool: the padding lands in somebody's page, and nothing says so (seeds, "padding token")."""

    id = "I1"
    statement = "the value of a token with a negative slot appears nowhere in the cache"
    operations = ("reshape_and_cache",)
    rank = 25

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.padded)

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if run.wild is not None and run.wild.value is not None:
            value = np.array([run.wild.value % 2**64], dtype=np.uint64).astype(FORMATS[case.dtype].bits)
            if is_sentinel(value)[0]:
                return self._violation(case, int(value[0]), run.wild.tensor, run.wild.index, f"; {run.wild}")
        for name, change in run.changes.items():
            found = np.flatnonzero(is_sentinel(change.after.view(FORMATS[case.dtype].bits)))
            if len(found):
                return self._violation(case, int(change.after[found[0]]), name, int(change.elements[found[0]]), "")
        return None

    def _violation(self, case: Any, bits: int, buffer: str, element: int, detail: str) -> Violation:
        token = next((t for t in case.padded if t & 0xFF == bits & 0xFF), case.padded[0])
        return Violation(
            f"the value of padded token {token} (slot {case.slots[token]}) was written{detail}",
            "a token with a negative slot is written nowhere",
            element_words(case, buffer, element),
        )
