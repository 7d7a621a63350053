"""What cases break on purpose, for I16: strides put apart, caches that no declaration covers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration
from pagefuzz.strategies import CASES, STRATEGIES
from pagefuzz.strategies.cache_layouts import CONTIGUOUS, LAYOUT_FAULTS, CacheLayout
from pagefuzz.strategies.case import InvalidCase, Limits, Sequence
from pagefuzz.strategies.draws import respaced
from pagefuzz.strategies.number_formats import FORMATS, STORAGE
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.strategies.tensors import Tensor, contiguous, padded_rows, row_major

SLOTS, WRITE, DECODE = "slot_mapping", "reshape_and_cache", "paged_decode_attention"
DEFAULT, STRIDED = Declaration(), Declaration(cache_layouts=("strided",))


@cache
def drawn(operation: str) -> list[Any]:
    cases: list[Any] = []
    each_case(STRATEGIES[operation](DEFAULT, Limits()), 125, 2, cases.append)
    return cases


def read(tensor: Tensor) -> np.ndarray:
    """What a kernel sees: the bits through the strides."""
    nothing: np.ndarray = np.zeros(0, dtype=STORAGE[tensor.buffer.dtype])
    ((start, bits),) = tensor.buffer.pieces or [(0, nothing)]
    index = np.indices(tensor.shape).reshape(len(tensor.shape), -1)
    found: np.ndarray = bits[tensor.offset - start + np.array(tensor.strides) @ index].reshape(tensor.shape)
    return found


# ------------------------------------------------------------------------------------------------------------- respaced


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize("dim", range(4))
def test_entries_are_put_apart(dtype: str, dim: int) -> None:
    shape, size = (2, 3, 4, 2), 96
    bits: np.ndarray = np.arange(48, dtype=STORAGE[dtype])
    tensor = contiguous("x", dtype, shape, bits)
    apart = respaced(tensor, dim)
    assert apart.shape == shape
    usual = row_major(shape)
    assert apart.strides == tuple(2 * each if place <= dim else each for place, each in enumerate(usual))
    assert apart.buffer.size == size and apart.buffer is not tensor.buffer
    assert np.array_equal(read(apart), bits.reshape(shape))
    assert tensor.strides == usual and np.array_equal(read(tensor), bits.reshape(shape)), "the other is as it was"
    poison = FORMATS[dtype].nan if dtype in FORMATS else 99999
    ((_, full),) = apart.buffer.pieces
    assert (full == poison).sum() == size - 48
    assert apart.last_element() < size


def test_a_view_with_an_offset_is_put_apart() -> None:
    rows = np.arange(40, dtype=np.uint32).reshape(4, 10)
    whole = padded_rows("qkv", "float32", rows, (10,))
    part = Tensor("key", whole.buffer, (4, 3, 2), (10, 2, 1), offset=3)
    assert np.array_equal(read(part), rows[:, 3:9].reshape(4, 3, 2))
    for dim in range(3):
        apart = respaced(part, dim)
        assert np.array_equal(read(apart), rows[:, 3:9].reshape(4, 3, 2)) and apart.offset == 0
        assert (apart.name, apart.buffer.name, apart.buffer.size) == ("key", "key", 48)


@pytest.mark.parametrize(("shape", "dim"), [((4, 1), 1), ((1, 4), 0), ((0, 4), 1), ((3, 0), 0), ((1,), 0), ((0,), 0)])
def test_nothing_to_put_apart(shape: tuple[int, ...], dim: int) -> None:
    bits = np.zeros(shape, dtype=np.int64)
    with pytest.raises(InvalidCase, match=f"^x has no two entries in dim {dim} to put apart$"):
        respaced(contiguous("x", "int64", shape, bits), dim)


APART = {
    (SLOTS, "block_tables with strided columns"): ("block_tables", 1),
    (SLOTS, "positions with a stride"): ("positions", 0),
    (WRITE, "key with its last dim strided"): ("key", 2),
    (WRITE, "key with strided heads"): ("key", 1),
    (WRITE, "value with its last dim strided"): ("value", 2),
    (WRITE, "slot_mapping with a stride"): ("slot_mapping", 0),
    (DECODE, "q with its last dim strided"): ("q", 2),
    (DECODE, "q with strided heads"): ("q", 1),
    (DECODE, "context_lens with a stride"): ("context_lens", 0),
    (DECODE, "block_tables with strided columns"): ("block_tables", 1),
}


def test_every_fault_of_a_stride_is_here() -> None:
    assert {operation for operation in CASES if CASES[operation].faults} == {SLOTS, WRITE, DECODE}
    strided = {
        (operation, fault)
        for operation, kind in CASES.items()
        for fault in kind.faults
        if "stride" in fault and fault not in LAYOUT_FAULTS
    }
    assert strided == set(APART)


@pytest.mark.parametrize(("operation", "fault"), APART, ids=[f"{o}-{f}" for o, f in APART])
def test_the_same_numbers_through_other_strides(operation: str, fault: str) -> None:
    """And nothing else of the call changes."""
    name, dim = APART[operation, fault]
    broken, said = 0, Counter[str]()
    for case in drawn(operation):
        before = case.arguments()
        try:
            twin = case.broken(fault, DEFAULT)
        except InvalidCase as error:
            said[str(error)] += 1
            assert before.tensors[name].shape[dim] < 2 or 0 in before.tensors[name].shape
            continue
        after = twin.arguments()
        assert list(after.values) == list(before.values)
        for each, tensor in after.tensors.items():
            if each in ("k_cache", "v_cache"):
                continue
            other = before.tensors[each]
            assert tensor.shape == other.shape and np.array_equal(read(tensor), read(other)), each
            assert (tensor.strides == other.strides) == (each != name)
        assert after.tensors[name].strides[dim] != row_major(after.tensors[name].shape)[dim]
        broken += 1
    assert broken > 30 and set(said) <= {f"{name} has no two entries in dim {dim} to put apart"}, said


# -------------------------------------------------------------------------------------------------------- cache layouts

DECODES = PagedDecodeAttentionCase(
    block_size=3, num_blocks=4, sequences=(Sequence((2, 0), (1,), 5),), num_kv_heads=2, head_dim=2, poison="nan"
)
WRITES = ReshapeAndCacheCase(block_size=3, num_blocks=4, slots=(11, -1, 4, 0), num_kv_heads=2, head_dim=2)
each_base = pytest.mark.parametrize("base", [DECODES, WRITES], ids=lambda case: case.operation)


@each_base
@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
def test_caches_that_are_not_declared(base: Any, fault: str) -> None:
    assert fault in base.faults
    twin = base.broken(fault, DEFAULT)
    twin.check()
    assert twin.fault == "" and twin.k_layout == twin.v_layout == LAYOUT_FAULTS[fault]
    assert twin.beyond(DEFAULT).endswith(" caches") and base.beyond(DEFAULT) == ""
    assert replace(twin, k_layout=CONTIGUOUS, v_layout=CONTIGUOUS) == base
    assert twin.arguments().tensors["k_cache"].strides != base.arguments().tensors["k_cache"].strides


KIND_OF = {"HND caches": "hnd", "caches in one tensor": "packed", "caches with their last dim strided": ""}


@each_base
@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
@pytest.mark.parametrize("declared", [*((one,) for one in CACHE_LAYOUTS), CACHE_LAYOUTS], ids=", ".join)
def test_what_is_declared_is_no_fault(base: Any, fault: str, declared: tuple[str, ...]) -> None:
    kind = KIND_OF.get(fault, "strided")
    declaration = Declaration(cache_layouts=declared)
    if kind in declared or ("strided" in declared and kind):
        with pytest.raises(InvalidCase, match=f"^fault={fault!r} needs a kernel that does not declare these$"):
            base.broken(fault, declaration)
    else:
        assert base.broken(fault, declaration).beyond(declaration) == f"{kind or 'dim-strided'} caches"


# Which sizes must be more than 1, any one of them, for a fault to move anything.
NEEDS = {
    "HND caches": [{"block_size", "num_kv_heads"}],
    "caches in one tensor": [{"num_blocks"}],
    "caches with gaps between blocks": [{"num_blocks"}],
    "caches with gaps between kv heads": [{"num_blocks"}, {"block_size"}, {"num_kv_heads"}],
    "caches with their last dim strided": [{"num_blocks"}, {"block_size"}, {"num_kv_heads"}, {"head_dim"}],
}


@each_base
@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
def test_a_case_with_nothing_to_move_says_so(base: Any, fault: str) -> None:
    names = ("num_blocks", "block_size", "num_kv_heads", "head_dim")
    for number in range(16):
        sizes = {name: 2 if number >> place & 1 else 1 for place, name in enumerate(names)}
        rows = {"sequences": (Sequence((0,), (), 1),)} if base is DECODES else {"slots": (0,)}
        case = replace(base, **sizes, **rows)
        large = {name for name, size in sizes.items() if size > 1}
        if any(needed <= large for needed in NEEDS[fault]):
            assert case.broken(fault, DEFAULT).layouts == (LAYOUT_FAULTS[fault],) * 2, sizes
        else:
            with pytest.raises(InvalidCase, match=f"^fault={fault!r} needs more than one of what would move$"):
                case.broken(fault, DEFAULT)


@each_base
def test_a_strided_case_breaks_too(base: Any) -> None:
    case = replace(base, k_layout=CacheLayout("NHSD", (0, 0, 5, 0)))
    twin = case.broken("caches with their last dim strided", STRIDED)
    assert twin.cache_kind() == ""
    with pytest.raises(InvalidCase, match=r"^fault='v_cache with another block size' needs contiguous caches$"):
        case.broken("v_cache with another block size", STRIDED)


def test_other_faults_are_named_in_the_case() -> None:
    twin = DECODES.broken("q without its head dim", DEFAULT)
    assert twin == replace(DECODES, fault="q without its head dim")
    with pytest.raises(InvalidCase, match=r"^fault='nonsense' is unknown to paged_decode_attention$"):
        DECODES.broken("nonsense", DEFAULT)
    tokens = SlotMappingCase(block_size=2, num_blocks=1, sequences=(Sequence((), (0,), 0),), tokens=(Token(0, -1),))
    with pytest.raises(InvalidCase, match=r"^fault='seq_id negative' needs a token$"):
        tokens.broken("seq_id negative", DEFAULT)
