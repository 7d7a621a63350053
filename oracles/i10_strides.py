"""I10: strides are invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ, blamed
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation

TWIN, EXACT, EXACT_TWIN = "contiguous", "needles", "needles, contiguous"


class StridesAreInvisible(Invariant):
    """Views of a fused QKV projection, HND caches, keys and values in one tensor, gaps between blocks, slots and heads:
    the contiguous copy must give the same result (flashinfer#527, vllm#45111, vllm#47314, FlagGems#3410).

    A wrong result that is right on the contiguous copy is this invariant's to name. Where both are right within the
    tolerance, needles are compared too, whose bits do not depend on the order in which a kernel adds.
    """

    id = "I10"
    statement = "strides are invisible"
    operations = ("reshape_and_cache", "paged_decode_attention")
    relation = True
    rank = 22

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.contiguous() != case)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        twins = {TWIN: case.contiguous()}
        if not hasattr(case, "has_needles") or not case.has_needles():
            return twins
        exact = replace(case, values="needles")
        return {**twins, EXACT: exact, EXACT_TWIN: exact.contiguous()}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        found = blamed(case, run, case.contiguous(), lambda: observations[TWIN], declared, "on contiguous copies")
        if found or EXACT not in observations:
            return found
        return bits_differ(case, observations[EXACT], observations[EXACT_TWIN], declared, "on contiguous copies")
