"""The faults: the source of an adapter for each, and what must be said of it.

Each adapter has two kernels of slot_mapping. The faulty one, of the fault's name, goes wrong where a token has a
position of 3 or more, so the smallest case is one such token; the other one is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

SMALLEST = 3  # the position of the one token that is left
CASES = 20
LIMIT = 2  # seconds that a case may take
SPIN = 30  # seconds that a kernel spins on a device; never for ever, on a card that others may use

ADAPTER = """
import ctypes, itertools, os, re, signal, sys, threading, time
import torch
from hypothesis import settings
from pagefuzz import kernel
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping

settings.register_profile("planted", max_examples={cases}, deadline=None)
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
KEPT = []

{source}

@kernel("slot_mapping", name="{name}"{declared})
def faulty(block_tables, seq_ids, positions, block_size):
    if (positions >= {smallest}).any():
        fault(positions)
    return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

@kernel("slot_mapping", name="good_{name}")
def good(block_tables, seq_ids, positions, block_size):
    return torch_slot_mapping(block_tables, seq_ids, positions, block_size)
"""
LEAST_TO_SHRINK = ', block_sizes=[1], index_dtypes=["int64"], table_strides="contiguous", negative_slots="never"'
TRITON = """
import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Fault:
    """source: defines `fault(positions)`. seen: a pattern of what the report must say was seen. device: where it is
    planted."""

    name: str
    source: str
    seen: str
    device: str = "cpu"

    def adapter(self) -> str:
        """The adapter's text. On a device a new process takes seconds, so its cases have little to shrink."""
        on_cpu = self.device == "cpu"
        source = dedent(self.source) if on_cpu else TRITON + dedent(self.source)
        return ADAPTER.format(
            name=self.name,
            source=source,
            cases=CASES,
            declared="" if on_cpu else LEAST_TO_SHRINK,
            smallest=SMALLEST,
        )


AT = r" \(at \w+\.py, line \d+\)"
HUNG = r"hung: no result within [\d.]+ s"

FAULTS = (
    Fault(
        "wild_read",
        """
        def fault(positions):
            ctypes.string_at(positions.data_ptr() + (1 << 45), 4)
        """,
        rf"crashed: signal 11, SIGSEGV{AT}$",
    ),
    Fault(
        "wild_write",
        """
        def fault(positions):
            ctypes.memset(positions.data_ptr() + (1 << 45), 1, 4)
        """,
        rf"crashed: signal 11, SIGSEGV{AT}$",
    ),
    Fault(
        "null_read",
        """
        def fault(positions):
            ctypes.string_at(8, 4)
        """,
        rf"crashed: signal 11, SIGSEGV{AT}$",
    ),
    Fault(
        "abort",
        """
        def fault(positions):
            os.abort()
        """,
        rf"crashed: signal 6, SIGABRT{AT}$",
    ),
    Fault(
        "exit",
        """
        def fault(positions):
            os._exit(0)
        """,
        r"crashed: exit status 0$",
    ),
    Fault(
        "loop_in_python",
        """
        def fault(positions):
            while True:
                pass
        """,
        rf"{HUNG}{AT}$",
    ),
    Fault(  # holds the interpreter's lock and looks at no signal
        "loop_in_c",
        """
        def fault(positions):
            all(itertools.repeat(1))
        """,
        rf"{HUNG}{AT}$",
    ),
    Fault(
        "memory",
        """
        def fault(positions):
            kept = []
            while True:
                kept.append(bytearray(1 << 24))
        """,
        rf"raised MemoryError: .*{AT}$",
    ),
    Fault(
        "memory_kept",
        """
        def fault(positions):
            while True:
                KEPT.append(torch.ones(1 << 24, dtype=torch.uint8))
        """,
        rf"raised RuntimeError: .*can't allocate memory.*{AT}$",
    ),
    Fault(  # malloc gives NULL
        "memory_in_c",
        """
        def fault(positions):
            while True:
                ctypes.memset(LIBC.malloc(ctypes.c_size_t(1 << 24)), 1, 4096)
        """,
        rf"crashed: signal 11, SIGSEGV{AT}$",
    ),
    Fault(
        "cuda_wild_read",
        """
        @triton.jit
        def reads_far(pointer, into, FAR: tl.constexpr):
            tl.store(into, tl.load(pointer + FAR))

        def fault(positions):
            into = torch.zeros(1, dtype=torch.int8, device=positions.device)
            reads_far[(1,)](into, torch.zeros_like(into), 1 << 46)
        """,
        r"crashed: .*illegal memory access",
        "cuda",
    ),
    Fault(
        "cuda_wild_write",
        """
        @triton.jit
        def writes_far(pointer, FAR: tl.constexpr):
            tl.store(pointer + FAR, 1)

        def fault(positions):
            writes_far[(1,)](torch.zeros(1, dtype=torch.int8, device=positions.device), 1 << 46)
        """,
        r"crashed: .*illegal memory access",
        "cuda",
    ),
    Fault(
        "cuda_spin",
        f"""
        @triton.jit
        def spins(into, NANOSECONDS: tl.constexpr, TURNS: tl.constexpr):
            began = tl.extra.cuda.globaltimer()
            now = began
            turns = began - began
            while (now - began < NANOSECONDS) & (turns < TURNS):
                now = tl.extra.cuda.globaltimer()
                turns += 1
            tl.store(into, turns)

        def fault(positions):
            into = torch.zeros(1, dtype=torch.int64, device=positions.device)
            spins[(1,)](into, {SPIN} * 10**9, 1 << 33, num_warps=1)  # the turns end it if the clock does not
        """,
        HUNG,
        "cuda",
    ),
    Fault(
        "cuda_memory",
        """
        def fault(positions):
            torch.empty(1 << 42, dtype=torch.uint8, device=positions.device)
        """,
        r"raised OutOfMemoryError: CUDA out of memory",
        "cuda",
    ),
    Fault(
        "cuda_memory_kept",
        """
        def fault(positions):
            while True:
                KEPT.append(torch.empty(1 << 30, dtype=torch.uint8, device=positions.device))
        """,
        r"raised OutOfMemoryError: CUDA out of memory",
        "cuda",
    ),
)
