"""I18: what was written is what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import blamed
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation

TWIN = "nothing to write"


class WrittenIsRead(Invariant):
    """A write and a decode agree on where a token lies (sglang#11985, lmdeploy#4229): the decode after the write equals
    the decode of the same tokens that lay in the cache before. A wrong result that is right there is this invariant's
    to name."""

    id = "I18"
    statement = "what was written is what is read"
    operations = ("write_then_decode",)
    rank = 24

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.written())

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {TWIN: replace(case, new_tokens=0)}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run, twin = observations["case"], replace(case, new_tokens=0)
        what = "with the same tokens in the cache before the call"
        return blamed(case, run, twin, lambda: observations[TWIN], declared, what)
