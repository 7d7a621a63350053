"""One run of the suite: which kernels, on what device, with which profile, and its work in shards.

The example budget of a kernel is cut into shards of a fixed size, one pytest item each, so any number of workers shares
the work, and a shard draws the same cases whoever runs it.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import importlib
import importlib.util
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pagefuzz.fuzz import saved as saving
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.explain import failure_text, not_repeatable_text, shown
from pagefuzz.fuzz.shrink import shrink
from pagefuzz.fuzz.verdict import DISAGREEMENT, NOT_REPEATABLE, PASS, UNSUPPORTED, Judge, Verdict
from pagefuzz.kernels import peers
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import with_pairs
from pagefuzz.kernels.registry import Kernel, RegistrationError, registered
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, InvalidCase

SHARD = 125  # examples


def shard_seed(seed: int, kernel: str, index: int) -> int:
    """The seed of one shard of a kernel in a run with the seed `seed`."""
    return int(hashlib.sha256(f"{seed}/{kernel}/{index}".encode()).hexdigest()[:15], 16)


class UsageError(ValueError):
    """The command line asks for something that cannot be; the message is one sentence."""


class Failed(AssertionError):
    """A report that goes to the terminal as it is, without a traceback."""


class ShownAlready(Failed):
    """A failure whose shrunk case this run has reported before."""


class NotJudged(Failed):
    """A saved case that could not be judged."""


@dataclass
class Statistics:
    """What one item did; plain data for the summary."""

    kernel: str
    operation: str
    cases: int = 0
    runs: int = 0
    loose: int = 0
    violations: int = 0
    seconds: float = 0.0
    judged: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, verdict: Verdict) -> None:
        self.cases += 1
        self.runs += verdict.runs
        self.loose += verdict.loose
        self.judged.update(verdict.judged)
        self.features.update(case.features())

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "judged": dict(self.judged), "features": dict(self.features)}


def load_adapter(name: str) -> None:
    """Import an adapter, a file or a module. Raises UsageError in one sentence for whatever goes wrong in it."""
    path = Path(name)
    before = len(registered())
    try:
        if os.path.isfile(path):
            digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
            spec = importlib.util.spec_from_file_location(f"pagefuzz_adapter_{digest}_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise UsageError(f"--adapter {name}: not a Python file; its name must end in .py.")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            sys.path.insert(0, str(path.resolve().parent))
            try:
                spec.loader.exec_module(module)
            finally:
                sys.path.remove(str(path.resolve().parent))
        elif name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            what = "this is a directory" if os.path.isdir(path) else "there is no such file"
            raise UsageError(f"--adapter {name}: {what}; name a Python file or an importable module.")
        else:
            importlib.import_module(name)
    except UsageError:
        raise
    except RegistrationError as error:
        raise UsageError(f"--adapter {name}{_line_in(error, path)}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and pytest's own outcomes too
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            said = ": there is no such file or module (a module must be importable: see PYTHONPATH)."
        elif isinstance(error, SyntaxError):
            here = error.filename is None or Path(error.filename).name == path.name
            where = f"line {error.lineno}" if error.lineno else "the file"
            said = f", {where}{'' if here else f' of {error.filename}'}: {error.msg}"
        else:
            said = f"{_line_in(error, path)}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"--adapter {name}{said}") from None
    if len(registered()) == before:
        raise UsageError(f"--adapter {name}: it registers no kernel; decorate one with @pagefuzz.kernel(OPERATION).")


def _line_in(error: BaseException, path: Path) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    return f", line {frames[-1].lineno}" if frames else ""


def load_own() -> None:
    """Register the project's kernels. Raises UsageError where an adapter has taken one of their names."""
    try:
        import pagefuzz.kernels.own  # noqa: F401  # registers them
    except RegistrationError as error:
        raise UsageError(f"--adapter: {error}") from None


def load_peers(patterns: Sequence[str], known: Collection[str]) -> tuple[dict[str, Kernel], list[str]]:
    """Register the peers that patterns name, and say which of them could not be: their kernels, and a line for each.

    A pattern that matches one of the `known` names means those: neither '*' nor an adapter's kernels bring a peer in.
    Raises UsageError where a pattern names peers, and none of them can be loaded.
    """
    before, missing = set(registered()), {}
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern) for name in known):
            continue
        wanted = peers.matching(pattern)
        for peer in wanted:
            try:
                peer.load()
            except peers.NotLoaded as error:
                missing[peer] = str(error)
        if wanted and all(peer in missing for peer in wanted):
            said = "; ".join(missing[peer] for peer in wanted)
            raise UsageError(f"--kernel {pattern}: {said}")
    return {name: kernel for name, kernel in registered().items() if name not in before}, list(missing.values())


