"""What it costs that a kernel runs in a process of its own: the same drawn cases, here and there by turns.

Processor time of both processes, a verdict; by wall: the median of the difference.

python bench/isolation.py [--cases N] [--kernel PATTERN] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of wall time."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def processor(pid: int) -> float:
    """Milliseconds of processor time of this process and that one."""
    return time.process_time() * 1000 + int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="cases a kernel (default 500)")
    parser.add_argument("--kernel", action="append", default=[], metavar="PATTERN", help="kernels by name")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    import torch

    from pagefuzz.fuzz.arena import CpuArena
    from pagefuzz.fuzz.drawing import each_case
    from pagefuzz.fuzz.isolation.parent import Isolated
    from pagefuzz.fuzz.run import Runner
    from pagefuzz.fuzz.session import choose, load_own
    from pagefuzz.fuzz.verdict import Judge
    from pagefuzz.strategies import STRATEGIES
    from pagefuzz.strategies.case import Case

    torch.set_num_threads(1)
    load_own()
    here = Runner(CpuArena(), interpreted=True)
    print(f"{'kernel':60}{'here':>8}{'there':>8}{'more':>8}{'more, by wall':>14}{'a start':>9}   (ms)")
    for name, kernel in choose(arguments.kernel).items():
        there = Isolated([kernel], lambda: Runner(CpuArena(), interpreted=True))
        judges = [Judge(kernel, here), Judge(kernel, there)]
        cases: list[Case] = []
        strategy = STRATEGIES[kernel.operation.name](kernel.declared, here.limits, ())
        each_case(strategy, arguments.cases, arguments.seed, cases.append)
        start = timed(partial(getattr, there, "limits"))
        for case in cases[:50]:  # imports, first launches
            for judge in judges:
                judge.verdict(case)
        assert there.worker is not None
        times, used = np.empty((len(cases), 2)), np.zeros(2)
        for index, case in enumerate(cases):
            for turn in (0, 1) if index % 2 else (1, 0):
                before = processor(there.worker.pid)
                times[index, turn] = timed(partial(judges[turn].verdict, case))
                used[turn] += processor(there.worker.pid) - before
        used /= len(cases)
        more = np.median(times[:, 1] - times[:, 0])
        print(f"{name:60}{used[0]:>8.2f}{used[1]:>8.2f}{used[1] - used[0]:>8.2f}{more:>14.2f}{start:>9.1f}")
        there.close()


if __name__ == "__main__":
    main()
