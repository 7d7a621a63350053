"""Runs the same launches memoised and not, in two processes, and compares every byte and every exception.

    python tests/same_bits [--launches N] [--first SEED]        # exit status 1, and what differs, where anything does
    python tests/same_bits --adapter FILE.py [--kernel PATTERN] [--cases N] [--first SEED]

The launches are the hand-written ones of zoo.py and N of random kernels, or N cases of each kernel of an adapter, drawn
as for a fuzz run. Both processes have the corrections of pagefuzz/fuzz/interpreter (bfloat16 and comparisons): what
differs is only that one of them is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES_OF_A_KERNEL = 4
KERNELS_OF_A_FILE = 50
ARENA = 1 << 16
Result = tuple[str, str]  # what was launched, and what came of it


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Observer:
    """Launches kernels under the tracer with all tensors in one arena, whose bytes are compared, gaps included."""

    def __init__(self) -> None:
        import torch

        self.arena = torch.zeros(ARENA, dtype=torch.uint8)
        offset = -self.arena.data_ptr() % 64
        self.arena = self.arena[offset:]

    def observe(self, kernel: Any, grid: tuple[int, ...], args: list[Any], kwargs: dict[str, Any]) -> str:
        import torch

        from pagefuzz.fuzz.tracer import traced

        end = 0
        named: dict[str, Any] = {}
        self.arena.fill_(0xA5)

        def placed(value: Any) -> Any:
            nonlocal end
            if hasattr(value, "base"):  # a tensor descriptor
                value.base = placed(value.base)
            if not isinstance(value, torch.Tensor):
                return value
            known = copies.get(id(value))
            if known is None:
                size = value.numel() * value.element_size()
                known = copies[id(value)] = self.arena[end : end + size].view(value.dtype).view(value.shape)
                known.copy_(value)
                end += -(-size // 64) * 64 + 64
                named[f"tensor{len(named)}"] = known
            return known

        copies: dict[int, Any] = {}
        args, kwargs = [placed(arg) for arg in args], {name: placed(arg) for name, arg in kwargs.items()}
        with traced(named) as trace:
            try:
                kernel[grid](*args, **kwargs)
                raised = ""
            except Exception as error:
                raised = _said(error)
        digest = hashlib.sha1(self.arena[: end + 64].numpy().tobytes()).hexdigest()[:16]
        sets = [{name: offsets.tolist() for name, offsets in kind.items()} for kind in (trace.loads, trace.stores)]
        accesses = hashlib.sha1(json.dumps(sets, sort_keys=True).encode()).hexdigest()[:16]
        return f"{digest} {accesses} {trace.wild} {raised}"


def _said(error: BaseException | None) -> str:
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return " <- ".join(said)


def zoo(pattern: str) -> Iterator[Result]:
    here = _load("zoo", Path(__file__).with_name("zoo.py"))
    observer = _Observer()
    for name, kernel, grid, args, kwargs in here.launches():
        if fnmatch.fnmatch(name, pattern):
            yield name, observer.observe(kernel, grid, args, kwargs)


def randoms(first: int, kernels: int) -> Iterator[Result]:
    random_kernels = _load("random_kernels", Path(__file__).with_name("random_kernels.py"))
    observer = _Observer()
    with tempfile.TemporaryDirectory() as folder:
        for start in range(first, first + kernels, KERNELS_OF_A_FILE):
            seeds = range(start, min(start + KERNELS_OF_A_FILE, first + kernels))
            path = Path(folder) / f"kernels{start}.py"
            path.write_text(random_kernels.HEAD + "".join(random_kernels.source(seed) for seed in seeds))
            module = _load(path.stem, path)
            for seed in seeds:
                for number, (grid, args) in enumerate(random_kernels.launches(seed, LAUNCHES_OF_A_KERNEL)):
                    kernel = getattr(module, f"kernel{seed}")
                    yield f"kernel {seed} launch {number}", observer.observe(kernel, grid, list(args.values()), {})
            del sys.modules[path.stem]


def chosen(adapter: str, pattern: str) -> dict[str, Any]:
    """The kernels of an adapter by name. Raises UsageError where there are none."""
    from pagefuzz.fuzz.session import check_pools, choose, load_adapter

    load_adapter(adapter)
    kernels = choose([pattern])
    check_pools(kernels)
    return kernels


def drawn(adapter: str, pattern: str, first: int, count: int) -> Iterator[Result]:
    """Cases as a fuzz run draws them, and all that is observed of each: a digest a field, then how it ended early."""
    import numpy as np

    from pagefuzz.fuzz.drawing import each_case
    from pagefuzz.fuzz.session import Session
    from pagefuzz.strategies import STRATEGIES
    from pagefuzz.strategies.case import Case, InvalidCase

    session = Session("cpu", count, first, chosen(adapter, pattern), ROOT)
    for name, kernel in session.kernels.items():
        cases: list[Case] = []
        strategy = STRATEGIES[kernel.operation.name](kernel.declared, session.runner.arena.limits, ())
        each_case(strategy, count, first, cases.append)
        for case in cases:
            try:
                seen = session.runner.observe(kernel, case)
            except InvalidCase as invalid:
                yield f"{name} {case.one_line()}", _said(invalid)
                continue
            with np.printoptions(threshold=sys.maxsize):  # the arrays hold integers: their words say every bit
                said = {field.name: repr(getattr(seen, field.name)) for field in dataclasses.fields(seen)}
            digests = [f"{what}={hashlib.sha1(word.encode()).hexdigest()[:8]}" for what, word in said.items()]
            yield f"{name} {case.one_line()}", f"{' '.join(digests)} {seen.wild or seen.raised or seen.misreturned}"


def import_this_tree() -> None:
    if "pagefuzz" not in sys.modules:
        _load("pagefuzz", ROOT / "__init__.py")


def child(arguments: argparse.Namespace) -> None:
    """One of the two processes: writes a line a launch."""
    import numpy as np

    import_this_tree()
    from pagefuzz.fuzz.interpreter import install

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    if arguments.fault:
        FAULTS[arguments.fault]()
    if arguments.adapter:  # the runner installs, once the adapter is loaded, as in a fuzz run
        sources = [drawn(arguments.adapter, arguments.kernel, arguments.first, arguments.cases)]
    else:
        install()
        kernels = -(-arguments.launches // LAUNCHES_OF_A_KERNEL)
        sources = [zoo(arguments.zoo), randoms(arguments.first, kernels)]
    with open(arguments.into, "w") as into:
        for results in sources:
            for result in results:
                into.write(json.dumps(result) + "\n")


def _faulty(change: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """A fault: keys are changed by `change(part of the key, argument)`."""

    def plant() -> None:
        from pagefuzz.fuzz.interpreter.memo import Memo

        right = Memo._key_function

        def wrong(memo: Any) -> Any:
            keys_of = right(memo)

            def keys_of_wrongly(args: Any, tensors: list[Any]) -> Any:
                args = list(args)
                return tuple(change(key, arg) for key, arg in zip(keys_of(args, tensors), args, strict=True))

            return keys_of_wrongly

        Memo._key_function = wrong  # type: ignore[assignment, method-assign]  # the planted fault

    return plant


def _is_mask(arg: Any) -> bool:
    return hasattr(arg, "handle") and arg.type.scalar.name == "int1"


# Each must be found: what it leaves out belongs to the key.
FAULTS: dict[str, Callable[[], None]] = {
    "aliasing": _faulty(lambda key, arg: key[0] if hasattr(arg, "handle") and type(key) is tuple else key),
    "scalar": _faulty(lambda key, arg: (float,) if type(arg) is float else key),
    "integer": _faulty(lambda key, arg: (int,) if type(arg) is int else key),
    "type of a scalar": _faulty(lambda key, arg: (int, arg) if type(arg) in (int, bool, float) else key),
    "bits of a scalar": _faulty(lambda key, arg: (float, str(abs(arg))) if type(arg) is float and not arg > 0 else key),
    "mask": _faulty(lambda key, arg: None if _is_mask(arg) else key),
}


def start(mode: str, into: Path, *options: str) -> subprocess.Popen[bytes]:
    """One of the two processes, "stock" or "fast"."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PAGEFUZZ_STOCK_INTERPRETER": "1" if mode == "stock" else ""}
    return subprocess.Popen([sys.executable, "-P", __file__, "--into", str(into), *options], env=environment)


