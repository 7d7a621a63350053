"""Nothing may be said against a right kernel, however unlike the project's own it is, whatever relations are asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.verdict import PASS, Judge
from pagefuzz.kernels.registry import Kernel
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case
from pagefuzz.tests.good_kernels import GOOD
from pagefuzz.tests.killing import runner

CASES = 150


@pytest.mark.parametrize("kernel", GOOD, ids=lambda kernel: kernel.name)
def test_it_passes_with_every_relation(kernel: Kernel) -> None:
    judge = Judge(kernel, runner())
    relations = tuple(item.id for item in judge.invariants if item.relation)
    judged: set[str] = set()

    def look(case: Case) -> None:
        verdict = judge.verdict(replace(case, relations=relations))
        assert verdict.kind == PASS, (verdict.named, verdict.violation, verdict.reason, case.one_line())
        judged.update(verdict.judged)

    each_case(STRATEGIES[kernel.operation.name](kernel.declared, runner().arena.limits, relations), CASES, 3, look)
    never = {"I16"} if kernel.declared.rejects is False else set()
    never |= set() if kernel.declared.deterministic else {"I17"}
    never |= {"I10"} if kernel.declared.token_strides == "contiguous" else set()
    never |= {"I14"} if len(kernel.declared.index_dtypes) == 1 else set()
    assert set(relations) - judged == never & set(relations)
