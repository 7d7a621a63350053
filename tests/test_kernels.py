"""The project's own kernels: worked examples computed by hand, the edges of the contract, and every host check."""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Before triton is first imported. Where a GPU is to run these tests compiled, TRITON_INTERPRET=0 says so.
os.environ.setdefault("TRITON_INTERPRET", "1")

from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INDEX_DTYPES = [torch.int32, torch.int64]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
INT32_MAX = 2**31 - 1

Kernel = Callable[..., Any]
Arguments = dict[str, Any]


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value).removeprefix("torch."))


each_write = pytest.mark.parametrize("write", [torch_reshape_and_cache, triton_reshape_and_cache], ids=name_of)
each_decode = pytest.mark.parametrize(
    "decode", [torch_paged_decode_attention, triton_paged_decode_attention], ids=name_of
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
each_index_dtype = pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE, dtype)


def tables_of(blocks: list[list[int]], width: int, tail: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([row + [tail] * (width - len(row)) for row in blocks], dtype=dtype).reshape(len(blocks), width)


# ---------------------------------------------------------------------------------------------- caches of any strides

# The memory that the caches lie in, whole, and k_cache and v_cache: [N, bs, KVH, D].
Caches = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]
Memory = Callable[..., torch.Tensor]


def heads_first(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    k, v = memory(blocks, heads, size, dim), memory(blocks, heads, size, dim)
    return [k, v], k.transpose(1, 2), v.transpose(1, 2)


def packed_in_a_block(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    both = memory(blocks, 2, size, heads, dim)
    return [both], both[:, 0], both[:, 1]


def packed_in_a_head(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    both = memory(blocks, size, heads, 2 * dim)
    return [both], both[..., :dim], both[..., dim:]


def packed_in_a_head_heads_first(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    both = memory(blocks, heads, size, 2 * dim)
    both_heads_inside = both.transpose(1, 2)
    return [both], both_heads_inside[..., :dim], both_heads_inside[..., dim:]


def padded_blocks(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    k, v = memory(blocks, size + 1, heads, dim), memory(blocks, size + 3, heads, dim)
    return [k, v], k[:, :size], v[:, 2 : size + 2]


def every_second_one(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    k, v = memory(2 * blocks, 2 * size, 2 * heads, dim), memory(2 * blocks, 2 * size, 2 * heads, dim)
    return [k, v], k[::2, ::2, ::2], v[1::2, 1::2, 1::2]


def unlike_each_other(memory: Memory, blocks: int, size: int, heads: int, dim: int) -> Caches:
    k, v = memory(blocks, size, heads + 2, dim + 3), memory(heads, size, blocks, dim + 1)
    return [k, v], k[:, :, 1:-1, 2:-1], v[..., 1:].permute(2, 1, 0, 3)


each_arrangement = pytest.mark.parametrize(
    "arrange",
    [
        heads_first,
        packed_in_a_block,
        packed_in_a_head,
        packed_in_a_head_heads_first,
        padded_blocks,
        every_second_one,
        unlike_each_other,
    ],
    ids=name_of,
)

# Shapes with dims of size 1, and strides of which only those of the other dims mean anything.
each_odd_stride = pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1, 1, 1, 4), (5, 77, 33, 1)),
        ((1, 3, 2, 4), (1, 8, 4, 1)),
        ((3, 1, 2, 4), (8, 3, 4, 1)),
        ((3, 2, 1, 4), (8, 4, 0, 1)),
        ((3, 2, 2, 1), (4, 2, 1, 99)),
        ((3, 2, 2, 1), (4, 1, 2, 0)),
        ((1, 1, 1, 1), (0, 0, 0, 0)),
    ],
    ids=str,
)


def strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of these strides."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    assert copy.stride() == strides
    return copy.copy_(tensor)


# ---------------------------------------------------------------------------------------------------- slot_mapping


@each_index_dtype
def test_slot_mapping_of_two_sequences(index_dtype: torch.dtype) -> None:
    # Block 3 holds position 5 of sequence 0: 3 * 4 + 1. Block 7 holds its position 9: 7 * 4 + 1. And 2 * 4 + 2.
    tables = torch.tensor([[9, 3, 7], [2, 5, 0]], dtype=index_dtype)
    slots = torch_slot_mapping(tables, torch.tensor([0, 0, 1]), torch.tensor([5, 9, 2]), 4)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [13, 29, 10]


def test_slot_mapping_of_the_third_page() -> None:
    slots = torch_slot_mapping(torch.tensor([[4, 11, 2]]), torch.tensor([0]), torch.tensor([40]), 16, check_values=True)
    assert slots.tolist() == [40]


@pytest.mark.parametrize("check_values", [False, True])
@pytest.mark.parametrize("width", [0, 1])
def test_slot_mapping_of_padding_looks_nothing_up(width: int, check_values: bool) -> None:
    tables = torch.zeros(1, width, dtype=torch.int32)
    seq_ids, positions = torch.tensor([99999, -7, INT32_MAX]), torch.tensor([-1, -2, -99999])
    assert torch_slot_mapping(tables, seq_ids, positions, 4, check_values=check_values).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("seq_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("position_dtype", INDEX_DTYPES, ids=name_of)
def test_slot_mapping_among_padding(seq_dtype: torch.dtype, position_dtype: torch.dtype) -> None:
    seq_ids = torch.tensor([-7, 1, 99999, 0], dtype=seq_dtype)
    positions = torch.tensor([-1, 2, -5, 5], dtype=position_dtype)
    tables = torch.tensor([[9, 3, 7], [2, 5, 0]], dtype=torch.int32)
    assert torch_slot_mapping(tables, seq_ids, positions, 4, check_values=True).tolist() == [-1, 10, -1, 13]


def test_slot_mapping_past_32_bits() -> None:
    block = 2**28 + 3
    tables = torch.tensor([[0, block]], dtype=torch.int32)
    positions = torch.tensor([17], dtype=torch.int32)
    slots = torch_slot_mapping(tables, torch.tensor([0], dtype=torch.int32), positions, 16)
    assert slots.tolist() == [2**32 + 49]


def test_slot_mapping_through_a_narrowed_table() -> None:
    wide = torch.full((2, 9), 99999, dtype=torch.int32)
    wide[:, 2:5] = torch.tensor([[9, 3, 7], [2, 5, 0]])
    slots = torch_slot_mapping(wide[:, 2:5], torch.tensor([0, 0, 1]), torch.tensor([5, 9, 2]), 4)
    assert slots.tolist() == [13, 29, 10]


def test_slot_mapping_of_no_tokens() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    slots = torch_slot_mapping(torch.zeros(0, 0, dtype=torch.int32), nothing, nothing, 4, check_values=True)
    assert slots.dtype == torch.int64
    assert slots.shape == (0,)


# ----------------------------------------------------------------------------------------------- reshape_and_cache


@each_write
@each_dtype
@each_index_dtype
def test_write_of_four_tokens(write: Kernel, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    key = torch.tensor([10.0, 20.0, 30.0, 40.0]).reshape(4, 1, 1)
    value = key * 0.1
    k_cache, v_cache = torch.zeros(3, 2, 1, 1, dtype=dtype), torch.zeros(3, 2, 1, 1, dtype=dtype)
    slots = torch.tensor([4, 5, -1, 1], dtype=index_dtype)
    write(key.to(dtype), value.to(dtype), k_cache, v_cache, slots, check_values=True)
    assert k_cache[:, :, 0, 0].tolist() == [[0, 40], [0, 0], [10, 20]]
    assert v_cache[:, :, 0, 0].tolist() == [[0, 4], [0, 0], [1, 2]]


@each_write
@pytest.mark.parametrize("padding", [-1, -2, -99999, -(2**31)])
def test_write_leaves_padding_out(write: Kernel, padding: int) -> None:
    key, value = torch.full((3, 2, 3), 9.0), torch.full((3, 2, 3), 8.0)
    key[1], value[1] = 1, 2
    k_cache, v_cache = torch.zeros(2, 2, 2, 3), torch.zeros(2, 2, 2, 3)
    write(key, value, k_cache, v_cache, torch.tensor([padding, 2, padding]), check_values=True)
    expected = torch.zeros(2, 2, 2, 3)
    expected[1, 0] = 1
    assert torch.equal(k_cache, expected)
    assert torch.equal(v_cache, 2 * expected)


@each_write
def test_write_of_padding_alone(write: Kernel) -> None:
    for blocks in (0, 1):
        k_cache, v_cache = torch.zeros(blocks, 2, 1, 3), torch.zeros(blocks, 2, 1, 3)
        write(numbers(2, 1, 3), numbers(2, 1, 3), k_cache, v_cache, torch.tensor([-1, -1]), check_values=True)
        assert not k_cache.any()
        assert not v_cache.any()


@each_write
def test_write_counts_only_the_tokens_that_have_slots(write: Kernel) -> None:
    key, value = numbers(5, 2, 4, seed=1), numbers(5, 2, 4, seed=2)
    k_cache, v_cache = torch.zeros(2, 4, 2, 4), torch.zeros(2, 4, 2, 4)
    write(key, value, k_cache, v_cache, torch.tensor([6, 1]))
    expected_k, expected_v = torch.zeros(8, 2, 4), torch.zeros(8, 2, 4)
    expected_k[6], expected_k[1], expected_v[6], expected_v[1] = key[0], key[1], value[0], value[1]
    assert torch.equal(k_cache.flatten(0, 1), expected_k)
    assert torch.equal(v_cache.flatten(0, 1), expected_v)


@each_write
@each_dtype
def test_write_copies_bits(write: Kernel, dtype: torch.dtype) -> None:
    # -0.0, quiet and signalling NaN with payloads of either sign, infinities, the smallest subnormals.
    patterns = {
        torch.float32: [0x80000000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0xFFABCDEF, 0x7F800000, 0xFF800000, 1],
        torch.float16: [0x8000, 0x7E55, 0xFE01, 0x7C01, 0xFD55, 0x7C00, 0xFC00, 1],
        torch.bfloat16: [0x8000, 0x7FC5, 0xFFC1, 0x7F81, 0xFFA5, 0x7F80, 0xFF80, 1],
    }[dtype]
    size = 2 ** (8 * dtype.itemsize)
    signed = [pattern - size if pattern >= size // 2 else pattern for pattern in patterns]
    key = torch.tensor(signed, dtype=BITS[dtype]).view(dtype).reshape(2, 1, 4)
    value = key.flip(0, 2).contiguous()
    k_cache, v_cache = torch.zeros(2, 2, 1, 4, dtype=dtype), torch.zeros(2, 2, 1, 4, dtype=dtype)
    write(key, value, k_cache, v_cache, torch.tensor([3, 0]))
    for cache, tokens in ((k_cache, key), (v_cache, value)):
        assert same_bits(cache[1, 1], tokens[0])
        assert same_bits(cache[0, 0], tokens[1])
        assert not cache[0, 1].view(BITS[dtype]).any()
        assert not cache[1, 0].view(BITS[dtype]).any()


@each_write
@each_dtype
def test_write_from_views(write: Kernel, dtype: torch.dtype) -> None:
    tokens, heads, dim = 5, 3, 5
    fused = numbers(tokens, 3, heads, dim, seed=3, dtype=dtype)
    key, value = fused[:, 1], numbers(2 * tokens, heads, dim, seed=4, dtype=dtype)[::2]
    slots = torch.tensor([7, -1, 0, 11, 3], dtype=torch.int32)
    before = fused.clone()
    results = []
    for k, v in ((key, value), (key.contiguous(), value.contiguous())):
        k_cache, v_cache = torch.zeros(4, 3, heads, dim, dtype=dtype), torch.zeros(4, 3, heads, dim, dtype=dtype)
        write(k, v, k_cache, v_cache, slots, check_values=True)
        results.append((k_cache, v_cache))
    (k_strided, v_strided), (k_plain, v_plain) = results
    assert same_bits(k_strided, k_plain)
    assert same_bits(v_strided, v_plain)
    assert same_bits(k_plain[2, 1], key[0])
    assert same_bits(v_plain[3, 2], value[3])
    assert same_bits(fused, before)


@each_write
def test_write_repeats_a_token_of_stride_zero(write: Kernel) -> None:
    key = torch.tensor([[[1.0, 2.0]]]).expand(3, 1, 2)
    k_cache, v_cache = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)
    write(key, 2 * key, k_cache, v_cache, torch.tensor([0, 1, 3]))
    assert k_cache.flatten(0, 1)[:, 0].tolist() == [[1, 2], [1, 2], [0, 0], [1, 2]]


@each_write
@each_dtype
@each_arrangement
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 8), (3, 5)])
def test_write_into_caches_of_any_strides(
    write: Kernel, dtype: torch.dtype, arrange: Kernel, heads: int, dim: int
) -> None:
    """The slots change, bit for bit, and no gap and no neighbour does."""
    key, value = numbers(5, heads, dim, seed=3, dtype=dtype), numbers(5, heads, dim, seed=4, dtype=dtype)
    slots = [7, -1, 0, 11, 3]

    def memory(*shape: int) -> torch.Tensor:
        return numbers(*shape, seed=5, dtype=dtype)

    memories, k_cache, v_cache = arrange(memory, 4, 3, heads, dim)
    write(key, value, k_cache, v_cache, torch.tensor(slots), check_values=True)
    expected, expected_k, expected_v = arrange(memory, 4, 3, heads, dim)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot // 3, slot % 3], expected_v[slot // 3, slot % 3] = key[token], value[token]
    for whole, expected_whole in zip(memories, expected, strict=True):
        assert same_bits(whole, expected_whole)


@each_write
@each_odd_stride
def test_write_takes_any_stride_of_a_dim_of_size_1(
    write: Kernel, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    blocks, size, heads, dim = shape
    key, value = numbers(blocks * size, heads, dim, seed=1), numbers(blocks * size, heads, dim, seed=2)
    for k_strides, v_strides in ((strides, torch.zeros(shape).stride()), (torch.zeros(shape).stride(), strides)):
        k_cache, v_cache = strided(torch.zeros(shape), k_strides), strided(torch.zeros(shape), v_strides)
        write(key, value, k_cache, v_cache, torch.arange(blocks * size), check_values=True)
        assert same_bits(k_cache, key.reshape(shape))
        assert same_bits(v_cache, value.reshape(shape))


@each_write
def test_write_takes_one_token_of_any_strides(write: Kernel) -> None:
    key = numbers(1, 1, 4).as_strided((1, 1, 4), (3, 99, 1))
    k_cache, v_cache = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    write(key, key, k_cache, v_cache, torch.tensor([0, 5]).as_strided((1,), (2,)), check_values=True)
    assert torch.equal(k_cache.flatten(), key.flatten())
    assert torch.equal(v_cache.flatten(), key.flatten())


@each_write
@pytest.mark.filterwarnings("error")  # a block size of 0 divides nothing
@pytest.mark.parametrize("shape", [(0, 2, 2, 3), (2, 0, 2, 3), (2, 2, 0, 3), (2, 2, 2, 0)], ids=str)
def test_write_takes_any_strides_of_empty_caches(write: Kernel, shape: tuple[int, ...]) -> None:
    key, cache = numbers(2, *shape[2:]), torch.empty_strided(shape, (0, 5, 0, 7))
    write(key, key, cache, cache, torch.tensor([-1, -1]), check_values=True)


@each_write
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(0, 2, 4), (2, 0, 4), (2, 2, 0)])
def test_write_of_nothing(write: Kernel, tokens: int, heads: int, dim: int) -> None:
    key = numbers(3, heads, dim)
    k_cache, v_cache = torch.zeros(2, 2, heads, dim), torch.zeros(2, 2, heads, dim)
    write(key, key, k_cache, v_cache, torch.arange(tokens), check_values=True)
    assert not k_cache.any()
    assert not v_cache.any()


