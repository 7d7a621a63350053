"""Right kernels, however they are written, are never accused: as many cases as fit into so many minutes.

    python tests/soak.py [--minutes N] [--workers N] [--first SEED]     # or: make soak MINUTES=10
    python tests/soak.py --device cuda --minutes 5 --workers 8          # compiled, in processes of their own

The kernels are the project's own, their pairs, and those of good_kernels.py. Each job is 125 cases of one kernel with a
seed of its own, drawn and judged as in a fuzz run; every second seed's cases pay for all relations. Exit status 1 where
one is accused, with the case and a token that replays it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = 125
LIMIT = 600.0  # seconds that one job may take
FAULTS = ("crashed", "hung", "error")


def _import_pagefuzz() -> None:
    """Make this tree the one that is imported, whatever is installed."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("pagefuzz", ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["pagefuzz"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def kernels() -> dict[str, Any]:
    """All that are soaked, by name."""
    from pagefuzz.fuzz.session import choose, load_own
    from pagefuzz.tests.good_kernels import GOOD

    load_own()
    return {**choose([]), **{kernel.name: kernel for kernel in GOOD}}


@cache
def isolated(device: str, sharing: int) -> tuple[dict[str, Any], Any]:
    """All kernels, and what runs them on a device: one process for all, since right ones leave it as it was."""
    from pagefuzz.tests.killing import apart

    found = kernels()
    return found, apart(found.values(), device, sharing)


def work(job: dict[str, Any], device: str = "", sharing: int = 1) -> dict[str, Any]:
    """One job: {kernel, seed} -> {cases, accused}. device: "" for interpreted kernels in this process."""
    from dataclasses import replace

    import torch

    from pagefuzz.fuzz.drawing import each_case
    from pagefuzz.fuzz.saved import token
    from pagefuzz.fuzz.session import shapes_of
    from pagefuzz.fuzz.verdict import PASS, Judge
    from pagefuzz.strategies import STRATEGIES
    from pagefuzz.tests.killing import runner

    torch.set_num_threads(1)
    found, observer = isolated(device, sharing) if device else (kernels(), runner())
    kernel = found[job["kernel"]]
    judge = Judge(kernel, observer)
    shapes = shapes_of(0, kernel.name, job["seed"]) if device else ()
    relations = tuple(item.id for item in judge.invariants if item.relation)
    seen, accused = 0, []

    def look(case: Any) -> bool:
        nonlocal seen
        seen += 1
        case = replace(case, relations=relations) if job["seed"] % 2 else case
        verdict = judge.verdict(case)
        if verdict.kind != PASS:
            said = f"{verdict.named}: {verdict.violation or verdict.reason}"
            accused.append(f"{said}\n  {case.one_line()}\n  {token(kernel.name, verdict.named, case)}")
        return bool(accused)

    drawn = STRATEGIES[kernel.operation.name](kernel.declared, observer.limits, relations, shapes)
    each_case(drawn, CASES, job["seed"], look)
    return {"cases": seen, "accused": accused}


def soak(minutes: float, workers: int, first: int, options: tuple[str, ...] = (), where: str = "") -> int:
    """Run jobs until the time is over; returns how many went wrong, and prints what was done, interrupted or not.

    options: of the processes. where: what to say of the device.
    """
    from pagefuzz.fuzz.saved import versions
    from pagefuzz.tests.workers import command_of, run

    names, ends = list(kernels()), time.monotonic() + 60 * minutes
    print(", ".join(f"{package} {found}" for package, found in versions().items()))
    print(f"{len(names)} kernels, {workers} processes, seeds from {first} on{where}")

    def jobs() -> Iterator[dict[str, Any]]:
        for seed in count(first):
            for name in names:
                if time.monotonic() > ends:
                    return
                yield {"kernel": name, "seed": seed}

    cases: Counter[str] = Counter()
    wrong = 0
    try:
        for job, result in run(command_of(Path(__file__).resolve(), "--work", *options), jobs(), workers, LIMIT):
            cases[job["kernel"]] += result.get("cases", 0)
            faults = result.get("accused") or [f"{how}: {said}" for how, said in result.items() if how in FAULTS]
            for fault in faults:
                wrong += 1
                print(f"{job['kernel']}, seed {job['seed']}: {fault}", flush=True)
    finally:
        for name in names:
            print(f"{name:60}{cases[name]:>8} cases")
        idle = sum(not cases[name] for name in names)
        print(f"{cases.total()} cases, {wrong} alarms" + (f"; no time for {idle} kernels" if idle else ""), flush=True)
    return wrong


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long jobs are begun (default 10)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: the cores; at most 8 on a device)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (interpreted), cuda, cuda:1, ... (compiled)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (default 1)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    # The way of a device with --device cpu: for the suite's own tests, where there is no device.
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.minutes > 0 or (arguments.workers is not None and arguments.workers < 1):
        parser.error("--minutes and --workers must be above 0")
    if "pagefuzz" not in sys.modules:
        _import_pagefuzz()
    from pagefuzz.tests import workers

    device = arguments.device
    workers.settle(device)
    count = arguments.workers or workers.default_workers(device)
    is_apart = arguments.apart or device != "cpu"
    if arguments.work:
        workers.serve(partial(work, device=device if is_apart else "", sharing=count))
    signal.signal(signal.SIGTERM, _interrupted)
    options, where = ("--device", device, "--workers", str(count), *(["--apart"] if arguments.apart else [])), ""
    try:
        if is_apart:
            where = f", on {workers.name_of(device)}"
        return int(soak(arguments.minutes, count, arguments.first, options, where) > 0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no process is left")
        return 130


if __name__ == "__main__":
    sys.exit(main())
