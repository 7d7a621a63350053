"""The arena: where tensors lie, what it sees of a run, and that nothing of one case reaches the next."""

# The parameters of kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import pagefuzz
from pagefuzz.fuzz.arena import ALIGNMENT, GUARD, CpuArena
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.run import Runner
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache
from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache
from pagefuzz.oracles.answers import is_right
from pagefuzz.oracles.i06_nothing_else import NothingElseChanges
from pagefuzz.oracles.invariant import Violation
from pagefuzz.oracles.observation import Change, Observation
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.cache_layouts import CacheLayout
from pagefuzz.strategies.case import Arguments, Case, InvalidCase, Sequence
from pagefuzz.strategies.number_formats import ITEMSIZE
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.strategies.tensors import Buffer, Tensor, contiguous
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase
from pagefuzz.tests.killing import runner

if type(tl.sum).__name__ != "InterpretedFunction":
    pytest.skip("this process compiles kernels; set TRITON_INTERPRET=1 before it starts", allow_module_level=True)

PLAIN = Declaration()
WRITE = ReshapeAndCacheCase(block_size=4, num_blocks=3, slots=(9, -1, 2), num_kv_heads=2, head_dim=2, seed=3)
ROWS = (Sequence((2, 0), (99999,), 6), Sequence((1,), (3, -1), 3))
DECODE = PagedDecodeAttentionCase(
    block_size=4, num_blocks=4, sequences=ROWS, num_kv_heads=2, group_size=2, head_dim=2, poison="nan", seed=3
)
SLOTS = SlotMappingCase(block_size=4, num_blocks=4, sequences=ROWS, tokens=(Token(0, 5), Token(1, 2)))
ALL = (WRITE, DECODE, SLOTS)


def of(case: Case, call: Callable[..., Any]) -> Kernel:
    return Kernel("under test", OPERATIONS[case.operation], call, PLAIN)


def observe(case: Case, call: Callable[..., Any]) -> Observation:
    return runner().observe(of(case, call), case)


GOOD: list[tuple[str, Callable[..., Any]]] = [
    ("reshape_and_cache", torch_reshape_and_cache),
    ("reshape_and_cache", triton_reshape_and_cache),
    ("paged_decode_attention", torch_paged_decode_attention),
    ("paged_decode_attention", triton_paged_decode_attention),
]


def far_cases() -> list[Any]:
    """An element past 2^31, and one past 2^32, in pools of 9 to 18 GB of float32."""
    found: list[Any] = []
    for past in (2**31, 2**32):
        block = past // (16 * 64) + 1
        row = Sequence((block, 3, block - 1), (99999,), 40)
        slots = (16 * block + 5, 7, -1, 16 * (block - 1))
        found.append(ReshapeAndCacheCase(block_size=16, num_blocks=block + 2, slots=slots, head_dim=64, seed=1))
        found.append(
            PagedDecodeAttentionCase(
                block_size=16, num_blocks=block + 2, sequences=(row,), group_size=2, head_dim=64, scale=0.125, seed=1
            )
        )
    return found


def digest(seen: Observation) -> str:
    """Of everything in an observation."""
    found = hashlib.sha256(repr((seen.raised, seen.wild, seen.misreturned, sorted(seen.touched.items()))).encode())
    if seen.output is not None:
        found.update(seen.output.dtype.encode() + seen.output.bits.tobytes())
    for name in sorted(seen.changes):
        change = seen.changes[name]
        found.update(
            name.encode() + b"".join(each.tobytes() for each in (change.elements, change.before, change.after))
        )
    for name in sorted(seen.watched):
        found.update(name.encode() + b"".join(each.tobytes() for each in seen.watched[name]))
    for accesses in (seen.loads, seen.stores):
        for name in sorted(accesses or {}):
            found.update(name.encode() + (accesses or {})[name].tobytes())
    return found.hexdigest()


