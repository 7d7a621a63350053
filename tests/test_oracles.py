"""The oracles agree, say so when they do not, give hand-computed answers, and share no code."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles import answers
from pagefuzz.oracles.answers import DENSE, LOOP, OracleDisagreement, answer, check_oracles
from pagefuzz.strategies import CASES, STRATEGIES
from pagefuzz.strategies.case import Case, Limits, Sequence
from pagefuzz.strategies.number_formats import encode
from pagefuzz.strategies.paged_decode_attention import PROBES, PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token

SLOTS, WRITE, DECODE = "slot_mapping", "reshape_and_cache", "paged_decode_attention"
BOTH = "write_then_decode"
each_operation = pytest.mark.parametrize("operation", STRATEGIES)


@cache
def drawn(operation: str) -> list[Any]:
    cases: list[Any] = []

    each_case(STRATEGIES[operation](Declaration(), Limits()), 400, 11, cases.append)
    return cases


# ------------------------------------------------------------------------------------------------------------ agreement


def test_every_operation_has_both_oracles() -> None:
    assert set(DENSE) == set(LOOP) == set(CASES)


@each_operation
def test_they_agree_on_what_is_drawn(operation: str) -> None:
    declared = Declaration()
    assert len(drawn(operation)) == 400
    for case in drawn(operation):
        check_oracles(case, declared)


@pytest.mark.parametrize("values", PROBES)
def test_they_agree_on_the_probes(values: str) -> None:
    declared = Declaration()
    for case in drawn(DECODE)[:80]:
        check_oracles(replace(case, values=values), declared)


def test_they_agree_on_nothing_at_all() -> None:
    for case in (
        SlotMappingCase(block_size=1, num_blocks=1),
        ReshapeAndCacheCase(block_size=1, num_blocks=1),
        PagedDecodeAttentionCase(block_size=1, num_blocks=1),
        PagedDecodeAttentionCase(block_size=1, num_blocks=1, sequences=(Sequence((), (5,), 0),)),
    ):
        check_oracles(case, Declaration())


# A fault of one oracle, as a text of its source and what stands in its place: (operation, which, good, bad).
FAULTS = [
    (SLOTS, "loop", "divmod(position, case.block_size)", "divmod(position + 1, case.block_size)"),
    (SLOTS, "loop", "if position < 0:", "if position < -1:"),
    (SLOTS, "loop", "* case.block_size + offset", "* case.block_size"),
    (SLOTS, "dense", ".repeat(case.block_size) * case.block_size", ".repeat(case.block_size)"),
    (SLOTS, "dense", "[token.position] if", "[token.position - 1] if"),
    (WRITE, "loop", "if slot >= 0", "if slot > 0"),
    (WRITE, "loop", '("v_cache", tensors["value"])', '("v_cache", tensors["key"])'),
    (WRITE, "loop", "t * source.strides[0]", "t * heads * dims"),
    (WRITE, "dense", "if slot >= 0]", "]"),
    (WRITE, "dense", 'case.token_bits("value")', '(case.token_bits("value") ^ 1)'),
    (DECODE, "dense", "keys = np.repeat(case.key_values(tokens), case.group_size, axis=1)",
     "keys = np.tile(case.key_values(tokens), (1, case.group_size, 1))"),
    (DECODE, "dense", "values = np.repeat(case.value_values(tokens), case.group_size, axis=1)",
     "values = np.tile(case.value_values(tokens), (1, case.group_size, 1))"),
    (DECODE, "dense", "tokens = case.token_ids(b)", "tokens = case.token_ids(b)[: n - n % case.block_size or n]"),
    (DECODE, "dense", "tokens = case.token_ids(b)", "tokens = case.token_ids(b)[: max(n - 1, 1)]"),
    (DECODE, "dense", "scores = case.scale * ", "scores = "),
    (DECODE, "dense", "queries[b]", "queries[0]"),
    (DECODE, "loop", "offset, kv_head)", "offset, 0)"),
    (DECODE, "loop", "range(n)", "range(max(n - 1, 1) if n else 0)"),
    (DECODE, "loop", "range(n)", "range(n - n % case.block_size or n)"),
    (DECODE, "loop", "query = q.row(b, h)", "query = q.row(b, 0)"),
    (DECODE, "loop", "places = [(int(table.at(b, j // case.block_size)), j % case.block_size)",
     "places = [(int(table.at(0, j // case.block_size)), j % case.block_size)"),
    (BOTH, "loop", '("v_cache", "value")', '("v_cache", "key")'),
    (BOTH, "loop", "_store(tensors[name], (block, offset, h, d)", "_store(tensors[name], (block, 0, h, d)"),
    (BOTH, "loop", "(t, h, d)))", "(0, h, d)))"),
    (BOTH, "loop", "enumerate(slots)", "enumerate(slots[1:])"),
    (BOTH, "loop", "range(case.num_kv_heads)", "range(1)"),
]  # fmt: skip


def edited(operation: str, which: str, good: str, bad: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The `right_answer` of an oracle with `bad` in place of `good` in its source."""
    module = importlib.import_module(f"pagefuzz.oracles.{which}.{operation}")
    source = inspect.getsource(module)
    assert good in source, f"{good!r} does not stand in oracles/{which}/{operation}.py any more"
    made = types.ModuleType(f"edited_{which}_{operation}")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # where dataclasses look their module up
    exec(compile(source.replace(good, bad), str(module.__file__), "exec"), vars(made))
    right: Callable[..., Any] = made.right_answer
    return right