# ------------------------------------------------------------------------------------------ paged_decode_attention


def decode_arguments(
    lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    block_size: int = 4,
    tail: int = 99999,
    width: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    placement: int = 0,
    unowned: float = float("nan"),
) -> Arguments:
    """Sequences of these lengths, their pages shuffled by `placement`, and `unowned` in every slot that none owns."""
    pages = [-(-n // block_size) for n in lens]
    blocks = sum(pages) + 3
    order = torch.randperm(blocks, generator=torch.Generator("cpu").manual_seed(placement), device="cpu").tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    k_cache = torch.full((blocks, block_size, kv_heads, dim), unowned, dtype=dtype)
    v_cache = k_cache.clone()
    for b, n in enumerate(lens):
        keys, values = (numbers(n, kv_heads, dim, seed=1000 * seed + 10 * b + which, dtype=dtype) for which in range(2))
        for j in range(n):
            block, offset = tables[b][j // block_size], j % block_size
            k_cache[block, offset], v_cache[block, offset] = keys[j], values[j]
    return {
        "q": torch.stack([numbers(heads, dim, seed=1000 * seed + 10 * b + 2, dtype=dtype) for b in range(len(lens))]),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables_of(tables, max(pages) if width is None else width, tail, index_dtype),
        "context_lens": torch.tensor(lens, dtype=index_dtype),
        "scale": dim**-0.5,
    }


@each_decode
@each_index_dtype
def test_decode_of_two_sequences(decode: Kernel, index_dtype: torch.dtype) -> None:
    # Scores of head 0: 1, 0, 1. Of head 1: 0, 2, 2. Behind the third token lie zeros, whose score would be 0.
    k_cache, v_cache = torch.zeros(4, 2, 1, 2), torch.zeros(4, 2, 1, 2)
    slots = torch.tensor([4, 5, 0, 6])
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 2.0]]).unsqueeze(1)
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).unsqueeze(1)
    torch_reshape_and_cache(key, value, k_cache, v_cache, slots)
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[5.0, -3.0], [0.25, 9.0]]])
    tables = torch.tensor([[2, 0], [3, 77]], dtype=index_dtype)
    out = decode(q, k_cache, v_cache, tables, torch.tensor([3, 1]), 1.0, check_values=True)
    expected = torch.tensor([[[3.0, 4.0], [3.8099, 4.8099]], [[7.0, 8.0], [7.0, 8.0]]])
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-5)


