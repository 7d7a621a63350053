"""Pairs of kernels: which there are, what they are called, and what they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagefuzz.fuzz.session import UsageError, check_pools, choose
from pagefuzz.kernels import registry
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import with_pairs
from pagefuzz.kernels.registry import CACHE_LAYOUTS, FLOAT_DTYPES, INDEX_DTYPES, Declaration, Kernel

WRITE, DECODE, BOTH = "reshape_and_cache", "paged_decode_attention", "write_then_decode"


def nothing(*arguments: Any) -> None:
    raise AssertionError("no kernel runs here")


def kernel(name: str, operation: str, call: Callable[..., Any] = nothing, **declared: Any) -> Kernel:
    return Kernel(name, OPERATIONS[operation], call, Declaration(**declared))


def known(*kernels: Kernel) -> dict[str, Kernel]:
    return {each.name: each for each in kernels}


def pair(write: dict[str, Any], decode: dict[str, Any]) -> Declaration | None:
    """What the pair of two kernels with these declarations declares, None where there is none."""
    kernels = with_pairs(known(kernel("a_w", WRITE, **write), kernel("a_d", DECODE, **decode)))
    assert list(kernels)[:2] == ["a_w", "a_d"] and set(kernels) <= {"a_w", "a_d", "a_w+a_d"}
    return kernels["a_w+a_d"].declared if "a_w+a_d" in kernels else None


# ---------------------------------------------------------------------------------------------------------- which pairs


def test_two_of_one_family_make_a_pair() -> None:
    kernels = with_pairs(
        known(
            kernel("mine_write", WRITE),
            kernel("mine-decode", DECODE),
            kernel("mine", DECODE),
            kernel("mine_slots", "slot_mapping"),
            kernel("theirs_write", WRITE),
            kernel("minefield_decode", DECODE),
        )
    )
    assert list(kernels)[6:] == ["mine_write+mine-decode", "mine_write+mine"]
    assert all(kernels[name].name == name for name in kernels)
    assert {kernels[name].operation.name for name in list(kernels)[6:]} == {BOTH}


def test_every_write_goes_with_every_decode_of_its_family() -> None:
    kernels = with_pairs(
        known(*(kernel(f"x_{i}w", WRITE) for i in range(2)), *(kernel(f"x_{i}d", DECODE) for i in range(3)))
    )
    assert len(kernels) == 5 + 6


def test_a_kernel_of_the_pair_s_name_is_kept() -> None:
    mine = kernel("a_w+a_d", BOTH)
    kernels = with_pairs(known(kernel("a_w", WRITE), kernel("a_d", DECODE), mine))
    assert kernels["a_w+a_d"] is mine and len(kernels) == 3


def test_the_project_s_own_pairs() -> None:
    import pagefuzz.kernels.own  # noqa: F401  # registers them

    names = [name for name, each in with_pairs(registry.registered()).items() if each.operation.name == BOTH]
    assert {
        "torch_reshape_and_cache+torch_paged_decode_attention",
        "triton_reshape_and_cache+triton_paged_decode_attention",
    } <= set(names)
    assert not [name for name in names if "torch" in name and "triton" in name]


def test_the_write_runs_first_and_each_gets_its_arguments() -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def write(*arguments: Any) -> str:
        calls.append(("write", arguments))
        return "not the result"

    def decode(*arguments: Any) -> str:
        calls.append(("decode", arguments))
        return "out"

    kernels = with_pairs(known(kernel("a_w", WRITE, write), kernel("a_d", DECODE, decode)))
    assert kernels["a_w+a_d"].call(*OPERATIONS[BOTH].parameters) == "out"
    assert calls == [("write", OPERATIONS[WRITE].parameters), ("decode", OPERATIONS[DECODE].parameters)]


# ------------------------------------------------------------------------------------------------- what a pair declares


def test_two_defaults_declare_the_default() -> None:
    declared = pair({}, {})
    assert declared is not None
    for name in ("dtypes", "index_dtypes", "cache_layouts", "head_dims", "block_sizes", "group_sizes", "devices"):
        assert getattr(declared, name) == getattr(Declaration(), name)


@pytest.mark.parametrize(
    ("field", "write", "decode", "both"),
    [
        ("dtypes", ("float16", "float32"), FLOAT_DTYPES, ("float32", "float16")),
        ("dtypes", ("bfloat16",), ("bfloat16", "float16"), ("bfloat16",)),
        ("index_dtypes", INDEX_DTYPES, ("int64",), ("int64",)),
        ("head_dims", None, None, None),
        ("head_dims", None, (64, 128), (64, 128)),
        ("head_dims", (64, 128), None, (64, 128)),
        ("head_dims", (64, 96), (128, 64), (64,)),
        ("block_sizes", range(1, 33), (16, 32, 64), (16, 32)),
        ("block_sizes", (16, 5), None, (16, 5)),
        ("head_dims", lambda size: size % 16 == 0, (8, 16, 24, 32), (16, 32)),
        ("head_dims", (8, 16, 24, 32), lambda size: size % 16 == 0, (16, 32)),
        ("cache_layouts", ("contiguous",), CACHE_LAYOUTS, ("contiguous",)),
        ("cache_layouts", ("strided",), ("strided",), CACHE_LAYOUTS),
        ("cache_layouts", ("strided",), ("contiguous", "hnd"), ("contiguous", "hnd")),
        ("cache_layouts", ("hnd", "packed"), ("strided", "contiguous"), ("hnd", "packed")),
        ("cache_layouts", ("contiguous", "packed"), ("contiguous", "hnd"), ("contiguous",)),
        ("devices", "any", "any", "any"),
        ("devices", ("cuda",), "any", ("cuda",)),
        ("devices", "any", ("cpu",), ("cpu",)),
        ("devices", ("cuda", "cpu"), ("cpu", "xpu"), ("cpu",)),
        ("most_slots", None, None, None),
        ("most_slots", 64, None, 64),
        ("most_slots", 64, 32, 32),
        ("token_strides", "any", "any", "any"),
        ("token_strides", "contiguous", "any", "contiguous"),
        ("token_strides", "any", "contiguous", "contiguous"),
        ("deterministic", True, False, False),
        ("deterministic", False, True, False),
        ("deterministic", True, True, True),
        ("rejects", True, "check_values", False),
        ("empty", "zeros", "never", "never"),
        ("unowned", "any", "finite", "finite"),
        ("table_reads", "exact", "row", "row"),
    ],
)
def test_a_pair_declares_what_both_do(field: str, write: Any, decode: Any, both: Any) -> None:
    declared = pair({field: write}, {field: decode})
    assert declared is not None and getattr(declared, field) == both


def test_group_sizes_are_the_decode_s() -> None:
    declared = pair({"group_sizes": (2,)}, {"group_sizes": (4, 8)})
    assert declared is not None and declared.group_sizes == (4, 8)


def test_two_predicates_of_sizes_meet() -> None:
    declared = pair({"head_dims": lambda size: size % 3 == 0}, {"head_dims": lambda size: size % 2 == 0})
    assert declared is not None
    assert [size for size in range(1, 20) if declared.supports_size("head_dims", size)] == [6, 12, 18]


@pytest.mark.parametrize(
    ("field", "write", "decode"),
    [
        ("dtypes", ("float16",), ("float32",)),
        ("index_dtypes", ("int32",), ("int64",)),
        ("head_dims", (64,), (128,)),
        ("block_sizes", (16,), (32,)),
        ("block_sizes", range(1, 4), (16,)),
        ("head_dims", lambda size: size > 64, (8, 64)),
        ("head_dims", (8, 64), lambda size: size > 64),
        ("head_dims", lambda size: size % 2 == 0, lambda size: size % 2 == 1),
        ("cache_layouts", ("contiguous",), ("hnd",)),
        ("cache_layouts", ("packed",), ("contiguous", "hnd")),
        ("devices", ("cuda",), ("cpu",)),
    ],
)
def test_nothing_in_common_is_no_pair(field: str, write: Any, decode: Any) -> None:
    assert pair({field: write}, {field: decode}) is None
    check_pools(with_pairs(known(kernel("a_w", WRITE, **{field: write}), kernel("a_d", DECODE, **{field: decode}))))


def test_a_predicate_that_raises_is_said_of_its_own_kernel() -> None:
    def predicate(size: int) -> bool:
        raise ZeroDivisionError("of the author's")

    for other in (None, (64,), lambda size: True):
        kernels = with_pairs(known(kernel("a_w", WRITE, head_dims=other), kernel("a_d", DECODE, head_dims=predicate)))
        with pytest.raises(UsageError, match=r"^kernel 'a_d': head_dims raised ZeroDivisionError: of the author's"):
            check_pools(kernels)


# ------------------------------------------------------------------------------------------------------- by their names


@contextmanager
def registered(*kernels: Kernel) -> Iterator[None]:
    before = dict(registry._registry)
    registry._registry.clear()
    registry._registry.update(known(*kernels))
    try:
        yield
    finally:
        registry._registry.clear()
        registry._registry.update(before)


def test_patterns_choose_pairs() -> None:
    with registered(kernel("a_w", WRITE), kernel("a_d", DECODE), kernel("b_w", WRITE), kernel("b_d", DECODE)):
        assert list(choose([])) == ["a_w", "a_d", "b_w", "b_d", "a_w+a_d", "b_w+b_d"]
        assert list(choose(["a_w+a_d"])) == ["a_w+a_d"]
        assert list(choose(["*+*"])) == ["a_w+a_d", "b_w+b_d"]
        assert list(choose(["b_w*"])) == ["b_w", "b_w+b_d"]
        assert list(choose(["*_d", "a_w"])) == ["a_w", "a_d", "b_d", "a_w+a_d", "b_w+b_d"]
        with pytest.raises(UsageError, match=r"no kernel has such a name; there are a_w, .*a_w\+a_d"):
            choose(["a_w+b_d"])


def test_a_pair_is_replayed_by_its_name() -> None:
    from pathlib import Path

    from pagefuzz.fuzz import saved as saving
    from pagefuzz.fuzz.session import NotJudged, Session
    from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase

    case = WriteThenDecodeCase(block_size=1, num_blocks=1)
    wanted, _ = saving.from_token(saving.token("a_w+a_d", "I18", case))
    with registered(kernel("a_w", WRITE), kernel("a_d", DECODE)):
        session = Session("cpu", 1, 0, choose([]), Path("."))
        assert session._kernel_for(wanted).name == "a_w+a_d"
        named = Session("cpu", 1, 0, choose(["a_w+a_d"]), Path("."), named=True)
        assert named._kernel_for(wanted).name == "a_w+a_d"
    with registered(kernel("a_w", WRITE), kernel("b_w", WRITE), kernel("b_d", DECODE)):
        other = Session("cpu", 1, 0, choose(["b_w+b_d"]), Path("."), named=True)
        assert other._kernel_for(wanted).name == "b_w+b_d"
        with pytest.raises(NotJudged, match=r"no kernel 'a_w\+a_d' of write_then_decode is registered"):
            Session("cpu", 1, 0, choose([]), Path("."))._kernel_for(wanted)
