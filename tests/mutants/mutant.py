"""What a mutant is, and how its kernel comes to be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pagefuzz
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import paired
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration, Kernel

KERNELS = Path(pagefuzz.__file__).parent / "kernels"
SOURCES = Path(__file__).parent / "sources"
# Good kernels of other algorithms, in SOURCES, and what they declare.
DECLARED = {
    "batched_paged_decode_attention": Declaration(cache_layouts=CACHE_LAYOUTS, table_reads="row"),
    "split_paged_decode_attention": Declaration(cache_layouts=CACHE_LAYOUTS, batch_invariant=True),
    "tiled_slot_mapping": Declaration(),
}
WRITE, DECODE = "torch_reshape_and_cache", "torch_paged_decode_attention"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    kernel: the edited file of kernels/ or of sources/. edits: (text of the good kernel, text in its place); each text
    must stand in the source exactly once, or `times`. origin: where the bug was seen: a public issue, or the seeds'
    table of pitfalls. invariant: the id that is named; also: those that another case may name in its place. smallest:
    whether a shrunk case is as small as a person would have written it. declares: beside what the good kernel of
    sources/ declares, or that it rejects what is forbidden. partner: a good kernel that it is one operation with
    (write_then_decode); for the file "pairs" itself it is the write.
    """

    name: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    origin: str
    invariant: str
    smallest: Callable[[Any], bool]
    times: int = 1
    declares: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    partner: str = ""
    also: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        return "write_then_decode" if self.partner else self.kernel.split("_", 1)[1]

    def build(self, folder: Path) -> Kernel:
        """Write the edited source to `folder` and load it. Raises ValueError where an edit no longer applies."""
        source = source_of(self.kernel).read_text()
        for good, bad in self.edits:
            if source.count(good) != self.times:
                raise ValueError(f"mutant {self.name}: {good!r} stands {source.count(good)} times in {self.kernel}.py")
            source = source.replace(good, bad)
        path = folder / f"{self.name}.py"
        path.write_text(source)
        module = _loaded(self.name, path)
        if not self.partner:
            return replace(self._half(self.kernel, module), name=self.name)
        good_half = self._half(self.partner, import_module(f"pagefuzz.kernels.{self.partner}"))
        if self.kernel == "pairs":
            decode = self._half(DECODE, import_module(f"pagefuzz.kernels.{DECODE}"))
            return replace(module.paired(good_half, decode), name=self.name)
        halves = [self._half(self.kernel, module), good_half]
        write, decode = sorted(halves, key=lambda half: half.operation.name, reverse=True)
        pair = paired(write, decode)
        assert pair is not None
        return replace(pair, name=self.name)

    def _half(self, name: str, module: Any) -> Kernel:
        declared = DECLARED.get(name, Declaration(rejects="check_values"))
        return _kernel(name, module, replace(declared, **self.declares))


def source_of(kernel: str) -> Path:
    """The file of a good kernel, the project's own or one of another algorithm."""
    return (SOURCES if kernel in DECLARED else KERNELS) / f"{kernel}.py"


def good_kernel(kernel: str) -> Kernel:
    """A good kernel of another algorithm, as it stands in its file."""
    return _kernel(kernel, _loaded(kernel, source_of(kernel)), DECLARED[kernel])


def _loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"mutant_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _kernel(name: str, module: Any, declared: Declaration) -> Kernel:
    return Kernel(name, OPERATIONS[name.split("_", 1)[1]], getattr(module, name), declared)