@each_decode
def test_decode_maps_query_heads_to_kv_heads(decode: Kernel) -> None:
    arguments = decode_arguments([6], heads=8, kv_heads=2)
    arguments["v_cache"][:] = torch.tensor([0.0, 1.0]).reshape(1, 1, 2, 1)
    out = decode(**arguments)
    assert (out == out[:, :, :1]).all()
    assert out[0, :, 0].round(decimals=5).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@each_decode
@each_dtype
@pytest.mark.parametrize("tail", [99999, -1, INT32_MAX])
def test_decode_ignores_what_the_sequence_does_not_own(decode: Kernel, dtype: torch.dtype, tail: int) -> None:
    clean = decode(**decode_arguments([5, 4, 1], dtype=dtype, tail=0, unowned=0.0))
    arguments = decode_arguments([5, 4, 1], dtype=dtype, tail=tail, width=4)
    before = {name: tensor.clone() for name, tensor in arguments.items() if name != "scale"}
    out = decode(**arguments, check_values=True)
    assert out.isfinite().all()
    assert same_bits(out, clean)
    for name in ("q", "k_cache", "v_cache"):
        assert same_bits(arguments[name], before[name])


@each_decode
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 8), (6, 2, 5), (4, 1, 32), (3, 3, 1)])
def test_decode_does_not_see_where_pages_lie(decode: Kernel, heads: int, kv_heads: int, dim: int) -> None:
    first, *others = (
        decode(**decode_arguments([70, 9], heads=heads, kv_heads=kv_heads, dim=dim, placement=placement))
        for placement in range(6)
    )
    for other in others:
        assert same_bits(other, first)


