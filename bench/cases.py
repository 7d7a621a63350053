"""Cases a second, everything included: drawing, running, twins, oracles, judging; what the quick profile really draws.

python bench/cases.py [--cases N] [--kernel PATTERN] [--seed N]     # one process, one core
python bench/cases.py --split                                       # and where the time of a case goes
python bench/cases.py --workers                                     # what two xdist workers gain over one
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


PHASES = ("drawing", "materialising", "kernel", "observing", "oracles", "judging")


class Split:
    """Where processor time goes: a clock that runs for one phase at a time, switched at the seams of the suite.

    drawing: Hypothesis and the strategies. materialising: the arguments' values, and placing them in the arena. kernel:
    its call, interpreted and traced. observing: what the run left in memory, and which elements it accessed. oracles:
    both. judging: the rest of a verdict.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """From now on, outside of all seams: drawing."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase, self.since = PHASES[0], time.process_time()

    def switch(self, phase: str) -> str:
        """Charge the time up to now to the phase that ends, and return it."""
        ended, now = self.phase, time.process_time()
        self.seconds[ended] += now - self.since
        self.phase, self.since = phase, now
        return ended

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time charged to `phase`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer = self.switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(outer)

        return call

    def install(self) -> None:
        """Put the clock at the seams; kernels are wrapped by `timed`."""
        from pagefuzz.fuzz.arena import Arena, CpuArena
        from pagefuzz.fuzz.run import Runner
        from pagefuzz.fuzz.verdict import Judge
        from pagefuzz.oracles.answers import DENSE, LOOP
        from pagefuzz.strategies import CASES

        seams: list[tuple[str, type, str]] = [
            ("judging", Judge, "verdict"),
            ("materialising", Arena, "place"),
            *(("materialising", case, "arguments") for case in CASES.values()),
            ("observing", Runner, "_observe"),
            ("observing", CpuArena, "forget"),
        ]
        for phase, owner, name in seams:
            setattr(owner, name, self.timed(phase, getattr(owner, name)))
        for oracle in (DENSE, LOOP):
            oracle.update({name: self.timed("oracles", answer) for name, answer in oracle.items()})


def one_core(cases: int, patterns: list[str], seed: int, split: Split | None) -> None:
    """Print a line a kernel."""
    from pagefuzz.fuzz.session import SHARD, Session, choose, load_own

    load_own()
    kernels = choose(patterns)
    # In this process, whose clock it is; bench/isolation.py measures what a process of its own costs.
    session = Session(device="cpu", examples=cases, seed=seed, kernels=kernels, home=Path.cwd(), isolate=False)
    if split:
        split.install()
    phases = "".join(f"{phase:>15}" for phase in PHASES) if split else ""
    print(f"{'kernel':32}{'cases':>7}{'runs a case':>13}{'cases/s':>9}{phases}")
    for name, kernel in session.kernels.items():
        if split:
            kernel = replace(kernel, call=split.timed("kernel", kernel.call))
        session.fuzz(kernel, 10_000, 25)  # imports, first launches
        if split:
            split.start()
        done = runs = 0
        started = time.process_time()
        for index in range(-(-cases // SHARD)):
            statistics = session.fuzz(kernel, index, min(SHARD, cases - index * SHARD))
            done, runs = done + statistics.cases, runs + statistics.runs
        seconds = time.process_time() - started
        print(f"{name:32}{done:>7}{runs / done:>13.2f}{done / seconds:>9.0f}", end="")
        if split:
            split.switch(PHASES[0])
            print("".join(f"{split.seconds[phase] / seconds:>15.1%}" for phase in PHASES), end="")
        print()


def workers(patterns: list[str], seed: int) -> None:
    """Print the wall time of the same fuzz run with one worker and with two, start of the workers included."""
    seconds = []
    for count in (1, 2):
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", str(count), "fuzz/", "--device", "cpu"]
        command += [f"--hypothesis-seed={seed}", *(part for pattern in patterns for part in ("--kernel", pattern))]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
        print(f"{count} worker{'s' if count > 1 else ''}: {seconds[-1]:.1f} s")
    print(f"two workers are {seconds[0] / seconds[1]:.2f} times as fast as one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="cases a kernel (default 1000)")
    parser.add_argument("--kernel", action="append", default=[], metavar="PATTERN", help="kernels by name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", action="store_true", help="print each phase's share of the time")
    parser.add_argument("--workers", action="store_true", help="compare one xdist worker with two")
    arguments = parser.parse_args()
    from pagefuzz.fuzz.saved import versions

    print(f"{platform.machine()}, {os.cpu_count()} cores; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    if arguments.workers:
        workers(arguments.kernel, arguments.seed)
    else:
        one_core(arguments.cases, arguments.kernel, arguments.seed, Split() if arguments.split else None)


if __name__ == "__main__":
    main()