@pytest.mark.parametrize(("operation", "which", "good", "bad"), FAULTS, ids=[f"{o}-{w}-{b}" for o, w, _, b in FAULTS])
def test_a_fault_of_one_oracle_shows(
    operation: str, which: str, good: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = edited(operation, which, good, bad, monkeypatch)
    takes = len(inspect.signature(wrong).parameters)
    if which == "loop":
        monkeypatch.setitem(LOOP, operation, wrong)
    else:
        monkeypatch.setitem(DENSE, operation, lambda case, declared: wrong(*(case, declared)[:takes]))
        monkeypatch.setattr(answers, "AttentionAnswer", HasBound)
    shown: list[tuple[Case, str]] = []
    declared = Declaration()
    for case in drawn(operation)[:250]:
        try:
            check_oracles(case, declared)
        except OracleDisagreement as error:
            shown.append((case, str(error)))
    assert len(shown) >= 15
    assert all(said == f"the dense and the loop oracle differ on {case.one_line()}" for case, said in shown)


class _HasBound(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "bound")


class HasBound(metaclass=_HasBound):
    """Stands for AttentionAnswer, of which an edited oracle has one of its own."""


def test_a_disagreement_is_no_verdict_about_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagefuzz.fuzz.verdict import DISAGREEMENT, Judge
    from pagefuzz.kernels.operations import OPERATIONS
    from pagefuzz.kernels.registry import Kernel

    def never(*arguments: Any) -> None:
        raise AssertionError("no kernel runs where the right answer is not known")

    class NoRunner:
        def observe(self, *arguments: Any) -> None:
            never()

    monkeypatch.setitem(LOOP, SLOTS, lambda case: [7 for _ in case.tokens])
    case = SlotMappingCase(block_size=2, num_blocks=1, sequences=(Sequence((0,), (), 1),), tokens=(Token(0, 0),))
    judge = Judge(Kernel("any", OPERATIONS[SLOTS], never, Declaration()), NoRunner())  # type: ignore[arg-type]
    verdict = judge.verdict(case)
    assert (verdict.kind, verdict.invariant, verdict.named) == (DISAGREEMENT, None, "oracle disagreement")
    assert verdict.reason == f"the dense and the loop oracle differ on {case.one_line()}"


# -------------------------------------------------------------------------------------------- examples computed by hand


def both(case: Any) -> tuple[Any, Any]:
    """The dense and the loop answer of a case."""
    case.check()
    declared = Declaration()
    check_oracles(case, declared)
    return answer(case, declared), LOOP[case.operation](case)


def test_slots_of_two_sequences() -> None:
    """Blocks [[9, 3, 7], [2, 5]] of 4 slots: position 5 lies in block 3 at 1, 9 in block 7 at 1, 2 in block 2 at 2."""
    rows = (Sequence((9, 3, 7), (), 12), Sequence((2, 5), (0,), 8))
    tokens = (Token(0, 5), Token(0, 9), Token(1, 2), Token(77, -1))
    case = SlotMappingCase(block_size=4, num_blocks=10, sequences=rows, tokens=tokens)
    dense, loop = both(case)
    assert dense.tolist() == loop == [13, 29, 10, -1]
    assert dense.dtype == np.int64


def test_a_slot_of_the_third_page() -> None:
    """Position 40 in blocks of 16 is page 2, which is block 2, at 8: slot 40, by chance."""
    rows = (Sequence((4, 11, 2), (), 41),)
    dense, loop = both(SlotMappingCase(block_size=16, num_blocks=12, sequences=rows, tokens=(Token(0, 40),)))
    assert dense.tolist() == loop == [40]


def test_a_slot_past_2_to_the_31() -> None:
    rows = (Sequence((2**28,), (), 16),)
    dense, loop = both(SlotMappingCase(block_size=16, num_blocks=2**28 + 1, sequences=rows, tokens=(Token(0, 15),)))
    assert dense.tolist() == loop == [4294967311]


class FourTokens(ReshapeAndCacheCase):
    """Keys 10, 20, 30, 40 and values a tenth of that, in place of a recipe's."""

    def token_bits(self, role: str) -> np.ndarray:
        numbers = np.array([[10.0], [20.0], [30.0], [40.0]])
        return encode(numbers if role == "key" else numbers / 10, self.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_four_tokens_and_one_of_them_padding(dtype: str) -> None:
    """Slots 4, 5, -1, 1 of a cache [3, 2, 1, 1]: block 2 holds tokens 0 and 1, block 0 holds token 3 at 1."""
    case = FourTokens(block_size=2, num_blocks=3, slots=(4, 5, -1, 1), dtype=dtype)
    dense, loop = both(case)
    for name, numbers in (("k_cache", [10.0, 20.0, 40.0]), ("v_cache", [1.0, 2.0, 4.0])):
        right = encode(np.array(numbers)[:, None], dtype)
        assert np.array_equal(dense[name], right) and loop[name] == right.tolist()
        assert case.watched()[name][1].tolist() == [[4], [5], [1]]


class TwoSequences(PagedDecodeAttentionCase):
    """The numbers of the example below, in place of a recipe's; tokens are 0, 1, 2 and, of sequence 1, 2^20."""

    def key_values(self, tokens: np.ndarray) -> np.ndarray:
        keys = np.array([[1, 0], [0, 1], [1, 1], [2, 2]], dtype=np.float64)
        return keys[np.where(tokens >> 20, 3, tokens)][:, None, :]

    def value_values(self, tokens: np.ndarray) -> np.ndarray:
        values = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=np.float64)
        return values[np.where(tokens >> 20, 3, tokens)][:, None, :]

    def query_values(self) -> np.ndarray:
        return np.array([[[1, 0], [0, 2]], [[1, 1], [-3, 5]]], dtype=np.float64)


def test_attention_of_two_sequences() -> None:
    """Tables [[2, 0], [3, 77]]. Head 0 of sequence 0 scores 1, 0, 1, so e : 1 : e weigh (1, 2), (3, 4) and (5, 6):
    (6 e + 3) / (2 e + 1) = 3 and 4. Head 1 scores 0, 2, 2: (1 + 8 e^2) / (1 + 2 e^2) and one more. One token is itself.
    """
    rows = (Sequence((2, 0), (), 3), Sequence((3,), (77,), 1))
    case = TwoSequences(
        block_size=2, num_blocks=4, sequences=rows, num_kv_heads=1, group_size=2, head_dim=2, scale=1.0, poison="nan"
    )
    dense, loop = both(case)
    square = np.exp(2.0)
    first = (1 + 8 * square) / (1 + 2 * square)
    right = [[[3.0, 4.0], [first, first + 1]], [[7.0, 8.0], [7.0, 8.0]]]
    assert np.allclose([first, first + 1], [3.8099, 4.8099], rtol=0, atol=5e-5)
    for found in (dense.exact, np.array(loop)):
        assert np.allclose(found, np.array(right), rtol=0, atol=1e-14)
    assert not dense.loose


def test_the_scale_is_on_the_scores() -> None:
    """Scale log(2) / 1 on scores 1, 0, 1 weighs 2 : 1 : 2, so head 0 gives (2 + 3 + 10) / 5 = 3."""
    rows = (Sequence((2, 0), (), 3), Sequence((3,), (77,), 1))
    case = TwoSequences(
        block_size=2,
        num_blocks=4,
        sequences=rows,
        group_size=2,
        head_dim=2,
        scale=float(np.log(2.0)),
        poison="infinity",
    )
    dense, loop = both(case)
    # Head 1 scores 0, 2 log 2, 2 log 2: 1 : 4 : 4, so (1 + 12 + 20) / 9.
    for found in (dense.exact, np.array(loop)):
        assert np.allclose(found[0], np.array([[3, 4], [33 / 9, 33 / 9 + 1]]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("values", ["heads_by_value", "heads_by_key"])
def test_query_heads_share_kv_heads_in_order(values: str) -> None:
    """H = 8, KVH = 2: heads 0 to 3 read kv head 0, heads 4 to 7 kv head 1. V of kv head k is k + 1; or K of kv head k
    points at token k, whose V is k + 1."""
    case = PagedDecodeAttentionCase(
        block_size=2, num_blocks=3, sequences=(Sequence((2, 0), (), 4),), num_kv_heads=2, group_size=4, values=values
    )
    dense, loop = both(case)
    for found in (dense.exact, np.array(loop)):
        assert np.round(found[0, :, 0], 9).tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


def test_rows_are_named_by_the_probe_of_the_context_length() -> None:
    case = PagedDecodeAttentionCase(
        block_size=2, num_blocks=3, sequences=(Sequence((2, 0), (), 3),), head_dim=4, values="rows_modulo"
    )
    dense, loop = both(case)
    for found in (dense.exact, np.array(loop)):
        assert np.allclose(found[0, 0], [1 / 3, 1 / 3, 1 / 3, 0], rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------------------- no code in common

ORACLES = Path(answers.__file__).parent
FILES = sorted((ORACLES / "loop").glob("*.py")) + sorted((ORACLES / "dense").glob("*.py"))
# What a loop oracle may ask a case for: its sizes. Everything else it reads from the arguments of the call.
SIZES = {
    SLOTS: {"tokens", "block_size"},
    WRITE: {"slots"},
    DECODE: {"sequences", "num_heads", "num_kv_heads", "group_size", "head_dim", "block_size", "scale"},
    BOTH: {"num_kv_heads", "head_dim", "block_size"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_dense_and_loop_oracles_do_not_know_each_other(path: Path) -> None:
    other = "loop" if path.parent.name == "dense" else "dense"
    known = imports(path)
    assert not [name for name in known if name.startswith(f"pagefuzz.oracles.{other}")]
    assert not [name for name in known if name.startswith(("pagefuzz.fuzz", "pagefuzz.oracles.answers", "torch"))]
    if path.parent.name == "loop":
        assert not [name for name in known if name.startswith(("numpy", "pagefuzz.oracles.tolerance"))]
        assert "pagefuzz.strategies.values" not in known
    else:
        assert not [name for name in known if name.endswith("arguments_of")]


def test_the_files_of_the_oracles_are_all_here() -> None:
    for folder, known in (("loop", {*CASES}), ("dense", {*CASES} - {BOTH})):  # a dense one never sees who writes
        assert {path.stem for path in (ORACLES / folder).glob("*.py")} >= {*known, "__init__"}
    assert DENSE[BOTH] is DENSE[DECODE]


@each_operation
def test_the_loop_oracle_asks_a_case_for_sizes_only(operation: str) -> None:
    tree = ast.parse((ORACLES / "loop" / f"{operation}.py").read_text())
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "case"
    }
    assert asked and asked <= SIZES[operation], asked - SIZES[operation]


@each_operation
def test_the_dense_oracle_never_sees_an_argument_of_the_call(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *rest: Any) -> None:
        raise AssertionError("the dense oracle looked at a page")

    for name in ("arguments", "caches", "cache_tensors", "block_table", "written"):
        if hasattr(CASES[operation], name):
            monkeypatch.setattr(CASES[operation], name, refuse)
    declared = Declaration()
    for case in drawn(operation)[:100]:
        answer(case, declared)


def test_the_loop_oracle_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two entries of the table exchanged it reads the other pages, so it does walk them."""
    case = PagedDecodeAttentionCase(
        block_size=1, num_blocks=2, sequences=(Sequence((0, 1), (), 2), Sequence((), (0, 0), 0)), values="heads_by_key"
    )
    before = LOOP[DECODE](case)
    arguments = case.arguments()
    table = arguments.tensors["block_tables"].buffer
    table.pieces = [(0, np.array([1, 0, 0, 0]))]
    module = importlib.import_module(f"pagefuzz.oracles.loop.{DECODE}")
    monkeypatch.setattr(module, "arguments_of", lambda case: arguments)
    assert np.allclose(LOOP[DECODE](case), before)  # two tokens in another order: the same sum
    table.pieces = [(0, np.array([1, 1, 0, 0]))]
    assert LOOP[DECODE](case)[0] == [[2.0]] != before[0]
