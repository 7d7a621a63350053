"""Processes, how they are started, and what they keep of the one that started them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress

from pagefuzz.fuzz.sanitizer import ENVIRONMENT

PR_SET_PDEATHSIG = 1
of_adapters: set[int] = set()  # sockets and pipes that adapters opened when they were loaded


def forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads, which here only wait
        return os.fork()


def watched(program: list[str]) -> int:
    """Start a program that ends when this process does, and with it what it has started."""
    pid = forked()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.execve(program[0], program, {**os.environ, **ENVIRONMENT})
        finally:
            os._exit(70)
    return pid


def in_a_fork(check: Callable[[], object]) -> None:
    """Call `check` in a process that ends with it, so that this one leaves a device alone. Raises RuntimeError with
    what it raised there."""
    reading, writing = os.pipe()
    pid = forked()
    if pid == 0:
        try:
            faulthandler.disable()
            check()
        except BaseException as error:
            os.write(writing, (str(error) or type(error).__name__).encode(errors="replace")[:4096])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read().decode(errors="replace")
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        said = said or f"the check ended with {status}"
    if said:
        raise RuntimeError(said)


def end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def channels() -> set[int]:
    """The sockets and pipes that this process has open, but for its standard input and outputs."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            mode = os.fstat(int(name)).st_mode
            if int(name) > 2 and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                found.add(int(name))
    return found


def leave_alone(kept: set[int]) -> None:
    """Have nothing in a fork that leads elsewhere, but for what is kept: not to pytest, and not to other kernels."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for channel in channels() - kept:
        os.dup2(nowhere, channel, inheritable=False)  # and the number stays taken
