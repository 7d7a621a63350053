"""I11: neighbours are invisible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import first_difference, is_right, rows_differ, unfinished
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.paged_decode_attention import NEEDLES

BATCH = "the batch"


class NeighboursAreInvisible(Invariant):
    """A sequence gives the same result alone, in a batch, and at another place in the batch (flashinfer#1930,
    flashinfer#3871, jax 10dbfcf747).

    Bit for bit where the kernel declares batch_invariant. Elsewhere a wrong result that is right alone is named, and
    needles are compared, whose bits do not depend on the order in which a kernel adds.
    """

    id = "I11"
    statement = "neighbours in the batch are invisible"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 34

    def applies(self, case: Any, declared: Declaration) -> bool:
        return any(case.context_lens)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        count = len(case.sequences)
        twins = {self._alone(b): case.batch([b]) for b in range(count)} if count > 1 else {}
        same = self._same(case, declared)
        if declared.batch_invariant or case.has_needles():
            if same != case:
                twins[BATCH] = same
            for name, rows in self._batches(case).items():
                twins[name] = same.batch(rows)
        return twins

    def _same(self, case: Any, declared: Declaration) -> Any:
        """The case whose bits must not depend on the batch."""
        return case if declared.batch_invariant else replace(case, values=NEEDLES)

    def _alone(self, b: int) -> str:
        return f"sequence {b} alone"

    def _batches(self, case: Any) -> dict[str, list[int]]:
        """Other batches of the case's sequences, by what they are in words."""
        count = len(case.sequences)
        if count == 1:
            return {"twice in one batch": [0, 0]}
        alive = [b for b, n in enumerate(case.context_lens) if n]
        return {"alone": [alive[case.seed % len(alive)]], "in a batch turned round": list(range(count))[::-1]}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        run = observations["case"]
        if not is_right(case, run, declared):
            return self._right_alone(case, run, observations, declared)
        if not declared.batch_invariant and not case.has_needles():
            return None
        batch = observations.get(BATCH, run)
        if not batch.finished:
            return None
        for name, rows in self._batches(case).items():
            twin = observations[name]
            if not twin.finished:
                return unfinished(twin, f"with the sequences {', '.join(map(str, rows))} {name}")
            found = rows_differ(self._same(case, declared), batch, twin, rows, declared, name)
            if found:
                return found
        return None

    def _right_alone(
        self, case: Any, run: Observation, observations: Mapping[str, Observation], declared: Declaration
    ) -> Violation | None:
        if not run.finished or len(case.sequences) == 1:
            return None
        wrong = first_difference(case, run, declared)
        if wrong is None:
            return None
        b = wrong.index[0]
        if not is_right(case.batch([b]), observations[self._alone(b)], declared):
            return None
        right = f"{wrong.right}; the kernel is right where this sequence is alone"
        return Violation(wrong.seen, right, f"{wrong.where}; context lengths {case.context_lens}")
