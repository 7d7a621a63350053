"""Judges one case of one kernel: runs it and the twins that are looked at, and asks every invariant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagefuzz.fuzz.known import Entry, explanation
from pagefuzz.fuzz.run import Observer
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.oracles.answers import OracleDisagreement, answer, check_oracles
from pagefuzz.oracles.invariant import Invariant, Violation, invariants_of
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Case, InvalidCase

PASS, VIOLATION, UNSUPPORTED = "pass", "violation", "unsupported"
NOT_REPEATABLE, DISAGREEMENT, KNOWN = "not repeatable", "oracle disagreement", "known failure"


@dataclass(frozen=True)
class Verdict:
    """What came of one case.

    kind: pass, violation, not repeatable, unsupported, oracle disagreement, known failure. invariant, violation: the
    one that is named, for a violation or a known failure. also: the ids of the others that the case breaks. judged: the
    ids that were asked, relations only where the case paid for them. loose: the tolerance says little about this case.
    runs: of the kernel. reason: a sentence, for the kinds that have no violation. ended: "crashed", "hung" or "out of
    memory" where the case's own run ended its process. known: the broken ids that an entry explains, which are all of
    them for a known failure, and never the named one for a violation.
    """

    kind: str
    invariant: Invariant | None = None
    violation: Violation | None = None
    also: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    loose: bool = False
    runs: int = 0
    reason: str = ""
    ended: str = ""
    known: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def named(self) -> str:
        """The id of the invariant that is named, or the kind."""
        return self.invariant.id if self.invariant else self.kind

    @property
    def rank(self) -> int:
        """How specific the named violation is; the lowest is the most. Only for violations."""
        assert self.invariant is not None and self.violation is not None
        return _rank(self.invariant, self.violation)


def _rank(invariant: Invariant, violation: Violation) -> int:
    return invariant.rank if violation.rank is None else violation.rank


class _Runs:
    """The runs of one case and its twins; each happens when it is first looked at. An equal twin of two invariants runs
    once; a twin that equals the case itself is run again, for that is what it is for."""

    def __init__(self, kernel: Kernel, case: Case, runner: Observer) -> None:
        self.kernel, self.case, self.runner = kernel, case, runner
        self.known: dict[Case, Observation] = {}
        self.count = 0

    def observe(self, case: Case) -> Observation:
        if case not in self.known:
            self.count += 1
            self.known[case] = self.runner.observe(self.kernel, case)
        return self.known[case]

    def again(self) -> Observation:
        self.count += 1
        return self.runner.observe(self.kernel, self.case)


class _Observations(Mapping[str, Observation]):
    """The observations that one invariant may look at."""

    def __init__(self, runs: _Runs, twins: Mapping[str, Case]) -> None:
        self.runs, self.twins = runs, twins
        self.repeated: dict[str, Observation] = {}

    def __getitem__(self, name: str) -> Observation:
        if name == "case":
            return self.runs.observe(self.runs.case)
        twin = self.twins[name]
        if twin != self.runs.case:
            return self.runs.observe(twin)
        if name not in self.repeated:
            self.repeated[name] = self.runs.again()
        return self.repeated[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("case", *self.twins))

    def __len__(self) -> int:
        return 1 + len(self.twins)

    def __contains__(self, name: object) -> bool:
        return name == "case" or name in self.twins


class Judge:
    """Judges cases of one kernel on one runner. known: the known failures of this kernel."""

    def __init__(self, kernel: Kernel, runner: Observer, known: Sequence[Entry] = ()) -> None:
        self.kernel, self.runner, self.known = kernel, runner, known
        self.invariants = invariants_of(kernel.operation.name)

    def verdict(self, case: Case, asked: tuple[str, ...] | None = None) -> Verdict:
        """Judge a case.

        Invariants without a second run are always asked, relations if the case pays for them, and those that have
        something to say without one (`Invariant.always`) without their twins if it does not. As soon as one is
        violated that no known failure explains, all are asked, and the most specific such one is named; with `asked`
        only those ids are, and the first violated one of the lowest rank is named.
        """
        with np.errstate(all="ignore"):  # whatever an adapter set: infinities and NaN are the suite's daily bread
            return self._verdict(case, asked)

    def _verdict(self, case: Case, asked: tuple[str, ...] | None) -> Verdict:
        declared = self.kernel.declared
        if beyond := case.beyond(declared):
            return Verdict(UNSUPPORTED, reason=f"{self.kernel.name} does not declare to support {beyond}")
        try:
            case.check()
            check_oracles(case, declared)
            runs = _Runs(self.kernel, case, self.runner)
            ended = runs.observe(case).ended
        except InvalidCase as invalid:
            return Verdict(UNSUPPORTED, reason=str(invalid))
        except OracleDisagreement as fault:
            return Verdict(DISAGREEMENT, reason=str(fault))
        applicable = [item for item in self.invariants if item.applies(case, declared)]
        paid = {item for item in applicable if not item.relation or item.id in case.relations}
        first = [item for item in applicable if item in paid or item.always]
        if asked is not None:
            first = [item for item in applicable if item.id in asked]
            paid = set(first)
        if ended:  # there is nothing to look at but that, and each twin might cost another process
            applicable = first = [item for item in applicable if item.of_ended_runs]
        violated: dict[Invariant, Violation] = {}
        known: dict[str, Entry] = {}
        for item in first:
            found = self._ask(item, case, runs, with_twins=item in paid)
            if found is not None:
                violated[item] = found
                known |= self._known(item, found, case, runs, with_twins=item in paid)
                if asked is None and item.id not in known:
                    break
        if asked is None and len(known) < len(violated):
            for item in applicable:
                found = self._ask(item, case, runs) if item not in violated else None
                if found is not None:
                    violated[item] = found
                    known |= self._known(item, found, case, runs)
        loose = bool(getattr(answer(case, declared), "loose", False))
        judged = tuple(item.id for item in first if item in paid)
        if not violated:
            return Verdict(PASS, judged=judged, loose=loose, runs=runs.count)
        unknown = [item for item in violated if item.id not in known]
        named = min(unknown or violated, key=lambda item: _rank(item, violated[item]))
        also = tuple(item.id for item in violated if item is not named)
        kind, ended = VIOLATION if unknown else KNOWN, ended.partition(":")[0]
        return Verdict(kind, named, violated[named], also, judged, loose, runs.count, ended=ended, known=known)

    def _known(
        self, item: Invariant, found: Violation, case: Case, runs: _Runs, with_twins: bool = True
    ) -> dict[str, Entry]:
        """The entry that explains a violation, by the invariant's id, if there is one."""
        if not self.known:
            return {}

        def beyond(entry: Entry) -> Violation | None:
            return self._ask(item, case, runs, with_twins, entry.loosened(self.kernel.declared))

        cases = [case, *item.twins(case, self.kernel.declared).values()]
        entry = explanation(self.known, item.id, found, cases, beyond)
        return {item.id: entry} if entry else {}

    def _ask(
        self,
        item: Invariant,
        case: Case,
        runs: _Runs,
        with_twins: bool = True,
        judged_as: Declaration | None = None,
    ) -> Violation | None:
        """judged_as: the declaration that a result is held to, in place of the kernel's own."""
        twins = item.twins(case, self.kernel.declared) if with_twins else {}
        try:
            return item.judge(case, _Observations(runs, twins), judged_as or self.kernel.declared)
        except InvalidCase:
            return None  # a twin does not fit this machine's arena: nothing to compare with
