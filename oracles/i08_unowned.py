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

TWIN, FRESH = "other values where nobody owns", "other fresh memory"
RANK_OF_FRESH = 33  # memory that the kernel allocates and reads before it has written there is a cause of its own


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
        fresh = replace(case, fresh="zeros" if case.fresh != "zeros" else "nan")
        return {TWIN: replace(fresh, poison=other), FRESH: fresh}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run, twin = observations["case"], self.twins(case, declared)[TWIN]
        poison = f"with {twin.poison} there", f"with {case.poison} where nobody owns"
        found = bits_differ(case, run, observations[TWIN], declared, *poison)
        if found is None:
            return None
        fresh = f"with {twin.fresh} in it", f"with {case.fresh} in fresh memory (torch.empty)"
        own = bits_differ(case, run, observations[FRESH], declared, *fresh)
        return replace(own, rank=RANK_OF_FRESH) if own else found
