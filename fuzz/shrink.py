"""Shrinks a failing case to what a person would have written.

Hypothesis finds failures; this makes them small, by steps that know what a layout is (`Case.simpler`: one sequence,
one head, fewer tokens, smaller blocks, blocks in order, no tail, ...), boldest first, until no step still fails.
The invariant that is named never gives way to a vaguer one: a lost padded token does not become "wrong numbers". A
crash stays a crash, and a hang a hang, and nothing else becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pagefuzz.fuzz.verdict import VIOLATION, Judge, Verdict
from pagefuzz.strategies.case import Case

MOST_TRIES = 3000
OTHER_SEEDS = (1, 2, 3)


def shrink(judge: Judge, case: Case, verdict: Verdict) -> tuple[Case, Verdict]:
    """The smallest case found that breaks the invariant named by `verdict` (or a more specific one), with its verdict.

    Returns the case itself if it does not fail a second time.
    """
    tried: set[Case] = set()
    found_as = case
    while True:
        with judge.runner.hurried() as tired:
            case = _smallest(judge, case, verdict, tried, tired)
        final = judge.verdict(case)
        if final.kind != VIOLATION or verdict.invariant is None:
            return (found_as if verdict.ended else case), verdict
        if final.rank >= verdict.rank or len(tried) >= MOST_TRIES:
            return case, final
        verdict = final  # small as it is now, the case shows a more specific cause: go on with that


def _smallest(judge: Judge, case: Case, verdict: Verdict, tried: set[Case], tired: Callable[[], bool]) -> Case:
    assert verdict.invariant is not None
    named = verdict.invariant
    asked = tuple(item.id for item in judge.invariants if not item.relation or item is named)
    case = replace(case, relations=(named.id,) if named.relation else ())
    while True:
        for simpler in _steps(case):
            if simpler in tried or len(tried) >= MOST_TRIES or tired():
                continue
            tried.add(simpler)
            found = judge.verdict(simpler, asked)
            if found.kind == VIOLATION and found.rank <= verdict.rank and found.ended == verdict.ended:
                case = simpler
                break
        else:
            return case


def _steps(case: Case) -> Iterator[Case]:
    """The simpler cases, then the same with other values, since a fault may show with some values only."""
    yield from case.simpler()
    for seed in OTHER_SEEDS:
        for simpler in case.simpler():
            yield replace(simpler, seed=seed)
