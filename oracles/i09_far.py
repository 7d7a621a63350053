"""I9: addresses are 64-bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ, blamed, is_right
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation

TWIN = "compact"


class AddressesAre64Bit(Invariant):
    """Slot times stride passes 2^31 elements in a pool of a few GiB; an int32 product then wraps, silently (vllm#1514,
    sglang#9344, lmdeploy#4494 and a dozen more). The same tokens in a compact pool must give the same result."""

    id = "I9"
    statement = "addresses are 64-bit"
    rank = 20

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.is_far())

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {TWIN: case.compact()}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run, compact = observations["case"], case.compact()
        if not is_right(case, run, declared):
            return blamed(case, run, compact, lambda: observations[TWIN], declared, "in a compact pool")
        if not is_right(compact, observations[TWIN], declared):
            return None  # wrong near, right far
        if not case.watched() and run.output is not None and run.output.dtype == "int64":
            return None  # slots name their blocks, which differ
        return bits_differ(case, run, observations[TWIN], declared, "in a compact pool")
