"""A process for kernels that shares nothing with the one that asked for it: `python fresh.py SOCKET WORDS`.

For adapters whose import uses the device, or starts threads: a fork could not use the one, and would not have the
others. It loads the same adapters again.
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

    from pagefuzz.fuzz.isolation import received, send, serve
    from pagefuzz.fuzz.session import UsageError, load_adapter, load_own, runner_on
    from pagefuzz.kernels.pairs import with_pairs
    from pagefuzz.kernels.registry import registered

    asked, words = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    recipe = received(asked)
    sys.path[:] = recipe.path
    try:
        for adapter in recipe.adapters:
            load_adapter(adapter)
        load_own()
    except UsageError as error:
        send(asked, ("fault", str(error)))
        return
    kernels = with_pairs(registered())
    serve(asked, words, recipe.parent, kernels, lambda: runner_on(recipe.device, recipe.workers), recipe.memory)


if __name__ == "__main__":
    main()
