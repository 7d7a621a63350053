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
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pagefuzz.fuzz import saved as saving
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.explain import failure_text, not_repeatable_text, shown
from pagefuzz.fuzz.isolation.forks import channels, of_adapters
from pagefuzz.fuzz.isolation.messages import Recipe
from pagefuzz.fuzz.isolation.parent import CASE_LIMIT, Isolated, is_checked_first, memory_for_one
from pagefuzz.fuzz.known import SUFFIX, Entry, Unusable, entries_of, read, told
from pagefuzz.fuzz.run import Observer, Runner
from pagefuzz.fuzz.sanitizer import SHARE, TOOLS, Sanitizer
from pagefuzz.fuzz.shrink import shrink
from pagefuzz.fuzz.verdict import DISAGREEMENT, KNOWN, NOT_REPEATABLE, PASS, UNSUPPORTED, Judge, Verdict
from pagefuzz.kernels import peers
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import with_pairs
from pagefuzz.kernels.registry import Kernel, RegistrationError, registered
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, InvalidCase

SHARD = 125  # examples
MOST_PROCESSES = 4  # that wait for the next case of their kernels, on the CPU
MOST_SHARING = 8  # workers a device that -n auto starts; with more they wait for each other (bench/README.md)
MOST_MEMORY = 0.9  # of a device, that torch may take there in all processes of a run together
SHAPES = 2  # that an item of compiled kernels draws its cases from
ITEMS_OF_OWN_SHAPES = 16  # then the next items have the same again


def shard_seed(seed: int, kernel: str, index: int) -> int:
    """The seed of one shard of a kernel in a run with the seed `seed`."""
    return int(hashlib.sha256(f"{seed}/{kernel}/{index}".encode()).hexdigest()[:15], 16)


def shapes_of(seed: int, kernel: str, index: int) -> tuple[int, ...]:
    """The seeds of the shapes that one shard draws from on a device: compiling a kernel for another shape takes as long
    as hundreds of runs."""
    first = SHAPES * (index % ITEMS_OF_OWN_SHAPES)
    return tuple(shard_seed(seed, f"{kernel}, shapes", first + which) for which in range(SHAPES))


def device_module(device: str) -> Any:
    """torch.cuda for "cuda" and "cuda:1", and so on; None for a device that has no such module."""
    import torch

    try:
        return torch.get_device_module(device.split(":")[0])
    except RuntimeError:
        return None


def runner_on(place: str, sharing: int) -> Runner:
    """Runs cases on a device that is shared by so many processes.

    Raises RuntimeError where there is too little memory for that.
    """
    import torch

    from pagefuzz.fuzz.arena import CpuArena
    from pagefuzz.fuzz.cuda_arena import CudaArena
    from pagefuzz.fuzz.device_arena import DeviceArena, arena_bytes

    torch.set_num_threads(1)  # the workers share the cores already
    if place == "cpu":
        return Runner(CpuArena(), interpreted=os.environ.get("TRITON_INTERPRET") == "1")
    device, module = torch.device(place), device_module(place)
    if device.index is not None and hasattr(module, "set_device"):
        module.set_device(device)  # kernels launch on the current one
    if hasattr(module, "set_per_process_memory_fraction"):  # what one takes for itself, the others lack
        module.set_per_process_memory_fraction(MOST_MEMORY / sharing)
    if device.type == "cuda":
        with suppress(OSError, RuntimeError):  # a driver that cannot map addresses and memory apart
            return Runner(CudaArena(device), interpreted=False)
    total = int(module.mem_get_info(device)[1]) if hasattr(module, "mem_get_info") else 4 << 30
    return Runner(DeviceArena(device, arena_bytes(total, sharing)), interpreted=False)


class UsageError(ValueError):
    """The command line asks for something that cannot be; the message is one sentence."""


class Failed(AssertionError):
    """A report that goes to the terminal as it is, without a traceback."""


class ShownAlready(Failed):
    """A failure whose shrunk case this run has reported before."""


class NotJudged(Failed):
    """A saved case that could not be judged."""


class KnownFailure(Failed):
    """A saved case that fails as it is known to."""


