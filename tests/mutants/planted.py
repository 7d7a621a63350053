"""Mutants that must fail a run of the matrix, and one that must not: what tests/test_matrix.py looks at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.tests.mutants.catalogue import MUTANTS as CATALOGUE


@dataclass(frozen=True)
class Planted:
    """A kernel of its own in place of an edit; the rest as in mutant.Mutant."""

    name: str
    call: Callable[..., Any]
    invariant: str = "I4"
    origin: str = "planted"
    operation: str = "slot_mapping"
    kernel: str = "torch_slot_mapping"

    def smallest(self, case: Any) -> bool:
        return len(case.tokens) <= 1

    def build(self, folder: Path) -> Kernel:
        return Kernel(self.name, OPERATIONS[self.operation], self.call, Declaration())


def aborts(*arguments: Any) -> Any:
    os.abort()


def hangs(*arguments: Any) -> Any:
    while True:
        time.sleep(1)


def off_by_one(*arguments: Any) -> Any:
    return torch_slot_mapping(*arguments) + 1


_edited = next(mutant for mutant in CATALOGUE if mutant.kernel == "torch_slot_mapping")
MUTANTS = (
    Planted("right", torch_slot_mapping),
    Planted("aborts", aborts),
    Planted("hangs", hangs),
    Planted("off_by_one", off_by_one),
    Planted("seen_by_another", off_by_one, "I17"),
    Planted("names_a_vaguer_one", off_by_one, "I14"),
    replace(_edited, name="no_longer_applies", edits=(("text that stands nowhere", ""),)),
)
