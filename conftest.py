"""Makes the tree that this file stands in importable as ``pagefuzz``, and loads the suite's pytest plugin.

The tree need not be installed, its directory may have any name, and it wins over another installed pagefuzz. pytest
imports the tree's ``__init__.py`` under the directory's name too, which does nothing.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def _import_this_tree() -> None:
    init = ROOT / "__init__.py"
    loaded = sys.modules.get("pagefuzz")
    if loaded is not None:
        if loaded.__file__ is None or Path(loaded.__file__).resolve() != init:
            raise ImportError(
                f"pagefuzz was imported from {loaded.__file__} before {ROOT} could be: "
                "leave out '-p pagefuzz.fuzz.plugin', which conftest.py loads by itself, or uninstall that pagefuzz."
            )
        return
    spec = importlib.util.spec_from_file_location("pagefuzz", init)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pagefuzz"] = module
    spec.loader.exec_module(module)


_import_this_tree()
# `python -m pytest` puts the working directory here, where `kernels` and `fuzz` would hide a user's packages.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

pytest_plugins = ["pagefuzz.fuzz.plugin"]
