"""Pairs: a kernel that writes the cache and one that reads it, run one after the other as one operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pagefuzz.kernels import peers
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration, Kernel

MOST = 1024  # the largest size that is looked for where only a predicate says which there are


def with_pairs(kernels: dict[str, Kernel]) -> dict[str, Kernel]:
    """`kernels`, and a kernel WRITE+DECODE of write_then_decode for each two whose names begin with the same word and
    that support something in common."""
    pairs = {}
    for write in kernels.values():
        for decode in kernels.values():
            if (write.operation.name, decode.operation.name) != ("reshape_and_cache", "paged_decode_attention"):
                continue
            pair = None
            if _family(write.name) == _family(decode.name):
                with suppress(Exception):  # a predicate of the author's raises: that is said of the kernel itself
                    pair = paired(write, decode)
            if pair is not None:
                pairs[pair.name] = pair
    return {**kernels, **{name: pair for name, pair in pairs.items() if name not in kernels}}


def paired(write: Kernel, decode: Kernel) -> Kernel | None:
    """The kernel WRITE+DECODE of write_then_decode; None where the two support nothing in common."""
    declared = _both(write.declared, decode.declared)
    if declared is None:
        return None
    operation = OPERATIONS["write_then_decode"]
    return Kernel(f"{write.name}+{decode.name}", operation, _one_after_the_other(write, decode), declared)


def _family(name: str) -> str:
    return peers.family(name) or re.split(r"[_-]", name, maxsplit=1)[0]


def _one_after_the_other(write: Kernel, decode: Kernel) -> Callable[..., Any]:
    def write_then_decode(
        key: Any,
        value: Any,
        k_cache: Any,
        v_cache: Any,
        slot_mapping: Any,
        q: Any,
        block_tables: Any,
        context_lens: Any,
        scale: float,
    ) -> Any:
        write.call(key, value, k_cache, v_cache, slot_mapping)
        return decode.call(q, k_cache, v_cache, block_tables, context_lens, scale)

    write_then_decode.parts = (write.call, decode.call)  # type: ignore[attr-defined]  # whose kernels it runs
    return write_then_decode


def _both(write: Declaration, decode: Declaration) -> Declaration | None:
    """What both of a pair support; None if that is nothing. What only a decode is asked for is the decode's."""

    def common(name: str) -> tuple[str, ...]:
        return tuple(item for item in getattr(decode, name) if item in getattr(write, name))

    def sizes(what: str) -> Any:
        mine, other = getattr(decode, what), getattr(write, what)
        if mine is None or other is None:
            return other if mine is None else mine
        if callable(mine) and callable(other):
            return lambda size: mine(size) and other(size)
        listed, asked = (other, decode) if callable(mine) else (mine, write)
        return tuple(size for size in listed if asked.supports_size(what, size))

    layouts = [set(each.cache_layouts) for each in (write, decode)]
    devices = decode.devices if write.devices == "any" else write.devices
    if "any" not in (write.devices, decode.devices):
        devices = common("devices")
    declared = replace(
        decode,
        dtypes=common("dtypes"),
        head_dims=sizes("head_dims"),
        block_sizes=sizes("block_sizes"),
        index_dtypes=common("index_dtypes"),
        cache_layouts=tuple(one for one in CACHE_LAYOUTS if all(one in each or "strided" in each for each in layouts)),
        deterministic=write.deterministic and decode.deterministic,
        rejects=False,
        devices=devices,
        most_slots=min((most for most in (write.most_slots, decode.most_slots) if most is not None), default=None),
        token_strides=min(write.token_strides, decode.token_strides, key=("contiguous", "any").index),
    )
    needed = (declared.dtypes, declared.index_dtypes, declared.cache_layouts, declared.devices)
    return (
        declared if all(needed) and all(_some_size(declared, what) for what in ("head_dims", "block_sizes")) else None
    )


def _some_size(declared: Declaration, what: str) -> bool:
    listed = getattr(declared, what)
    return any(map(listed, range(1, MOST + 1))) if callable(listed) else listed is None or len(listed) > 0
