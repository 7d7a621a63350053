"""The arena on a device: what it sees of a run, and that nothing of one case reaches the next.

The dense one runs on the CPU's memory too, as on any torch device; the one of CUDA needs a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagefuzz.fuzz.cuda_arena import MOST_GRANULES, NOWHERE, CudaArena
from pagefuzz.fuzz.device_arena import CHUNK, LEAST_BYTES, MARGIN, SMALL, DeviceArena, arena_bytes
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.session import choose, load_own
from pagefuzz.fuzz.verdict import Judge
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, InvalidCase, Sequence, arguments_of
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase

SIZE = 1 << 28
WRITE = ReshapeAndCacheCase(block_size=4, num_blocks=3, slots=(9, -1, 2), num_kv_heads=2, head_dim=2, seed=3)
ROWS = (Sequence((2, 0), (99999,), 6), Sequence((1,), (3, -1), 3))
DECODE = PagedDecodeAttentionCase(
    block_size=4, num_blocks=4, sequences=ROWS, num_kv_heads=2, group_size=2, head_dim=2, poison="nan", seed=3
)


@pytest.fixture(scope="module", params=["dense", "cuda"])
def arena(request: pytest.FixtureRequest) -> Iterator[DeviceArena]:
    if request.param == "dense":
        yield DeviceArena(torch.device("cpu"), SIZE)
        return
    if not torch.cuda.is_available():
        pytest.skip("CUDA's driver maps the memory of this arena: it needs a card")
    yield CudaArena(torch.device("cuda"))


def observe(arena: DeviceArena, case: Case, call: Callable[..., Any]) -> Observation:
    kernel = Kernel("under test", OPERATIONS[case.operation], call, Declaration())
    return Runner(arena, interpreted=False).observe(kernel, case)


def is_poison(arena: DeviceArena, first: int, last: int) -> bool:
    return bool((arena.memory[first:last] == 255).all())


def test_what_is_placed_lies_in_the_tensors_and_the_kernel_changes_it(arena: DeviceArena) -> None:
    seen: dict[str, np.ndarray] = {}

    def write(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
        seen.update(key=key.clone().cpu().numpy(), slots=slot_mapping.clone().cpu().numpy())
        assert key.device.type == arena.device.type
        k_cache.view(-1, 2, 2)[9] = key[0]

    found = observe(arena, WRITE, write)
    assert seen["slots"].tolist() == [9, -1, 2]
    tensor = arguments_of(WRITE).tensors["key"]
    assert np.array_equal(seen["key"].reshape(-1).view(np.uint32), tensor.buffer.pieces[0][1][: tensor.buffer.size])
    assert list(found.changes) == ["k_cache"] and found.changes["k_cache"].elements.tolist() == [36, 37, 38, 39]
    assert np.array_equal(found.changes["k_cache"].after, seen["key"][0].reshape(-1).view(np.uint32))
    assert np.array_equal(found.watched["k_cache"][0], seen["key"][0].reshape(-1).view(np.uint32))
    assert found.touched == {} and found.loads is None


def test_the_output_comes_along(arena: DeviceArena) -> None:
    found = observe(arena, DECODE, lambda q, *others: (q * 2).transpose(0, 1).contiguous().transpose(0, 1))
    assert found.output is not None and found.output.dtype == "float32" and found.output.bits.shape == (2, 4, 2)
    right = 2 * DECODE.query_values().astype(np.float32)
    assert np.array_equal(found.output.bits.view(np.float32), right)
    nothing = replace(DECODE, sequences=())
    assert observe(arena, nothing, lambda q, *others: q).output is not None


@pytest.mark.parametrize("where", [-1, -64, -MARGIN, -SMALL // 4, 48, 48 + 64])
def test_a_stray_write_near_a_tensor_is_named_to_the_element(arena: DeviceArena, where: int) -> None:
    def stray(key: Any, value: Any, k_cache: Any, *others: Any) -> None:
        torch.as_strided(k_cache, (1,), (1,), k_cache.storage_offset() + where)[0] = 5.0

    found = observe(arena, WRITE, stray)
    ((name, change),) = found.changes.items()
    if isinstance(arena, CudaArena) and where == -SMALL // 4:  # no memory of its own
        assert name == NOWHERE and len(change.elements) == 1
    else:
        assert name == "k_cache" and change.elements.tolist() == [where]
    assert change.after.tolist() == [int(np.float32(5.0).view(np.uint32))]
    assert observe(arena, WRITE, lambda *arguments: None).changes == {}


def test_a_stray_write_far_from_everything_is_seen_and_gone_for_the_next_case(arena: DeviceArena) -> None:
    large = ReshapeAndCacheCase(block_size=16, num_blocks=40_000, slots=(5,), head_dim=8, seed=1)  # 20 MB
    distance = 3 << 20  # elements

    def stray(key: Any, value: Any, k_cache: Any, *others: Any) -> None:
        torch.as_strided(k_cache, (1,), (1,), k_cache.storage_offset() - distance)[0] = 5.0

    found = observe(arena, large, stray)
    ((name, change),) = found.changes.items()
    if isinstance(arena, CudaArena):
        assert name == NOWHERE and len(change.elements) == 1
    else:
        assert name == "k_cache" and change.elements.tolist() == [-distance]
    assert observe(arena, large, lambda *arguments: None).changes == {}


def test_nothing_of_a_case_reaches_the_next(arena: DeviceArena) -> None:
    starts: list[tuple[int, int]] = []

    def scribble(*arguments: Any) -> None:
        starts.extend((start, start + buffer.size * 4) for start, buffer in arena.places)
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                argument.fill_(1)

    for case in (WRITE, DECODE):
        starts.clear()
        assert observe(arena, case, scribble).changes
        assert starts and all(is_poison(arena, first - 256, last + 256) for first, last in starts)
        assert arena.places == [] and arena.windows == {}


def test_a_run_that_raises_leaves_nothing_either(arena: DeviceArena) -> None:
    def raises(key: Any, *others: Any) -> None:
        key.fill_(7)
        raise ValueError("no")

    found = observe(arena, WRITE, raises)
    assert found.raised is not None and found.raised.message == "no" and list(found.changes) == ["key"]
    assert observe(arena, WRITE, lambda *arguments: None).changes == {}


def test_a_case_that_nobody_looked_at_leaves_nothing(arena: DeviceArena) -> None:
    """As where a run is interrupted."""
    arena.place(arguments_of(WRITE))
    places = [(start, start + buffer.size * 4) for start, buffer in arena.places]
    assert not any(is_poison(arena, first, last) for first, last in places[:1])
    arena.forget()
    assert all(is_poison(arena, first, last) for first, last in places)


def test_a_case_that_does_not_fit_leaves_the_arena_empty(arena: DeviceArena) -> None:
    many = ReshapeAndCacheCase(num_kv_heads=1, head_dim=1, block_size=1, num_blocks=2**60, slots=(0,))
    with pytest.raises(InvalidCase, match="more than the"):
        observe(arena, many, lambda *arguments: None)
    assert observe(arena, WRITE, lambda *arguments: None).changes == {}


def test_every_invariant_can_judge_a_stray_write(arena: DeviceArena) -> None:
    def narrow(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
        for cache in (k_cache, v_cache):
            torch.as_strided(cache, (2,), (1,), cache.storage_offset() - (3 << 20))[1] = key.reshape(-1)[0]

    kernel = Kernel("narrow", OPERATIONS["reshape_and_cache"], narrow, Declaration())
    for dtype in ("float32", "float16", "bfloat16"):
        verdict = Judge(kernel, Runner(arena, interpreted=False)).verdict(replace(WRITE, dtype=dtype))
        assert {verdict.named, *verdict.also} >= {"I4", "I6"}


@pytest.mark.parametrize("name", ["torch_slot_mapping", "torch_reshape_and_cache", "torch_paged_decode_attention"])
def test_right_kernels_pass(arena: DeviceArena, name: str) -> None:
    load_own()
    kernel = choose([name])[name]
    judge = Judge(kernel, Runner(arena, interpreted=False))
    relations = tuple(item.id for item in judge.invariants if item.relation)
    verdicts: Counter[str] = Counter()
    drawn = STRATEGIES[kernel.operation.name](kernel.declared, judge.runner.limits, relations, (1, 2))
    each_case(drawn, 60, 5, lambda case: verdicts.update([judge.verdict(case).kind]))
    assert verdicts == {"pass": 60}


def test_far_offsets_take_no_memory_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA's driver maps the memory of this arena: it needs a card")
    arena = CudaArena(torch.device("cuda"))
    free = torch.cuda.mem_get_info()[0]
    block = 2**31 // (16 * 64) + 1
    slots = (*(16 * (block + 9 * at) for at in range(2 * MOST_GRANULES)), 7)
    case = ReshapeAndCacheCase(block_size=16, num_blocks=block + 10 * len(slots), slots=slots, head_dim=64, seed=1)

    def write(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
        k_cache.view(-1, 1, 64)[slot_mapping.long()] = key[: len(slot_mapping)]
        v_cache.view(-1, 1, 64)[slot_mapping.long()] = value[: len(slot_mapping)]

    for _ in range(3):
        found = observe(arena, case, write)
        assert len(found.changes["k_cache"].elements) == 64 * len(slots)
        assert observe(arena, WRITE, lambda *arguments: None).changes == {}
    assert len(arena.own) <= MOST_GRANULES
    assert free - torch.cuda.mem_get_info()[0] < 1 << 30


def test_the_size_of_a_dense_arena() -> None:
    assert arena_bytes(200 << 30, 1) == 1 << 36
    assert arena_bytes(24 << 30, 2) == 1 << 33
    assert arena_bytes(8 << 30, 4) == 1 << 30
    assert LEAST_BYTES % CHUNK == 0
    with pytest.raises(RuntimeError, match=r"4\.0 GiB.*4 workers want 1 GiB each: use fewer \(-n\)"):
        arena_bytes(4 << 30, 4)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="it is CUDA's runtime that remembers an error: it needs a card"
)
def test_an_error_that_a_kernel_raises_does_not_stay_behind() -> None:
    def mine(*arguments: Any) -> None:
        # No such memory: an error, of no launch, which is remembered.
        torch.cuda.cudart().cudaHostUnregister(64)  # type: ignore[no-untyped-call]
        raise ValueError("mine")

    arena = CudaArena(torch.device("cuda"))
    for _ in range(2):
        seen = observe(arena, WRITE, mine)
        assert not seen.ended and seen.raised is not None and seen.raised.message == "mine"
    assert observe(arena, WRITE, lambda *arguments: None).raised is None
