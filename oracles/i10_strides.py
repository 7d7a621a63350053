"""I10: strides are invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ, blamed
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.paged_decode_attention import NEEDLES

TWIN, WHOLE, EXACT, EXACT_TWIN = "contiguous", "whole table", "needles", "needles, contiguous"


class StridesAreInvisible(Invariant):
    """Views of a fused QKV projection, HND caches, keys and values in one tensor, gaps between blocks, slots and heads,
    block tables narrower than their row stride: the contiguous copy must give the same result (flashinfer#527,
    vllm#45111, vllm#47314, FlagGems#3410, vllm#55109).

    A wrong result that is right on the contiguous copy is this invariant's to name. Where both are right within the
    tolerance, needles are compared too, whose bits do not depend on the order in which a kernel adds.
    """

    id = "I10"
    statement = "strides are invisible"
    operations = ("reshape_and_cache", "paged_decode_attention")
    relation = True
    rank = 22

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(case.contiguous() != case or getattr(case, "table_padding", 0))

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        twins = {TWIN: case.contiguous()}
        if getattr(case, "table_padding", 0):
            twins[WHOLE] = replace(case.contiguous(), table_padding=0)
        if case.contiguous() == case or not hasattr(case, "has_needles") or not case.has_needles():
            return twins
        exact = replace(case, values=NEEDLES)
        return {**twins, EXACT: exact, EXACT_TWIN: exact.contiguous()}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        found = blamed(case, run, case.contiguous(), lambda: observations[TWIN], declared, "on contiguous copies")
        if found is None and WHOLE in observations:
            how = "on contiguous copies of all, the block table too"
            whole = replace(case.contiguous(), table_padding=0)
            found = blamed(case, run, whole, lambda: observations[WHOLE], declared, how)
        if found or EXACT not in observations:
            return found
        exact, twin = observations[EXACT], observations[EXACT_TWIN]
        return bits_differ(replace(case, values=NEEDLES), exact, twin, declared, "on contiguous copies")
