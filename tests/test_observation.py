"""What a run of a kernel is seen to do: `Runner.observe`."""

# The kernels here are what a user would write, without types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.kernels.triton_paged_decode_attention import triton_paged_decode_attention
from pagefuzz.kernels.triton_reshape_and_cache import triton_reshape_and_cache
from pagefuzz.oracles.observation import Observation, Output, Raised, Wild
from pagefuzz.strategies.case import Case, Sequence
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.killing import runner

if type(tl.sum).__name__ != "InterpretedFunction":
    pytest.skip("this process compiles kernels; set TRITON_INTERPRET=1 before it starts", allow_module_level=True)

ROWS = (Sequence((2, 0), (99999,), 6), Sequence((1,), (3, -1), 3))
DECODE = PagedDecodeAttentionCase(block_size=4, num_blocks=4, sequences=ROWS, group_size=2, head_dim=2, seed=3)
WRITE = ReshapeAndCacheCase(block_size=4, num_blocks=3, slots=(9, -1, 2), num_kv_heads=2, head_dim=2, seed=3)
SLOTS = SlotMappingCase(block_size=4, num_blocks=4, sequences=ROWS, tokens=(Token(0, 5), Token(1, 2), Token(7, -1)))


def observe(case: Case, call: Callable[..., Any]) -> Observation:
    return runner().observe(Kernel("under test", OPERATIONS[case.operation], call, Declaration()), case)


# ------------------------------------------------------------------------------------------------------------ arguments


def test_arguments_go_by_position_in_the_order_of_the_contract() -> None:
    seen: list[Any] = []

    def kernel(*arguments: Any, **keywords: Any) -> None:
        assert not keywords
        seen.append([tuple(each.shape) if isinstance(each, torch.Tensor) else each for each in arguments])

    for case in (WRITE, DECODE, SLOTS):
        observe(case, kernel)
    assert seen == [
        [(3, 2, 2), (3, 2, 2), (3, 4, 2, 2), (3, 4, 2, 2), (3,)],
        [(2, 2, 2), (4, 4, 1, 2), (4, 4, 1, 2), (2, 3), (2,), 1.0],
        [(2, 3), (3,), (3,), 4],
    ]


@pytest.mark.parametrize("case", [WRITE, DECODE, SLOTS], ids=lambda case: case.operation)
def test_check_values_is_passed_for_faults_of_values_only(case: Any) -> None:
    passed: dict[str, Any] = {}

    def kernel(*arguments: Any, **keywords: Any) -> None:
        passed[fault] = keywords

    for fault in ("", case.faults[0], *case.value_faults):
        observe(replace(case, fault=fault), kernel)
    wanted: dict[str, Any] = {"": {}, case.faults[0]: {}}
    assert passed == wanted | {fault: {"check_values": True} for fault in case.value_faults}


# --------------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_output_is_kept_bit_for_bit(dtype: str) -> None:
    bits = np.array([0x8001, 0x7FFF, 0x0001, 0xFFC1, 0, 0x8000, 0x3F80, 0x7F81], dtype=np.uint16)
    if dtype == "float32":
        bits = np.array([0x80000001, 0x7FFFFFFF, 1, 0xFF800001, 0, 0x80000000, 0x3F800000, 0x7F800001], dtype=np.uint32)
    signed = torch.from_numpy(bits.view(np.int32 if dtype == "float32" else np.int16).copy())
    out = signed.view(getattr(torch, dtype)).reshape(2, 2, 2)
    seen = observe(replace(DECODE, dtype=dtype), lambda *arguments: out)
    assert seen.finished and seen.output is not None
    assert (seen.output.dtype, seen.output.bits.shape) == (dtype, (2, 2, 2))
    assert seen.output.bits.reshape(-1).tolist() == bits.tolist()


def test_the_output_is_a_copy() -> None:
    """It must outlive the arena, and what the kernel does with its tensor later."""
    kept: list[torch.Tensor] = []

    def kernel(q, *rest: Any):
        kept.append(q.mul_(1))
        return kept[0]

    seen = observe(DECODE, kernel)
    assert seen.output is not None
    before = seen.output.bits.copy()
    assert before.any()
    observe(replace(DECODE, seed=4), lambda *arguments: None)
    assert np.array_equal(seen.output.bits, before)
    out = torch.ones(2, 2, 2)
    seen = observe(DECODE, lambda *arguments: out)
    out.zero_()
    assert seen.output is not None and seen.output.bits.all()


def test_an_output_of_odd_strides_that_requires_a_gradient() -> None:
    wide = torch.arange(16.0).reshape(2, 2, 4).requires_grad_()
    seen = observe(DECODE, lambda *arguments: wide[:, :, ::2])
    assert seen.output is not None
    assert seen.output.bits.view(np.float32).reshape(-1).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_slots_are_int64() -> None:
    seen = observe(SLOTS, torch_slot_mapping)
    assert seen.output is not None and (seen.output.dtype, seen.output.bits.tolist()) == ("int64", [1, 6, -1])


