"""Draws cases with Hypothesis. It only draws: failures are shrunk by fuzz/shrink.py and kept by fuzz/saved.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy


class _Enough(Exception):
    pass


def each_case(cases: SearchStrategy[Any], examples: int, seed: int, look: Callable[[Any], object]) -> None:
    """Show `look` so many drawn cases, always the same ones for a seed; it returns something true to end early."""
    first, enough = True, False

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples + 1,
        database=None,  # saved failures are what is tried first, whatever the number of shards
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        derandomize=False,
    )
    @given(cases)
    def one_case(case: Any) -> None:
        nonlocal first, enough
        if first:  # Hypothesis begins with the simplest choices, and so with the same case whatever the seed
            first = False
            return
        enough = enough or bool(look(case))
        if enough:
            raise _Enough

    with suppress(_Enough):
        one_case()
