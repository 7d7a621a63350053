"""I2: only block_tables[b, :ceil(n / bs)] is used, and only owned pages are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import element_words, first_difference, is_right
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.number_formats import ITEMSIZE

HARMLESS = "harmless tails"
_PAGED = ("block_tables", "k_cache", "v_cache")


class TailIsUnused(Invariant):
    """Past ceil(n / bs) a table row holds what its last owner left (vllm#42494, vllm#53982, tpu-inference#2366). Four
    things show a use of it: an exception or a wrong result that harmless ids make go away, a traced load of the entry,
    a traced load of a page that nobody owns, and untouched memory that was looked at."""

    id = "I2"
    statement = "only block_tables[b, :ceil(n / bs)] is used, and only owned pages are read"
    operations = ("slot_mapping", "paged_decode_attention")
    rank = 30

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        harmless = case.with_harmless_tails()
        return {} if harmless is None else {HARMLESS: harmless}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if run.wild is not None and run.wild.kind == "load" and run.wild.tensor in _PAGED:
            return Violation(
                str(run.wild),
                "loads stay inside the table and inside owned pages",
                element_words(case, run.wild.tensor, run.wild.index) + self._tails(case, "; "),
            )
        found = None
        if declared.table_reads == "exact":
            found = self._table_loads(case, run) or self._page_loads(case, run) or self._touched(case, run)
        if found or HARMLESS not in observations:
            return found
        if run.raised is not None:
            if observations[HARMLESS].finished:
                return Violation(
                    f"raised {run.raised}",
                    "tail entries are never used: with ids of owned blocks in their place it runs",
                    self._tails(case),
                )
            return None
        if run.finished:
            wrong = first_difference(case, run, declared)
            if wrong and is_right(case.with_harmless_tails(), observations[HARMLESS], declared):
                return Violation(
                    wrong.seen, f"{wrong.right}, as it is with ids of owned blocks in the tails", wrong.where
                )
        return None

    def _tails(self, case: Any, before: str = "") -> str:
        tails = [f"row {b} has the tail {row.tail}" for b, row in enumerate(case.sequences) if row.tail]
        return before + "; ".join(tails) if tails else ""

    def _table_loads(self, case: Any, run: Observation) -> Violation | None:
        if run.loads is None or "block_tables" not in run.loads:
            return None
        stride = case.width + case.table_padding
        for element in run.loads["block_tables"].tolist():
            b, column = divmod(element, stride)
            used = len(case.sequences[b].blocks)
            if column >= used:
                return Violation(
                    f"block_tables[{b}, {column}] = {(*case.sequences[b].blocks, *case.sequences[b].tail)[column]} "
                    "was loaded",
                    f"only the first {used} entries of row {b} are loaded (or declare table_reads='row')",
                    f"sequence {b}",
                )
        return None

    def _page_loads(self, case: Any, run: Observation) -> Violation | None:
        owned = case.owned
        for name in ("k_cache", "v_cache"):
            elements = (run.loads or {}).get(name, np.empty(0, np.int64))
            blocks = elements // case.caches()[name].strides[0] if len(elements) else elements
            for block in blocks[np.diff(blocks, prepend=-1) != 0].tolist():
                if block not in owned:
                    return self._foreign(case, name, block, "was loaded")
        return None

    def _touched(self, case: Any, run: Observation) -> Violation | None:
        for name, stride in _cache_buffers(case).items():
            for first, last in run.touched.get(name, ()):
                size = stride * ITEMSIZE[case.dtype]
                blocks = range(first // size, last // size + 1)
                named = [entry for row in case.sequences for entry in row.tail if entry in blocks]
                if not named and len(blocks) > 1:  # one memory page holds many small blocks
                    return Violation(
                        f"one of the blocks {blocks[0]} to {blocks[-1]} of {name}, owned by no sequence, was looked at",
                        self._owned(case),
                        self._tails(case),
                    )
                return self._foreign(case, name, named[0] if named else blocks[0], "was looked at")
        return None

    def _owned(self, case: Any) -> str:
        owned = ", ".join(map(str, sorted(case.owned))) or "none"
        return f"only owned blocks are: {owned} (or declare table_reads='row', if it is masked afterwards)"

    def _foreign(self, case: Any, cache: str, block: int, verb: str) -> Violation:
        place = "outside the pool" if not 0 <= block < case.num_blocks else "owned by no sequence"
        rows = [str(b) for b, row in enumerate(case.sequences) if block in row.tail]
        return Violation(
            f"block {block} of {cache}, {place}, {verb}",
            self._owned(case),
            f"the tail of row {rows[0]} names it" if rows else "no row names it",
        )


def _cache_buffers(case: Any) -> dict[str, int]:
    """The buffers of the caches, and the elements from block to block in each; none for slot_mapping."""
    return {cache.buffer: cache.strides[0] for cache in case.caches().values()} if hasattr(case, "caches") else {}
