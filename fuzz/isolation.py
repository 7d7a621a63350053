"""Runs kernels in a process of their own: one that crashes or hangs is a finding, and not the end of the run.

The process is forked, so it has what the adapter set up and starts in milliseconds; it stays, and takes one case after
the other, until it dies, takes too long, or the run ends. Cases go to it and observations come back over a socket that
nobody else has; judging, shrinking and saving stay where they were. Linux only, as the arena is.

On a device the parent leaves the device alone, since a fork could not use it then. Where an adapter's import has used
it, or has started threads, which no fork has, the process is a fresh Python that loads the adapters again
(fuzz/fresh.py).

On the CPU a page that cannot be accessed lies right behind every tensor that is no cache.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pagefuzz.fuzz.arena import EVERY, CpuArena
from pagefuzz.fuzz.plain_arena import PlainArena
from pagefuzz.fuzz.run import TORCHS_ADVICE, Runner
from pagefuzz.fuzz.sanitizer import ENVIRONMENT, MOST_LOG, SLOWER, Log, Sanitizer, new_log, read, said
from pagefuzz.kernels.registry import Kernel
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Case, InvalidCase, Limits, arguments_of

CASE_LIMIT = 10.0  # seconds that one run of the kernel may take
WARM_UP = 3.0  # times that, for the first one, which may have to compile
HANGS_UP = 200  # hundredths of a second for a process to end that has closed its socket
START = 120.0  # seconds for a process to make its arena
LEAST_HURRIED, TIMES_SLOWEST = 1.0, 20.0  # while shrinking: seconds, or so many times the slowest run that ended
PATIENCE = 60.0  # seconds that a shrinking may spend on runs that take longer than that, or never end, and on starts
SHORTAGES = (
    "out of memory",
    "too many resources",
    "CUDA error: unknown error",
    "ALLOC_FAILED",
    "can't allocate memory",
)
LAST_WORDS = 300  # characters of what a dead process said last
PR_SET_PDEATHSIG = 1
TEST = "PYTEST_CURRENT_TEST"
FRESH = Path(__file__).with_name("fresh.py")
of_adapters: set[int] = set()  # sockets and pipes that adapters opened when they were loaded
_HEADER = struct.Struct("<8sQ")  # of a message: that it is one, and its length
_MAGIC = b"pagefuzz"
_NOT_THE_AUTHORS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], str(Path(__file__).parent), "<")


def is_checked_first(kernel: Kernel) -> bool:
    """Whether it is known that interpreted all accesses of a kernel, or of both of a pair, are checked before they
    happen: of pagefuzz's own Triton kernels. What an adapter does besides launching nobody knows."""
    parts = getattr(kernel.call, "parts", (kernel.call,))
    return all(str(getattr(part, "__module__", "")).startswith("pagefuzz.kernels.triton_") for part in parts)


@dataclass(frozen=True)
class Recipe:
    """What a fresh Python has to know to run the same kernels. device: a torch device string. adapters: as --adapter
    takes them. path: of Python's imports. workers: processes that share the device. memory: as for a forked process.
    parent: the process that asks. tool, log: of compute-sanitizer, where it watches the new process; else both empty.
    """

    device: str
    adapters: tuple[str, ...]
    path: tuple[str, ...]
    workers: int
    memory: int | None
    parent: int
    tool: str = ""
    log: str = ""


class _Died(Exception):
    """The process ended instead of answering."""


class _TooLong(Exception):
    """The process did not answer in time."""


