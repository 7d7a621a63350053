"""I3: exactly context_lens[b] K/V rows take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import answer, unfinished
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.number_formats import decode


class ContextLength(Invariant):
    """With q = 0 every visible row weighs 1 / n. Row j of V is one-hot at j mod D, in a second twin at j // D, in the
    unowned slots of the last page too, so that the output names every row that took part (seeds, I3)."""

    id = "I3"
    statement = "exactly context_lens[b] K/V rows take part"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 35

    def applies(self, case: Any, declared: Declaration) -> bool:
        return any(case.context_lens)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        twins = {"rows modulo D": replace(case, values="rows_modulo")}
        if 1 < case.head_dim < max(case.context_lens):
            twins["rows divided by D"] = replace(case, values="rows_quotient")
        return twins

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        for name, twin in self.twins(case, declared).items():
            run = observations[name]
            if not run.finished:
                return unfinished(run, "with q = 0 and one-hot rows of V") if observations["case"].finished else None
            assert run.output is not None
            seen = decode(run.output.bits, run.output.dtype)
            right = answer(twin, declared)
            for b, n in enumerate(case.context_lens):
                # Half of what one row more or less moves; rounding, however coarse, is I4's business.
                allowed = np.maximum(right.bound[b], 0.2 if case.head_dim == 1 else 0.25 / (n + 1))
                wrong = ~(np.abs(seen[b] - right.exact[b]) <= allowed)
                if n and wrong.any():
                    h, d = (int(i) for i in np.argwhere(wrong)[0])
                    return Violation(
                        f"{self._rows(case, name, n, seen[b, h])}: out[{b}, {h}, {d}] = {seen[b, h, d]:.6g} with q = 0",
                        f"rows 0 to {n - 1} with weight 1/{n} each: {right.exact[b, h, d]:.6g}",
                        f"sequence {b} (context length {n}, block size {case.block_size}), head {h}",
                    )
        return None

    def _rows(self, case: Any, name: str, n: int, weights: np.ndarray) -> str:
        """Which rows took part, as far as one output row tells."""
        size, dim = case.block_size, case.head_dim
        if dim == 1 or name != "rows modulo D" or dim < -(-n // size) * size:
            return "other rows took part"  # a dim stands for several rows, so counts tell no more than that
        took = {j for j in range(min(dim, -(-n // size) * size)) if weights[j] > 0.5 / (n + size)}
        if beyond := sorted(took - set(range(n))):
            return f"row{'s' if len(beyond) > 1 else ''} {_listed(beyond)} past the context took part"
        if missing := sorted(set(range(n)) - took):
            return f"row{'s' if len(missing) > 1 else ''} {_listed(missing)} took no part"
        return "rows took part with other weights"


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows)) if len(rows) <= 4 else f"{rows[0]} to {rows[-1]}"
