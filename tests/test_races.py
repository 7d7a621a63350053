"""What is said of kernels whose programs get in each other's way, and of odd ones whose programs do not."""

# The kernels here are what a user would write, without types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import triton
import triton.language as tl

from pagefuzz.fuzz import saved as saving
from pagefuzz.fuzz.order import permutation
from pagefuzz.fuzz.session import Session
from pagefuzz.fuzz.verdict import PASS, Judge, Verdict
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache
from pagefuzz.strategies.case import Case
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.tests.killing import find, runner

if type(tl.sum).__name__ != "InterpretedFunction":
    pytest.skip("this process compiles kernels; set TRITON_INTERPRET=1 before it starts", allow_module_level=True)

CASE = ReshapeAndCacheCase(
    block_size=2, num_blocks=4, slots=(4, 1, 2), num_kv_heads=2, head_dim=2, seed=3, relations=("I17",)
)


@triton.jit
def copy_token(source, source_row, key_stride, target, target_row, SIZE: tl.constexpr, P: tl.constexpr):
    i = tl.arange(0, P)
    mask = i < tl.where((source_row >= 0) & (target_row >= 0), SIZE, 0)
    tl.store(target + target_row * SIZE + i, tl.load(source + source_row * key_stride + i, mask=mask), mask=mask)


@triton.jit
def copied_twice(key, cache, slots, stride, SIZE: tl.constexpr, P: tl.constexpr):
    """Each token by two programs."""
    t = tl.program_id(0).to(tl.int64)
    copy_token(key, t, stride, cache, tl.load(slots + t).to(tl.int64), SIZE, P)


@triton.jit
def by_one_program(key, cache, slots, stride, T, SIZE: tl.constexpr, P: tl.constexpr):
    for t in range(T):
        copy_token(key, t, stride, cache, tl.load(slots + t).to(tl.int64), SIZE, P)