@dataclass
class Statistics:
    """What one item did; plain data for the summary.

    known, held: for how many cases each known failure was seen, and for how many its condition held, by label.
    """

    kernel: str
    operation: str
    cases: int = 0
    runs: int = 0
    loose: int = 0
    violations: int = 0
    seconds: float = 0.0
    judged: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, verdict: Verdict, entries: Sequence[Entry]) -> None:
        self.cases += 1
        self.runs += verdict.runs
        self.loose += verdict.loose
        self.judged.update(verdict.judged)
        self.features.update(case.features())
        self.known.update({entry.label for entry in verdict.known.values()})
        self.held.update(entry.label for entry in entries if entry.when.holds(case))

    def plain(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Adapter:
    """An adapter that was loaded: its file, if it is one, and the names of the kernels that it registered."""

    file: Path | None
    kernels: tuple[str, ...]


def load_adapter(name: str) -> Adapter:
    """Import an adapter, a file or a module. Raises UsageError in one sentence for whatever goes wrong in it."""
    path = Path(name)
    before, open_before = registered(), channels()
    file: str | None = name
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
            file = importlib.import_module(name).__file__
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
    of_adapters.update(channels() - open_before)
    added = tuple(kernel for kernel in registered() if kernel not in before)
    if not added:
        raise UsageError(f"--adapter {name}: it registers no kernel; decorate one with @pagefuzz.kernel(OPERATION).")
    return Adapter(Path(file) if file else None, added)


def load_known(adapters: Iterable[Adapter], device: str) -> tuple[Entry, ...]:
    """The known failures that stand beside the adapters. Raises UsageError in one sentence for what is wrong there."""
    found: list[Entry] = []
    for adapter in adapters:
        path = adapter.file.with_suffix(SUFFIX) if adapter.file else None
        if path is not None and os.path.lexists(path):
            try:
                found += read(path, shown(path, Path.cwd()), adapter.kernels, with_pairs(registered()), device)
            except Unusable as error:
                raise UsageError(str(error)) from None
    return tuple(found)


def _line_in(error: BaseException, path: Path) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    return f", line {frames[-1].lineno}" if frames else ""


def load_own() -> None:
    """Register the project's kernels. Raises UsageError where an adapter has taken one of their names."""
    try:
        import pagefuzz.kernels.own  # noqa: F401  # registers them
    except RegistrationError as error:
        raise UsageError(f"--adapter: {error}") from None


def load_peers(patterns: Sequence[str], known: Collection[str]) -> tuple[list[peers.Peer], list[str]]:
    """Register the peers that patterns name: those that could be, and a line on each that could not.

    A pattern that matches one of the `known` names means those: neither '*' nor an adapter's kernels bring a peer in.
    Raises UsageError where a pattern names peers, and none of them can be loaded.
    """
    there: dict[peers.Peer, None] = {}
    missing: dict[peers.Peer, str] = {}
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern) for name in known):
            continue
        wanted = peers.matching(pattern)
        for peer in wanted:
            try:
                peer.load()
                there[peer] = None
            except peers.NotLoaded as error:
                missing[peer] = str(error)
        if wanted and all(peer in missing for peer in wanted):
            said = "; ".join(missing[peer] for peer in wanted)
            raise UsageError(f"--kernel {pattern}: {said}")
    return list(there), list(missing.values())


