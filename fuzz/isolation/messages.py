"""What the two sides say to each other, and how: pickles, each behind a header.

The parent sends (a kernel's name, whether it is called or `nothing` in its place, the case, what the arena guards, the
test that is running), and before all that a Recipe where the process is a fresh Python. The process answers with a
word and what belongs to it: ready, observed, reported, invalid, exhausted or fault.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

TEST = "PYTEST_CURRENT_TEST"
HEADER = struct.Struct("<8sQ")  # of a message: that it is one, and its length
MAGIC = b"pagefuzz"


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


def nothing(*arguments: object, **keywords: object) -> None:
    """In a kernel's place: whether a run can be observed at all."""


def send(to: socket.socket, message: object) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    to.sendall(HEADER.pack(MAGIC, len(data)) + data)


def received(source: socket.socket) -> Any:
    """The next message; ends this process where there is no more."""
    got = bytearray()
    wanted = HEADER.size
    while len(got) < wanted:
        piece = source.recv(wanted - len(got))
        if not piece:
            os._exit(0)
        got += piece
        if len(got) == wanted == HEADER.size:
            wanted += HEADER.unpack_from(got)[1]
    return pickle.loads(memoryview(got)[HEADER.size :])
