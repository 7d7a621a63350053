"""Cases a second, everything included: drawing, running, twins, oracles, judging; what the quick profile really draws.

python bench/cases.py [--cases N] [--kernel PATTERN] [--seed N]     # one process, one core
python bench/cases.py --workers                                     # what two xdist workers gain over one
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def one_core(cases: int, patterns: list[str], seed: int) -> None:
    """Print a line a kernel."""
    from pagefuzz.fuzz.session import SHARD, Session, choose, load_own

    load_own()
    session = Session(device="cpu", examples=cases, seed=seed, kernels=choose(patterns), home=Path.cwd(), repeat="")
    print(f"{'kernel':32}{'cases':>7}{'runs a case':>13}{'cases/s':>9}")
    for name, kernel in session.kernels.items():
        session.fuzz(kernel, 10_000, 25)  # imports, first launches
        done = runs = 0
        started = time.process_time()
        for index in range(-(-cases // SHARD)):
            statistics = session.fuzz(kernel, index, min(SHARD, cases - index * SHARD))
            done, runs = done + statistics.cases, runs + statistics.runs
        seconds = time.process_time() - started
        print(f"{name:32}{done:>7}{runs / done:>13.2f}{done / seconds:>9.0f}")


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
    parser.add_argument("--workers", action="store_true", help="compare one xdist worker with two")
    arguments = parser.parse_args()
    from pagefuzz.fuzz.saved import versions

    print(f"{platform.machine()}, {os.cpu_count()} cores; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    if arguments.workers:
        workers(arguments.kernel, arguments.seed)
    else:
        one_core(arguments.cases, arguments.kernel, arguments.seed)


if __name__ == "__main__":
    main()
