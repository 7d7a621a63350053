"""I17: a run is repeatable, in any order of its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import bits_differ, element_words
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import arguments_of, order_words

REORDERED, AGAIN, ONCE_MORE = "in another order of programs", "again", "once more"
RANK_OF_A_RACE = 28  # only I9 and I1 say where two programs went to the same place


class Repeatable(Invariant):
    """The same case twice gives the same bits, in whatever order the programs of a launch run. What differs was read
    from memory that nobody wrote, or depends on timing (flashinfer#1912).

    Two programs of one launch that write one address, or of which one reads what the other writes, are told by the
    trace of the case's own run: the interpreter runs one program after the other, so the bits may well be right here.
    That is a specific cause; padding that all goes to slot 0, or an offset that wraps, is a more specific one.
    """

    id = "I17"
    statement = "a run is repeatable, in any order of its programs, and none of them touches what another one writes"
    relation = True
    always = True
    rank = 10

    def applies(self, case: Any, declared: Declaration) -> bool:
        return declared.deterministic

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {REORDERED: replace(case, order=0 if case.order == 1 else 1), AGAIN: case, ONCE_MORE: case}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if run.race is not None:
            race = run.race
            tensor = arguments_of(case).tensors.get(race.tensor)
            return Violation(
                str(race),
                f"no program {'writes' if race.kind == 'store' else 'reads'} what another one of its launch writes",
                element_words(case, tensor.buffer.name, race.index + tensor.offset) if tensor else "",
                RANK_OF_A_RACE,
            )
        if AGAIN not in observations:
            return None  # the case does not pay for a second run
        if run.loads is None:  # no interpreted launch, so no order
            return self._again(case, run, observations[AGAIN], declared)
        twin = self.twins(case, declared)[REORDERED]
        what, otherwise = (f"with the programs {order_words(each.order)}" for each in (twin, case))
        differ = bits_differ(case, run, observations[REORDERED], declared, what, otherwise)
        if differ is None:
            return None
        # Two runs more, so that what changes with every run is not blamed on the order.
        return (
            self._again(case, run, observations[AGAIN], declared)
            or self._again(case, run, observations[ONCE_MORE], declared)
            or differ
        )

    def _again(self, case: Any, run: Observation, twin: Observation, declared: Declaration) -> Violation | None:
        return bits_differ(case, run, twin, declared, "in a second run", "in the first run")
