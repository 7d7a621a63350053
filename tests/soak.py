"""Right kernels, however they are written, are never accused: as many cases as fit into so many minutes.

    python tests/soak.py [--minutes N] [--workers N] [--first SEED]     # or: make soak MINUTES=10

The kernels are the project's own, their pairs, and those of good_kernels.py. Each job is 125 cases of one kernel with a
seed of its own, drawn and judged as in a fuzz run; every second seed's cases pay for all relations. Exit status 1 where
one is accused, with the case and a token that replays it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
CASES = 125
LIMIT = 600.0  # seconds that one job may take


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


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One job: {kernel, seed} -> {cases, accused}."""
    from dataclasses import replace

    import torch

    from pagefuzz.fuzz.drawing import each_case
    from pagefuzz.fuzz.saved import token
    from pagefuzz.fuzz.verdict import PASS, Judge
    from pagefuzz.strategies import STRATEGIES
    from pagefuzz.tests.killing import runner

    torch.set_num_threads(1)
    kernel = kernels()[job["kernel"]]
    judge = Judge(kernel, runner())
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

    each_case(
        STRATEGIES[kernel.operation.name](kernel.declared, runner().arena.limits, relations), CASES, job["seed"], look
    )
    return {"cases": seen, "accused": accused}


def soak(minutes: float, workers: int, first: int) -> int:
    """Run jobs until the time is over; returns how many went wrong, and prints what was done."""
    from pagefuzz.fuzz.saved import versions
    from pagefuzz.tests.mutants.workers import run

    names, ends = list(kernels()), time.monotonic() + 60 * minutes
    print(", ".join(f"{package} {found}" for package, found in versions().items()))
    print(f"{len(names)} kernels, {workers} processes, seeds from {first} on")

    def jobs() -> Iterator[dict[str, Any]]:
        for seed in count(first):
            for name in names:
                if time.monotonic() > ends:
                    return
                yield {"kernel": name, "seed": seed}

    cases: Counter[str] = Counter()
    wrong = 0
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work"]
    for job, result in run(command, jobs(), workers, LIMIT):
        cases[job["kernel"]] += result.get("cases", 0)
        faults = result.get("accused") or [f"{how}: {said}" for how, said in result.items() if how in FAULTS]
        for fault in faults:
            wrong += 1
            print(f"{job['kernel']}, seed {job['seed']}: {fault}", flush=True)
    for name in names:
        print(f"{name:60}{cases[name]:>8} cases")
    idle = sum(not cases[name] for name in names)
    print(f"{cases.total()} cases, {wrong} alarms" + (f"; no time for {idle} kernels" if idle else ""))
    return wrong


FAULTS = ("crashed", "hung", "error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long jobs are begun (default 10)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: the cores)"
    )
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (default 1)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.minutes > 0 or arguments.workers < 1:
        parser.error("--minutes and --workers must be above 0")
    _import_pagefuzz()
    if arguments.work:
        from pagefuzz.tests.mutants.workers import serve

        serve(work)
    try:
        return int(soak(arguments.minutes, arguments.workers, arguments.first) > 0)
    except KeyboardInterrupt:
        print("interrupted: no process is left")
        return 130


if __name__ == "__main__":
    sys.exit(main())
