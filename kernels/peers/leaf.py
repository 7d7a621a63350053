"""Loads one module of an inference engine without the engine: no package `__init__` runs.

An engine's kernels lie in small modules, but `import engine.sub.kernel` first imports all of the engine, which wants a
GPU and dozens of packages. Here the packages on the way are bare modules that know their real directory only, and what
the wanted module itself imports from elsewhere in the engine is given by the adapter, name by name. A checkout of the
needed files on the path is as good as an installed package.

What a leaf imports from outside its engine is what anyone gets: `import kernels` is the package of that name if there
is one and ModuleNotFoundError if not, since this tree imports as `pagefuzz` only.

A process in which `leaf` has loaded part of an engine cannot import the whole engine any more.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Stubs = Mapping[str, Mapping[str, Any]]


def load(module: str, stubs: Stubs) -> Any:
    """Import `module` from its engine's installed files.

    stubs: module name -> the names in it, for everything of the engine that `module` imports and that is not to be
    loaded from its real file. What is neither stubbed nor a leaf itself fails as in any import.

    Raises ModuleNotFoundError where the engine is not installed, ImportError where it has been imported as a whole.
    """
    for name, names in stubs.items():
        _bare_parents(name)
        stub = sys.modules.get(name) or ModuleType(name)
        vars(stub).update(names)
        _register(name, stub)
    _bare_parents(module)
    return importlib.import_module(module)


def directory(package: str) -> Path:
    """Where a package lies. Raises ModuleNotFoundError where it is not installed."""
    known = sys.modules.get(package)
    if known is not None and getattr(known, "__path__", None):
        return Path(next(iter(known.__path__)))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed in {sys.prefix}", name=package)
    return Path(next(iter(spec.submodule_search_locations)))


def _bare_parents(module: str) -> None:
    parts = module.split(".")[:-1]
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        known = sys.modules.get(name)
        if known is None:
            bare = ModuleType(name)
            bare.__path__ = [str(directory(parts[0]).joinpath(*parts[1:length]))]
            _register(name, bare)
        elif getattr(known, "__file__", None):
            raise ImportError(f"{name} has been imported from {known.__file__}; load its leaves before, or elsewhere")


def _register(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
