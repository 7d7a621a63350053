"""I12: the page size is invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import blamed, is_right, rows_differ, unfinished
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.draws import BLOCK_SIZES
from pagefuzz.strategies.paged_decode_attention import NEEDLES

SAME, OTHER, EXACT, EXACT_OTHER = "pages", "other pages", "needles", "needles, other pages"


class PageSizeIsInvisible(Invariant):
    """The same tokens under another block size give the same result (flashinfer#810, sglang#11985, pytorch#159247):
    needles bit for bit, since their bits do not depend on where a kernel's sums are cut. Both runs have their blocks in
    order and share none."""

    id = "I12"
    statement = "the page size is invisible"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 55

    def applies(self, case: Any, declared: Declaration) -> bool:
        return any(case.context_lens) and self._other(case, declared) is not None

    def _other(self, case: Any, declared: Declaration) -> int | None:
        """Another block size that the kernel supports; one for each shape, since compiling costs more than running."""
        sizes = [size for size in dict.fromkeys(BLOCK_SIZES) if declared.supports_size("block_sizes", size)]
        others = [size for size in sizes if size != case.block_size]
        return others[(case.head_dim + case.num_kv_heads + case.block_size) % len(others)] if others else None

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        size = self._other(case, declared)
        same, other = case.repaged(case.block_size), case.repaged(size)
        twins = {SAME: same, OTHER: other}
        if same.has_needles():
            twins |= {EXACT: replace(same, values=NEEDLES), EXACT_OTHER: replace(other, values=NEEDLES)}
        return twins

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        twins = self.twins(case, declared)
        what = f"with block size {twins[OTHER].block_size}"
        if not is_right(case, observations["case"], declared):
            return blamed(twins[SAME], observations[SAME], twins[OTHER], lambda: observations[OTHER], declared, what)
        if EXACT not in observations or not observations[EXACT].finished:
            return None
        other = observations[EXACT_OTHER]
        if not other.finished:
            return unfinished(other, what)
        rows = range(len(case.sequences))
        here = f"with block size {case.block_size}"
        return rows_differ(twins[EXACT], observations[EXACT], other, rows, declared, what, here)