@pytest.mark.parametrize(
    ("case", "returned", "said"),
    [
        (DECODE, None, "returned NoneType, not a tensor"),
        (DECODE, (torch.zeros(2, 2, 2),), "returned tuple, not a tensor"),
        (DECODE, np.zeros((2, 2, 2), np.float32), "returned ndarray, not a tensor"),
        (
            DECODE,
            torch.zeros(2, 2, 2, dtype=torch.float64),
            "returned torch.float64 (2, 2, 2) on cpu, where the contract says torch.float32 (2, 2, 2) on cpu",
        ),
        (
            DECODE,
            torch.zeros(2, 4),
            "returned torch.float32 (2, 4) on cpu, where the contract says torch.float32 (2, 2, 2) on cpu",
        ),
        (
            DECODE,
            torch.zeros(2, 2, 2, device="meta"),
            "returned torch.float32 (2, 2, 2) on meta, where the contract says torch.float32 (2, 2, 2) on cpu",
        ),
        (
            SLOTS,
            torch.zeros(3, dtype=torch.int32),
            "returned torch.int32 (3,) on cpu, where the contract says torch.int64 (3,) on cpu",
        ),
        (
            SLOTS,
            torch.zeros(3, 1, dtype=torch.int64),
            "returned torch.int64 (3, 1) on cpu, where the contract says torch.int64 (3,) on cpu",
        ),
    ],
)
def test_what_the_contract_does_not_say_is_misreturned(case: Case, returned: Any, said: str) -> None:
    seen = observe(case, lambda *arguments: returned)
    assert (seen.misreturned, seen.output, seen.finished) == (said, None, False)


@pytest.mark.parametrize("returned", [None, 5, torch.zeros(3), "done"])
def test_what_a_write_returns_is_nobodys_business(returned: Any) -> None:
    seen = observe(WRITE, lambda *arguments: returned)
    assert seen.finished and seen.output is None and seen.misreturned == ""


