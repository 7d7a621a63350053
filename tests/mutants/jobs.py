"""What a process does with one mutant: look for a failure, look at many failures, or ask the checks that others use."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pagefuzz.fuzz.session import SHARD, shard_seed
from pagefuzz.fuzz.shrink import shrink
from pagefuzz.fuzz.verdict import DISAGREEMENT, PASS, UNSUPPORTED, VIOLATION, Judge, Verdict
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Kernel
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case
from pagefuzz.tests.killing import runner
from pagefuzz.tests.mutants import other_checks
from pagefuzz.tests.mutants.features import words

QUICK = "quick"
FAILURES_LOOKED_AT = 40  # of one mutant, by --idle
REJUDGED = 5  # of them, without the dense oracle


def mutants(catalogue: str) -> dict[str, Any]:
    """The mutants of a module by name. Raises ValueError where two have one name."""
    known: dict[str, Any] = {}
    for mutant in importlib.import_module(catalogue).MUTANTS:
        if mutant.name in known:
            raise ValueError(f"{catalogue}: two mutants are called {mutant.name}; give one of them another name")
        known[mutant.name] = mutant
    return known


@cache
def budget(operation: str) -> int:
    """Examples of the quick profile for a kernel of an operation."""
    from hypothesis import settings

    import pagefuzz.fuzz.plugin  # noqa: F401  # registers the profiles

    return -(-settings.get_profile(QUICK).max_examples // OPERATIONS[operation].share)


class Shop:
    """Does the jobs of one catalogue: {"mutant": name, "what": "kill", "idle" or "others", ...}."""

    def __init__(self, catalogue: str) -> None:
        import torch

        torch.set_num_threads(1)  # there are as many processes as cores
        self.known = mutants(catalogue)

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        mutant = self.known[job["mutant"]]
        with tempfile.TemporaryDirectory() as folder:
            kernel = mutant.build(Path(folder))
            if job["what"] == "kill":
                return kill(mutant, kernel, job["seed"], job["examples"])
            if job["what"] == "idle":
                return idle(kernel, job["seed"], job["examples"])
            return other_checks.ask(job["check"], kernel)


def drawn(judge: Judge, seed: int, examples: int, look: Callable[[Case], bool]) -> None:
    """Show `look` the cases of `pytest fuzz/ --hypothesis-seed=SEED`, shard by shard, until it returns True."""
    from pagefuzz.fuzz.drawing import each_case

    kernel = judge.kernel
    relations = tuple(item.id for item in judge.invariants if item.relation)
    cases = STRATEGIES[kernel.operation.name](kernel.declared, judge.runner.limits, relations)
    enough = False

    def ask(case: Case) -> bool:
        nonlocal enough
        enough = look(case)
        return enough

    for index, first in enumerate(range(0, examples, SHARD)):
        if not enough:
            each_case(cases, min(SHARD, examples - first), shard_seed(seed, kernel.name, index), ask)


def kill(mutant: Any, kernel: Kernel, seed: int, examples: int | None) -> dict[str, Any]:
    """The first failure of a mutant, shrunk: {"examples", "seconds", "found", "shrunk", ...}, or {"survived": ...}.

    examples: to stop after; None for the quick profile's.
    """
    judge = Judge(kernel, runner())
    found: list[tuple[Case, Verdict]] = []
    count = 0

    def look(case: Case) -> bool:
        nonlocal count
        count += 1
        verdict = judge.verdict(case)
        if verdict.kind not in (PASS, UNSUPPORTED):
            found.append((case, verdict))
        return bool(found)

    started = time.perf_counter()
    drawn(judge, seed, examples or budget(kernel.operation.name), look)
    result: dict[str, Any] = {"seed": seed, "examples": count, "seconds": time.perf_counter() - started}
    if not found:
        return {**result, "survived": f"all {count} examples passed"}
    case, verdict = found[0]
    if verdict.kind == DISAGREEMENT:
        return {**result, "error": f"{verdict.reason}: a fault of pagefuzz, which must not pass for a kill"}
    result["found"] = _judged(mutant, case, verdict)
    result["repeatable"] = judge.verdict(case).kind != PASS
    result["shrunk"] = _judged(mutant, *shrink(judge, case, verdict))
    result["shrink_seconds"] = time.perf_counter() - started - result["seconds"]
    return result


def _judged(mutant: Any, case: Case, verdict: Verdict) -> dict[str, Any]:
    return {
        "named": verdict.named,
        "also": list(verdict.also),
        "shapes": case.shapes(),
        "case": case.one_line(),
        "smallest": _is_smallest(mutant, case),
    }


def _is_smallest(mutant: Any, case: Case) -> bool:
    try:
        return bool(mutant.smallest(case))
    except (AttributeError, IndexError, ValueError):  # it asks for what only smaller cases have
        return False


def idle(kernel: Kernel, seed: int, examples: int) -> dict[str, Any]:
    """What the failures among so many cases have in common: {"drawn": features of all cases, "failures": [...]}."""
    judge = Judge(kernel, runner())
    seen: Counter[str] = Counter()
    failures: list[tuple[Case, Verdict, frozenset[str]]] = []
    count = 0

    def look(case: Case) -> bool:
        nonlocal count
        count += 1
        features = words(case)
        seen.update(features)
        verdict = judge.verdict(case)
        if verdict.kind == VIOLATION:
            failures.append((case, verdict, features))
        return len(failures) >= FAILURES_LOOKED_AT

    drawn(judge, seed, examples, look)
    return {
        "operation": kernel.operation.name,
        "cases": count,
        "drawn": dict(seen),
        "failures": [
            {"features": sorted(features), "invariants": [verdict.named, *verdict.also]}
            for _, verdict, features in failures
        ],
        "lives without the dense oracle": not any(
            seen_without_dense_oracle(kernel, case) for case, _, _ in failures[:REJUDGED]
        ),
    }


def seen_without_dense_oracle(kernel: Kernel, case: Case) -> tuple[str, ...]:
    """The invariants that a case breaks where nobody knows the right answer: relations, and what memory tells."""
    with no_dense_oracle() as gone:
        judge = Judge(kernel, runner())
        judge.invariants = tuple(item for item in judge.invariants if type(item).__module__ not in gone)
        relations = tuple(item.id for item in judge.invariants if item.relation)
        verdict = judge.verdict(replace(case, relations=relations))
    return (verdict.named, *verdict.also) if verdict.kind == VIOLATION else ()


@contextlib.contextmanager
def no_dense_oracle() -> Iterator[set[str]]:
    """Every result that a run finished with counts as right. Yields the modules of invariants that compare a run of
    theirs with the oracle's answer itself, and so have nothing left to say."""
    import pagefuzz.oracles

    gone: set[str] = set()
    changed: list[tuple[Any, Any]] = []
    try:
        for item in pkgutil.iter_modules(pagefuzz.oracles.__path__):
            module: Any = importlib.import_module(f"pagefuzz.oracles.{item.name}")
            if hasattr(module, "first_difference"):
                changed.append((module, module.first_difference))
                module.first_difference = lambda *arguments, **keywords: None
            if hasattr(module, "answer") and item.name != "answers":
                gone.add(module.__name__)
        yield gone
    finally:
        for module, stock in changed:
            module.first_difference = stock
