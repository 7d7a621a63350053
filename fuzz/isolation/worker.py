"""The parent's side of one process: how it is begun, asked, waited for and ended."""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pagefuzz.fuzz.isolation.endings import LAST_WORDS, authors_line, signal_name
from pagefuzz.fuzz.isolation.messages import HEADER, MAGIC, send

HANGS_UP = 200  # hundredths of a second for a process to end that has closed its socket


class Died(Exception):
    """The process ended instead of answering."""


class TooLong(Exception):
    """The process did not answer in time."""


class Worker:
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
        """Raises Died."""
        try:
            send(self.socket, message)
        except OSError:
            raise Died from None

    def answer(self, limit: float) -> tuple[str, Any]:
        """What the process says next. Raises Died, or TooLong where that takes more than `limit` seconds."""
        deadline, got, wanted = time.monotonic() + limit, bytearray(), HEADER.size
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TooLong
            if self.poll.poll(min(left, 0.1) * 1000):
                try:
                    piece = self.socket.recv(1 << 20)
                except OSError:
                    raise Died from None
                if not piece:
                    raise Died
                got += piece
                if wanted == HEADER.size and len(got) >= wanted:
                    magic, length = HEADER.unpack_from(got)
                    if magic != MAGIC:
                        return "fault", "it wrote to a socket of pagefuzz"
                    wanted += length
                if wanted > HEADER.size and len(got) >= wanted:
                    break
            elif self.is_dead():  # and a child of its own keeps the socket open
                raise Died
        try:
            kind, what = pickle.loads(memoryview(got)[HEADER.size :])  # written by our own code a moment ago
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
        return authors_line(said)

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
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {-self.status}{signal_name(-self.status)}"
        heard = " ".join(re.split(r"(?m)^Fatal Python error|^Current thread|^Thread 0x", said)[0].split())
        return how + authors_line(said) + (f": {heard[-LAST_WORDS:]}" if heard else "")

    def _has_hung_up(self) -> bool:
        return self.socket.fileno() >= 0 and any(event & select.POLLHUP for _, event in self.poll.poll(0))

    def _said(self) -> str:
        if self.words < 0:
            return ""
        size = os.fstat(self.words).st_size
        return os.pread(self.words, 1 << 16, max(0, size - (1 << 16))).decode(errors="replace")
