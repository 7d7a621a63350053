"""A process for kernels that shares nothing with the one that asked for it: `python fresh.py SOCKET WORDS`.

For adapters whose import uses the device, since no fork can use it after that. It loads the same adapters again.
"""

import importlib.util
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.pop(0)  # this folder, whose names would hide others
    spec = importlib.util.spec_from_file_location("pagefuzz", ROOT / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pagefuzz"] = module
    spec.loader.exec_module(module)

    from pagefuzz.fuzz.isolation import received, serve
    from pagefuzz.fuzz.session import device_runner, load_adapter, load_own
    from pagefuzz.kernels.pairs import with_pairs
    from pagefuzz.kernels.registry import registered

    asked, words = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    recipe = received(asked)
    sys.path[:] = recipe.path
    for adapter in recipe.adapters:
        load_adapter(adapter)
    load_own()
    kernels = with_pairs(registered())
    serve(asked, words, recipe.parent, kernels, lambda: device_runner(recipe.device, recipe.workers), None)


if __name__ == "__main__":
    main()
