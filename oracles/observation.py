"""What one run of a kernel on a case left behind: plain data, never a whole cache, fit to cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Raised:
    """An exception that left the kernel. `inside_launch`: it came from within a Triton program, not from the host."""

    type: str
    message: str
    where: str
    inside_launch: bool

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" + (f" (at {self.where})" if self.where else "")


@dataclass(frozen=True)
class Wild:
    """An access outside every tensor of the launch, refused before it happened.

    kind: load, store or atomic. program: the program id. tensor: whose address it was computed from, `index` elements
    from that tensor's first element. lanes: how many lanes of the access were wild. value: the bits of the first one
    that would have been stored.
    """

    kind: str
    program: tuple[int, int, int]
    tensor: str
    index: int
    lanes: int
    value: int | None

    def __str__(self) -> str:
        lanes = "" if self.lanes == 1 else f" ({self.lanes} lanes)"
        return f"program {self.program}: wild {self.kind} at element {self.index} of {self.tensor}{lanes}"


@dataclass(frozen=True)
class Race:
    """Two programs of one launch that get in each other's way: what comes of it depends on which is first.

    kind: "store", both write one address (with whatever bits), or "load", the first program writes what the second
    reads, whichever ran first here. programs: their ids. tensor, index: the address, in elements from that tensor's
    first; the lowest one of the launch. elements: how many elements of that tensor it happens to, between any programs.
    """

    kind: str
    programs: tuple[tuple[int, int, int], tuple[int, int, int]]
    tensor: str
    index: int
    elements: int

    def __str__(self) -> str:
        first, second = self.programs
        element, many = f"element {self.index} of {self.tensor}", ""
        if self.elements > 1:
            many = f" ({self.elements} elements of {self.tensor} in all)"
        if self.kind == "store":
            return f"programs {first} and {second} both wrote {element}{many}"
        return f"program {second} read {element}, which program {first} of the same launch wrote{many}"


@dataclass(frozen=True)
class Change:
    """Elements of one buffer that the run changed. `elements` count from the buffer's first element: a negative one or
    one past its end lies in a guard zone."""

    elements: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Output:
    """A returned tensor: its bits, and what its dtype, shape and device are called."""

    bits: np.ndarray
    dtype: str


@dataclass(frozen=True)
class Observation:
    """One run.

    raised, wild: how it ended early, if it did. ended: how the process of the kernel ended, or was ended, instead of
    giving a result, and then nothing else is known: "crashed: signal 11, SIGSEGV", "hung: no result within 10 s".
    output: the returned tensor; misreturned: a sentence on what was
    returned instead of what the contract says ("" if right). changes: by buffer. watched: for each buffer the bits of
    the element runs that the case asked to see afterwards. loads, stores: by tensor, the elements (from its first one)
    that traced launches read and wrote; None where accesses could not be traced. touched: by buffer, the runs of bytes
    (first, last) of untouched memory that something looked at. race: the first one of the traced launches; a launch
    with an atomic access is left out, since locks and counters order what its programs do.
    """

    raised: Raised | None = None
    wild: Wild | None = None
    output: Output | None = None
    misreturned: str = ""
    changes: dict[str, Change] = field(default_factory=dict)
    watched: dict[str, list[np.ndarray]] = field(default_factory=dict)
    loads: dict[str, np.ndarray] | None = None
    stores: dict[str, np.ndarray] | None = None
    touched: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    race: Race | None = None
    ended: str = ""

    @property
    def instead(self) -> str:
        """What came instead of the result of a run that did not finish."""
        return f"raised {self.raised}" if self.raised else str(self.wild or self.ended or self.misreturned)

    @property
    def finished(self) -> bool:
        """Whether the kernel returned what the contract says, right or wrong."""
        return self.raised is None and self.wild is None and not self.misreturned and not self.ended

    def same_result(self, other: Observation) -> bool:
        """Whether both runs finished with the same bits, in the output and in the watched elements."""
        if not (self.finished and other.finished) or self.watched.keys() != other.watched.keys():
            return False
        mine, theirs = self.output, other.output
        if (mine is None) != (theirs is None):
            return False
        if mine is not None and theirs is not None and not np.array_equal(mine.bits, theirs.bits):
            return False
        return all(
            len(runs) == len(other.watched[name])
            and all(np.array_equal(a, b) for a, b in zip(runs, other.watched[name], strict=True))
            for name, runs in self.watched.items()
        )
