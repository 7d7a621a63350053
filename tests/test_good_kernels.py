"""Nothing may be said against a right kernel, however unlike the project's own it is, whatever relations are asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.saved import from_token
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


# Right, and accused once: by `make soak`, until the bound knew what sums of float16 lose to underflow.
ACCUSED = {
    "half_sums": [
        (
            "pf1.eNo1T0FuwzAM-4vOPsxB0K75Qd8QFIYSq65Rxc5iudhW9O-Vg-1GURRFjrBiIO88zdmTQxFKEnMCAzfkqyt1KYrPPZgnFCIP"
            "g7X9h4GNGJuwwDDC2XZN9AkXAxPn-e5K_CWVdgZSXdzOqbI79EZdviqlmdrlE_5XY6-3gpEV2uNRhzknoW9xTAmG02tfT0xuRe9j"
            "CupuwMvPqn9gunJGsQdNseZYNP8AZUFmKqLcA7m2f8C4BXKcQ5RWq2W7P9yN0Ld02lmR83HZh7Dluv416V6XNyoJYoE"
        ),
        (
            "pf1.eNp9kEtuwyAQhu8y61Hlty3fIGeIIoTN2EbB4BocJY1y9w6oWbSLbj7NE_75z7DJmZRQNDpFQoZANmhnAWGRZhL-WD3Hpwrw"
            "CZ5IQV-2dVUh7GRknPTQn-FUxqE6oo3oIvIsMU8sEqvEJrGFC8Jg3HgVXn8R9HmDYI9VpBo_2yH_-HmQHSl-8oR349xihg0WvB-k"
            "NlzoOBydDXQPwpCFvilf-GshxxLr_xdSdzAkNqmUtjMrQtBW0V2o8NhYIWehjJe882EyToZ00Oa0Z9_izKStDg-u3aQ5onYwcp9J"
            "GDfrEO2MV15vYiGpuMtmxkgovaZk3t2x_XhSsAejNBxlHzUCS53D8kfO6_INhA2M_A"
        ),
    ],
}


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in GOOD if kernel.name in ACCUSED], ids=lambda kernel: kernel.name
)
def test_it_is_no_longer_accused(kernel: Kernel) -> None:
    judge = Judge(kernel, runner())
    for token in ACCUSED[kernel.name]:
        _, case = from_token(token)
        verdict = judge.verdict(case)
        assert verdict.kind == PASS, (verdict.named, verdict.violation, case.one_line())
