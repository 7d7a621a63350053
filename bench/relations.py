"""Relations between runs on the project's own kernels: how often a twin really differs from what it is held against.

    python bench/relations.py [--cases N] [--kernel PATTERN] [--seed N] [--workers N]

Every case pays for all relations. A twin that equals what it is compared with proves nothing: the table says in which
share of the cases the tensors of the call, the memory that it is given or the order of its programs were others.
Exit status 1 where a kernel is accused.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What a twin is compared with, where that is not the case itself.
BASES = {
    ("I10", "needles, contiguous"): "needles",
    ("I11", "alone"): "the batch",
    ("I11", "in a batch turned round"): "the batch",
    ("I11", "twice in one batch"): "the batch",
    ("I12", "other pages"): "pages",
    ("I12", "needles, other pages"): "needles",
}
# What others are compared with, or the very case once more, on purpose.
ONLY_BASES = {("I10", "needles"), ("I11", "the batch"), ("I12", "pages"), ("I12", "needles"), ("I17", "again")}
ONLY_BASES |= {("I17", "once more")}


def differ(left: Any, right: Any) -> bool:
    """Whether two cases give other tensors, strides, numbers, fresh memory or program order to the kernel."""
    if (left.order, getattr(left, "fresh", "")) != (right.order, getattr(right, "fresh", "")):
        return True
    calls = [case.arguments().values for case in (left, right)]
    return any(_plain(mine) != _plain(theirs) for mine, theirs in zip(*(call.values() for call in calls), strict=True))


def _plain(value: Any) -> Any:
    if not hasattr(value, "buffer"):
        return value
    pieces = [(start, bits.tobytes()) for start, bits in value.buffer.pieces]
    return value.shape, value.strides, value.offset, value.buffer.dtype, value.buffer.size, pieces


def measure(name: str, cases: int, seed: int) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]], list[str]]:
    """(how many twins, how many of them differ, the accusations) by (invariant, twin) for one kernel."""
    import torch

    from pagefuzz.fuzz.arena import CpuArena
    from pagefuzz.fuzz.drawing import each_case
    from pagefuzz.fuzz.run import Runner
    from pagefuzz.fuzz.session import choose, load_own
    from pagefuzz.fuzz.verdict import PASS, Judge
    from pagefuzz.strategies import STRATEGIES

    load_own()
    torch.set_num_threads(1)
    kernel = choose([name])[name]
    runner = Runner(CpuArena(), interpreted=True)
    judge = Judge(kernel, runner)
    relations = [item for item in judge.invariants if item.relation]
    counted: Counter[tuple[str, str]] = Counter()
    differing: Counter[tuple[str, str]] = Counter()
    accused = []

    def look(case: Any) -> None:
        case = replace(case, relations=tuple(item.id for item in relations))
        verdict = judge.verdict(case)
        if verdict.kind != PASS:
            accused.append(f"{name}: {verdict.named} {verdict.violation or verdict.reason} on {case.one_line()}")
        for item in relations:
            if item.id not in verdict.judged:
                continue
            twins = item.twins(case, kernel.declared)
            counted[item.id, ""] += 1
            for called, twin in twins.items():
                base = BASES.get((item.id, called))
                if (item.id, called) in ONLY_BASES:
                    continue
                shown = (
                    "what the contract forbids" if item.id == "I16" else re.sub(r"sequence \d+", "a sequence", called)
                )
                counted[item.id, shown] += 1
                differing[item.id, shown] += differ(twins.get(base or "", case), twin)

    each_case(STRATEGIES[kernel.operation.name](kernel.declared, runner.arena.limits, ()), cases, seed, look)
    return counted, differing, accused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=250, help="of each kernel and worker (default 250)")
    parser.add_argument("--kernel", action="append", default=[], metavar="PATTERN", help="kernels by name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args()
    from pagefuzz.fuzz.saved import versions
    from pagefuzz.fuzz.session import choose, load_own

    load_own()
    print(", ".join(f"{package} {found}" for package, found in versions().items()))
    accusations = 0
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        for name in choose(arguments.kernel):
            seeds = range(arguments.seed, arguments.seed + arguments.workers)
            parts = [pool.submit(measure, name, arguments.cases, seed) for seed in seeds]
            counted: Counter[tuple[str, str]] = Counter()
            differing: Counter[tuple[str, str]] = Counter()
            for part in parts:
                more, others, accused = part.result()
                counted, differing = counted + more, differing + others
                accusations += len(accused)
                print(*accused, sep="\n", end="\n" if accused else "")
            total = sum(count for (_, twin), count in counted.items() if not twin)
            print(f"{name}: {arguments.cases * arguments.workers} cases, {total} relations asked")
            for (invariant, twin), count in sorted(counted.items(), key=lambda pair: (len(pair[0][0]), pair[0])):
                if twin:
                    share = 100 * differing[invariant, twin] / count
                    print(f"  {invariant:4} {twin:32} {count:>7}  differs in {share:.1f} %")
    return int(accusations > 0)


if __name__ == "__main__":
    sys.exit(main())
