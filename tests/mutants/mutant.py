"""What a mutant is, and how its kernel comes to be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pagefuzz
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel

KERNELS = Path(pagefuzz.__file__).parent / "kernels"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    edits: (text of the good kernel, text in its place); each text must stand in the source exactly once, or `times`.
    origin: where the bug was seen: a public issue, or the seeds' table of pitfalls. invariant: the id that is named.
    smallest: whether a shrunk case is as small as a person would have written it.
    """

    name: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    origin: str
    invariant: str
    smallest: Callable[[Any], bool]
    times: int = 1

    @property
    def operation(self) -> str:
        return self.kernel.split("_", 1)[1]

    def build(self, folder: Path) -> Kernel:
        """Write the edited source to `folder` and load it. Raises ValueError where an edit no longer applies."""
        source = (KERNELS / f"{self.kernel}.py").read_text()
        for good, bad in self.edits:
            if source.count(good) != self.times:
                raise ValueError(f"mutant {self.name}: {good!r} stands {source.count(good)} times in {self.kernel}.py")
            source = source.replace(good, bad)
        path = folder / f"{self.name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"mutant_{self.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return Kernel(
            self.name, OPERATIONS[self.operation], getattr(module, self.kernel), Declaration(rejects="check_values")
        )
