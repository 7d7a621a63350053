"""The one mechanism of all invariants: `twins` names further cases, `judge` says what is wrong."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.observation import Observation


@dataclass(frozen=True)
class Violation:
    """What is wrong: what was seen, what is right, and the first place where they differ, in the words of the case.

    rank: in place of the invariant's own, where this is more or less specific than what it finds otherwise.
    """

    seen: str
    right: str
    where: str = ""
    rank: int | None = None


class InvariantViolated(AssertionError):
    """A kernel broke an invariant. Each invariant raises a type of its own (`Invariant.exception`)."""


class Invariant(ABC):
    """A named statement about every run of a kernel.

    id: I1, I2, ...; what the reports, `Case.relations` and the mutants call it. statement: one line. operations: those
    that it speaks of; empty for all. relation: True if it needs a second run on every case; then only the cases that
    draw it pay for it. always: True for a relation that has something to say about the case's own run too: it is asked
    of every case, and its twins are among the observations of those that pay. of_ended_runs: True if it is asked of a
    run that ended with its process, of which nothing else is known. rank: when a case breaks several
    invariants, the one with the lowest rank is named (10: nothing else can be trusted; 20 to 60: a specific cause; 80
    and up: something is wrong somewhere).

    A subclass in a file of its own in this folder is found by itself.
    """

    id: ClassVar[str]
    statement: ClassVar[str]
    operations: ClassVar[tuple[str, ...]] = ()
    relation: ClassVar[bool] = False
    always: ClassVar[bool] = False
    of_ended_runs: ClassVar[bool] = False
    rank: ClassVar[int] = 50
    exception: ClassVar[type[InvariantViolated]] = InvariantViolated

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("id", "statement"):
            if not isinstance(getattr(cls, name, None), str):
                raise TypeError(f"invariant {cls.__module__}.{cls.__name__} needs a class attribute {name} (a str)")
        cls.exception = type(f"{cls.id}Violated", (InvariantViolated,), {"__module__": cls.__module__})

    def applies(self, case: Any, declared: Declaration) -> bool:
        """Whether there is anything to judge about this case of a kernel that declares `declared`."""
        return True

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        """The further cases that `judge` looks at, by names of its choice. None runs before it is looked at."""
        return {}

    @abstractmethod
    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        """What is wrong, or None. `observations["case"]` is the case's own run; the others are the twins'."""


@cache
def invariants() -> tuple[Invariant, ...]:
    """Every invariant of this folder, by number. Raises ValueError if two have one id."""
    package = importlib.import_module("pagefuzz.oracles")
    found: dict[str, Invariant] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            continue
        loaded = importlib.import_module(f"pagefuzz.oracles.{module.name}")
        for value in vars(loaded).values():
            if not (isinstance(value, type) and issubclass(value, Invariant) and value.__module__ == loaded.__name__):
                continue
            if value is Invariant:
                continue
            if value.id in found:
                raise ValueError(f"two invariants are called {value.id}: {found[value.id]!r} and {value!r}")
            found[value.id] = value()
    return tuple(sorted(found.values(), key=lambda invariant: (len(invariant.id), invariant.id)))


def invariants_of(operation: str) -> tuple[Invariant, ...]:
    """The invariants that speak of an operation, by number."""
    return tuple(item for item in invariants() if not item.operations or operation in item.operations)