def adapter_of(peer: peers.Peer) -> Adapter:
    """A peer that was loaded, as an adapter."""
    return Adapter(Path(peers.__file__).with_name(f"{peer.module}.py"), peer.kernels)


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
    that are not there. known: the failures that are not red. adapters: as --adapter names them, and the peers'.
    has_threads: whether their import left threads, which a fork would not have. isolate: whether kernels run in
    processes of their own; None: all but pagefuzz's own interpreted ones do. case_limit: seconds that one run may take
    there. memory_limit: bytes that such a process may take, on the CPU. worker, workers: which of how many processes of
    this run this one is. sanitizer: what watches them, if anything does. started: when, in seconds of time.time().
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
    known: tuple[Entry, ...] = ()
    adapters: tuple[str, ...] = ()
    has_threads: bool = False
    isolate: bool | None = None
    case_limit: float = CASE_LIMIT
    memory_limit: int = field(default_factory=memory_for_one)
    worker: int = 0
    workers: int = 1
    sanitizer: Sanitizer | None = None
    started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.isolated: OrderedDict[str, Isolated] = OrderedDict()
        if self.sanitizer is not None:
            self.examples = -(-self.examples // SHARE)

    def is_isolated(self, kernel: Kernel) -> bool:
        """Whether a kernel runs in a process of its own."""
        if self.isolate is not None:
            return self.isolate
        return self.sanitizer is not None or self.device != "cpu" or not is_checked_first(kernel)

    def runner_for(self, kernel: Kernel) -> Observer:
        """What runs the cases of a kernel."""
        if not self.is_isolated(kernel):
            return self.runner
        import torch

        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        name, kernels = kernel.name, [kernel]
        if self.device != "cpu" or self.sanitizer:  # one process for all: it takes seconds to start, and memory
            name, kernels = "", list({**with_pairs(registered()), **self.kernels}.values())
        if name in self.isolated and kernel.name not in self.isolated[name].kernels:  # registered since, by a replay
            self.isolated.pop(name).close()
        if name not in self.isolated:
            self.isolated[name] = Isolated(
                kernels, self.make_runner, self.case_limit, self._memory(), self._recipe, self.sanitizer
            )
        self.isolated.move_to_end(name)
        for idle in list(self.isolated.values())[:-MOST_PROCESSES]:
            idle.close()
        return self.isolated[name]

    def _memory(self) -> int | None:
        return self.memory_limit if self.device == "cpu" else None  # a driver maps more than there is

    def _recipe(self) -> Recipe | None:
        """For a fresh Python, where a fork will not do: see fuzz/fresh.py."""
        is_used = getattr(device_module(self.device), "is_initialized", lambda: False)
        if not self.has_threads and self.sanitizer is None and (self.device == "cpu" or not is_used()):
            return None
        place, sharing = self._place()
        return Recipe(place, self.adapters, tuple(sys.path), sharing, self._memory(), os.getpid())

    def _place(self) -> tuple[str, int]:
        """The device of this process, dealt round robin where --device names none of several, and by how many processes
        it is shared."""
        count = int(getattr(device_module(self.device), "device_count", lambda: 1)())
        if ":" in self.device or count < 2:
            return self.device, self.workers
        return f"{self.device}:{self.worker % count}", -(-self.workers // count)

    def close(self) -> None:
        """End the processes that kernels ran in."""
        for isolated in self.isolated.values():
            isolated.close()

    @cached_property
    def runner(self) -> Runner:
        """Runs cases in this process."""
        return self.make_runner()

    def make_runner(self) -> Runner:
        return runner_on(*self._place())

    def shards(self, operation: str) -> list[tuple[str, int, int]]:
        """(kernel, shard, examples) of every item of an operation."""
        examples = -(-self.examples // OPERATIONS[operation].share)
        return [
            (name, index, min(SHARD, examples - index * SHARD))
            for index in range(-(-examples // SHARD))
            for name, kernel in self.kernels.items()
            if kernel.operation.name == operation
        ]

    def planned(self) -> Counter[str]:
        """How many shards of each kernel the whole run has."""
        return Counter(name for operation in OPERATIONS for name, _, _ in self.shards(operation))

    def command(self, what: str) -> str:
        """The command that replays `what`, a word as a shell reads it."""
        return f"{self.pytest} --replay {what} {self.repeat}".rstrip()

    def judge(self, kernel: Kernel) -> Judge:
        return Judge(kernel, self.runner_for(kernel), entries_of(self.known, kernel.name))

    # ---- the items

    def fuzz(self, kernel: Kernel, index: int, examples: int) -> Statistics:
        """Fuzz one shard. Raises the failure of the first case that breaks an invariant, shrunk and saved."""
        judge = self.judge(kernel)
        relations = tuple(item.id for item in judge.invariants if item.relation)
        shapes = () if self.device == "cpu" else shapes_of(self.seed, kernel.name, index)
        drawn = STRATEGIES[kernel.operation.name](kernel.declared, judge.runner.limits, relations, shapes)
        statistics = Statistics(kernel.name, kernel.operation.name)
        found: list[tuple[Case, Verdict]] = []
        started = time.perf_counter()

        def look(case: Case) -> bool:
            verdict = _verdict(judge, case)
            statistics.add(case, verdict, judge.known)
            if verdict.kind in (PASS, UNSUPPORTED, KNOWN):
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
        if _verdict(judge, found_as).kind in (PASS, KNOWN):
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
        """Judge a saved case, which `--replay` calls `again`, and say what came of it. Raises the failure, KnownFailure
        or NotJudged."""
        tool = wanted.seen.partition(":")[0]
        if tool in TOOLS and (self.sanitizer is None or self.sanitizer.tool != tool):
            raise NotJudged(f"unsupported: {tool} has seen it, and nothing else does; add --sanitize {tool}.")
        kernel = self._kernel_for(wanted)
        if not kernel.declared.runs_on(self.device):
            raise NotJudged(
                f"unsupported: {kernel.name} declares to run on {', '.join(kernel.declared.devices)} and not on "
                f"{self.device}; choose another with --device."
            )
        verdict = _verdict(self.judge(kernel), case)
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
        if verdict.kind == KNOWN:
            raise KnownFailure(f"known failure: {'; '.join(told(verdict.known))}\n{said}: {text}")
        raise verdict.invariant.exception(f"{said}: {text}")

    def _of_a_peer(self, name: str) -> Kernel | None:
        """A peer's kernel by its name, None where no peer has one. Raises NotJudged where it cannot be loaded."""
        for peer in peers.matching(glob.escape(name)):
            try:
                peer.load()
                self.known += load_known([adapter_of(peer)], self.device)
            except (peers.NotLoaded, UsageError) as error:
                raise NotJudged(f"unsupported: {error}") from None
            self.adapters += (peer.adapter,)
        return with_pairs(registered()).get(name)

    def _kernel_for(self, wanted: saving.SavedCase) -> Kernel:
        """The kernel that failed if it is among those chosen, else the one that was chosen in its place."""
        chosen = self.kernels if self.named else with_pairs(registered())
        kernel = chosen.get(wanted.kernel)
        if kernel is None and not self.named:
            kernel = self._of_a_peer(wanted.kernel)
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
