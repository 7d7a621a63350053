"""A process for kernels that shares nothing with the one that asked for it: `python fresh.py SOCKET WORDS`.

For adapters whose import uses the device, or starts threads: a fork could not use the one, and would not have the
others. And for compute-sanitizer, which starts what it watches. It loads the same adapters again.
"""

import importlib.util
import os
import socket
import sys
from functools import partial
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

    from pagefuzz.fuzz import sanitizer
    from pagefuzz.fuzz.isolation.child import serve
    from pagefuzz.fuzz.isolation.messages import received, send
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
    if recipe.tool:  # its parent is the tool
        make = partial(sanitizer.runner, recipe.device, recipe.tool)
        serve(asked, words, os.getppid(), kernels, make, None, recipe.tool, recipe.log)
    serve(asked, words, recipe.parent, kernels, lambda: runner_on(recipe.device, recipe.workers), recipe.memory)


if __name__ == "__main__":
    main()