@each_decode
def test_decode_does_not_see_its_neighbours(decode: Kernel) -> None:
    lens = [9, 66, 0, 1]
    together = decode(**decode_arguments(lens, heads=3, kv_heads=3, dim=5))
    arguments = decode_arguments(lens, heads=3, kv_heads=3, dim=5)
    for b in range(len(lens)):
        alone = {name: arguments[name][b : b + 1] for name in ("q", "block_tables", "context_lens")}
        assert same_bits(decode(**(arguments | alone)), together[b : b + 1])


@each_decode
@each_dtype
def test_decode_of_an_empty_context_gives_zeros(decode: Kernel, dtype: torch.dtype) -> None:
    out = decode(**decode_arguments([0, 3, 0], dtype=dtype), check_values=True)
    assert not out[0].view(BITS[dtype]).any()
    assert not out[2].view(BITS[dtype]).any()
    assert same_bits(out[1], decode(**decode_arguments([0, 3], dtype=dtype))[1])
    no_pages = decode_arguments([0], dtype=dtype) | {"k_cache": torch.zeros(0, 4, 2, 8, dtype=dtype)}
    no_pages["v_cache"] = no_pages["k_cache"]
    assert no_pages["block_tables"].shape == (1, 0)
    assert not decode(**no_pages, check_values=True).view(BITS[dtype]).any()