class Isolated:
    """Runs the cases of some kernels, as a Runner does, in a process of theirs. The process starts when it is needed.

    make: makes the Runner, in that process. limit: seconds that one run may take; a kernel's very first one may take
    longer. memory: bytes of address space that the process may take beyond what it starts with; None for any. fresh:
    None, or gives what a fresh Python has to know to make the same Runner and kernels, where no fork could. sanitizer:
    what watches that fresh Python, if anything does; its reports are observed as ended runs.
    """

    def __init__(
        self,
        kernels: Iterable[Kernel],
        make: Callable[[], Runner],
        limit: float = CASE_LIMIT,
        memory: int | None = None,
        fresh: Callable[[], Recipe | None] = lambda: None,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.make, self.limit, self.memory, self.fresh = make, limit, memory, fresh
        self.sanitizer = sanitizer
        self.log = ""  # of the sanitizer of the process that there is
        if sanitizer is not None:
            self.limit *= SLOWER
        self.worker: _Worker | None = None
        self.hurry = False
        self.warm: set[str] = set()  # kernels that have run
        self.served: list[str] = []  # the kernels that the process that there is has run, by its runs
        self.slowest = 0.0
        self.lost = 0.0
        self.known: Limits | None = None

    @property
    def limits(self) -> Limits:
        """What the strategies may draw for the arena there."""
        if self.known is None:
            self._started()
        assert self.known is not None
        return self.known

    @contextmanager
    def hurried(self) -> Iterator[Callable[[], bool]]:
        """Less patience with hangs inside; gives a function that says whether they took too long."""
        self.hurry, self.lost = True, 0.0
        try:
            yield lambda: self.lost >= PATIENCE
        finally:
            self.hurry = False

    def observe(self, kernel: Kernel, case: Case) -> Observation:
        """One run. Raises InvalidCase where the case does not fit this machine, RuntimeError for a fault of pagefuzz.

        Whatever else happens is observed; `Observation.ended` says it where the process did not survive.
        """
        for second in (False, True):
            kind, what = self._asked(kernel, case)
            if kind == "reported":  # by a sanitizer, and the process is as good as before
                assert isinstance(what, Observation)
                return what
            if kind == "observed":
                assert isinstance(what, Observation)
                before, is_shortage = self.served[:-1], _is_shortage(what)
                if what.ended or is_shortage:
                    self.close()  # what it still keeps, others may want
                # Earlier cases may have taken it, or others have what a device has for all; and another kernel may have
                # destroyed what this one died of. A fresh process tells.
                if not second and ((is_shortage and before) or (what.ended and {*before} - {kernel.name})):
                    continue
                return what if self.hurry or "SIGSEGV" not in what.ended else self._past_the_end(kernel, case, what)
            if kind == "invalid":
                raise InvalidCase(what)
            # An earlier case may have eaten the memory, or written into Python's: a fresh process tells.
            self.close()
            if second and kind == "exhausted":
                return Observation(ended=f"out of memory: {what}")
            if second and self._asked(replace(kernel, call=_nothing), case)[0] == "observed":
                return Observation(ended=f"crashed: what it left behind could not be looked at: {_last_line(what)}")
        raise RuntimeError(f"while a kernel in a process of its own was observed:\n{what}")

    def _past_the_end(self, kernel: Kernel, case: Case, crashed: Observation) -> Observation:
        """Say which tensors' guard pages a run was killed by, if it was."""
        if self._survives(kernel, case, ""):
            tensors = [buffer.name for buffer in arguments_of(case).buffers if not buffer.is_cache]
            if past := [name for name in tensors if not self._survives(kernel, case, name)]:
                return replace(crashed, ended=f"{crashed.ended}, at what lies right behind {' and '.join(past)}")
        return crashed

    def _survives(self, kernel: Kernel, case: Case, guarded: str) -> bool:
        kind, what = self._asked(kernel, case, guarded)
        return kind == "observed" and not what.ended

    def close(self) -> None:
        """End the process, if there is one; the next run starts another."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None
        if self.log:
            with suppress(OSError):
                os.unlink(self.log)
            self.log = ""

    def _started(self) -> _Worker:
        if self.worker is None or self.worker.is_dead():
            self.close()
            began = time.monotonic()
            recipe = self.fresh()
            if recipe is not None and self.sanitizer is not None:
                self.log = new_log()
                recipe = replace(recipe, tool=self.sanitizer.tool, log=self.log)
            worker = self.worker = _Worker(lambda theirs, words: self._begun(recipe, theirs, words))
            names = ", ".join(self.kernels)
            try:
                if recipe is not None:
                    worker.send(recipe)
                kind, what = worker.answer(START if self.sanitizer is None else 3 * START)
            except (_Died, _TooLong):
                how = " ".join([worker.end(), *(read(self.log, 0).split() if self.log else ())])[: 4 * LAST_WORDS]
                self.worker = None
                self.close()
                raise RuntimeError(f"the process for {names} did not start: {how}") from None
            if kind != "ready":
                self.close()
                raise RuntimeError(f"the process for {names} could not begin:\n{what}")
            self.known = self.known or what
            self.served = []
            self.lost += time.monotonic() - began
        return self.worker

    def _begun(self, recipe: Recipe | None, theirs: socket.socket, words: int) -> int:
        """The number of a new process, which serves on the socket `theirs`."""
        if recipe is not None:
            program = [sys.executable, str(FRESH), str(theirs.fileno()), str(words)]
            os.set_inheritable(theirs.fileno(), True)
            os.set_inheritable(words, True)
            try:
                if self.sanitizer is not None and recipe.log:
                    return _watched([*self.sanitizer.command(recipe.log), *program])
                return os.posix_spawn(sys.executable, program, os.environ)
            finally:
                os.set_inheritable(words, False)
        parent = os.getpid()
        pid = _forked()
        if pid == 0:
            try:
                _leave_alone({theirs.fileno(), words} | of_adapters)
                serve(theirs, words, parent, self.kernels, self.make, self.memory)
            finally:
                os._exit(70)
        return pid

    def _asked(self, kernel: Kernel, case: Case, guarded: str = EVERY) -> tuple[str, Any]:
        worker = self._started()
        assert kernel.name in self.kernels
        is_warm = kernel.name in self.warm
        limit = self.limit if is_warm else WARM_UP * self.limit
        if is_warm and self.hurry:
            limit = min(limit, max(LEAST_HURRIED, TIMES_SLOWEST * self.slowest))
        began = time.monotonic()
        self.served.append(kernel.name)
        logged = os.stat(self.log).st_size if self.log else 0
        try:
            worker.send((kernel.name, kernel.call is not _nothing, case, guarded, os.environ.get(TEST)))
            answer = worker.answer(limit)
        except _Died:
            self.worker = None
            how = f"crashed: {worker.end()}"
            if self.log and self.sanitizer is not None:
                how = said(read(self.log, logged), self.sanitizer.tool) or how
            return "observed", Observation(ended=how)
        except _TooLong:
            self.worker = None
            return "observed", Observation(ended=f"hung: no result within {limit:.3g} s{worker.where()}")
        except BaseException:  # an interrupt: the answer to come belongs to nothing that is asked later
            self.close()
            raise
        finally:
            self.warm.add(kernel.name)
            took = time.monotonic() - began
            self.lost += took if took > LEAST_HURRIED else 0.0
        self.slowest = max(self.slowest, took)
        return answer


class _Worker:
    """The parent's side of one process. begin: starts it, with its end of a socket and a file for its last words."""

    def __init__(self, begin: Callable[[socket.socket, int], int]) -> None:
        self.socket, theirs = socket.socketpair()
        self.words = os.memfd_create("pagefuzz-last-words")  # what it writes to standard error during one run
        self.status: int | None = None
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()  # or both processes write what is still in there
        self.pid = begin(theirs, self.words)
        theirs.close()
        with suppress(OSError):  # here too, since the process may not have come to it yet
            os.setpgid(self.pid, self.pid)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)

    def send(self, message: object) -> None:
        """Raises _Died."""
        try:
            send(self.socket, message)
        except OSError:
            raise _Died from None

    def answer(self, limit: float) -> tuple[str, Any]:
        """What the process says next. Raises _Died, or _TooLong where that takes more than `limit` seconds."""
        deadline, got, wanted = time.monotonic() + limit, bytearray(), _HEADER.size
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _TooLong
            if self.poll.poll(min(left, 0.1) * 1000):
                try:
                    piece = self.socket.recv(1 << 20)
                except OSError:
                    raise _Died from None
                if not piece:
                    raise _Died
                got += piece
                if wanted == _HEADER.size and len(got) >= wanted:
                    magic, length = _HEADER.unpack_from(got)
                    if magic != _MAGIC:
                        return "fault", "it wrote to a socket of pagefuzz"
                    wanted += length
                if wanted > _HEADER.size and len(got) >= wanted:
                    break
            elif self.is_dead():  # and a child of its own keeps the socket open
                raise _Died
        try:
            kind, what = pickle.loads(memoryview(got)[_HEADER.size :])  # written by our own code a moment ago
        except Exception as error:
            return "fault", f"{type(error).__name__}: {error}"
        return kind, what

    def is_dead(self) -> bool:
        # It stays to be waited for until `end`, so that its number is not given to another's group.
        asked = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.status is not None or os.waitid(os.P_PID, self.pid, asked) is not None

    def where(self) -> str:
        """End a process that hangs; the line that it was at, as the end of a sentence."""
        if not self.is_dead():
            os.kill(self.pid, signal.SIGABRT)  # faulthandler writes where it was, even out of a loop in C
            for _ in range(100):
                if self.is_dead():
                    break
                time.sleep(0.01)
        said = self._said()
        self.end()
        return _line(said)

    def end(self) -> str:
        """End the process, if it has not ended itself, and those that it started; say how it did."""
        # A dying process closes its socket before it can be waited for.
        has_hung_up = self.status is None and self._has_hung_up()
        for _ in range(HANGS_UP if has_hung_up else 0):
            if self.is_dead():
                break
            time.sleep(0.01)
        lives_on = has_hung_up and not self.is_dead()
        if self.status is None:
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = self._said()
        self.socket.close()
        if self.words >= 0:
            os.close(self.words)
            self.words = -1
        assert self.status is not None
        if lives_on:  # another program in its place, say
            return "it closed the files of pagefuzz and went on"
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {-self.status}{_name(-self.status)}"
        heard = " ".join(re.split(r"(?m)^Fatal Python error|^Current thread|^Thread 0x", said)[0].split())
        return how + _line(said) + (f": {heard[-LAST_WORDS:]}" if heard else "")

    def _has_hung_up(self) -> bool:
        return self.socket.fileno() >= 0 and any(event & select.POLLHUP for _, event in self.poll.poll(0))

    def _said(self) -> str:
        if self.words < 0:
            return ""
        size = os.fstat(self.words).st_size
        return os.pread(self.words, 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")


def _is_shortage(seen: Observation) -> bool:
    """Whether a run failed for want of memory, or of what else a device has for all its processes together."""
    raised = seen.raised
    if raised is None or raised.type not in ("AcceleratorError", "OutOfMemoryError", "RuntimeError", "MemoryError"):
        return False
    return raised.type == "MemoryError" or any(words in raised.message for words in SHORTAGES)


def _nothing(*arguments: object, **keywords: object) -> None:
    """In a kernel's place: whether a run can be observed at all."""


def _last_line(said: str) -> str:
    return said.partition(TORCHS_ADVICE)[0].strip().rpartition("\n")[2][-LAST_WORDS:]


def _name(number: int) -> str:
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""


def _line(said: str) -> str:
    """The author's line in a traceback of faulthandler, as the end of a sentence."""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', said):
        if not file.startswith(_NOT_THE_AUTHORS):
            return f" (at {Path(file).name}, line {line})"
    return ""


def send(to: socket.socket, message: object) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    to.sendall(_HEADER.pack(_MAGIC, len(data)) + data)


def received(source: socket.socket) -> Any:
    """The next message; ends this process where there is no more."""
    got = bytearray()
    wanted = _HEADER.size
    while len(got) < wanted:
        piece = source.recv(wanted - len(got))
        if not piece:
            os._exit(0)
        got += piece
        if len(got) == wanted == _HEADER.size:
            wanted += _HEADER.unpack_from(got)[1]
    return pickle.loads(memoryview(got)[_HEADER.size :])


# ---- the other side


def serve(
    asked: socket.socket,
    words: int,
    parent: int,
    kernels: Mapping[str, Kernel],
    make: Callable[[], Runner],
    memory: int | None,
    tool: str = "",
    log: str = "",
) -> NoReturn:
    """Observe one case after the other, until there are no more or the parent is gone.

    tool, log: of compute-sanitizer, where it watches this process.
    """
    _end_with_the_parent()
    if os.getppid() != parent:
        os._exit(0)
    os.register_at_fork(after_in_child=_end_with_the_parent)  # what the kernel forks too
    with suppress(OSError):
        os.setpgid(0, 0)  # and all that it starts is ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this process has to go
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    said = os.dup(2)
    os.dup2(words, 2)
    faulthandler.enable(file=words)
    try:
        runner = make()
        runner.hears_interrupts = False
        if memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
        send(asked, ("ready", runner.limits))
    except Exception:
        send(asked, ("fault", traceback.format_exc()))
        os._exit(0)
    me, ours = os.getpid(), _identity(words)
    watch = Log(log, at=os.stat(log).st_size) if log else None
    while True:
        name, is_called, case, guarded, test = received(asked)
        kernel = kernels[name] if is_called else replace(kernels[name], call=_nothing)
        if isinstance(runner.arena, CpuArena):
            runner.arena.guarded = guarded
        if test is not None:
            os.environ[TEST] = test
        if watch is not None:
            watch.begin()
        answer = _observed(runner, kernel, case)
        if watch is not None:
            answer = _with_reports(answer, runner, tool, watch)
        if os.getpid() != me:
            os._exit(0)  # a child that the kernel started came back from it
        if _identity(words) != ours:
            os._exit(70)  # the kernel closed it, and what has its number now is no business of ours
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if size := os.fstat(words).st_size:
            os.lseek(words, 0, os.SEEK_SET)
            os.sendfile(said, words, 0, size)
            os.ftruncate(words, 0)
        send(asked, answer)


def _observed(runner: Runner, kernel: Kernel, case: Case) -> tuple[str, Any]:
    try:
        return "observed", runner.observe(kernel, case)
    except InvalidCase as error:
        return "invalid", str(error) + (" (under --sanitize)" if isinstance(runner.arena, PlainArena) else "")
    except MemoryError as error:
        return "exhausted", " ".join(f"MemoryError {error}".split())
    except BaseException as error:
        if "alloc" in str(error) or getattr(error, "errno", None) == 12:  # torch's CPU allocator; ENOMEM
            return "exhausted", " ".join(f"{type(error).__name__}: {error}".split())[:LAST_WORDS]
        return "fault", traceback.format_exc()


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _identity(file: int) -> tuple[int, int] | None:
    """What an open file is; None if it is closed."""
    with suppress(OSError):
        found = os.fstat(file)
        return found.st_dev, found.st_ino
    return None


def channels() -> set[int]:
    """The sockets and pipes that this process has open, but for its standard input and outputs."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            mode = os.fstat(int(name)).st_mode
            if int(name) > 2 and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                found.add(int(name))
    return found


def _leave_alone(kept: set[int]) -> None:
    """Have nothing in a fork that leads elsewhere, but for what is kept: not to pytest, and not to other kernels."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for channel in channels() - kept:
        os.dup2(nowhere, channel, inheritable=False)  # and the number stays taken


def _with_reports(answer: tuple[str, Any], runner: Runner, tool: str, watch: Log) -> tuple[str, Any]:
    """What was observed, or what the sanitizer has reported of the run instead: more is not known of such a run."""
    kind, what = answer
    told = said(watch.new(), tool, getattr(runner.arena, "addresses", ()), watch.late)
    if not told:
        return answer
    is_well = kind == "observed" and not what.ended and watch.at < MOST_LOG
    return "reported" if is_well else "observed", Observation(ended=told)


def _watched(program: list[str]) -> int:
    """Start a program that ends when this process does, and with it what it has started."""
    pid = _forked()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.execve(program[0], program, {**os.environ, **ENVIRONMENT})
        finally:
            os._exit(70)
    return pid


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads, which here only wait
        return os.fork()


def in_a_fork(check: Callable[[], object]) -> None:
    """Call `check` in a process that ends with it, so that this one leaves a device alone. Raises RuntimeError with
    what it raised there."""
    reading, writing = os.pipe()
    pid = _forked()
    if pid == 0:
        try:
            faulthandler.disable()
            check()
        except BaseException as error:
            os.write(writing, str(error).encode(errors="replace")[:4096])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read().decode(errors="replace")
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        said = said or f"the check ended with {status}"
    if said:
        raise RuntimeError(said)


def memory_for_one() -> int:
    """Bytes that one process may take: half of what this machine, or this container, has for all of the workers."""
    total = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1 << 31, total // 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