@triton.jit
def padding_to_slot_0(key, cache, slots, stride, SIZE: tl.constexpr, P: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    copy_token(key, t, stride, cache, tl.where(slot < 0, 0, slot), SIZE, P)


@triton.jit
def stage(key, workspace, slots, stride, SIZE: tl.constexpr, P: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    copy_token(key, t, stride, workspace, t, SIZE, P)


@triton.jit
def unstage(workspace, cache, slots, stride, SIZE: tl.constexpr, P: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    copy_token(workspace, t, SIZE, cache, tl.load(slots + t).to(tl.int64), SIZE, P)


@triton.jit
def stage_and_unstage(key, cache, workspace, slots, stride, T, SIZE: tl.constexpr, P: tl.constexpr):
    """Program t stages token t and stores the one that the program before it staged; the last one its own too."""
    t = tl.program_id(0).to(tl.int64)
    copy_token(key, t, stride, workspace, t, SIZE, P)
    copy_token(workspace, t - 1, SIZE, cache, tl.load(slots + t - 1, mask=t > 0, other=-1).to(tl.int64), SIZE, P)
    last = tl.load(slots + t, mask=t == T - 1, other=-1).to(tl.int64)
    copy_token(workspace, t, SIZE, cache, last, SIZE, P)


@triton.jit
def last_one_stores(key, cache, workspace, counter, slots, stride, T, SIZE: tl.constexpr, P: tl.constexpr):
    """Every program stages its token; the last to arrive stores them all."""
    t = tl.program_id(0).to(tl.int64)
    copy_token(key, t, stride, workspace, t, SIZE, P)
    if tl.atomic_add(counter, 1) == T - 1:
        for each in range(T):
            copy_token(workspace, each, SIZE, cache, tl.load(slots + each).to(tl.int64), SIZE, P)


@triton.jit
def first_come(key, cache, counter, slots, stride, SIZE: tl.constexpr, P: tl.constexpr):
    """The program that takes number 0 stores -x in place of x: the trouble of numbers taken in turn."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    sign = tl.where(tl.atomic_add(counter, 1) == 0, -1.0, 1.0)
    i = tl.arange(0, P)
    mask = i < tl.where(slot >= 0, SIZE, 0)
    tl.store(cache + slot * SIZE + i, tl.load(key + t * stride + i, mask=mask) * sign, mask=mask)


@triton.jit
def with_neighbour(key, cache, slots, stride, last, SIZE: tl.constexpr, P: tl.constexpr):
    """Stores a token, and what lies in the slot after it back to where it lies."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    copy_token(cache, tl.where(slot < last, slot + 1, -1), SIZE, cache, slot + 1, SIZE, P)
    copy_token(key, t, stride, cache, slot, SIZE, P)


@triton.jit
def slots_of(block_tables, seq_ids, positions, out, table_stride, block_size):
    t = tl.program_id(0)
    position = tl.load(positions + t).to(tl.int64)
    b = tl.load(seq_ids + t, mask=position >= 0, other=0).to(tl.int64)
    at = block_tables + b * table_stride + position // block_size
    block = tl.load(at, mask=position >= 0, other=0).to(tl.int64)
    tl.store(out + t, tl.where(position >= 0, block * block_size + position % block_size, -1))
    tl.store(at, block, mask=position >= 0)


def write(launch: Callable[..., None]) -> Kernel:
    """A kernel of reshape_and_cache: launch(key, cache, slots, P) for each of the two caches."""

    def call(key, value, k_cache, v_cache, slot_mapping) -> None:
        if len(slot_mapping):
            for new, cache in ((key, k_cache), (value, v_cache)):
                size = cache.shape[2] * cache.shape[3]
                launch(new, cache, slot_mapping, {"SIZE": size, "P": triton.next_power_of_2(size)})

    return Kernel("under_test", OPERATIONS["reshape_and_cache"], call, Declaration())


@write
def twice(key, cache, slots, sizes) -> None:
    copied_twice[(len(slots), 2)](key, cache, slots, key.stride(0), **sizes)


@write
def alone(key, cache, slots, sizes) -> None:
    by_one_program[(1,)](key, cache, slots, key.stride(0), len(slots), **sizes)


@write
def padded_to_0(key, cache, slots, sizes) -> None:
    padding_to_slot_0[(len(slots),)](key, cache, slots, key.stride(0), **sizes)


@write
def two_launches(key, cache, slots, sizes) -> None:
    workspace = torch.empty(len(slots), sizes["SIZE"], dtype=key.dtype)
    stage[(len(slots),)](key, workspace, slots, key.stride(0), **sizes)
    unstage[(len(slots),)](workspace, cache, slots, key.stride(0), **sizes)


@write
def one_launch(key, cache, slots, sizes) -> None:
    workspace = torch.empty(len(slots), sizes["SIZE"], dtype=key.dtype)
    stage_and_unstage[(len(slots),)](key, cache, workspace, slots, key.stride(0), len(slots), **sizes)


@write
def last_one(key, cache, slots, sizes) -> None:
    workspace, counter = torch.empty(len(slots), sizes["SIZE"], dtype=key.dtype), torch.zeros(1, dtype=torch.int32)
    last_one_stores[(len(slots),)](key, cache, workspace, counter, slots, key.stride(0), len(slots), **sizes)


@write
def in_turn(key, cache, slots, sizes) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    first_come[(len(slots),)](key, cache, counter, slots, key.stride(0), **sizes)


@write
def neighbour_too(key, cache, slots, sizes) -> None:
    last = cache.shape[0] * cache.shape[1] - 1
    with_neighbour[(len(slots),)](key, cache, slots, key.stride(0), last, **sizes)


def verdict(kernel: Kernel, case: Case = CASE, asked: tuple[str, ...] | None = None) -> Verdict:
    return Judge(kernel, runner()).verdict(case, asked)


def said(kernel: Kernel, case: Case = CASE, asked: tuple[str, ...] | None = None) -> tuple[str, str, str, str]:
    """The invariant that is named, what was seen, what is right, where."""
    found = verdict(kernel, case, asked)
    assert found.violation is not None, found
    return found.named, found.violation.seen, found.violation.right, found.violation.where


@pytest.mark.parametrize("kernel", [alone, two_launches, last_one], ids=["alone", "two launches", "last one"])
def test_odd_and_right(kernel: Kernel) -> None:
    assert find(kernel, examples=250, seed=1) is None


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("relations", [(), ("I17",)])
def test_the_right_token_written_twice(relations: tuple[str, ...]) -> None:
    assert said(twice, replace(CASE, relations=relations)) == (
        "I17",
        "programs (1, 0, 0) and (1, 1, 0) both wrote element 4 of k_cache (12 elements of k_cache in all)",
        "no program writes what another one of its launch writes",
        "k_cache, element 4 = block 0, offset 1, kv head 0, dim 0",
    )
    found = verdict(twice, replace(CASE, relations=relations))
    assert found.also == ()


def test_a_token_read_from_where_the_program_before_left_it() -> None:
    """Right in ascending order, so that nothing but the trace shows it; wrong in any other."""
    race = (
        "program (1, 0, 0) read element 0 of workspace, which program (0, 0, 0) of the same launch wrote "
        "(8 elements of workspace in all)"
    )
    for order in (0, 1, 2, 3):
        found = verdict(one_launch, replace(CASE, order=order, relations=()))
        assert found.named == "I17" and found.violation is not None and found.violation.seen == race
        assert found.violation.where == ""
        assert found.also == (("I4", "I6") if permutation(order, 3) != [0, 1, 2] else ())
    assert said(one_launch)[2] == "no program reads what another one of its launch writes"


def test_a_race_is_named_before_what_comes_of_it_but_not_before_its_cause() -> None:
    padded = replace(CASE, slots=(-1, 0, -1))
    found = verdict(padded_to_0, padded)
    assert found.named == "I1" and set(found.also) == {"I4", "I6", "I17"}
    assert verdict(padded_to_0, padded, asked=("I6", "I17")).named == "I17"


def test_a_kernel_that_is_not_deterministic_is_not_asked() -> None:
    kernel = replace(twice, declared=Declaration(deterministic=False))
    assert verdict(kernel).kind == PASS


def test_a_race_is_looked_for_in_every_case_but_counts_as_judged_only_with_a_second_run() -> None:
    kernel = Kernel("good", OPERATIONS["reshape_and_cache"], triton_reshape_and_cache, Declaration())
    with_it, without = verdict(kernel), verdict(kernel, replace(CASE, relations=()))
    assert with_it.kind == without.kind == PASS
    assert "I17" in with_it.judged and "I17" not in without.judged
    assert (with_it.runs, without.runs) == (2, 1)


@pytest.mark.parametrize("steady", [True, False])
def test_a_race_is_reported_whether_or_not_it_comes_back(steady: bool, tmp_path: Path) -> None:
    calls: list[int] = []

    def call(key, value, k_cache, v_cache, slot_mapping) -> None:
        calls.append(1)
        good = triton_reshape_and_cache
        (twice.call if steady or len(calls) == 1 else good)(key, value, k_cache, v_cache, slot_mapping)

    kernel = replace(twice, call=call)
    judge = Judge(kernel, runner())
    session = Session(device="cpu", examples=1, seed=1, kernels={"under_test": kernel}, home=tmp_path)
    text = str(session.failure(judge, CASE, judge.verdict(CASE)))
    saved, case = saving.read(next((tmp_path / saving.FAILURES).iterdir()))
    if steady:
        assert text.startswith("I17 violated by under_test") and " both wrote element 0 of k_cache" in text
        assert saved.kind == "failure" and isinstance(case, ReshapeAndCacheCase) and case.slots == (0,)
    else:
        assert (
            text.startswith("not repeatable: under_test broke I17 once") and " both wrote element 4 of k_cache" in text
        )
        assert saved.kind == "not repeatable" and case == CASE


# ---------------------------------------------------------------------------------------------------------------- order


def test_what_depends_on_the_order_of_programs() -> None:
    """A launch with atomics has no races; what it does is compared in another order."""
    asked = ("I17",)
    named, seen, right, where = said(in_turn, asked=asked)
    assert named == "I17"
    assert seen.startswith("k_cache holds 0x") and right == "the same bits"
    assert " with the programs in ascending order, 0x" in seen and seen.endswith(
        " with the programs in descending order"
    )
    assert where == "token 0, slot 4 (block 2, offset 0), kv head 0, dim 0"
    seen = said(in_turn, replace(CASE, order=1), asked)[1]
    assert " in descending order, 0x" in seen and seen.endswith(" in ascending order")
    assert " in an order shuffled by the seed 5, 0x" in said(in_turn, replace(CASE, order=5), asked)[1]
    assert verdict(in_turn, replace(CASE, slots=(4,)), asked).kind == PASS  # one program has one order


def test_what_changes_with_every_run_is_not_blamed_on_the_order() -> None:
    for period in (2, 3, 100):
        calls: list[int] = []

        def changing(key, value, k_cache, v_cache, slot_mapping, calls=calls, period=period) -> None:
            calls.append(1)
            triton_reshape_and_cache(key + len(calls) % period, value, k_cache, v_cache, slot_mapping)

        kernel = Kernel("changing", OPERATIONS["reshape_and_cache"], changing, Declaration())
        named, seen, _, where = said(kernel, asked=("I17",))
        assert named == "I17" and " in the first run, 0x" in seen and seen.endswith(" in a second run")
        assert where.startswith("token 0, slot 4")


# ------------------------------------------------------------------------------------------ stores of the same bits


def test_a_neighbour_put_back_where_it_lay() -> None:
    assert said(neighbour_too, replace(CASE, slots=(4,))) == (
        "I6",
        "a store to 4 elements that the call must leave alone; the bits are the same afterwards, but the store "
        "happens, and undoes what another program or stream writes there meanwhile",
        "nothing but the addressed slots is stored to",
        "k_cache, element 20 = block 2, offset 1, kv head 0, dim 0",
    )
    found = verdict(neighbour_too, replace(CASE, slots=(4, 5)))  # here the neighbour is another token's
    assert found.named == "I17"


def test_an_input_put_back_where_it_lay() -> None:
    from pagefuzz.strategies.case import Sequence
    from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token

    def slot_mapping(block_tables, seq_ids, positions, block_size):
        out = torch.empty(len(positions), dtype=torch.int64)
        if len(positions):
            slots_of[(len(positions),)](block_tables, seq_ids, positions, out, block_tables.stride(0), block_size)
        return out

    rows = (Sequence((2, 0), (99999,), 6), Sequence((1,), (3, -1), 3))
    case = SlotMappingCase(block_size=4, num_blocks=4, sequences=rows, tokens=(Token(0, 5), Token(7, -1)))
    named, seen, right, where = said(Kernel("s", OPERATIONS["slot_mapping"], slot_mapping, Declaration()), case)
    assert (named, right, where) == (
        "I6",
        "the call stores to no input",
        "block_tables, element 1 = row 0, column 1 of 3",
    )
    assert seen.startswith("a store to 1 element that the call must leave alone; the bits are the same afterwards")


def test_a_case_in_another_order_says_so() -> None:
    assert CASE.lines()[0].startswith("pool of") and "programs in another order" not in CASE.features()
    for order, words in ((1, "in descending order"), (7, "in an order shuffled by the seed 7")):
        case = replace(CASE, order=order)
        assert case.lines() == [f"the programs of each launch run {words}", *CASE.lines()]
        assert "programs in another order" in case.features() and f"order={order}" in case.one_line()
        assert CASE in case.simpler() and replace(CASE, order=1) in replace(CASE, order=7).simpler()
