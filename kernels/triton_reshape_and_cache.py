"""Writing new tokens into a paged KV cache in Triton: one program copies one token."""

from typing import Any

import torch
import triton
import triton.language as tl

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)

# Every tensor argument: its dims, its dtypes, and what of it must lie contiguously: the whole, each of its rows (the
# stride of the first dim is free then), or its last dim (all other strides are free, and each tensor has its own). The
# stride of a dim of size 0 or 1 means nothing and is not looked at.
CONTRACT = {
    "key": ("T' KVH D", FLOATS, "rows"),
    "value": ("T' KVH D", FLOATS, "rows"),
    "k_cache": ("N bs KVH D", FLOATS, "last dim"),
    "v_cache": ("N bs KVH D", FLOATS, "last dim"),
    "slot_mapping": ("T", INTS, "whole"),
}


@triton.jit
def reshape_and_cache_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,  # values in a token: KVH * D
    PADDED_SIZE: tl.constexpr,  # the next power of two
):
    token = tl.program_id(0).to(tl.int64)
    # int64: block * k_block_stride passes 2**31 in any large cache.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    # A token's [KVH, D] is one run in key and value, and a run for each head in the caches.
    offs = tl.arange(0, PADDED_SIZE)
    head, dim = (offs // D).to(tl.int64), offs % D
    k_slot_ptr = k_cache_ptr + block * k_block_stride + place * k_slot_stride
    v_slot_ptr = v_cache_ptr + block * v_block_stride + place * v_slot_stride
    # Padding copies nothing. Not `(offs < SIZE) & (slot >= 0)`: a vector & a scalar fails in some Triton interpreters.
    mask = offs < tl.where(slot >= 0, SIZE, 0)

    # Loaded and stored in the caches' own dtype, so that every bit survives.
    k = tl.load(key_ptr + token * key_stride + offs, mask=mask)
    tl.store(k_slot_ptr + head * k_head_stride + dim, k, mask=mask)
    v = tl.load(value_ptr + token * value_stride + offs, mask=mask)
    tl.store(v_slot_ptr + head * v_head_stride + dim, v, mask=mask)


def triton_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    check_values: bool = False,
) -> None:
    """Write token t of `key` and `value` into slot `slot_mapping[t]` of the caches, bit for bit and in place.

    Args:
        key, value: [T', KVH, D], float32, float16 or bfloat16, T' >= T: only the first T tokens count. Tokens may lie
            any distance apart (a view of a fused QKV projection); inside a token, [KVH, D] is contiguous.
        k_cache, v_cache: [N, bs, KVH, D], of the same dtype. Slot s is `cache[s // bs, s % bs]`. Each may have any
            strides of block, slot and kv head (a view of [N, KVH, bs, D], or of one tensor that holds both), as long as
            they nest: each steps over all that the smaller ones span. The last dim is contiguous.
        slot_mapping: [T], int32 or int64. A token with a negative slot is padding and is not written. The other slots
            differ from each other.
        check_values: also check the range and uniqueness of slot_mapping, which waits for the device.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: dims, sizes, dtypes, strides, devices or values other than the above; nothing has been written then.
    """
    sizes = _check_tensors(
        {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    )
    if sizes["T'"] < sizes["T"]:
        raise ValueError(f"key must have at least the {sizes['T']} tokens of slot_mapping, got {len(key)}.")
    _check_places({"k_cache": k_cache, "v_cache": v_cache})
    if check_values:
        _check_values(slot_mapping, sizes["N"] * sizes["bs"])

    if sizes["T"] == 0 or k_cache.numel() == 0:
        return
    size = sizes["KVH"] * sizes["D"]
    reshape_and_cache_kernel[(sizes["T"],)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=sizes["bs"],
        D=sizes["D"],
        SIZE=size,
        PADDED_SIZE=triton.next_power_of_2(size),
    )


def _check_tensors(arguments: dict[str, Any]) -> dict[str, int]:
    """Hold every tensor against CONTRACT without reading its data; return the size of each dim by its name."""
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    owner = next(iter(CONTRACT))
    first = arguments[owner]
    for name, (dims, dtypes, contiguous) in CONTRACT.items():
        tensor = arguments[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.dim() != len(dims.split()):
            raise ValueError(f"{name} must have the dims [{dims}], got the shape {tuple(tensor.shape)}.")
        for dim, size in zip(dims.split(), tensor.shape, strict=True):
            if size != sizes.setdefault(dim, size):
                known = f"{owners[dim]} has {dim} = {sizes[dim]}"
                raise ValueError(f"{name} has {dim} = {size}, but {known}: make them equal.")
            owners.setdefault(dim, name)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must have one of the dtypes {', '.join(map(str, dtypes))}, got {tensor.dtype}.")
        if contiguous == "whole" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got the strides {tensor.stride()}.")
        if contiguous == "rows" and tensor.numel() and not tensor[0].is_contiguous():
            raise ValueError(f"{name} must be contiguous after its first dim, got the strides {tensor.stride()}.")
        if contiguous == "last dim" and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            raise ValueError(f"{name} must be contiguous in its last dim, got the strides {tensor.stride()}.")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, but {owner} is on {first.device}: use one device.")
        if dtypes is FLOATS and tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but {owner} is {first.dtype}: use one dtype.")
    return sizes


def _check_places(caches: dict[str, torch.Tensor]) -> None:
    """Refuse a cache whose strides do not nest: of an expanded tensor, for one, many slots lie in one place."""
    for name, cache in caches.items():
        span = 1
        for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
            if size > 1 and stride < span and cache.numel():
                raise ValueError(
                    f"{name} must not have two slots in one place, got the strides {cache.stride()} for the shape "
                    f"{tuple(cache.shape)}: make each stride step over all that the dims of smaller strides span."
                )
            span += (size - 1) * stride


def _check_values(slot_mapping: torch.Tensor, slots: int) -> None:
    writers: dict[int, int] = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= slots:
            raise ValueError(f"slot_mapping[{token}] is {slot}, but the caches have {slots} slots.")
        if slot >= 0 and writers.setdefault(slot, token) != token:
            raise ValueError(
                f"slot_mapping[{token}] is {slot}, the slot of token {writers[slot]}: every slot must differ."
            )