def read(path: Path) -> list[Result]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def differences(stock: list[Result], fast: list[Result]) -> list[str]:
    """What differs, a paragraph each."""
    found = [
        f"{name}\n  stock {expected[:600]}\n  fast  {seen[:600]}"
        for (name, expected), (other, seen) in zip(stock, fast, strict=False)
        if name != other or expected != seen
    ]
    if len(stock) != len(fast):
        found.append(f"{len(stock)} launches in stock, {len(fast)} in fast: one of the processes died")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20_000, help="of random kernels (default 20000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random kernel, or of the cases")
    parser.add_argument("--zoo", default="*", metavar="PATTERN", help="hand-written launches, by name")
    parser.add_argument(
        "--adapter", default="", metavar="FILE.py", help="drawn cases of its kernels instead of launches"
    )
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help="kernels of the adapter, by name")
    parser.add_argument("--cases", type=int, default=500, help="of each kernel of the adapter (default 500)")
    parser.add_argument("--fault", choices=FAULTS, default="", help="plant a fault in the key, which must be found")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into:
        child(arguments)
        return 0
    if arguments.adapter:
        import_this_tree()
        from pagefuzz.fuzz.session import UsageError

        try:
            chosen(arguments.adapter, arguments.kernel)
        except UsageError as error:
            parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        paths = {mode: Path(folder) / mode for mode in ("stock", "fast")}
        options = ["--launches", str(arguments.launches), "--first", str(arguments.first), "--zoo", arguments.zoo]
        options += ["--adapter", arguments.adapter, "--kernel", arguments.kernel, "--cases", str(arguments.cases)]
        fault = ["--fault", arguments.fault] if arguments.fault else []
        processes = [start("stock", paths["stock"], *options), start("fast", paths["fast"], *options, *fault)]
        failed = [process.wait() for process in processes]
        stock, fast = (read(path) if path.exists() else [] for path in paths.values())
    found = differences(stock, fast)
    found += [f"the process {mode} ended with {status}" for mode, status in zip(paths, failed, strict=True) if status]
    raised = sum(not result.endswith(" ") for _, result in stock)
    import triton

    print("\n".join(found[:20]))
    print(f"triton {triton.__version__}: {len(stock)} launches, of which {raised} raise; {len(found)} differ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
