"""The checks that kernels of this kind usually get: a fixed grid of shapes, random numbers, one global tolerance.

grid: a serving engine's own tests. Writes of 42 tokens to unique shuffled slots out of strided projections, the whole
    caches compared; decode with lengths 523, 37 and 2011, three pairs of heads, bfloat16, a table of random valid ids.
equal: equal lengths of 54 and 97, pages of 1, 8 and 16 in ascending order, groups of 1 and 8, float16, 1e-3.
tiny: the decode shapes of both with numbers in +-1e-3 and an absolute tolerance of 1e-4.

Slot mappings have no tests of their own there; they get the same lengths, pages and tables. A kernel that raises counts
as caught. Behind and before every tensor lie zeros, as an allocator that hands out large pieces leaves them, so that a
read a little past the end gives the same on every machine; what `torch.empty` hands out is zeros too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pagefuzz.kernels.registry import Kernel

CHECKS = ("grid", "equal", "tiny")
MARGIN = 1 << 14  # elements of zeros around each tensor
GRID_LENGTHS, EQUAL_LENGTHS = (523, 37, 2011), (54, 97)
EQUAL_BATCH = 4


class Wrong(AssertionError):
    """A kernel failed a check."""


def ask(check: str, kernel: Kernel) -> dict[str, Any]:
    """What one of CHECKS says of a kernel: {"killed": why}, {"passed": calls}, or {"silent": why} where it has nothing
    for the operation. Under Triton's interpreter that of pagefuzz is used: stock gets bfloat16 wrong."""
    from pagefuzz.fuzz.interpreter import install

    install()
    operation = kernel.operation.name
    if check == "tiny" and operation not in ("paged_decode_attention", "write_then_decode"):
        return {"silent": f"no {operation}"}
    calls = 0
    for call in _CALLS[operation](check):
        calls += 1
        try:
            with _FreshMemoryIsPlaced():
                call(kernel.call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # one that exits is caught too
            return {"killed": f"call {calls}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"passed": calls}


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor amid zeros."""
    memory = torch.zeros(tensor.numel() + 2 * MARGIN, dtype=tensor.dtype)
    inside = memory[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


class _FreshMemoryIsPlaced(TorchFunctionMode):
    """What `torch.empty` and its kin hand out lies amid zeros too, so that a store past its end hits nobody."""

    makers = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.zeros, torch.zeros_like)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return _placed(made.zero_()) if func in self.makers and made.is_contiguous() else made


def _random(chance: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, tiny: bool = False) -> torch.Tensor:
    if tiny:
        return _placed(((2 * torch.rand(shape, generator=chance) - 1) * 1e-3).to(dtype))
    return _placed(torch.randn(shape, generator=chance).to(dtype))


def _close(what: str, seen: torch.Tensor, right: torch.Tensor, atol: float, rtol: float) -> None:
    if not torch.allclose(seen.float(), right.float(), atol=atol, rtol=rtol):
        error = (seen.float() - right.float()).abs().max().item()
        raise Wrong(f"{what}: off by up to {error:.3g}, where atol is {atol:g} and rtol {rtol:g}")


# ---- writes


def _writes(check: str) -> Iterator[Callable[[Any], None]]:
    if check == "grid":
        for head_dim in (64, 80, 256):
            for block_size in (8, 16, 32):
                yield partial(_grid_write, head_dim=head_dim, block_size=block_size)
        return
    for length in EQUAL_LENGTHS:
        for block_size in (1, 8, 16):
            yield partial(_equal_write, length=length, block_size=block_size)


def _grid_write(call: Any, head_dim: int, block_size: int) -> None:
    chance = torch.Generator().manual_seed(head_dim + block_size)
    tokens, heads, blocks = 42, 8, 128
    qkv = _random(chance, (tokens, 3, heads, head_dim), torch.bfloat16)
    _, key, value = qkv.unbind(1)
    caches = [_random(chance, (blocks, block_size, heads, head_dim), torch.bfloat16) for _ in range(2)]
    slots = _placed(torch.randperm(blocks * block_size, generator=chance)[:tokens])
    _write(call, key, value, caches, slots, 0.0)


def _equal_write(call: Any, length: int, block_size: int) -> None:
    chance = torch.Generator().manual_seed(length + block_size)
    pages = -(-length // block_size)
    slots = torch.cat([torch.arange(length) + b * pages * block_size for b in range(EQUAL_BATCH)])
    key, value = (_random(chance, (len(slots), 4, 128), torch.float16) for _ in range(2))
    caches = [_placed(torch.zeros(EQUAL_BATCH * pages, block_size, 4, 128, dtype=torch.float16)) for _ in range(2)]
    _write(call, key, value, caches, _placed(slots), 1e-3)


def _write(
    call: Any, key: torch.Tensor, value: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, tolerance: float
) -> None:
    right = [cache.clone() for cache in caches]
    for cache, rows in zip(right, (key, value), strict=True):
        cache.view(-1, *cache.shape[2:])[slots] = rows
    call(key, value, *caches, slots)
    for name, seen, expected in zip(("k_cache", "v_cache"), caches, right, strict=True):
        _close(name, seen, expected, tolerance, tolerance)


# ---- tables and decodes


def _tables(check: str) -> Iterator[tuple[list[int], int, torch.Tensor, int]]:
    """(lengths, block size, table, number of blocks) of a check's decodes."""
    if check in ("grid", "tiny"):
        chance = torch.Generator().manual_seed(7)
        width, blocks = -(-max(GRID_LENGTHS) // 16), 512
        table = torch.randint(0, blocks, (len(GRID_LENGTHS), width), generator=chance, dtype=torch.int32)
        yield list(GRID_LENGTHS), 16, table, blocks
    if check in ("equal", "tiny"):
        for length in EQUAL_LENGTHS:
            for block_size in (1, 8, 16):
                pages = -(-length // block_size)
                table = torch.arange(EQUAL_BATCH * pages, dtype=torch.int32).view(EQUAL_BATCH, pages)
                yield [length] * EQUAL_BATCH, block_size, table, EQUAL_BATCH * pages


def _slot_mappings(check: str) -> Iterator[Callable[[Any], None]]:
    for lengths, block_size, table, _ in _tables(check):
        yield partial(_slot_mapping, lengths=lengths, block_size=block_size, table=table)


def _slot_mapping(call: Any, lengths: list[int], block_size: int, table: torch.Tensor) -> None:
    sequence = torch.cat([torch.full((n,), b, dtype=torch.int32) for b, n in enumerate(lengths)])
    position = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    right = table[sequence.long(), position.long() // block_size].long() * block_size + position % block_size
    seen = call(_placed(table), _placed(sequence), _placed(position), block_size)
    if not torch.equal(seen, right):
        raise Wrong(f"{int((seen != right).sum())} of {len(right)} slots are wrong")


def _decodes(check: str, with_write: bool = False) -> Iterator[Callable[[Any], None]]:
    for lengths, block_size, table, blocks in _tables(check):
        serving = len(lengths) == len(GRID_LENGTHS)
        dtype = torch.bfloat16 if serving else torch.float16
        for heads, kv_heads in ((4, 4), (8, 2), (5, 1)) if serving else ((4, 4), (32, 4)):
            for head_dim in (128, 256) if serving else (128,):
                sizes = (heads, kv_heads, head_dim, block_size, blocks)
                atol, rtol = (1.5e-2, 1e-2) if serving else (1e-3, 1e-3)
                if check == "tiny":
                    atol, rtol = 1e-4, 0.0
                yield partial(
                    _decode,
                    lengths=lengths,
                    table=table,
                    sizes=sizes,
                    dtype=dtype,
                    close=(atol, rtol),
                    tiny=check == "tiny",
                    with_write=with_write,
                )


def _decode(
    call: Any,
    lengths: list[int],
    table: torch.Tensor,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    close: tuple[float, float],
    tiny: bool,
    with_write: bool,
) -> None:
    heads, kv_heads, head_dim, block_size, blocks = sizes
    chance = torch.Generator().manual_seed(sum(sizes) + sum(lengths))
    q = _random(chance, (len(lengths), heads, head_dim), dtype, tiny)
    caches = [_random(chance, (blocks, block_size, kv_heads, head_dim), dtype, tiny) for _ in range(2)]
    scale = head_dim**-0.5
    arguments: list[Any] = [q, *caches]
    right_caches = [cache.clone() for cache in caches]
    if with_write:  # the last token of each sequence is new
        slots = torch.tensor([int(table[b, (n - 1) // block_size]) for b, n in enumerate(lengths)]) * block_size
        slots += (torch.tensor(lengths) - 1) % block_size
        new = [_random(chance, (len(lengths), kv_heads, head_dim), dtype, tiny) for _ in range(2)]
        for cache, rows in zip(right_caches, new, strict=True):
            cache.view(-1, kv_heads, head_dim)[slots] = rows
        arguments = [*new, *caches, _placed(slots), q]
    right = _dense(q, right_caches, table, lengths, scale)
    seen = call(*arguments, _placed(table), _placed(torch.tensor(lengths, dtype=torch.int32)), scale)
    _close("out", seen, right, *close)


def _dense(
    q: torch.Tensor, caches: list[torch.Tensor], table: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Attention over gathered rows in float32."""
    rows = []
    for b, n in enumerate(lengths):
        keys, values = (cache[table[b].long()].flatten(0, 1)[:n].float() for cache in caches)
        group = q.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[b].float(), keys) * scale, dim=1)
        rows.append(torch.einsum("hn,nhd->hd", weights, values))
    return torch.stack(rows).to(q.dtype)


_CALLS: dict[str, Callable[[str], Iterator[Callable[[Any], None]]]] = {
    "slot_mapping": _slot_mappings,
    "reshape_and_cache": _writes,
    "paged_decode_attention": _decodes,
    "write_then_decode": lambda check: _decodes(check, with_write=True),
}
