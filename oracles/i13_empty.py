"""I13: empty is defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import is_right
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.number_formats import decode

TWIN = "without the empty sequences"


class EmptyIsDefined(Invariant):
    """A context length of 0 gives what the kernel declares and touches no other sequence; no sequence and no token at
    all do nothing (vllm#57017: 0 / 0; vllm#37442: rows left unwritten; flashinfer#353)."""

    id = "I13"
    statement = "empty is defined: context length 0, B = 0, T = 0"
    rank = 32

    def applies(self, case: Any, declared: Declaration) -> bool:
        return case.rows_of_call() == 0 or 0 in getattr(case, "context_lens", ())

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        if case.rows_of_call() == 0 or not any(case.context_lens):
            return {}
        return {TWIN: case.fitted([row for row in case.sequences if row.context_len], case.width)}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if case.rows_of_call() == 0:
            if run.finished and not run.changes:
                return None
            seen = run.instead or "memory changed"
            return Violation(seen, "nothing to do: it returns an empty result and changes nothing")
        if run.finished and declared.empty == "zeros":
            assert run.output is not None
            values = decode(run.output.bits, run.output.dtype)
            for b, n in enumerate(case.context_lens):
                if n == 0 and not (values[b] == 0).all():
                    h, d = (int(i) for i in np.argwhere(values[b] != 0)[0])
                    return Violation(
                        f"out[{b}, {h}, {d}] = {values[b, h, d]:.6g}",
                        "0, the output for a context length of 0 (or declare empty='untouched')",
                        f"sequence {b} (context length 0)",
                    )
        if TWIN not in observations or is_right(case, run, declared):
            return None
        twin = self.twins(case, declared)[TWIN]
        if is_right(twin, observations[TWIN], declared):
            return Violation(
                f"raised {run.raised}" if run.raised else str(run.wild or "another sequence's output is wrong"),
                "an empty sequence touches nobody else: without it the kernel is right",
                f"context lengths {case.context_lens}",
            )
        return None