def good_runs() -> dict[str, str]:
    """By case and kernel, the digests of runs that must always be the same."""
    return {
        f"{call.__name__} {case.one_line()}": digest(observe(case, call))
        for case in (WRITE, DECODE)
        for operation, call in GOOD
        if case.operation == operation
    }


def in_a_fresh_process() -> None:
    """What the subprocess of the tests below prints."""
    fresh = good_runs()
    small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    right = {
        f"{call.__name__} {case.one_line()}": is_right(case, observe(case, call), PLAIN)
        for case in far_cases()
        for operation, call in GOOD
        if case.operation == operation
    }
    large = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arena = runner().arena
    assert isinstance(arena, CpuArena)
    print(json.dumps({"small": small, "large": large, "right": right, "fresh": fresh, "left": arena._populated()}))


@pytest.fixture(scope="module")
def fresh_process() -> dict[str, Any]:
    script = (
        "import importlib, importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('pagefuzz', sys.argv[1])\n"
        "sys.modules['pagefuzz'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "importlib.import_module('pagefuzz.tests.test_arena').in_a_fresh_process()\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(pagefuzz.__file__))],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ----------------------------------------------------------------------------------------------------- 64-bit addresses


def test_far_cases_take_less_than_a_gibibyte(fresh_process: dict[str, Any]) -> None:
    assert all(case.is_far() for case in far_cases())
    assert len(fresh_process["right"]) == 8 and all(fresh_process["right"].values()), fresh_process["right"]
    assert fresh_process["large"] < 1 << 20, "KiB resident at the most"
    assert fresh_process["large"] - fresh_process["small"] < 32 << 10, fresh_process
    assert fresh_process["left"] == []


@pytest.mark.parametrize(("operation", "call"), GOOD, ids=[call.__name__ for _, call in GOOD])
def test_far_cases_run_right_here_too(operation: str, call: Callable[..., Any]) -> None:
    for case in far_cases():
        if case.operation == operation:
            seen = observe(case, call)
            assert is_right(case, seen, PLAIN), seen
            assert seen.touched == {}


@triton.jit
def write_int32_kernel(key, cache, slot_mapping, SIZE: tl.constexpr):
    token, i = tl.program_id(0), tl.arange(0, SIZE)
    slot = tl.load(slot_mapping + token).to(tl.int32)
    tl.store(cache + slot * SIZE + i, tl.load(key + token * SIZE + i), mask=i < tl.where(slot >= 0, SIZE, 0))


def write_int32(key, value, k_cache, v_cache, slot_mapping):
    write_int32_kernel[(len(slot_mapping),)](key, k_cache, slot_mapping, SIZE=key.shape[1] * key.shape[2])


