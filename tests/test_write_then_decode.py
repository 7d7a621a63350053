"""Cases of write_then_decode: what the call finds, what it is handed, and what it must write."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles import answers
from pagefuzz.oracles.answers import DENSE, LOOP, OracleDisagreement, answer, check_oracles
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import InvalidCase, Limits, Sequence
from pagefuzz.strategies.number_formats import FORMATS
from pagefuzz.strategies.paged_decode_attention import DRAWN_VALUES, PROBES, PagedDecodeAttentionCase
from pagefuzz.strategies.tensors import Tensor
from pagefuzz.strategies.values import poison_bits
from pagefuzz.strategies.write_then_decode import NEW_TOKENS, WriteThenDecodeCase
from pagefuzz.tests.good_kernels import GOOD
from pagefuzz.tests.killing import find

BOTH = "write_then_decode"
STRIDED = Declaration(cache_layouts=("strided",))

# Rows 0 and 1 share block 3; row 2 is empty; row 3 is all of row 0's first page.
ROWS = (
    Sequence((3, 0), (99999,), 5),
    Sequence((3, 5, 1), (), 7),
    Sequence((), (-1, 0, 2), 0),
    Sequence((3,), (4, 4), 3),
)
CASE = WriteThenDecodeCase(
    block_size=3, num_blocks=6, sequences=ROWS, num_kv_heads=2, group_size=2, head_dim=2, poison="nan", seed=4
)


@cache
def drawn() -> list[WriteThenDecodeCase]:
    cases: list[WriteThenDecodeCase] = []
    for seed in range(4):
        each_case(STRATEGIES[BOTH](STRIDED, Limits()), 125, seed, cases.append)
    return cases


def element(tensor: Tensor, *index: int) -> int:
    """The bits at an index; fails where nothing is filled."""
    place = tensor.offset + sum(i * stride for i, stride in zip(index, tensor.strides, strict=True))
    for first, bits in tensor.buffer.pieces:
        if first <= place < first + len(bits):
            return int(bits[place - first])
    raise AssertionError(f"nothing lies at {index} of {tensor.name}")


def token(tensor: Tensor, *index: int) -> list[int]:
    """The bits of a token, [KVH * D]."""
    return [element(tensor, *index, h, d) for h in range(tensor.shape[-2]) for d in range(tensor.shape[-1])]


def plain(case: WriteThenDecodeCase) -> PagedDecodeAttentionCase:
    """The decode on its own, with every token in the cache before the call."""
    known = {item.name: getattr(case, item.name) for item in fields(case) if item.name != "new_tokens"}
    return PagedDecodeAttentionCase(**known)


# ----------------------------------------------------------------------------------------------------------- the tokens


@pytest.mark.parametrize(
    ("new_tokens", "written"),
    [
        (0, []),
        (1, [(0, 4, 1), (1, 6, 3)]),
        (2, [(0, 3, 0), (0, 4, 1), (1, 5, 17), (1, 6, 3)]),
        # The first page of row 0 is row 1's and row 3's too.
        (3, [(0, 3, 0), (0, 4, 1), (1, 4, 16), (1, 5, 17), (1, 6, 3)]),
        (4096, [(0, 3, 0), (0, 4, 1), (1, 3, 15), (1, 4, 16), (1, 5, 17), (1, 6, 3)]),
    ],
)
def test_the_last_tokens_outside_shared_pages_are_written(new_tokens: int, written: list[tuple[int, int, int]]) -> None:
    case = replace(CASE, new_tokens=new_tokens)
    case.check()
    assert case.written() == written
    tensors = case.arguments().tensors
    assert tensors["key"].shape == tensors["value"].shape == (len(written), 2, 2)
    assert tensors["slot_mapping"].shape == (len(written),)
    slots = [element(tensors["slot_mapping"], t) for t in range(len(written))]
    assert slots == [slot for _, _, slot in written]


def test_the_arguments_are_those_of_the_contract() -> None:
    from pagefuzz.kernels.operations import OPERATIONS

    assert tuple(CASE.arguments().values) == OPERATIONS[BOTH].parameters


def test_the_slots_hold_poison_and_the_tokens_come_in_key_and_value() -> None:
    """And with the tokens put in, the caches are those of the decode on its own, bit for bit."""
    seen = Counter[str]()
    for case in [CASE, replace(CASE, new_tokens=3), *drawn()]:
        case.check()
        before, now = plain(case).arguments().tensors, case.arguments().tensors
        written = case.written()
        owners = Counter(block for row in case.sequences for block in row.blocks)
        assert [(b, position) for b, position, _ in written] == [
            (b, position)
            for b, row in enumerate(case.sequences)
            for position in range(max(row.context_len - case.new_tokens, 0), row.context_len)
            if owners[row.blocks[position // case.block_size]] == 1
        ]
        assert len({slot for _, _, slot in written}) == len(written)
        for name, source in (("k_cache", "key"), ("v_cache", "value")):
            poison = poison_bits(case.poison, case.dtype, case.row, case.seed).tolist()
            watched = case.watched()[name][1]
            for t, (b, position, slot) in enumerate(written):
                page, offset = divmod(position, case.block_size)
                block = case.sequences[b].blocks[page]
                assert slot == block * case.block_size + offset == element(now["slot_mapping"], t)
                assert token(now[name], block, offset) == poison
                assert token(now[source], t) == token(before[name], block, offset)
                seen["written"] += 1
                seen["poison differs"] += poison != token(before[name], block, offset)
                bits = dict(now[name].buffer.pieces)[block * now[name].strides[0]]
                bits[watched[t] - block * now[name].strides[0]] = token(now[source], t)
        for name in ("q", "k_cache", "v_cache", "block_tables", "context_lens"):
            mine, theirs = now[name], before[name]
            assert (mine.shape, mine.strides, mine.offset) == (theirs.shape, theirs.strides, theirs.offset)
            for (first, bits), (other, right) in zip(mine.buffer.pieces, theirs.buffer.pieces, strict=True):
                assert first == other and np.array_equal(bits, right), name
        assert case.arguments().values["scale"] == case.scale
        seen["shared"] += "shared pages" in case.features()
        seen["far"] += case.is_far() and bool(written)
        seen["packed"] += case.packed and bool(written)
        seen["nothing"] += not written
    assert seen["written"] > 500 and seen["poison differs"] > 0.99 * seen["written"], seen
    assert min(seen[word] for word in ("shared", "far", "packed", "nothing")) > 10, seen


def test_shared_pages_are_never_written() -> None:
    shared = 0
    for case in drawn():
        owners = Counter(block for row in case.sequences for block in row.blocks)
        everything = replace(case, new_tokens=4096)
        blocks = {slot // case.block_size for _, _, slot in everything.written()}
        assert blocks == {block for block, count in owners.items() if count == 1}
        shared += any(count > 1 for count in owners.values())
    assert shared > 20


def test_nothing_new_is_the_decode_on_its_own() -> None:
    for case in [CASE, *drawn()[:100]]:
        case = replace(case, new_tokens=0)
        case.check()
        mine, theirs = case.arguments(), plain(case).arguments()
        assert case.written() == [] and all(not len(rows) for _, rows in case.watched().values())
        assert mine.tensors["key"].shape == mine.tensors["value"].shape == (0, case.num_kv_heads, case.head_dim)
        assert mine.tensors["slot_mapping"].shape == (0,)
        for name, tensor in theirs.tensors.items():
            for (first, bits), (other, right) in zip(
                mine.tensors[name].buffer.pieces, tensor.buffer.pieces, strict=True
            ):
                assert first == other and np.array_equal(bits, right)
        check_oracles(case, STRIDED)


# -------------------------------------------------------------------------------------------------------------- oracles


def test_the_right_answer_does_not_depend_on_where_tokens_come_from() -> None:
    for case in [CASE, *drawn()]:
        check_oracles(case, STRIDED)
        right = answer(plain(case), STRIDED).exact
        assert np.array_equal(answer(case, STRIDED).exact, right)
        assert np.array_equal(answer(replace(case, new_tokens=2), STRIDED).exact, right)


@pytest.mark.parametrize("values", [*sorted(set(DRAWN_VALUES)), *PROBES])
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_oracles_agree_on_every_recipe(values: str, dtype: str) -> None:
    for new_tokens in (0, 1, 3, 4096):
        check_oracles(replace(CASE, values=values, dtype=dtype, new_tokens=new_tokens), Declaration())


def test_a_loop_oracle_that_does_not_write_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagefuzz.oracles.loop import paged_decode_attention

    monkeypatch.setitem(LOOP, BOTH, paged_decode_attention.right_answer)
    with pytest.raises(OracleDisagreement):
        check_oracles(CASE, Declaration())
    assert DENSE[BOTH] is DENSE["paged_decode_attention"] and answers.LOOP is LOOP


def test_the_loop_oracle_leaves_the_arguments_as_they_are() -> None:
    from pagefuzz.strategies.case import arguments_of

    case = replace(CASE, new_tokens=3)
    before = [bits.copy() for buffer in arguments_of(case).buffers for _, bits in buffer.pieces]
    LOOP[BOTH](case)
    after = [bits for buffer in arguments_of(case).buffers for _, bits in buffer.pieces]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(before, after, strict=True))


# -------------------------------------------------------------------------------------------------------------- drawing


def test_what_is_drawn() -> None:
    cases = drawn()
    counts = Counter(case.new_tokens for case in cases)
    assert set(counts) == set(NEW_TOKENS) and min(counts.values()) > 40
    seen = Counter[str]()
    for case in cases:
        case.check()
        assert case.beyond(STRIDED) == ""
        pages = {(b, position // case.block_size) for b, position, _ in case.written()}
        seen["over a page's border"] += any((b, page + 1) in pages for b, page in pages)
        seen["all of a sequence"] += any(0 < n <= case.new_tokens for n in case.context_lens)
        seen["some of a sequence"] += any(0 < case.new_tokens < n for n in case.context_lens)
        seen["int32"] += case.index_dtype == "int32"
        seen["a slot past 2^31"] += any(slot >= 2**31 for _, _, slot in case.written())
        assert case.index_dtype == "int64" or all(slot < 2**31 for _, _, slot in case.written())
    for what in ("over a page's border", "all of a sequence", "some of a sequence", "int32"):
        assert seen[what] > 30, seen
    assert seen["a slot past 2^31"] > 0, seen


@pytest.mark.parametrize(
    "changes",
    [
        {"dtypes": ("float16",), "index_dtypes": ("int32",)},
        {"head_dims": (1, 2), "group_sizes": (1,), "index_dtypes": ("int32",)},
        {"head_dims": (64,), "block_sizes": (16,), "empty": "never"},
        {"token_strides": "contiguous", "table_strides": "contiguous"},
    ],
)
def test_a_restricted_declaration_is_kept_to(changes: dict[str, Any]) -> None:
    declared, cases = Declaration(**changes), list[Any]()
    each_case(STRATEGIES[BOTH](declared, Limits()), 60, 1, cases.append)
    for case in cases:
        case.check()
        assert case.beyond(declared) == "", case.one_line()


def test_slots_that_do_not_fit_their_dtype() -> None:
    row = (Sequence((2**27,), (), 1),)
    case = WriteThenDecodeCase(block_size=16, num_blocks=2**28, sequences=row, index_dtype="int64")
    case.check()
    with pytest.raises(InvalidCase, match=r"^slots of block 134217728 do not fit int32$"):
        replace(case, index_dtype="int32").check()
    last = (Sequence((2**27 - 1,), (), 16),)
    replace(case, sequences=last, index_dtype="int32").check()


def test_simpler_cases_write_less() -> None:
    case = replace(CASE, new_tokens=3)
    assert {simpler.new_tokens for simpler in case.simpler()} >= {1, 2}
    assert all(type(simpler) is WriteThenDecodeCase for simpler in case.simpler())
    assert "the call writes the last 3 of each sequence, then reads" in case.lines()
    assert "the call writes all tokens of each sequence, then reads" in replace(CASE, new_tokens=4096).lines()


def test_many_new_tokens_take_little_time() -> None:
    """A case at the bounds: 4,096 written tokens of a million."""
    import time

    n = 1 << 20
    case = WriteThenDecodeCase(
        block_size=4096, num_blocks=256, sequences=(Sequence(tuple(range(256)), (), n),), new_tokens=4096
    )
    case.check()
    started = time.process_time()
    key = case.arguments().tensors["key"]
    assert key.shape == (4096, 1, 1) and time.process_time() - started < 2


# ------------------------------------------------------------------------------------------- what is left in the cache


@pytest.mark.parametrize("left", ["nothing", "rubbish"])
def test_a_right_output_does_not_excuse_a_wrong_cache(left: str) -> None:
    """Kernels that take the new tokens as they come and leave the next step nothing, or rubbish, to read."""
    (good,) = (kernel for kernel in GOOD if kernel.name == "new_tokens_from_registers")

    def bad(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, *rest: Any) -> Any:
        before = k_cache.clone(), v_cache.clone()
        out = good.call(key, value, k_cache, v_cache, slots, *rest)
        for tensor, old in zip((k_cache, v_cache), before, strict=True):
            for slot in slots.tolist():
                place = slot // tensor.shape[1], slot % tensor.shape[1]
                tensor[place] = old[place] if left == "nothing" else 1234
        return out

    killed = find(replace(good, name=left, call=bad), examples=200, seed=1)
    assert killed is not None and killed.verdict.named == "I18" and killed.verdict.also == ("I4", "I6")
    assert isinstance(killed.case, WriteThenDecodeCase) and len(killed.case.slots) == 1
    assert "the bits of the token" in str(killed.verdict.violation)