def choose(patterns: Sequence[str], known: dict[str, Kernel] | None = None) -> dict[str, Kernel]:
    """Those of `known` and of their pairs whose names match one of the shell patterns, if there is a pattern.

    known: default: all that are registered.
    """
    known = with_pairs(registered() if known is None else known)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise UsageError(f"--kernel {pattern}: no kernel has such a name; there are {', '.join(known)}.")
    return {
        name: kernel
        for name, kernel in known.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


@dataclass
class Session:
    """What an item needs to know.

    device: a torch device string. examples: for each kernel. seed: of the whole run. kernels: those chosen. home: where
    `.pagefuzz` lies. pytest, repeat: how a command begins and the options that it needs to show the same again, as a
    shell reads them. named: whether --kernel chose. missing: of the peers that it names, what is to be said of those
    that are not there. started: when, in seconds of time.time().
    """

    device: str
    examples: int
    seed: int
    kernels: dict[str, Kernel]
    home: Path
    pytest: str = "pytest fuzz/"
    repeat: str = ""
    named: bool = False
    missing: Sequence[str] = ()
    started: float = field(default_factory=time.time)

    @cached_property
    def runner(self) -> Any:
        import torch

        from pagefuzz.fuzz.run import Runner

        torch.set_num_threads(1)  # the workers share the cores already
        if self.device == "cpu":
            from pagefuzz.fuzz.arena import CpuArena

            return Runner(CpuArena(), interpreted=os.environ.get("TRITON_INTERPRET") == "1")
        from pagefuzz.fuzz.device_arena import DeviceArena

        return Runner(DeviceArena(torch.device(self.device)), interpreted=False)

    def shards(self, operation: str) -> list[tuple[str, int, int]]:
        """(kernel, shard, examples) of every item of an operation."""
        examples = -(-self.examples // OPERATIONS[operation].share)
        return [
            (name, index, min(SHARD, examples - index * SHARD))
            for index in range(-(-examples // SHARD))
            for name, kernel in self.kernels.items()
            if kernel.operation.name == operation
        ]

    def command(self, what: str) -> str:
        """The command that replays `what`, a word as a shell reads it."""
        return f"{self.pytest} --replay {what} {self.repeat}".rstrip()

    # ---- the items

    def fuzz(self, kernel: Kernel, index: int, examples: int) -> Statistics:
        """Fuzz one shard. Raises the failure of the first case that breaks an invariant, shrunk and saved."""
        judge = Judge(kernel, self.runner)
        relations = tuple(item.id for item in judge.invariants if item.relation)
        drawn = STRATEGIES[kernel.operation.name](kernel.declared, self.runner.arena.limits, relations)
        statistics = Statistics(kernel.name, kernel.operation.name)
        found: list[tuple[Case, Verdict]] = []
        started = time.perf_counter()

        def look(case: Case) -> bool:
            verdict = _verdict(judge, case)
            statistics.add(case, verdict)
            if verdict.kind in (PASS, UNSUPPORTED):
                return False
            found.append((case, verdict))
            return True

        each_case(drawn, examples, shard_seed(self.seed, kernel.name, index), look)
        statistics.seconds = time.perf_counter() - started
        if found:
            statistics.violations += 1
            error = self.failure(judge, *found[0])
            error.statistics = statistics  # type: ignore[attr-defined]  # the summary counts failing items too
            raise error
        return statistics

    def failure(self, judge: Judge, found_as: Case, verdict: Verdict) -> AssertionError:
        """Shrink, save and word a failure; the error to raise."""
        name = judge.kernel.name
        if verdict.kind == DISAGREEMENT:
            return Failed(f"{verdict.reason}\n{_fault(name, found_as)}")
        assert verdict.violation is not None
        if _verdict(judge, found_as).kind == PASS:
            token = self.command(saving.token(name, verdict.named, found_as))
            command, _ = self._save(name, NOT_REPEATABLE, found_as, found_as, verdict)
            return Failed(not_repeatable_text(name, found_as, verdict, command or token))
        case, verdict = shrink(judge, found_as, verdict)
        assert verdict.violation is not None and verdict.invariant is not None
        command, known = self._save(name, "failure", case, found_as, verdict)
        if known:
            return ShownAlready(
                f"{verdict.named} violated by {name}, by the same shrunk case as another report: {command}"
            )
        token = self.command(saving.token(name, verdict.named, case))
        return verdict.invariant.exception(failure_text(name, case, found_as, verdict, command, token))

    def _save(self, name: str, kind: Any, case: Case, found_as: Case, verdict: Verdict) -> tuple[str, bool]:
        """Save a failure; returns the command that replays its file, and whether this run saved it before. Where the
        disk does not take it the command is "": a report must not be lost for that."""
        assert verdict.violation is not None
        folder = self.home / saving.FAILURES
        try:
            path, known = saving.save(folder, name, kind, verdict.named, case, found_as, verdict.violation, self.device)
            known = known and path.stat().st_mtime >= self.started
            os.utime(path)  # shown in this run, so the next shard with this case need not show it again
        except OSError as error:
            warnings.warn(f"{saving.FAILURES}: the failure could not be saved: {error.strerror}", stacklevel=2)
            return "", False
        return self.command(shown(path, self.home)), known

    def replay(self, wanted: saving.SavedCase, case: Case, again: str) -> str:
        """Judge a saved case, which `--replay` calls `again`, and say what came of it. Raises the failure, or
        NotJudged."""
        kernel = self._kernel_for(wanted)
        judge = Judge(kernel, self.runner)
        verdict = _verdict(judge, case)
        if verdict.kind == UNSUPPORTED:
            raise NotJudged(f"unsupported: {verdict.reason}.")
        if verdict.kind == PASS:
            return f"passes on {kernel.name}"
        if verdict.kind == DISAGREEMENT:
            raise NotJudged(f"{verdict.reason}\n{_fault(kernel.name, case)}")
        assert verdict.invariant is not None and verdict.violation is not None
        same = verdict.named == wanted.invariant
        said = "still fails" if same else f"fails otherwise ({wanted.invariant!r} when it was saved)"
        token = self.command(saving.token(kernel.name, verdict.named, case))
        text = failure_text(kernel.name, case, None, verdict, self.command(again), token)
        raise verdict.invariant.exception(f"{said}: {text}")

    def _kernel_for(self, wanted: saving.SavedCase) -> Kernel:
        """The kernel that failed if it is among those chosen, else the one that was chosen in its place."""
        chosen = self.kernels if self.named else with_pairs(registered())
        kernel = chosen.get(wanted.kernel)
        if kernel is None and not self.named:
            kernel = _of_a_peer(wanted.kernel)
        if kernel is not None and kernel.operation.name == wanted.operation:
            return kernel
        if not self.named:
            raise NotJudged(
                f"unsupported: no kernel {wanted.kernel!r} of {wanted.operation} is registered; name its adapter with "
                "--adapter FILE.py, or another kernel with --kernel NAME."
            )
        fitting = [kernel for kernel in chosen.values() if kernel.operation.name == wanted.operation]
        if len(fitting) != 1:
            many = ", ".join(kernel.name for kernel in fitting) or "none"
            raise NotJudged(f"unsupported: --kernel must name one kernel of {wanted.operation}; it names {many}.")
        return fitting[0]


def _of_a_peer(name: str) -> Kernel | None:
    """A peer's kernel by its name, None where no peer has such a one. Raises NotJudged where it cannot be loaded."""
    for peer in peers.matching(glob.escape(name)):
        try:
            peer.load()
        except peers.NotLoaded as error:
            raise NotJudged(f"unsupported: {error}") from None
    return with_pairs(registered()).get(name)


def _verdict(judge: Judge, case: Case) -> Verdict:
    """The verdict on a case. What goes wrong in pagefuzz itself says so, and on which case."""
    try:
        return judge.verdict(case)
    except Exception as error:
        error.add_note(_fault(judge.kernel.name, case))
        raise


def _fault(name: str, case: Case) -> str:
    return f"This is a fault of pagefuzz, not of {name}: please report it, with this case: {case.one_line()}"


def check_pools(kernels: dict[str, Kernel]) -> None:
    """Raise UsageError where a declaration leaves nothing to draw."""
    from pagefuzz.strategies.draws import BLOCK_SIZES, GROUP_SIZES, HEAD_DIMS, sizes

    for name, kernel in kernels.items():
        for what, preferred in (("head_dims", HEAD_DIMS), ("group_sizes", GROUP_SIZES), ("block_sizes", BLOCK_SIZES)):
            try:
                sizes(kernel.declared, what, preferred)
            except InvalidCase as error:
                raise UsageError(f"kernel {name!r}: {error}.") from None
            except Exception as error:
                raise UsageError(f"kernel {name!r}: {what} raised {type(error).__name__}: {error}.") from None
