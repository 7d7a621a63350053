"""I14: the dtype of indices is invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ, blamed, is_right
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import InvalidCase

TWIN = "other index dtype"


class IndexDtypeIsInvisible(Invariant):
    """Tables, slots, positions and lengths in int32 and in int64 give the same result. One that is read as the other
    gives every number with a zero behind it (flashinfer#697, flashinfer#2255); arithmetic in it may wrap."""

    id = "I14"
    statement = "the dtype of indices is invisible"
    relation = True
    rank = 23

    def applies(self, case: Any, declared: Declaration) -> bool:
        return len(declared.index_dtypes) > 1 and self._other(case) is not None

    def _other(self, case: Any) -> Any:
        """The case with all its indices in int64, or in int32 if that is so already; None where they do not fit."""
        now = {getattr(case, name) for name in case.index_fields}
        dtype = "int32" if now == {"int64"} else "int64"
        twin = replace(case, **dict.fromkeys(case.index_fields, dtype))
        try:
            twin.check()
        except InvalidCase:
            return None
        return twin

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {TWIN: self._other(case)}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run, twin = observations["case"], self._other(case)
        what = f"with {getattr(twin, case.index_fields[0])} indices"
        if is_right(case, run, declared):
            return bits_differ(case, run, observations[TWIN], declared, what)
        return blamed(case, run, twin, lambda: observations[TWIN], declared, what)