@pytest.mark.parametrize(
    "fresh",
    [
        lambda q: torch.empty(q.shape, dtype=q.dtype),
        torch.empty_like,
        lambda q: q.new_empty(q.shape),
        lambda q: torch.empty_strided(q.shape, q.stride(), dtype=q.dtype),
    ],
    ids=["empty", "empty_like", "new_empty", "empty_strided"],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fresh_memory_is_nan(dtype: str, fresh: Callable[[torch.Tensor], torch.Tensor]) -> None:
    nan: list[bool] = []

    def kernel(q, *rest: Any):
        out = fresh(q)
        nan.append(bool(out.isnan().all()))
        return out

    assert observe(replace(DECODE, dtype=dtype), kernel).finished
    assert nan == [True]


# -------------------------------------------------------------------------------------------------------------- raising


@triton.jit
def raising_kernel(x):
    tl.static_assert(False, "on purpose")


def fails_on_the_host(*arguments: Any) -> None:
    raise RuntimeError("two\n  lines   of it")


def fails_in_the_launch(key, value, k_cache, v_cache, slot_mapping):
    raising_kernel[(1,)](key)


def test_an_error_of_the_host_names_its_line() -> None:
    seen = observe(WRITE, fails_on_the_host)
    line = fails_on_the_host.__code__.co_firstlineno + 1
    assert seen.raised == Raised("RuntimeError", "two lines of it", f"test_observation.py, line {line}", False)
    assert not seen.finished and seen.output is None and seen.wild is None
    assert str(seen.raised) == f"RuntimeError: two lines of it (at test_observation.py, line {line})"


def test_an_error_within_a_launch_says_so() -> None:
    seen = observe(WRITE, fails_in_the_launch)
    assert seen.raised is not None and seen.raised.inside_launch
    assert "on purpose" in seen.raised.message and seen.raised.where.startswith("test_observation.py, line ")
    assert not seen.finished


def test_a_long_message_is_cut() -> None:
    def kernel(*arguments: Any) -> None:
        raise ValueError("x" * 10_000)

    raised = observe(WRITE, kernel).raised
    assert raised is not None and len(raised.message) == 500


def test_what_was_written_before_an_error_is_seen() -> None:
    def kernel(key, value, k_cache, v_cache, slot_mapping):
        k_cache[0, 0, 0, 0] += 1
        raise ValueError("too late")

    seen = observe(WRITE, kernel)
    assert seen.raised is not None and seen.changes["k_cache"].elements.tolist() == [0]


@pytest.mark.parametrize("error", [SystemExit, pytest.skip.Exception, AssertionError, MemoryError])
def test_a_kernel_that_exits_or_skips_has_raised(error: type[BaseException]) -> None:
    def kernel(*arguments: Any) -> None:
        raise error("on purpose")

    raised = observe(WRITE, kernel).raised
    assert raised is not None and (raised.type, raised.message) == (error.__name__, "on purpose")


def test_what_a_kernel_sets_of_numpy_stays_with_it() -> None:
    before = np.geterr()

    def kernel(*arguments: Any) -> None:
        np.seterr(all="raise")

    observe(WRITE, kernel)
    assert np.geterr() == before


def test_an_interrupt_is_not_observed() -> None:
    def kernel(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(WRITE, kernel)
    assert observe(WRITE, torch_reshape_and_cache).finished


# -------------------------------------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    ("case", "call"),
    [(WRITE, torch_reshape_and_cache), (DECODE, torch_paged_decode_attention), (SLOTS, torch_slot_mapping)],
    ids=["write", "decode", "slots"],
)
def test_accesses_of_torch_are_not_traced(case: Case, call: Callable[..., Any]) -> None:
    seen = observe(case, call)
    assert seen.finished and seen.loads is None and seen.stores is None


def test_accesses_of_a_write_are_those_of_its_tokens() -> None:
    seen = observe(WRITE, triton_reshape_and_cache)
    assert seen.loads is not None and seen.stores is not None
    assert seen.loads["slot_mapping"].tolist() == [0, 1, 2]
    assert seen.loads["key"].tolist() == seen.loads["value"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    for name in ("k_cache", "v_cache"):
        assert seen.stores[name].tolist() == [8, 9, 10, 11, 36, 37, 38, 39]
        assert seen.loads[name].size == 0


def test_accesses_of_attention_are_those_of_owned_slots() -> None:
    seen = observe(DECODE, triton_paged_decode_attention)
    assert seen.loads is not None and seen.stores is not None
    assert seen.loads["block_tables"].tolist() == [0, 1, 3]
    owned = [0, 1, 2, 3, *range(8, 14), *range(16, 24)]  # 2 of block 0, 3 of block 1, all 4 of block 2; D = 2
    for name in ("k_cache", "v_cache"):
        assert seen.loads[name].tolist() == owned
    assert all(seen.stores[name].size == 0 for name in ("q", "k_cache", "v_cache", "block_tables", "context_lens"))


# ----------------------------------------------------------------------------------------------------------- plain data


def test_an_observation_is_small_plain_data() -> None:
    """It may cross to another process, so it must never hold a cache, here of 17 GB."""
    block = 2**32 // 1024 + 1
    far = (
        (ReshapeAndCacheCase(block_size=16, num_blocks=block + 1, slots=(16 * block,), head_dim=64), True),
        (
            PagedDecodeAttentionCase(
                block_size=16, num_blocks=block + 1, sequences=(Sequence((block,), (), 9),), head_dim=64
            ),
            False,
        ),
    )
    for case, write in far:
        seen = observe(case, triton_reshape_and_cache if write else triton_paged_decode_attention)
        assert seen.finished
        packed = pickle.dumps(seen)
        assert len(packed) < 100_000
        loaded = pickle.loads(packed)
        assert loaded.same_result(seen) and loaded.changes.keys() == seen.changes.keys()
    wild = Wild("load", (1, 2, 3), "q", -5, 7, None)
    assert pickle.loads(pickle.dumps(Observation(wild=wild))).wild == wild
    assert str(wild) == "program (1, 2, 3): wild load at element -5 of q (7 lanes)"
    assert str(replace(wild, lanes=1)) == "program (1, 2, 3): wild load at element -5 of q"


def test_the_same_result() -> None:
    def output(*values: float, dtype: str = "float32") -> Output:
        return Output(np.array(values, dtype=np.float32).view(np.uint32), dtype)

    plain = Observation(output=output(1, 2), watched={"k_cache": [np.array([1, 2])]})
    assert plain.same_result(replace(plain, output=output(1, 2)))
    for other in (
        replace(plain, output=output(1, 3)),
        replace(plain, output=None),
        replace(plain, watched={}),
        replace(plain, watched={"v_cache": [np.array([1, 2])]}),
        replace(plain, watched={"k_cache": [np.array([1, 3])]}),
        replace(plain, watched={"k_cache": []}),
        replace(plain, raised=Raised("ValueError", "", "", False)),
        replace(plain, wild=Wild("load", (0, 0, 0), "q", 1, 1, None)),
        replace(plain, misreturned="returned int, not a tensor"),
    ):
        assert not plain.same_result(other) and not other.same_result(plain)
    zeros = Observation(output=output(0.0))
    assert not zeros.same_result(Observation(output=output(-0.0))), "bits, not numbers"
    nan = Observation(output=output(float("nan")))
    assert nan.same_result(Observation(output=output(float("nan"))))


def test_two_runs_of_a_good_kernel_are_the_same() -> None:
    for case, call in ((WRITE, triton_reshape_and_cache), (DECODE, triton_paged_decode_attention)):
        first, second = observe(case, call), observe(case, call)
        assert first.same_result(second)
        assert first.touched == second.touched == {}