@each_decode
@pytest.mark.parametrize(("batch", "heads", "dim"), [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_decode_of_nothing(decode: Kernel, batch: int, heads: int, dim: int) -> None:
    cache = torch.zeros(3, 4, 2, dim)
    tables, lens = torch.zeros(batch, 1, dtype=torch.int32), torch.full((batch,), 3)
    out = decode(torch.zeros(batch, heads, dim), cache, cache, tables, lens, 1.0, check_values=True)
    assert out.shape == (batch, heads, dim)


@each_decode
@each_dtype
def test_decode_through_views(decode: Kernel, dtype: torch.dtype) -> None:
    plain = decode_arguments([37, 41], heads=6, kv_heads=2, dim=33, block_size=16, dtype=dtype)
    fused = torch.full((2, 6 + 2 + 2, 33), float("nan"), dtype=dtype)
    fused[:, 1:7] = plain["q"]
    wide = torch.full((2, 8), 99999, dtype=torch.int32)
    wide[:, 1:4] = plain["block_tables"]
    views = plain | {"q": fused[:, 1:7], "block_tables": wide[:, 1:4]}
    out = decode(**views, check_values=True)
    assert out.is_contiguous()
    assert same_bits(out, decode(**plain))


@each_decode
def test_decode_takes_any_stride_of_a_dim_of_size_1(decode: Kernel) -> None:
    plain = decode_arguments([3], heads=1, kv_heads=1, dim=4)
    blocks = plain["k_cache"].shape[0]
    odd = plain | {
        "q": plain["q"].as_strided((1, 1, 4), (3, 99, 1)),
        "k_cache": plain["k_cache"].as_strided((blocks, 4, 1, 4), (16, 4, 77, 1)),
        "block_tables": plain["block_tables"].as_strided((1, 1), (5, 7)),
        "context_lens": plain["context_lens"].as_strided((1,), (9,)),
    }
    assert same_bits(decode(**odd, check_values=True), decode(**plain))


@each_decode
@each_dtype
@each_arrangement
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 1), (4, 2, 8), (3, 3, 5)])
def test_decode_over_caches_of_any_strides(
    decode: Kernel, dtype: torch.dtype, arrange: Kernel, heads: int, kv_heads: int, dim: int
) -> None:
    plain = decode_arguments([37, 0, 5], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)

    def memory(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    memories, k_cache, v_cache = arrange(memory, *plain["k_cache"].shape)
    k_cache.copy_(plain["k_cache"])
    v_cache.copy_(plain["v_cache"])
    before = [whole.clone() for whole in memories]
    out = decode(**(plain | {"k_cache": k_cache, "v_cache": v_cache}), check_values=True)
    assert out.isfinite().all()
    assert same_bits(out, decode(**plain))
    assert all(same_bits(*pair) for pair in zip(memories, before, strict=True))


@each_decode
@each_odd_stride
def test_decode_takes_any_stride_of_a_cache_dim_of_size_1(
    decode: Kernel, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    blocks, size, heads, dim = shape
    plain: dict[str, Any] = {
        "q": numbers(1, 2 * heads, dim),
        "k_cache": numbers(*shape, seed=1),
        "v_cache": numbers(*shape, seed=2),
        "block_tables": torch.arange(blocks).flip(0)[None],
        "context_lens": torch.tensor([blocks * size]),
        "scale": 1.0,
    }
    expected = decode(**plain)
    for name in ("k_cache", "v_cache"):
        assert same_bits(decode(**(plain | {name: strided(plain[name], strides)}), check_values=True), expected)


@each_decode
def test_decode_takes_any_strides_of_empty_caches(decode: Kernel) -> None:
    cache = torch.empty_strided((0, 4, 2, 8), (0, 5, 0, 7))
    arguments = decode_arguments([0, 0]) | {"k_cache": cache, "v_cache": cache}
    assert not decode(**arguments, check_values=True).any()


@each_decode
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_decode_over_expanded_caches(decode: Kernel, dim: int) -> None:
    """Two slots in one place are nothing wrong for who only reads."""
    plain = decode_arguments([6, 3], unowned=0.0)
    expanded = {name: plain[name].narrow(dim, 1, 1).expand(plain[name].shape) for name in ("k_cache", "v_cache")}
    copies = {name: cache.contiguous() for name, cache in expanded.items()}
    assert same_bits(decode(**(plain | expanded), check_values=True), decode(**(plain | copies)))


@each_decode
def test_decode_takes_small_and_whole_scales(decode: Kernel) -> None:
    arguments = decode_arguments([4], heads=2, kv_heads=1, dim=4)
    mean = arguments["v_cache"][arguments["block_tables"][0, 0]].mean(0).expand(2, 4)
    for scale in (0, 0.0, -0.0, 1e-42, -1e-300):
        torch.testing.assert_close(decode(**(arguments | {"scale": scale}))[0], mean, rtol=1e-6, atol=1e-6)
    assert same_bits(decode(**(arguments | {"scale": 1})), decode(**(arguments | {"scale": 1.0})))


@each_decode
def test_decode_survives_a_first_step_without_a_finite_score(decode: Kernel) -> None:
    arguments = decode_arguments([130], heads=1, kv_heads=1, dim=1, block_size=130)
    arguments["q"][:] = 1
    block = arguments["block_tables"][0, 0]
    arguments["k_cache"][block] = float("-inf")
    arguments["k_cache"][block, 129] = 0
    assert decode(**arguments).item() == arguments["v_cache"][block, 129].item()


@pytest.mark.parametrize("seed", range(36))
def test_triton_decode_equals_torch_decode(seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)

    def pick(choices: list[int]) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator, device="cpu"))]

    kv_heads, group = pick([1, 2, 3]), pick([1, 2, 3, 4, 5])
    arguments = decode_arguments(
        [pick([0, 1, 2, 7, 16, 33, 63, 64, 65, 129]) for _ in range(pick([1, 2, 3]))],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=pick([1, 3, 4, 8, 16, 20, 33]),
        block_size=pick([1, 2, 3, 5, 8, 16, 17]),
        tail=pick([99999, -1, INT32_MAX]),
        width=130,
        seed=seed,
        index_dtype=INDEX_DTYPES[seed % 2],
    )
    arguments["context_lens"] = arguments["context_lens"].to(INDEX_DTYPES[seed // 2 % 2])
    expected = torch_paged_decode_attention(**arguments, check_values=True)
    assert expected.isfinite().all()
    torch.testing.assert_close(triton_paged_decode_attention(**arguments), expected, rtol=1e-5, atol=1e-5)


@each_decode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_decode_computes_in_float32(decode: Kernel, dtype: torch.dtype) -> None:
    # Scores of order 30 times a length: rounded to the dtype anywhere before the end, weights would be off by far more.
    arguments = decode_arguments([40, 77], heads=6, kv_heads=2, dim=16, dtype=dtype) | {"scale": 4.0}
    exact = {name: arguments[name].float() for name in ("q", "k_cache", "v_cache")}
    expected = torch_paged_decode_attention(**(arguments | exact))
    out = decode(**arguments)
    assert out.dtype == dtype
    # The dtype's spacing: the interpreter's float32 to bfloat16 cuts off where it should round.
    spacing = torch.finfo(dtype).eps
    assert ((out.float() - expected).abs() <= 1.01 * spacing * expected.abs() + 1e-6).all()


# ------------------------------------------------------------------------------------------------ 64-bit addresses


def large_zeros(*shape: int) -> torch.Tensor:
    """A float16 tensor of zeros, of which only what is touched takes memory (on a GPU, all of it)."""
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 24 * 2**30:
            pytest.skip("two caches past 2**32 elements need 24 GiB of free GPU memory")
        return torch.zeros(*shape, dtype=torch.float16)
    count = 1
    for size in shape:
        count *= size
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
    memory = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.float16).reshape(shape)


@pytest.mark.parametrize(
    ("write", "decode"),
    [
        (torch_reshape_and_cache, torch_paged_decode_attention),
        (triton_reshape_and_cache, triton_paged_decode_attention),
    ],
    ids=["torch", "triton"],
)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 16)])
def test_addresses_past_32_bits(write: Kernel, decode: Kernel, heads: int, dim: int) -> None:
    block_size = 16
    size = block_size * heads * dim
    # First pages at element offsets 2**31 and 2**32, and one in between; the compact twin has them at 0, 1, 2.
    far = [2**32 // size, 2**31 // size, 2**31 // size + 5]
    slots = [far[0] * block_size + j for j in range(16)] + [far[1] * block_size + j for j in range(16)]
    slots += [far[2] * block_size, -1]
    key, value = numbers(34, heads, dim, seed=5).half(), numbers(34, heads, dim, seed=6).half()
    q = numbers(1, heads, dim, seed=7).half()
    lens = torch.tensor([33], dtype=torch.int32)
    outputs = []
    for blocks, table, where in (
        (2**32 // size + 1, far, slots),
        (3, [0, 1, 2], [*range(33), -1]),
    ):
        k_cache, v_cache = (large_zeros(blocks, block_size, heads, dim) for _ in range(2))
        slot_mapping = torch.tensor(where, dtype=torch.int32 if max(where) <= INT32_MAX else torch.int64)
        write(key, value, k_cache, v_cache, slot_mapping)
        assert same_bits(k_cache[table[0]], key[:16])
        assert same_bits(v_cache[table[1]], value[16:32])
        outputs.append(decode(q, k_cache, v_cache, torch.tensor([table], dtype=torch.int32), lens, 0.5))
    assert outputs[1].any()
    assert same_bits(*outputs)


@pytest.mark.parametrize(
    ("write", "decode"),
    [
        (torch_reshape_and_cache, torch_paged_decode_attention),
        (triton_reshape_and_cache, triton_paged_decode_attention),
    ],
    ids=["torch", "triton"],
)
def test_rows_that_lie_2_to_the_30_apart(write: Kernel, decode: Kernel) -> None:
    # No stride passes 2**31, but the start of the third row does.
    stride, plain = 2**30, decode_arguments([3, 0, 6], heads=2, kv_heads=2, dim=3, dtype=torch.float16, unowned=0.0)
    q = large_zeros(2 * stride + 8).as_strided((3, 2, 3), (stride, 3, 1))
    q.copy_(plain["q"])
    tables = large_zeros(4 * stride + 8).view(torch.int32).as_strided((3, 2), (stride, 1))
    tables.copy_(plain["block_tables"])
    assert same_bits(decode(**(plain | {"q": q, "block_tables": tables})), decode(**plain))

    k_cache, v_cache = torch.zeros(2, 2, 2, 3, dtype=torch.float16), torch.zeros(2, 2, 2, 3, dtype=torch.float16)
    write(q, plain["q"], k_cache, v_cache, torch.tensor([0, 1, 3]))
    write(plain["q"], q, v_cache, k_cache, torch.tensor([-1, -1, 2]))
    assert same_bits(k_cache.flatten(0, 1), plain["q"][[0, 1, 2, 2]])
    assert same_bits(v_cache.flatten(0, 1), plain["q"][[0, 1, 2, 2]])


@pytest.mark.parametrize(
    ("write", "decode"),
    [
        (torch_reshape_and_cache, torch_paged_decode_attention),
        (triton_reshape_and_cache, triton_paged_decode_attention),
    ],
    ids=["torch", "triton"],
)
@pytest.mark.parametrize("stride", [2**30, 2**31 + 8], ids=["2**30", "2**31 + 8"])
@pytest.mark.parametrize("far", ["block", "slot", "head"])
def test_strides_that_lead_past_32_bits(write: Kernel, decode: Kernel, far: str, stride: int) -> None:
    # Of the first no stride passes 2**31, but the start of the third block, slot or head does.
    strides = {"block": (stride, 9, 3, 1), "slot": (9, stride, 3, 1), "head": (9, 3, stride, 1)}[far]
    key, value = numbers(9, 3, 3, seed=5).half(), numbers(9, 3, 3, seed=6).half()
    slots = torch.tensor([8, 1, 3, 0, 2, 7, 4, 5, 6])
    decoded = {
        "q": numbers(1, 6, 3, seed=7).half(),
        "block_tables": torch.tensor([[2, 0, 1]], dtype=torch.int32),
        "context_lens": torch.tensor([9], dtype=torch.int32),
        "scale": 0.5,
    }
    compact = {name: torch.zeros(3, 3, 3, 3, dtype=torch.float16) for name in ("k_cache", "v_cache")}
    write(key, value, **compact, slot_mapping=slots)
    expected = decode(**decoded, **compact)
    assert expected.any()
    for name in compact:
        far_cache = large_zeros(2 * stride + 27).as_strided((3, 3, 3, 3), strides)
        caches = {other: torch.zeros_like(cache) for other, cache in compact.items()} | {name: far_cache}
        write(key, value, **caches, slot_mapping=slots)
        assert all(same_bits(caches[other], cache) for other, cache in compact.items())
        assert same_bits(decode(**decoded, **caches), expected)


# ----------------------------------------------------------------------------------------------------- host checks


def slot_mapping_arguments() -> Arguments:
    return {
        "block_tables": torch.tensor([[9, 3, 7], [2, 5, 0]], dtype=torch.int32),
        "seq_ids": torch.tensor([0, 0, 1, 5]),
        "positions": torch.tensor([5, 9, 2, -1], dtype=torch.int32),
        "block_size": 4,
    }


def write_arguments() -> Arguments:
    return {
        "key": numbers(4, 2, 3, seed=1),
        "value": numbers(4, 2, 3, seed=2),
        "k_cache": torch.zeros(3, 2, 2, 3),
        "v_cache": torch.zeros(3, 2, 2, 3),
        "slot_mapping": torch.tensor([4, 5, -1, 1]),
    }


def attention_arguments() -> Arguments:
    return decode_arguments([3, 6], heads=4, kv_heads=2, dim=3, width=3)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with a gap behind each of the last dim."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def swapped(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, with this dim and the next lying the other way round in memory."""
    return tensor.transpose(dim, dim + 1).contiguous().transpose(dim, dim + 1)


def longer(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)


# An argument of a good call, what is done to it, and how the sentence of the exception begins.
Fault = tuple[str, Callable[[Any], Any], str]


class Operation:
    """A good call of an operation's kernels, and what is wrong with other calls."""

    def __init__(
        self,
        kernels: list[Kernel],
        good: Callable[[], Arguments],
        tensors: list[str],
        types: list[Fault],
        properties: list[Fault],
        values: list[Fault],
    ) -> None:
        first, second, *_ = tensors
        self.kernels = kernels
        self.good = good
        self.types = [
            (name, torch.Tensor.tolist, f"{name} must be a torch.Tensor, got list") for name in tensors
        ] + types
        self.properties = properties
        for name in tensors:
            self.properties += [
                (name, lambda t: t[None], f"{name} must have the dims ["),
                (name, torch.Tensor.double, f"{name} must have one of the dtypes"),
                (name, spread, f"{name} must be contiguous"),
            ]
        self.devices: list[Fault] = [
            (name, lambda t: t.to("meta"), f"{second if name == first else name} is on ") for name in tensors
        ]
        self.values = values


OPERATIONS = [
    Operation(
        [torch_slot_mapping],
        slot_mapping_arguments,
        ["block_tables", "seq_ids", "positions"],
        types=[
            ("block_size", float, "block_size must be an int, got float"),
            ("block_size", bool, "block_size must be an int, got bool"),
        ],
        properties=[
            ("positions", lambda t: longer(t, 0), "positions has T = 5, but seq_ids has T = 4"),
            ("block_size", lambda n: 0, "block_size must be at least 1, got 0"),
            ("block_size", lambda n: -n, "block_size must be at least 1, got -4"),
        ],
        values=[
            ("positions", lambda t: t + 3, "positions[1] is 12, but a row of block_tables covers 12"),
            ("seq_ids", lambda t: t + 1, "seq_ids[2] is 2, but block_tables has 2 rows"),
            ("seq_ids", lambda t: t - 1, "seq_ids[0] is -1, but block_tables has 2 rows"),
        ],
    ),
    Operation(
        [torch_reshape_and_cache, triton_reshape_and_cache],
        write_arguments,
        ["key", "value", "k_cache", "v_cache", "slot_mapping"],
        types=[],
        properties=[
            ("value", lambda t: longer(t, 0), "value has T' = 5, but key has T' = 4"),
            ("value", lambda t: longer(t, 1), "value has KVH = 3, but key has KVH = 2"),
            ("value", lambda t: longer(t, 2), "value has D = 4, but key has D = 3"),
            ("k_cache", lambda t: longer(t, 2), "k_cache has KVH = 3, but key has KVH = 2"),
            ("k_cache", lambda t: longer(t, 3), "k_cache has D = 4, but key has D = 3"),
            ("v_cache", lambda t: longer(t, 0), "v_cache has N = 4, but k_cache has N = 3"),
            ("v_cache", lambda t: longer(t, 1), "v_cache has bs = 3, but k_cache has bs = 2"),
            ("v_cache", lambda t: longer(t, 2), "v_cache has KVH = 3, but key has KVH = 2"),
            ("v_cache", lambda t: longer(t, 3), "v_cache has D = 4, but key has D = 3"),
            ("slot_mapping", lambda t: longer(t, 0), "key must have at least the 5 tokens of slot_mapping, got 4"),
            ("value", torch.Tensor.half, "value is torch.float16, but key is torch.float32"),
            ("k_cache", torch.Tensor.bfloat16, "k_cache is torch.bfloat16, but key is torch.float32"),
            ("v_cache", torch.Tensor.half, "v_cache is torch.float16, but key is torch.float32"),
            ("key", lambda t: swapped(t, 1), "key must be contiguous after its first dim, got the strides (6, 1, 2)"),
            ("value", lambda t: swapped(t, 1), "value must be contiguous after its first dim"),
            ("k_cache", lambda t: swapped(t, 2), "k_cache must be contiguous in its last dim, got the strides"),
            ("v_cache", lambda t: swapped(t, 2), "v_cache must be contiguous in its last dim, got the strides"),
            ("v_cache", lambda t: t[..., :1].expand(t.shape), "v_cache must be contiguous in its last dim"),
            ("k_cache", lambda t: t[:1].expand(t.shape), "k_cache must not have two slots in one place, got the str"),
            ("k_cache", lambda t: t[:, :1].expand(t.shape), "k_cache must not have two slots in one place"),
            ("v_cache", lambda t: t[:, :, :1].expand(t.shape), "v_cache must not have two slots in one place"),
            ("v_cache", lambda t: t.as_strided(t.shape, (11, 6, 3, 1)), "v_cache must not have two slots in one place"),
            ("k_cache", lambda t: t.as_strided(t.shape, (12, 6, 2, 1)), "k_cache must not have two slots in one place"),
        ],
        values=[
            ("slot_mapping", lambda t: t + 1, "slot_mapping[1] is 6, but the caches have 6 slots"),
            ("slot_mapping", lambda t: t.clamp(max=4), "slot_mapping[1] is 4, the slot of token 0"),
        ],
    ),
    Operation(
        [torch_paged_decode_attention, triton_paged_decode_attention],
        attention_arguments,
        ["q", "k_cache", "v_cache", "block_tables", "context_lens"],
        types=[
            ("scale", str, "scale must be a float, got str"),
            ("scale", bool, "scale must be a float, got bool"),
            ("scale", complex, "scale must be a float, got complex"),
        ],
        properties=[
            ("k_cache", lambda t: longer(t, 3), "k_cache has D = 4, but q has D = 3"),
            ("v_cache", lambda t: longer(t, 0), "v_cache has N = 7, but k_cache has N = 6"),
            ("v_cache", lambda t: longer(t, 1), "v_cache has bs = 5, but k_cache has bs = 4"),
            ("v_cache", lambda t: longer(t, 2), "v_cache has KVH = 3, but k_cache has KVH = 2"),
            ("v_cache", lambda t: longer(t, 3), "v_cache has D = 4, but q has D = 3"),
            ("block_tables", lambda t: longer(t, 0), "block_tables has B = 3, but q has B = 2"),
            ("context_lens", lambda t: longer(t, 0), "context_lens has B = 3, but q has B = 2"),
            ("q", lambda t: longer(t, 1), "q must have a multiple of the 2 heads of k_cache, got 5"),
            ("k_cache", torch.Tensor.half, "k_cache is torch.float16, but q is torch.float32"),
            ("v_cache", torch.Tensor.bfloat16, "v_cache is torch.bfloat16, but q is torch.float32"),
            ("q", lambda t: swapped(t, 1), "q must be contiguous after its first dim, got the strides"),
            ("k_cache", lambda t: swapped(t, 2), "k_cache must be contiguous in its last dim, got the strides"),
            ("v_cache", lambda t: swapped(t, 2), "v_cache must be contiguous in its last dim, got the strides"),
            ("k_cache", lambda t: t[..., :1].expand(t.shape), "k_cache must be contiguous in its last dim"),
            ("scale", lambda s: float("nan"), "scale must be finite in float32, got nan"),
            ("scale", lambda s: float("-inf"), "scale must be finite in float32, got -inf"),
            ("scale", lambda s: 1e39, "scale must be finite in float32, got 1e+39"),
        ],
        values=[
            ("context_lens", lambda t: t + 10, "context_lens[0] is 13, but a row of block_tables covers 0 to 12"),
            ("context_lens", lambda t: -t, "context_lens[0] is -3, but a row of block_tables covers 0 to 12"),
            ("context_lens", lambda t: t + 5, "block_tables[0, 1] is 99999, but the caches have 6 blocks"),
            ("block_tables", lambda t: t * 0 + 6, "block_tables[0, 0] is 6, but the caches have 6 blocks"),
            ("block_tables", lambda t: t * 0 - 1, "block_tables[0, 0] is -1, but the caches have 6 blocks"),
        ],
    ),
]


def each_kernel_with(*kinds: str) -> pytest.MarkDecorator:
    cases = [
        pytest.param(kernel, operation.good, name, change, sentence, id=f"{name_of(kernel)}-{name}-{number}")
        for operation in OPERATIONS
        for number, (name, change, sentence) in enumerate(fault for kind in kinds for fault in getattr(operation, kind))
        for kernel in operation.kernels
    ]
    return pytest.mark.parametrize(("kernel", "good", "name", "change", "sentence"), cases)


def reject(kernel: Kernel, arguments: Arguments, error: type[Exception], sentence: str, **options: bool) -> None:
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(error) as caught:
        kernel(**arguments, **options)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")
    for name, value in before.items():
        unchanged = value.is_meta or torch.equal(arguments[name].nan_to_num(), value.nan_to_num())
        assert unchanged, f"{name} was changed"


@each_kernel_with("types")
def test_a_wrong_type_is_named(kernel: Kernel, good: Kernel, name: str, change: Kernel, sentence: str) -> None:
    arguments = good()
    reject(kernel, arguments | {name: change(arguments[name])}, TypeError, sentence)


@each_kernel_with("properties", "devices")
def test_a_wrong_argument_is_named(kernel: Kernel, good: Kernel, name: str, change: Kernel, sentence: str) -> None:
    arguments = good()
    reject(kernel, arguments | {name: change(arguments[name])}, ValueError, sentence)


@each_kernel_with("properties")
def test_a_wrong_argument_is_found_without_data(
    kernel: Kernel, good: Kernel, name: str, change: Kernel, sentence: str
) -> None:
    arguments = good()
    arguments[name] = change(arguments[name])
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    reject(kernel, arguments, ValueError, sentence)


@each_kernel_with("values")
def test_a_wrong_value_is_named_when_asked_for(
    kernel: Kernel, good: Kernel, name: str, change: Kernel, sentence: str
) -> None:
    kernel(**good(), check_values=True)
    arguments = good()
    reject(kernel, arguments | {name: change(arguments[name])}, ValueError, sentence, check_values=True)


@each_decode
@pytest.mark.parametrize("shape", [(3, 0, 2, 4), (3, 4, 0, 4)])
def test_decode_needs_a_block_size_and_kv_heads(decode: Kernel, shape: tuple[int, ...]) -> None:
    cache, index = torch.zeros(shape), torch.zeros(1, 1, dtype=torch.int32)
    arguments: Arguments = {"q": torch.zeros(1, 2, 4), "k_cache": cache, "v_cache": cache, "block_tables": index}
    arguments |= {"context_lens": index[0], "scale": 1.0}
    reject(decode, arguments, ValueError, "k_cache must have bs and KVH of at least 1, got the shape (3, ")
