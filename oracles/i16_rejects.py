"""I16: reject or be right."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import first_difference, is_right, stray_change
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import InvalidCase


class RejectsWhatIsForbidden(Invariant):
    """What the contract forbids raises a clear error on the host before anything is written, or gives the right result
    all the same; asked of kernels that declare `rejects` (flashinfer#320, flashinfer#2255, flashinfer#2236: garbage in
    silence). Each case that pays for it breaks the contract in one way, chosen by its seed."""

    id = "I16"
    statement = "what the contract forbids is rejected before anything is written"
    relation = True
    rank = 70

    def applies(self, case: Any, declared: Declaration) -> bool:
        return bool(declared.rejects)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        faults = case.faults + (case.value_faults if declared.rejects == "check_values" else ())
        for turn in range(len(faults)):
            fault = faults[(case.seed + turn) % len(faults)]
            with suppress(InvalidCase):  # this case may have nothing to break in that way
                return {fault: case.broken(fault, declared)}
        return {}

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        if not is_right(case, observations["case"], declared):
            return None  # wrong without the fault too: that it is with it says nothing about the fault
        for fault, twin in self.twins(case, declared).items():
            run = observations[fault]
            asked = " with check_values=True" if fault in case.value_faults else ""
            right = "a ValueError or another clear error from the host"
            alike = run.finished and _alike(run, observations["case"])
            if alike and is_right(twin, run, declared):
                continue
            if run.raised is None:
                wrong = (stray_change(twin, run) or first_difference(twin, run, declared)) if alike else None
                instead = wrong.seen if wrong else run.instead or "a result of another shape"
                return Violation(f"{fault}: no error{asked}, and then {instead}", right, wrong.where if wrong else "")
            if run.raised.inside_launch:
                return Violation(f"{fault}: raised {run.raised} inside the launch{asked}", right)
            if run.raised.type == "AssertionError" and not run.raised.message:
                return Violation(f"{fault}: an assertion without a message{asked}", right)
            if run.changes:
                return Violation(f"{fault}: memory was written before the error{asked}", "an error before any write")
        return None


def _alike(run: Observation, other: Observation) -> bool:
    """Whether a run returned what the unbroken case's run did, as far as dtype and shape go."""
    mine, theirs = run.output, other.output
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and mine.bits.shape == theirs.bits.shape