@triton.jit
def read_block_kernel(cache, block_tables, out, column, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    block = tl.load(block_tables + column).to(tl.int64)
    tl.store(out + i, tl.load(cache + block * SIZE + i))


def read_column(column: int) -> Callable[..., torch.Tensor]:
    def kernel(q, k_cache, v_cache, block_tables, context_lens, scale):
        out = torch.zeros_like(q)
        read_block_kernel[(1,)](v_cache, block_tables, out.new_zeros(64), column, SIZE=16)
        return out

    return kernel


@triton.jit
def store_at_kernel(cache, index, value):
    tl.store(cache + index, value)


def test_an_int32_product_is_a_wild_store_with_its_place() -> None:
    slots = (3, 2**29)  # 2^29 slots of 4 elements: the product wraps to -2^31
    case = ReshapeAndCacheCase(block_size=4, num_blocks=2**27 + 1, slots=slots, num_kv_heads=2, head_dim=2)
    seen = observe(case, write_int32)
    assert seen.wild is not None and not seen.finished and seen.raised is None
    assert (seen.wild.kind, seen.wild.program, seen.wild.tensor) == ("store", (1, 0, 0), "k_cache")
    assert (seen.wild.index, seen.wild.lanes) == (-(2**31), 4)
    assert seen.wild.value == int(case.token_bits("key")[1, 0])
    assert str(seen.wild) == "program (1, 0, 0): wild store at element -2147483648 of k_cache (4 lanes)"
    # The store of program 0 happened, the wild one did not.
    assert {name: change.elements.tolist() for name, change in seen.changes.items()} == {"k_cache": [12, 13, 14, 15]}
    near = replace(case, slots=(3, 5))
    assert observe(near, write_int32).wild is None


@pytest.mark.parametrize(("column", "entry"), [(2, 99999), (5, -1)])
def test_an_id_outside_the_pool_is_a_wild_load_with_its_place(column: int, entry: int) -> None:
    seen = observe(DECODE, read_column(column))
    assert seen.wild is not None
    assert (seen.wild.kind, seen.wild.program, seen.wild.tensor) == ("load", (0, 0, 0), "v_cache")
    assert (seen.wild.index, seen.wild.lanes, seen.wild.value) == (16 * entry, 16, None)
    assert seen.changes == {} and seen.touched == {}
    assert observe(DECODE, read_column(0)).wild is None


@pytest.mark.parametrize("index", [2**44, -(2**44), 48, -1])
def test_an_access_far_outside_everything_is_no_crash(index: int) -> None:
    def kernel(key, value, k_cache, v_cache, slot_mapping):
        store_at_kernel[(1,)](k_cache, index, 1.5)

    seen = observe(WRITE, kernel)
    assert seen.wild is not None and (seen.wild.tensor, seen.wild.index) == ("k_cache", index)
    assert seen.changes == {}


# ----------------------------------------------------------------------------------------------- one case after another


def arena() -> CpuArena:
    found = runner().arena
    assert isinstance(found, CpuArena)
    return found


def starts() -> dict[str, tuple[int, Buffer]]:
    return {buffer.name: (start, buffer) for start, buffer in arena().places}


def scribble(*tensors: Any) -> torch.Tensor:
    """Write over the inputs, the guard zones on both sides of each, and memory far from everything."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            tensor.fill_(1)
    memory, size = arena().memory, arena().size
    for start, buffer in starts().values():
        end = start + buffer.size * ITEMSIZE[buffer.dtype]
        memory[start - GUARD : start] = memory[end : end + GUARD] = b"\x07" * GUARD
    for place in (size - 1, size // 2 + 12345, size // 4 - (1 << 33), size * 5 // 8 + (1 << 30), size // 8):
        memory[place] = 7
    return torch.zeros(4) if len(tensors) == 6 else torch.zeros(0)


def test_nothing_of_one_case_reaches_the_next(fresh_process: dict[str, Any]) -> None:
    for case in ALL:
        dirty = observe(case, scribble)
        assert len(dirty.changes) >= 3 and dirty.finished != bool(OPERATIONS[case.operation].result)
        assert arena()._populated() == [] and arena().places == [] and arena().before == {}
    assert good_runs() == fresh_process["fresh"]


@pytest.mark.parametrize("error", [ValueError, InvalidCase, SystemExit, KeyboardInterrupt])
def test_a_kernel_that_raises_leaves_nothing_either(error: type[BaseException]) -> None:
    def kernel(*arguments: Any) -> None:
        scribble(*arguments)
        raise error("on purpose")

    if error is not KeyboardInterrupt:
        raised = observe(WRITE, kernel).raised
        assert raised is not None and raised.message == "on purpose"
    else:
        with pytest.raises(error):
            observe(WRITE, kernel)
    assert arena()._populated() == [] and arena().places == []


def test_a_tensor_that_a_kernel_keeps_sees_nothing_of_the_next_case() -> None:
    kept: list[torch.Tensor] = []
    observe(WRITE, lambda *arguments: kept.append(arguments[2]))
    assert not kept[0].any()


# ----------------------------------------------------------------------------------------------------- what has changed


def only_change(case: Case, do: Callable[[], None]) -> dict[str, Change]:
    return observe(case, lambda *arguments: do()).changes


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.operation)
def test_changes_belong_to_the_right_buffer_and_element(case: Case) -> None:
    """In every buffer: its first and last element, and the first and last of the guard zones on both sides."""
    looked = 0
    for buffer in case.arguments().buffers:
        itemsize = ITEMSIZE[buffer.dtype]
        guard = GUARD // itemsize
        for element in (0, buffer.size - 1, -1, -guard, buffer.size, buffer.size + guard - 1):
            inside = 0 <= element < buffer.size
            was: list[bytes] = []

            def change(name: str = buffer.name, element: int = element, was: list[bytes] = was) -> None:
                start, placed = starts()[name]
                itemsize = ITEMSIZE[placed.dtype]
                at = start + element * itemsize
                was.append(arena().memory[at : at + itemsize])
                arena().memory[at] ^= 0x5A

            changes = only_change(case, change)
            assert list(changes) == [buffer.name], (buffer.name, element)
            seen = changes[buffer.name]
            assert seen.elements.tolist() == [element]
            assert seen.before.tobytes() == was[0] and seen.after.tobytes() == bytes([was[0][0] ^ 0x5A]) + was[0][1:]
            assert inside or was[0] == b"\xff" * itemsize, "guard zones hold NaN, or -1"
            looked += 1
    assert looked == 6 * len(case.arguments().buffers)


def test_changes_far_away_belong_to_the_nearest_buffer() -> None:
    size = arena().size

    def change() -> None:
        arena().memory[size // 4 - 4 * 2**31] = 1
        arena().memory[size // 4 + (1 << 30)] = 1
        arena().memory[size - 4] = 1

    changes = only_change(WRITE, change)
    assert {name: seen.elements.tolist() for name, seen in changes.items()} == {
        "k_cache": [-(2**31), 2**28],
        "v_cache": [(size - size * 5 // 8) // 4 - 1],
    }
    assert all(not seen.before.any() for seen in changes.values())


def test_changes_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read gives 2 GiB at most, and a kernel may change all of a pool."""

    def change() -> None:
        start, _ = starts()["k_cache"]
        arena().memory[start : start + 30_000] = b"\x5a" * 30_000

    whole = only_change(WRITE, change)
    monkeypatch.setattr("pagefuzz.fuzz.arena.PIECE", 4096)
    pieces = only_change(WRITE, change)
    assert whole.keys() == pieces.keys() and sum(len(seen.elements) for seen in whole.values()) > 7000
    for name, seen in whole.items():
        for field in ("elements", "before", "after"):
            assert np.array_equal(getattr(seen, field), getattr(pieces[name], field))


def test_writing_what_was_there_is_no_change() -> None:
    def kernel(key, value, k_cache, v_cache, slot_mapping):
        for tensor in (key, value, k_cache, v_cache, slot_mapping):
            tensor.copy_(tensor.clone())

    assert observe(WRITE, kernel).changes == {}


def test_a_changed_input_is_seen() -> None:
    def kernel(key, value, k_cache, v_cache, slot_mapping):
        slot_mapping[1] = 0
        value[2, 1, 0] = -value[2, 1, 0]

    changes = observe(WRITE, kernel).changes
    assert {name: seen.elements.tolist() for name, seen in changes.items()} == {"slot_mapping": [1], "value": [10]}
    assert (changes["slot_mapping"].before.tolist(), changes["slot_mapping"].after.tolist()) == ([-1], [0])


def test_watched_elements_are_those_of_the_addressed_slots() -> None:
    for call in (torch_reshape_and_cache, triton_reshape_and_cache):
        seen = observe(WRITE, call)
        for name, role in (("k_cache", "key"), ("v_cache", "value")):
            tokens = WRITE.token_bits(role)
            assert [run.tolist() for run in seen.watched[name]] == [tokens[0].tolist(), tokens[2].tolist()]
            assert seen.changes[name].elements.tolist() == [8, 9, 10, 11, 36, 37, 38, 39]
    untouched = observe(WRITE, lambda *arguments: None)
    before = WRITE.arguments().tensors["k_cache"].buffer.pieces[2][1][4:8]
    assert untouched.watched["k_cache"][0].tolist() == before.tolist()
    assert observe(DECODE, torch_paged_decode_attention).watched == {}


# Their caches lie as they say in the words of the test; slot 9 is block 2, offset 1, and slot 2 is block 0, offset 2.
LYING = {
    "HND": ("NHSD", (0, 0, 0, 0), "NHSD", (0, 0, 0, 0)),
    "gaps": ("NSHD", (5, 3, 1, 0), "NSHD", (5, 3, 1, 0)),
    "unlike": ("NHSD", (0, 2, 0, 0), "NSHD", (7, 0, 0, 0)),
    "packed": ("N2SHD", (), "N2SHD", ()),
    "packed rows": ("NSH2D", (2, 0, 0, 1, 0), "NSH2D", (2, 0, 0, 1, 0)),
}
STRIDED = Declaration(cache_layouts=("strided",))


def lying(how: str) -> ReshapeAndCacheCase:
    k_order, k_gaps, v_order, v_gaps = LYING[how]
    case = replace(WRITE, k_layout=CacheLayout(k_order, k_gaps), v_layout=CacheLayout(v_order, v_gaps))
    case.check()
    return case


def strided_write(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """The right answer through any strides, scalar by scalar."""
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // 4, slot % 4] = key[t]
            v_cache[slot // 4, slot % 4] = value[t]


def nothing_else(case: ReshapeAndCacheCase, call: Callable[..., Any]) -> Violation | None:
    """What I6 says of a kernel."""
    return NothingElseChanges().judge(case, {"case": observe(case, call)}, STRIDED)


@pytest.mark.parametrize("how", LYING)
def test_watched_elements_of_strided_caches(how: str) -> None:
    """The bits of just the tokens, whatever lies between their elements."""
    case = lying(how)
    seen = observe(case, strided_write)
    assert seen.raised is None and set(seen.watched) == {"k_cache", "v_cache"}
    changed: dict[str, set[int]] = {}
    for name, role in (("k_cache", "key"), ("v_cache", "value")):
        tokens = case.token_bits(role)
        assert [run.tolist() for run in seen.watched[name]] == [tokens[0].tolist(), tokens[2].tolist()]
        buffer, elements = case.watched()[name]
        assert elements.shape == (2, 4)
        tensor = case.arguments().tensors[name]
        offsets = [tensor.offset + block * tensor.strides[0] + at * tensor.strides[1] for block, at in ((2, 1), (0, 2))]
        assert elements[:, 0].tolist() == offsets
        changed.setdefault(buffer, set()).update(elements.reshape(-1).tolist())
    assert {name: set(change.elements.tolist()) for name, change in seen.changes.items()} == changed
    assert is_right(case, seen, STRIDED) and nothing_else(case, strided_write) is None
    untouched = observe(case, lambda *arguments: None)
    for name in ("k_cache", "v_cache"):
        buffer, elements = case.watched()[name]
        tensor = case.arguments().tensors[name]
        bits = np.concatenate([piece for _, piece in tensor.buffer.pieces])
        assert [run.tolist() for run in untouched.watched[name]] == bits[elements].tolist()
    assert nothing_else(case, lambda *arguments: None) is not None


@pytest.mark.parametrize("how", LYING)
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_every_stray_write_into_a_strided_cache_is_seen(how: str, which: str) -> None:
    """Into each gap and each neighbour of the addressed slots: I6 names the element."""
    case = lying(how)
    tensor = case.arguments().tensors[which]
    rows = [elements for buffer, elements in case.watched().values() if buffer == tensor.buffer.name]
    addressed = set(np.concatenate(rows).reshape(-1).tolist())
    gaps = neighbours = 0
    for element in range(tensor.buffer.size):
        if element in addressed:
            continue

        def stray(key, value, k_cache, v_cache, slot_mapping, element=element):
            strided_write(key, value, k_cache, v_cache, slot_mapping)
            cache = k_cache if which == "k_cache" else v_cache
            start = cache.storage_offset() - tensor.offset
            cache.as_strided((1,), (1,), start + element).fill_(7.5)

        found = nothing_else(case, stray)
        words = case.cache_words(tensor.buffer.name, element)
        assert found is not None and found.where == f"{tensor.buffer.name}, element {element} = {words}"
        assert found.seen.startswith("1 element changed that the call must leave alone")
        gaps += "in a gap" in words
        neighbours += "in a gap" not in words
    assert neighbours >= 32 and (gaps > 0) == any(any(layout.padding) for layout in case.layouts if which[0] in "kv")


@pytest.mark.parametrize("how", LYING)
def test_a_write_that_misses_an_element_of_a_strided_token_is_seen(how: str) -> None:
    case = lying(how)

    def most(key, value, k_cache, v_cache, slot_mapping):
        before = v_cache[2, 1, 1, 0].clone()
        strided_write(key, value, k_cache, v_cache, slot_mapping)
        v_cache[2, 1, 1, 0] = before

    found = nothing_else(case, most)
    assert found is not None and found.where.startswith("token 0, slot 9 (block 2, offset 1), kv head 1, dim 0; 1 of 4")


def test_the_write_of_a_pair_is_watched_too() -> None:
    case = WriteThenDecodeCase(
        block_size=4,
        num_blocks=3,
        sequences=(Sequence((2, 1), (), 6),),
        num_kv_heads=2,
        head_dim=2,
        k_layout=CacheLayout("N2SHD", (0, 0, 1, 0, 0)),
        v_layout=CacheLayout("N2SHD", (0, 0, 1, 0, 0)),
        new_tokens=3,
        poison="nan",
    )
    case.check()

    def both(key, value, k_cache, v_cache, slot_mapping, q, block_tables, context_lens, scale):
        strided_write(key, value, k_cache, v_cache, slot_mapping)
        return torch_paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens, scale)

    seen = observe(case, both)
    tensors = case.arguments().tensors
    for name, source in (("k_cache", "key"), ("v_cache", "value")):
        (_, bits), *_ = tensors[source].buffer.pieces
        assert [run.tolist() for run in seen.watched[name]] == bits.reshape(3, 4).tolist()
    assert is_right(case, seen, STRIDED)


# --------------------------------------------------------------------------------------------------- what was looked at


DISTANT = replace(DECODE, num_blocks=6000, sequences=(Sequence((2, 0), (5000,), 6), ROWS[1]))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_look_at_a_page_that_nobody_owns_is_seen(name: str) -> None:
    """By a kernel whose accesses nothing traces."""

    def kernel(q, k_cache, v_cache, block_tables, context_lens, scale):
        cache = {"k_cache": k_cache, "v_cache": v_cache}[name]
        return torch.zeros_like(q) + 0 * cache[block_tables[0, 2]].sum()

    seen = observe(DISTANT, kernel)
    assert seen.finished and seen.changes == {} and list(seen.touched) == [name]
    block_bytes = DISTANT.block_elements() * 4
    first, last = seen.touched[name][0]
    assert first <= 5000 * block_bytes < 5001 * block_bytes <= last + 1
    assert last - first < mmap.PAGESIZE


def test_most_distant_tails_that_are_drawn_show_a_look() -> None:
    """The block of a "distant" tail must share no memory page with what is filled in, guard zones included."""
    cases: list[Any] = []

    each_case(STRATEGIES["paged_decode_attention"](PLAIN, arena().limits), 400, 3, cases.append)
    looked = seen = 0
    for case in dict.fromkeys(cases):
        pieces = case.arguments().tensors["k_cache"].buffer.pieces
        filled = {first // case.block_elements() for first, _ in pieces}
        inside = {entry for row in case.sequences for entry in row.tail if 0 <= entry < case.num_blocks}
        for block in sorted(inside - filled)[:1]:

            def kernel(q, k_cache, *rest: Any, block: int = block):
                k_cache[block].sum()
                return torch.zeros_like(q)

            looked += 1
            seen += list(observe(case, kernel).touched) == ["k_cache"]
    assert looked > 20 and seen >= 0.9 * looked, (seen, looked)


def test_a_good_kernel_looks_at_nothing_of_the_kind() -> None:
    for call in (torch_paged_decode_attention, triton_paged_decode_attention):
        seen = observe(DISTANT, call)
        assert seen.touched == {} and is_right(DISTANT, seen, PLAIN)


def test_a_write_to_untouched_memory_is_a_change_and_a_look() -> None:
    def kernel(q, k_cache, v_cache, block_tables, context_lens, scale):
        k_cache[5000, 1, 0, 1] = 2.0
        return torch.zeros_like(q)

    seen = observe(DISTANT, kernel)
    assert seen.changes["k_cache"].elements.tolist() == [5000 * 16 + 5]
    assert list(seen.touched) == ["k_cache"]


# -------------------------------------------------------------------------------------------------------------- placing


@pytest.fixture
def placed() -> Iterator[Callable[[Arguments], list[Any]]]:
    def place(arguments: Arguments) -> list[Any]:
        arena().forget()
        return arena().place(arguments)

    yield place
    arena().forget()


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The view, out of the pieces alone."""
    buffer = tensor.buffer
    flat = np.zeros(buffer.size, dtype=buffer.pieces[0][1].dtype if buffer.pieces else np.int64)
    for first, bits in buffer.pieces:
        flat[first : first + len(bits)] = bits
    strides = tuple(stride * flat.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides)


VIEWS = (
    *ALL,
    replace(WRITE, fused=True, key_padding=1, value_padding=3, extra_rows=2),
    replace(WRITE, key_padding=5, dtype="float16", values="bit_patterns", index_dtype="int32"),
    replace(WRITE, value_padding=2, dtype="bfloat16", values="signed_zeros"),
    replace(DECODE, table_padding=3, q_padding=1, index_dtype="int32", length_dtype="int32", dtype="bfloat16"),
    replace(SLOTS, table_padding=1, token_dtype="int32"),
)


@pytest.mark.parametrize("case", VIEWS, ids=range(len(VIEWS)))
def test_views_hold_the_right_data(case: Case, placed: Callable[[Arguments], list[Any]]) -> None:
    arguments = case.arguments()
    tensors = placed(arguments)
    assert len(tensors) == len(OPERATIONS[case.operation].parameters)
    for (name, wanted), found in zip(arguments.values.items(), tensors, strict=True):
        if not isinstance(wanted, Tensor):
            assert found == wanted
            continue
        assert tuple(found.shape) == wanted.shape and found.stride() == wanted.strides, name
        assert str(found.dtype) == f"torch.{wanted.buffer.dtype}"
        assert (found.data_ptr() - wanted.offset * found.element_size()) % ALIGNMENT == 0
        bits = found.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]).numpy()
        assert bits.tobytes() == np.ascontiguousarray(as_numpy(wanted)).tobytes(), name


def test_fused_views_lie_in_one_buffer(placed: Callable[[Arguments], list[Any]]) -> None:
    key, value, *_ = placed(VIEWS[3].arguments())
    assert value.data_ptr() - key.data_ptr() == (4 + 1) * 4
    assert key.stride() == value.stride() == (4 + 1 + 4 + 3, 2, 1)


@pytest.mark.parametrize(
    "case",
    [
        replace(WRITE, slots=()),
        replace(WRITE, slots=(), extra_rows=2),
        replace(WRITE, slots=(), fused=True, key_padding=1),
        replace(DECODE, sequences=()),
        replace(DECODE, sequences=(), q_padding=3, table_padding=2),
        replace(SLOTS, sequences=(), tokens=()),
        replace(SLOTS, tokens=()),
    ],
    ids=lambda case: case.one_line(),
)
def test_empty_tensors_have_their_shape_and_strides(case: Case, placed: Callable[[Arguments], list[Any]]) -> None:
    case.check()
    arguments = case.arguments()
    assert any(0 in tensor.shape for tensor in arguments.tensors.values())
    for wanted, found in zip(arguments.values.values(), placed(arguments), strict=True):
        if isinstance(wanted, Tensor):
            assert tuple(found.shape) == wanted.shape and found.stride() == wanted.strides
            assert str(found.dtype) == f"torch.{wanted.buffer.dtype}"
            assert found.numel() == int(np.prod(wanted.shape))


def test_placing_twice_without_forgetting_is_refused(placed: Callable[[Arguments], list[Any]]) -> None:
    placed(WRITE.arguments())
    with pytest.raises(AssertionError, match=r"^the arena still holds another case$"):
        arena().place(WRITE.arguments())


def test_a_case_that_does_not_fit_says_so() -> None:
    small = CpuArena()
    small.size = 1 << 20
    assert small.limits.cache_bytes == 1 << 18
    run = Runner(small, interpreted=True)
    case = replace(WRITE, num_blocks=1 << 13)  # 2^13 blocks of 64 bytes: 2^19
    with pytest.raises(InvalidCase, match=r"^k_cache takes 524288 bytes, more than the 262144 that there are here$"):
        run.observe(of(case, torch_reshape_and_cache), case)
    assert small._populated() == [] and small.places == []
    many = ReshapeAndCacheCase(block_size=1, num_blocks=64, slots=tuple(range(64)), head_dim=512, key_padding=64)
    with pytest.raises(InvalidCase, match=r"^key takes 147456 bytes, more than the 130816 that there are here$"):
        run.observe(of(many, torch_reshape_and_cache), many)
    assert run.observe(of(WRITE, torch_reshape_and_cache), WRITE).finished


def test_it_takes_what_address_space_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def limited(file: int, size: int, **options: Any) -> mmap.mmap:
        if size > most:
            raise OSError("no address space")
        return real(file, size, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    most = 1 << 32
    assert CpuArena().size == 1 << 32
    most = 1 << 29
    with pytest.raises(OSError, match=r"^cannot map 1 GiB of sparse memory for the arena; raise .*ulimit -v"):
        CpuArena()


def test_caches_leave_room_for_an_int32_product(placed: Callable[[Arguments], list[Any]]) -> None:
    """2^31 elements of 4 bytes below each cache are inside the arena and belong to nobody."""
    placed(WRITE.arguments())
    places = {buffer.name: start for start, buffer in arena().places}
    small = max(start + b.size * ITEMSIZE[b.dtype] for start, b in arena().places if not b.is_cache)
    assert places["k_cache"] - 4 * 2**31 > small
    assert places["v_cache"] - 4 * 2**31 > places["k_cache"] + arena().limits.cache_bytes
    assert places["v_cache"] + arena().limits.cache_bytes < arena().size


def test_poison_lies_around_a_tensor_of_every_dtype(placed: Callable[[Arguments], list[Any]]) -> None:
    for dtype in ITEMSIZE:
        bits = np.ones(3, dtype={2: np.uint16, 4: np.uint32, 8: np.int64}[ITEMSIZE[dtype]])
        [tensor] = placed(Arguments({"x": contiguous("x", dtype, (3,), bits)}))
        around = torch.frombuffer(
            arena().memory, dtype=tensor.dtype, count=5, offset=arena().places[0][0] - tensor.element_size()
        )
        for outside in (around[0].item(), around[4].item()):
            assert outside == -1 or (dtype.endswith(("16", "32")) and np.isnan(outside))


@triton.jit
def nothing(keys, again, values):
    pass


def test_a_launch_copies_nothing_of_keys_and_values_in_one_tensor() -> None:
    """Not even where a tensor is passed twice, for which Triton's interpreter copies every storage back."""
    packed = CacheLayout("N2SHD")
    case = ReshapeAndCacheCase(
        block_size=16, num_blocks=30_000, slots=(5,), head_dim=8, k_layout=packed, v_layout=packed
    )
    assert case.packed

    def launches(key, value, k_cache, v_cache, slot_mapping):
        nothing[(1,)](k_cache, k_cache, v_cache)

    seen = observe(case, launches)
    assert seen.raised is None and seen.touched == {} and seen.changes == {}
