"""What a mutant is, and how its kernel comes to be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefuzz.kernels import own
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration, Kernel, registered

KERNELS = Path(own.__file__).parent
SOURCES = Path(__file__).parent / "sources"
# Good kernels of other algorithms, and what they declare.
DECLARED = {
    "batched_paged_decode_attention": Declaration(cache_layouts=CACHE_LAYOUTS, table_reads="row"),
    "split_paged_decode_attention": Declaration(cache_layouts=CACHE_LAYOUTS, batch_invariant=True),
    "tiled_slot_mapping": Declaration(),
}


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    edits: (text of the good kernel, text in its place); each text must stand in the source exactly once, or `times`.
    origin: where the bug was seen: a public issue, or the seeds' table of pitfalls. invariant: the id that is named
    first; also: those that may be named in its place, by the case that comes first. smallest: whether a shrunk case is
    as small as a person would have written it.
    """

    name: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    origin: str
    invariant: str
    smallest: Callable[[Any], bool]
    times: int = 1
    also: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        return self.kernel.split("_", 1)[1]

    def build(self, folder: Path) -> Kernel:
        """Write the edited source to `folder` and load it. Raises ValueError where an edit no longer applies."""
        source = source_of(self.kernel).read_text()
        for good, bad in self.edits:
            if source.count(good) != self.times:
                raise ValueError(f"mutant {self.name}: {good!r} stands {source.count(good)} times in {self.kernel}.py")
            source = source.replace(good, bad)
        path = folder / f"{self.name}.py"
        path.write_text(source)
        return Kernel(
            self.name, OPERATIONS[self.operation], _loaded(self.name, path, self.kernel), declaration_of(self.kernel)
        )


def source_of(kernel: str) -> Path:
    """The file of a good kernel, the project's own or one of another algorithm."""
    return (SOURCES if kernel in DECLARED else KERNELS) / f"{kernel}.py"


def declaration_of(kernel: str) -> Declaration:
    """What a good kernel declares, and so its mutants."""
    return DECLARED[kernel] if kernel in DECLARED else registered()[kernel].declared


def good_kernel(kernel: str) -> Kernel:
    """A good kernel of another algorithm, as it stands in its file."""
    operation = OPERATIONS[kernel.split("_", 1)[1]]
    return Kernel(kernel, operation, _loaded(kernel, source_of(kernel), kernel), declaration_of(kernel))


def _loaded(name: str, path: Path, kernel: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"mutant_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, kernel)
