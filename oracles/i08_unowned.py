"""I8: what nobody owns is invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.values import FINITE_POISONS

TWIN = "other values where nobody owns"


class UnownedIsInvisible(Invariant):
    """Free blocks, block 0, the tail of the last page, the gaps of views and the memory that the kernel allocates hold
    poison; other poison must give the same bits. A weight of 0 times a NaN of the last page's tail is a NaN (vllm#641,
    flashinfer#941, jax 11cf85deb0)."""

    id = "I8"
    statement = "what nobody owns is invisible"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 40

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        if declared.unowned == "finite":
            other = "tenant" if case.poison != "tenant" else "zeros"
        else:
            other = "nan" if case.poison in FINITE_POISONS else "zeros"
        return {TWIN: replace(case, poison=other, fresh="zeros" if case.fresh != "zeros" else "nan")}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        twin = self.twins(case, declared)[TWIN]
        what = f"with {twin.poison} in place of {case.poison} where nobody owns, "
        what += f"{twin.fresh} in place of {case.fresh} in fresh memory"
        return bits_differ(case, observations["case"], observations[TWIN], declared, what)
