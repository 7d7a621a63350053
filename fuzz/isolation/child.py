"""What runs in the process of a kernel: it takes one case after the other, and sends back what it observed."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from pagefuzz.fuzz.arena import CpuArena
from pagefuzz.fuzz.isolation.endings import LAST_WORDS
from pagefuzz.fuzz.isolation.forks import end_with_the_parent
from pagefuzz.fuzz.isolation.messages import TEST, nothing, received, send
from pagefuzz.fuzz.plain_arena import PlainArena
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.sanitizer import MOST_LOG, Log, said
from pagefuzz.kernels.registry import Kernel
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Case, InvalidCase


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
    end_with_the_parent()
    if os.getppid() != parent:
        os._exit(0)
    os.register_at_fork(after_in_child=end_with_the_parent)  # what the kernel forks too
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
    try:
        while True:
            name, is_called, case, guarded, test = received(asked)
            kernel = kernels[name] if is_called else replace(kernels[name], call=nothing)
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
                with suppress(OSError):  # where nobody reads, say. (sendfile appends to no file.)
                    at = 0
                    while piece := os.pread(words, min(1 << 16, size - at), at):
                        at += os.write(said, piece)
                os.ftruncate(words, 0)
            send(asked, answer)
    except MemoryError:  # earlier cases have left none to hear or to answer with: a fresh process tells
        send(asked, ("exhausted", "MemoryError"))
        os._exit(0)


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


def _with_reports(answer: tuple[str, Any], runner: Runner, tool: str, watch: Log) -> tuple[str, Any]:
    """What was observed, or what the sanitizer has reported of the run instead: more is not known of such a run."""
    kind, what = answer
    told = said(watch.new(), tool, getattr(runner.arena, "addresses", ()), watch.late)
    if not told:
        return answer
    is_well = kind == "observed" and not what.ended and watch.at < MOST_LOG
    return "reported" if is_well else "observed", Observation(ended=told)


def _identity(file: int) -> tuple[int, int] | None:
    """What an open file is; None if it is closed."""
    with suppress(OSError):
        found = os.fstat(file)
        return found.st_dev, found.st_ino
    return None
