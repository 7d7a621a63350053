"""Finds and shrinks a failure of a kernel, without the pytest items around it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from pagefuzz.fuzz.arena import CpuArena
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.isolation.parent import Isolated
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.shrink import shrink
from pagefuzz.fuzz.verdict import PASS, Judge, Verdict
from pagefuzz.kernels.registry import Kernel
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case

SMALL_ARENA = 1 << 27  # bytes

_runners: list[Runner] = []


def runner() -> Runner:
    """The one runner of this process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("these tests look at interpreted kernels: run them with --device cpu")
    if not _runners:
        _runners.append(Runner(CpuArena(), interpreted=True))
    return _runners[0]


def apart(kernels: Iterable[Kernel], device: str, sharing: int) -> Isolated:
    """What runs kernels in a process of theirs on a device that so many such processes share. This process never
    touches the device: none of its forks could use it then.

    device: a torch device string; "cpu" stands in for a device where there is none, as the suite's own tests need it.
    """
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive the fork

    def make() -> Runner:
        from pagefuzz.fuzz.device_arena import DeviceArena
        from pagefuzz.fuzz.session import runner_on

        if device != "cpu":
            return runner_on(device, sharing)
        from pagefuzz.fuzz.interpreter import install

        install()
        return Runner(DeviceArena(torch.device("cpu"), SMALL_ARENA), interpreted=False)

    return Isolated(kernels, make)


@dataclass(frozen=True)
class Killed:
    """A shrunk failure, the case as it was drawn, and how many examples it took."""

    case: Case
    found_as: Case
    verdict: Verdict
    examples: int


def find(kernel: Kernel, examples: int, seed: int) -> Killed | None:
    """The first failure among so many examples, shrunk; None if there is none."""
    judge = Judge(kernel, runner())
    relations = tuple(item.id for item in judge.invariants if item.relation)
    found: list[tuple[Case, Verdict]] = []
    count = 0

    def look(case: Case) -> bool:
        nonlocal count
        count += 1
        verdict = judge.verdict(case)
        if verdict.kind != PASS:
            found.append((case, verdict))
        return bool(found)

    cases = STRATEGIES[kernel.operation.name](kernel.declared, runner().arena.limits, relations)
    each_case(cases, examples, seed, look)
    if not found:
        return None
    case, verdict = shrink(judge, *found[0])
    return Killed(case, found[0][0], verdict, count)
