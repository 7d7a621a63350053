"""The run's side: which process a case goes to, and what to make of its answer, or of how it ended."""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagefuzz.fuzz.arena import EVERY
from pagefuzz.fuzz.isolation.child import serve
from pagefuzz.fuzz.isolation.endings import LAST_WORDS, last_line
from pagefuzz.fuzz.isolation.forks import forked, leave_alone, of_adapters, watched
from pagefuzz.fuzz.isolation.messages import TEST, Recipe, nothing
from pagefuzz.fuzz.isolation.worker import Died, TooLong, Worker
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.sanitizer import SLOWER, Sanitizer, new_log, read, said
from pagefuzz.kernels.registry import Kernel
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Case, InvalidCase, Limits, arguments_of

CASE_LIMIT = 10.0  # seconds that one run of the kernel may take
WARM_UP = 3.0  # times that, for the first one, which may have to compile
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
FRESH = Path(__file__).parents[1] / "fresh.py"


def is_checked_first(kernel: Kernel) -> bool:
    """Whether it is known that interpreted all accesses of a kernel, or of both of a pair, are checked before they
    happen: of pagefuzz's own Triton kernels. What an adapter does besides launching nobody knows."""
    parts = getattr(kernel.call, "parts", (kernel.call,))
    return all(str(getattr(part, "__module__", "")).startswith("pagefuzz.kernels.triton_") for part in parts)


def memory_for_one() -> int:
    """Bytes that one process may take: half of what this machine, or this container, has for all of the workers."""
    total = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1 << 31, total // 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


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
        self.worker: Worker | None = None
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
            if second and self._asked(replace(kernel, call=nothing), case)[0] == "observed":
                return Observation(ended=f"crashed: what it left behind could not be looked at: {last_line(what)}")
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

    def _started(self) -> Worker:
        if self.worker is None or self.worker.is_dead():
            self.close()
            began = time.monotonic()
            recipe = self.fresh()
            if recipe is not None and self.sanitizer is not None:
                self.log = new_log()
                recipe = replace(recipe, tool=self.sanitizer.tool, log=self.log)
            worker = self.worker = Worker(lambda theirs, words: self._begun(recipe, theirs, words))
            names = ", ".join(self.kernels)
            try:
                if recipe is not None:
                    worker.send(recipe)
                kind, what = worker.answer(START if self.sanitizer is None else 3 * START)
            except (Died, TooLong):
                how = " ".join([worker.end(), *(read(self.log, 0).split() if self.log else ())])[: 4 * LAST_WORDS]
                self.worker = None
                self.close()
                raise RuntimeError(f"the process for {names} did not start: {how}") from None
            except BaseException:  # an interrupt: it may not have begun yet
                self.close()
                raise
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
                    return watched([*self.sanitizer.command(recipe.log), *program])
                return os.posix_spawn(sys.executable, program, os.environ)
            finally:
                os.set_inheritable(words, False)
        parent = os.getpid()
        pid = forked()
        if pid == 0:
            try:
                leave_alone({theirs.fileno(), words} | of_adapters)
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
            worker.send((kernel.name, kernel.call is not nothing, case, guarded, os.environ.get(TEST)))
            answer = worker.answer(limit)
        except Died:
            self.worker = None
            how = f"crashed: {worker.end()}"
            if self.log and self.sanitizer is not None:
                how = said(read(self.log, logged), self.sanitizer.tool) or how
            return "observed", Observation(ended=how)
        except TooLong:
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


def _is_shortage(seen: Observation) -> bool:
    """Whether a run failed for want of memory, or of what else a device has for all its processes together."""
    raised = seen.raised
    if raised is None or raised.type not in ("AcceleratorError", "OutOfMemoryError", "RuntimeError", "MemoryError"):
        return False
    return raised.type == "MemoryError" or any(words in raised.message for words in SHORTAGES)
