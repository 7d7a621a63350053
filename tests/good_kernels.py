"""Kernels that are right and unlike the project's own, each with what it has to declare.

A relation that accuses one of them is wrong: they add in another order, round where they say so, split by other rules,
take other roads to the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration, Kernel

LOG2E = math.log2(math.e)
DECODE, WRITE = "paged_decode_attention", "reshape_and_cache"
GOOD: list[Kernel] = []


def good(operation: str, **declared: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a kernel to GOOD."""

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        GOOD.append(Kernel(call.__name__, OPERATIONS[operation], call, Declaration(**declared)))
        return call

    return add


# ------------------------------------------------------------------------------------ decodes of one sequence at a time


def one_by_one(name: str, attend: Callable[..., torch.Tensor], **declared: Any) -> None:
    """Adds a decode that calls attend(q[H, D], k[n, H, D], v[n, H, D], scale, bs, B) -> [H, D] for each sequence; k and
    v are float32 copies."""

    def decode(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for b, n in enumerate(context_lens.tolist()):
            if n:
                pages = block_tables[b, : -(-n // size)].long()
                k, v = (
                    cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)
                    for cache in (k_cache, v_cache)
                )
                query = q[b].to(torch.float32, copy=True)
                attended = attend(query, k, v, scale, size, len(q))
                out[b] = attended.to(q.dtype)
        return out

    decode.__name__ = name
    good(DECODE, **{"cache_layouts": CACHE_LAYOUTS, **declared})(decode)


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[H, n]"""
    return torch.einsum("hd,nhd->hn", q, k) * scale


def normalised_first(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    s = scores_of(q, k, scale)
    return torch.einsum("hn,nhd->hd", torch.exp(s - torch.logsumexp(s, 1, keepdim=True)), v)


def base_two(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    s = scores_of(q * (scale * LOG2E), k, 1.0)
    weights = torch.exp2(s - s.amax(1, keepdim=True))
    return torch.einsum("hn,nhd->hd", weights, v) / weights.sum(1, keepdim=True)


def in_float64(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    return torch.einsum("hn,nhd->hd", scores_of(q.double(), k.double(), scale).softmax(1), v.double())


def online(starts: Callable[[range], Any]) -> Callable[..., Any]:
    """Page after page with a running maximum."""

    def attend(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
        m = torch.full((len(q), 1), -1e30, device=q.device)
        total, acc = torch.zeros_like(m), torch.zeros_like(q)
        for start in starts(range(0, len(k), size)):
            s = scores_of(q, k[start : start + size], scale)
            larger = torch.maximum(m, s.amax(1, keepdim=True))
            weights, rescale = torch.exp(s - larger), torch.exp(m - larger)
            total = total * rescale + weights.sum(1, keepdim=True)
            acc = acc * rescale + torch.einsum("hn,nhd->hd", weights, v[start : start + size])
            m = larger
        return acc / total

    return attend


def split(exp: Callable[[Any], Any], log: Callable[[Any], Any]) -> Callable[..., Any]:
    """As many splits as the batch leaves room for, of whole pages; each is normalised, then weighed by its LSE less
    that of all, as FlashAttention's combine kernel does."""

    def attend(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
        pages = -(-len(k) // size)
        step = -(-pages // max(1, 6 // batch)) * size
        outs, lses = [], []
        for start in range(0, len(k), step):
            s = scores_of(q, k[start : start + step], scale)
            m = s.amax(1, keepdim=True)
            weights = exp(s - m)
            total = weights.sum(1, keepdim=True)
            outs.append(torch.einsum("hn,nhd->hd", weights / total, v[start : start + step]))
            lses.append(m + log(total))
        lse = torch.stack(lses)
        m = lse.amax(0)
        whole = m + log(exp(lse - m).sum(0))
        return sum(out * exp(part - whole) for out, part in zip(outs, lse, strict=True))

    return attend


def merged_in_pairs(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    """A third of the tokens each time; the first two parts are merged, then the result and the last one."""
    state = None
    for keys, values in zip(k.tensor_split(3), v.tensor_split(3), strict=True):
        if len(keys):
            s = scores_of(q, keys, scale)
            out = torch.einsum("hn,nhd->hd", s.softmax(1), values)
            lse = s.logsumexp(1, keepdim=True)
            if state is not None:
                new, old = torch.sigmoid(lse - state[1]), torch.sigmoid(state[1] - lse)  # 1 - new would cancel
                out, lse = out * new + state[0] * old, torch.logaddexp(lse, state[1])
            state = out, lse
    assert state is not None
    return state[0]


def finite_fill(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    """Whole tiles of 16, masked by -1e30, where the running maximum starts too."""
    m = torch.full((len(q), 1), -1e30, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    for start in range(0, len(k), 16):
        keys, values = q.new_zeros(16, *q.shape), q.new_zeros(16, *q.shape)
        live = min(16, len(k) - start)
        keys[:live], values[:live] = k[start : start + 16], v[start : start + 16]
        s = torch.where(torch.arange(16, device=q.device) < live, scores_of(q, keys, scale), -1e30)
        larger = torch.maximum(m, s.amax(1, keepdim=True))
        weights, rescale = torch.exp(s - larger), torch.exp(m - larger)
        total = total * rescale + weights.sum(1, keepdim=True)
        acc, m = acc * rescale + torch.einsum("hn,nhd->hd", weights, values), larger
    return acc / total


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 11 bits."""
    bits = x.view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def tf32_products(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    weights = scores_of(tf32(q), tf32(k), scale).softmax(1)
    return torch.einsum("hn,nhd->hd", tf32(weights), tf32(v))


def bfloat16_scores(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    return torch.einsum("hn,nhd->hd", scores_of(q, k, scale).bfloat16().float().softmax(1), v)


def half_sums(q: Any, k: Any, v: Any, scale: float, size: int, batch: int) -> Any:
    """One multiplication and one rounding to float16 after the other."""
    s = torch.zeros(len(q), len(k), dtype=torch.float16, device=q.device)
    for d in range(q.shape[1]):
        s = (s.float() + (q[:, d] * k[..., d]).T).half()
    weights = (s.float() * scale).softmax(1)
    acc = torch.zeros_like(q, dtype=torch.float16)
    for n in range(len(k)):
        acc = (acc.float() + weights[:, n, None] * v[n]).half()
    return acc.float()


one_by_one("normalised_first", normalised_first)
one_by_one("base_two", base_two)
one_by_one("in_float64", in_float64)
one_by_one("pages_in_order", online(list))
one_by_one("pages_backwards", online(reversed))
one_by_one("split_by_page_size_and_batch", split(torch.exp, torch.log))
one_by_one("split_in_base_two", split(lambda x: torch.exp2(x * LOG2E), lambda x: torch.log2(x) * math.log(2.0)))
one_by_one("merged_in_pairs", merged_in_pairs)
one_by_one("finite_fill", finite_fill)
one_by_one("tf32_products", tf32_products, unit_roundoff={"products": "tf32"})
one_by_one("bfloat16_scores", bfloat16_scores, unit_roundoff={"scores": "bfloat16"})
one_by_one("half_sums", half_sums, unit_roundoff={"sums": "float16"})
one_by_one("heads_first_only", base_two, cache_layouts=("hnd",))
one_by_one("packed_only", online(list), cache_layouts=("packed",), index_dtypes=("int32",), empty="never")


# -------------------------------------------------------------------------------------------------------- other decodes


@good(DECODE, unit_roundoff={"weights": "input"})
def weights_in_the_input_dtype(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float
) -> Any:
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, n in enumerate(context_lens.tolist()):
        pages = block_tables[b, : -(-n // size)].long()
        k, v = (cache[pages].flatten(0, 1)[:n].repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))
        if n:
            weights = scores_of(q[b].to(torch.float32, copy=True), k.float(), scale).softmax(1).to(q.dtype)
            out[b] = torch.einsum("hn,nhd->hd", weights.float(), v.float()).to(q.dtype)
    return out


@good(DECODE, cache_layouts=CACHE_LAYOUTS, table_reads="row", unowned="finite")
def whole_batch_at_once(q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float) -> Any:
    """All rows as long as the longest one: how many zeros a sum has, and so its order, depends on the neighbours."""
    count, heads, dim = q.shape
    size, kv_heads = k_cache.shape[1:3]
    longest = int(context_lens.max()) if count else 0
    if longest == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    pages = -(-longest // size)
    used = torch.arange(pages, device=q.device) < -(-context_lens // size)[:, None]
    table = torch.where(used, block_tables[:, :pages].long(), 0)
    k = k_cache[table].reshape(count, pages * size, kv_heads, dim).float()
    v = v_cache[table].reshape(count, pages * size, kv_heads, dim).float()
    grouped = q.reshape(count, kv_heads, heads // kv_heads, dim).float()
    s = torch.einsum("bkgd,bnkd->bkgn", grouped, k) * scale
    dead = torch.arange(pages * size, device=q.device) >= context_lens[:, None]
    s = s.masked_fill(dead[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    s = s.masked_fill(dead[:, None, None], 0.0)
    v = v.masked_fill((context_lens == 0)[:, None, None, None], 0.0)
    return torch.einsum("bkgn,bnkd->bkgd", s, v).reshape(q.shape).to(q.dtype)


@good(DECODE, cache_layouts=CACHE_LAYOUTS)
def copies_first(q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float) -> Any:
    """Copies what it reads to fresh contiguous memory of its own, and writes its result there twice."""
    q, block_tables = q.contiguous(), block_tables.contiguous()
    out, group = torch.empty_like(q), q.shape[1] // k_cache.shape[2]
    for b, n in enumerate(context_lens.tolist()):
        out[b] = 0
        if n:
            slots = torch.arange(n, device=q.device)
            blocks = block_tables[b, slots // k_cache.shape[1]].long()
            k = torch.empty(n, *k_cache.shape[2:], device=q.device)
            v = torch.empty_like(k)
            for mine, cache in ((k, k_cache), (v, v_cache)):
                mine.copy_(cache[blocks, slots % k_cache.shape[1]])
            grouped = q[b].reshape(-1, group, q.shape[2]).float()
            weights = torch.softmax(torch.einsum("kgd,nkd->kgn", grouped, k) * scale, -1)
            out[b] = torch.einsum("kgn,nkd->kgd", weights, v).reshape(q.shape[1:]).to(q.dtype)
    return out


@triton.jit
def add_tokens(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    acc,
    total,
    largest,
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    q_stride,
    table_stride,
    scale,
    H,
    KVH,
    D: tl.constexpr,
    BS,
):
    b, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    tokens = tl.program_id(0) * 16 + tl.arange(0, 16)
    live = tokens < tl.load(lengths + b)
    block = tl.load(tables + b * table_stride + tokens // BS, mask=live, other=0).to(tl.int64)
    cols = tl.arange(0, D)[None, :]
    offs = ((block * BS + tokens % BS) * KVH + head // (H // KVH))[:, None] * D + cols
    query = tl.load(q + b * q_stride + head * D + cols).to(tl.float32)
    keys = tl.load(k_cache + offs, mask=live[:, None], other=0.0).to(tl.float32)
    weights = tl.exp(tl.sum(query * keys, 1) * scale - tl.load(largest + b * H + head))
    weights = tl.where(live, weights, 0.0)  # exp(0 - the largest) may overflow
    values = tl.load(v_cache + offs, mask=live[:, None], other=0.0).to(tl.float32)
    tl.atomic_add(acc + (b * H + head) * D + tl.arange(0, D), tl.sum(weights[:, None] * values, 0))
    tl.atomic_add(total + b * H + head, tl.sum(weights, 0))


@good(DECODE, deterministic=False, head_dims=(1, 2, 4, 8, 16))
def adds_with_atomics(q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float) -> Any:
    """A program for every 16 tokens, all of which add to one sum; the host looks for the largest score first."""
    count, heads, dim = q.shape
    size, kv_heads = k_cache.shape[1:3]
    acc, total, largest = (
        torch.zeros(shape, device=q.device) for shape in ((count, heads, dim), (count, heads), (count, heads))
    )
    for b, n in enumerate(context_lens.tolist()):
        if n:
            pages = block_tables[b, : -(-n // size)].long()
            k = k_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(heads // kv_heads, dim=1)
            largest[b] = scores_of(q[b].float(), k, scale).amax(1)
    grid = (-(-max(context_lens.tolist(), default=0) // 16), count, heads)
    if 0 not in grid:
        tensors = (acc, total, largest, q, k_cache, v_cache, block_tables, context_lens)
        add_tokens[grid](*tensors, q.stride(0), block_tables.stride(0), scale, heads, kv_heads, dim, size)
    return (acc / torch.where(total > 0, total, 1.0)[..., None]).to(q.dtype)


# --------------------------------------------------------------------------------------------------------------- writes


@good(WRITE, cache_layouts=CACHE_LAYOUTS)
def through_an_intermediate(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Keys and values to one tensor of integers, and from there token by token, last one first."""
    ints = {2: torch.int16, 4: torch.int32}[key.element_size()]
    both = torch.stack([tensor[: len(slot_mapping)].contiguous().view(ints) for tensor in (key, value)])
    for token, slot in reversed(list(enumerate(slot_mapping.tolist()))):
        if slot >= 0:
            for cache, rows in zip((k_cache, v_cache), both, strict=True):
                cache[slot // cache.shape[1], slot % cache.shape[1]] = rows[token].view(cache.dtype)


@triton.jit
def copy_head(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    key, value, k_cache, v_cache, slots, key_stride, value_stride, KVH, D: tl.constexpr, P: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    cols = tl.arange(0, P)
    if slot >= 0:
        to = (slot * KVH + head) * D + cols
        tl.store(k_cache + to, tl.load(key + token * key_stride + head * D + cols, mask=cols < D), mask=cols < D)
        tl.store(v_cache + to, tl.load(value + token * value_stride + head * D + cols, mask=cols < D), mask=cols < D)


@good(WRITE)
def token_by_head(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """A program for each head of each token, started in a grid of two dims."""
    grid = (len(slot_mapping), key.shape[1])
    if 0 not in grid and k_cache.numel():
        dims = (key.shape[1], key.shape[2], triton.next_power_of_2(key.shape[2]))
        copy_head[grid](key, value, k_cache, v_cache, slot_mapping, key.stride(0), value.stride(0), *dims)


@good("write_then_decode", table_reads="row")
def new_tokens_from_registers(
    key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, q: Any, block_tables: Any, lengths: Any, scale: float
) -> Any:
    """Reads the old tokens before it writes, takes the new ones as they come, and writes them last."""
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    given = {slot: token for token, slot in enumerate(slots.tolist())}
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, n in enumerate(lengths.tolist()):
        if n:
            pages = block_tables[b, : -(-n // size)].long()
            places = (pages[:, None] * size + torch.arange(size, device=q.device)).flatten()[:n].tolist()
            k, v = (cache[pages].flatten(0, 1)[:n].float() for cache in (k_cache, v_cache))
            for position, slot in enumerate(places):
                if slot in given:
                    k[position], v[position] = key[given[slot]].float(), value[given[slot]].float()
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            weights = scores_of(q[b].to(torch.float32, copy=True), k, scale).softmax(1)
            out[b] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    for slot, token in given.items():
        k_cache[slot // size, slot % size], v_cache[slot // size, slot % size] = key[token], value[token]
    return out
