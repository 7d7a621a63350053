"""Cases of the same tokens in other batches, pages and places; and needles, whose right answer is exact."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import answer, check_oracles
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.cache_layouts import CacheLayout
from pagefuzz.strategies.case import InvalidCase, Limits, Sequence
from pagefuzz.strategies.number_formats import FORMATS, decode
from pagefuzz.strategies.paged_decode_attention import DRAWN_VALUES, GAP, NEEDLES, PagedDecodeAttentionCase
from pagefuzz.strategies.tensors import Tensor

DECODE = "paged_decode_attention"
STRIDED = Declaration(cache_layouts=("strided",))

# A prefix of two pages that all share, a page more that rows 0 and 3 share, an empty row, and a row all of whose pages
# row 0 has too.
SHARING = PagedDecodeAttentionCase(
    block_size=2,
    num_blocks=9,
    sequences=(
        Sequence((4, 1, 7), (), 6),
        Sequence((4, 1, 0), (), 5),
        Sequence((), (99999, -1, 4), 0),
        Sequence((4, 1, 7), (), 6),
        Sequence((4, 1), (8,), 4),
    ),
    num_kv_heads=2,
    group_size=2,
    head_dim=3,
    poison="nan",
    seed=9,
)


@cache
def drawn() -> list[PagedDecodeAttentionCase]:
    """With strided caches too."""
    cases: list[PagedDecodeAttentionCase] = []
    for seed in range(3):
        each_case(STRATEGIES[DECODE](STRIDED, Limits()), 125, seed, cases.append)
    return [SHARING, *(case for case in cases if case.sequences)]


def element(tensor: Tensor, *index: int) -> int:
    """The bits at an index, or -1 where nothing is filled."""
    place = tensor.offset + sum(i * stride for i, stride in zip(index, tensor.strides, strict=True))
    for first, bits in tensor.buffer.pieces:
        if first <= place < first + len(bits):
            return int(bits[place - first])
    return -1


def gathered(case: PagedDecodeAttentionCase) -> list[dict[str, list[int]]]:
    """For each row, the bits of its query and of the keys and values that its table leads to."""
    tensors, rows = case.arguments().tensors, []
    dims = [(head, dim) for head in range(case.num_kv_heads) for dim in range(case.head_dim)]
    kept = dims[:: max(1, len(dims) // 6)]  # of wide tokens some elements
    queries = [(head, dim) for head in range(case.num_heads) for dim in range(case.head_dim)]
    for b in range(len(case.sequences)):
        length = element(tensors["context_lens"], b)
        places = [
            (element(tensors["block_tables"], b, j // case.block_size), j % case.block_size) for j in range(length)
        ]
        row = {
            name: [element(tensors[name], *place, *at) for place in places for at in kept]
            for name in ("k_cache", "v_cache")
        }
        row["q"] = [element(tensors["q"], b, *at) for at in queries[:: max(1, len(queries) // 6)]]
        row["length"] = [length]
        rows.append(row)
    return rows


def few() -> list[PagedDecodeAttentionCase]:
    """Of what is drawn, those whose tokens are read quickly here."""
    return [case for case in drawn() if sum(case.context_lens) < 90][:130]


# -------------------------------------------------------------------------------------------------------------- batches


def test_there_is_something_to_test() -> None:
    seen = Counter[str]()
    for case in few():
        seen.update(case.features())
    for word in ("shared pages", "context length 0", "B >= 2", "caches strided", "caches packed", "offset past 2^31"):
        assert seen[word] >= 5, (word, seen)


BATCHES: dict[str, Callable[[int], list[int]]] = {
    "reversed": lambda count: list(range(count))[::-1],
    "doubled": lambda count: list(range(count)) * 2,
    "turned and doubled": lambda count: [*range(1, count), 0, *range(count)],
    "the last alone": lambda count: [count - 1],
    "the same": lambda count: list(range(count)),
}


@pytest.mark.parametrize("how", BATCHES)
def test_a_batch_of_the_same_sequences_has_their_tokens_and_queries(how: str) -> None:
    for case in few():
        rows = BATCHES[how](len(case.sequences))
        twin = case.batch(rows)
        twin.check()
        before = gathered(case)
        assert gathered(twin) == [before[b] for b in rows], case.one_line()
        assert [row.tail for row in twin.sequences] == [case.sequences[b].tail for b in rows]


def test_each_sequence_alone_has_its_tokens_and_its_query() -> None:
    for case in few():
        before = gathered(case)
        for b in range(len(case.sequences)):
            twin = case.batch([b])
            twin.check()
            assert gathered(twin) == [before[b]], case.one_line()


def test_a_batch_of_a_batch() -> None:
    twin = SHARING.batch([3, 1, 0]).batch([2, 1])
    twin.check()
    before = gathered(SHARING)
    assert gathered(twin) == [before[0], before[1]]
    assert twin.queries_of == (0, 1)


def test_the_oracles_follow_the_labels() -> None:
    """The dense oracle from the labels, the loop oracle from the memory; and rows keep their right answer."""
    chance = random.Random(3)
    for case in few():
        rows = [chance.randrange(len(case.sequences)) for _ in range(3)]
        twin = case.batch(rows)
        check_oracles(twin, STRIDED)
        right = answer(case, STRIDED).exact
        assert np.array_equal(answer(twin, STRIDED).exact, right[rows])


def test_rows_of_one_batch_differ() -> None:
    """The comparisons above are only worth what they tell apart."""
    differ = alike = 0
    for case in few():
        rows = gathered(case)
        for b in range(1, len(rows)):
            differ += rows[b]["q"] != rows[0]["q"]
            alike += rows[b]["q"] == rows[0]["q"]
    assert differ > 100 and alike < 0.2 * differ  # of a single element each, some are


# ---------------------------------------------------------------------------------------------------- sharing and pages


def test_copies_of_shared_pages_hold_the_same_tokens() -> None:
    shared = [case for case in drawn() if case.unshared() is not None]
    assert len(shared) > 20
    for case in shared:
        twin = case.unshared()
        assert twin is not None
        twin.check()
        assert sum(len(row.blocks) for row in twin.sequences) == len(twin.owned)
        assert twin.unshared() is None
        for row, other in zip(case.sequences, twin.sequences, strict=True):
            assert (row.context_len, row.tail) == (other.context_len, other.tail)
        assert twin.sequences[0] == case.sequences[0]
        assert np.array_equal(answer(twin, STRIDED).exact, answer(case, STRIDED).exact)
        if sum(case.context_lens) < 90:
            assert gathered(twin) == gathered(case), case.one_line()
        check_oracles(twin, STRIDED)


def test_nothing_shared_has_no_copies() -> None:
    alone = [case for case in drawn() if sum(len(row.blocks) for row in case.sequences) == len(case.owned)]
    assert len(alone) > 100 and all(case.unshared() is None for case in alone)


def pages_are_one_s_own(case: PagedDecodeAttentionCase) -> bool:
    return all(set(pages) <= {b} for b, pages in enumerate(case.page_labels()))


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_other_block_sizes_hold_the_same_tokens(block_size: int) -> None:
    compared = 0
    for case in few():
        twin = case.repaged(block_size)
        twin.check()
        check_oracles(twin, STRIDED)
        assert twin.context_lens == case.context_lens and twin.block_size == block_size
        # Sharing is given up, so two such twins hold the same, and the case itself where it shares nothing.
        assert gathered(twin) == gathered(case.repaged(2))
        if pages_are_one_s_own(case):
            assert gathered(twin) == gathered(case)
            compared += 1
    assert compared > 80


def test_a_batch_under_another_block_size_keeps_its_tokens_and_queries() -> None:
    for case in few():
        if not pages_are_one_s_own(case):
            continue
        rows = list(range(len(case.sequences)))[::-1]
        twin = case.batch(rows).repaged(case.block_size + 1)
        twin.check()
        before = gathered(case)
        assert gathered(twin) == [before[b] for b in rows]
    twin = SHARING.batch([2, 1, 4]).repaged(3)
    twin.check()
    assert [set(pages) for pages in twin.tokens_of] == [set(), {1}, {0}]


def test_the_contiguous_case_holds_the_same_tokens() -> None:
    changed = 0
    for case in few():
        twin = case.contiguous()
        twin.check()
        assert gathered(twin) == gathered(case)
        assert twin.cache_kind() == "contiguous" and twin.q_padding == 0
        changed += twin != case
    assert changed > 50


# -------------------------------------------------------------------------------------------------------------- needles


def needle_rows(case: PagedDecodeAttentionCase, b: int) -> list[tuple[int, ...]]:
    """By kv head, the positions of sequence b whose score is 0; fails where any other is less than GAP below."""
    tensors, found = case.arguments().tensors, []
    for head in range(case.num_kv_heads):
        for query in range(head * case.group_size, (head + 1) * case.group_size):
            q = [element(tensors["q"], b, query, dim) for dim in range(case.head_dim)]
            scores = []
            for position in range(case.context_lens[b]):
                block, slot = case.sequences[b].blocks[position // case.block_size], position % case.block_size
                k = [element(tensors["k_cache"], block, slot, head, dim) for dim in range(case.head_dim)]
                numbers = decode(np.array([q, k], dtype=FORMATS[case.dtype].bits), case.dtype)
                scores.append(case.scale * float((numbers[0] * numbers[1]).sum()))
            at = tuple(position for position, score in enumerate(scores) if score == 0)
            assert all(score <= -GAP for score in scores if score), (case.one_line(), scores)
            found.append(at)
        assert len(set(found[-case.group_size :])) == 1
        del found[head + 1 :]
    return found


SCALES = (1.0, -1.0, 0.5, 0.125, 3**-0.5, -(128**-0.5), 7.3, 1e4, -1e4, 2.0**-7, 0.0062)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [1, 2, 5])
@pytest.mark.parametrize("scale", SCALES)
def test_needles_are_exact(dtype: str, head_dim: int, scale: float) -> None:
    for seed in range(6):
        case = PagedDecodeAttentionCase(
            block_size=4,
            num_blocks=9,
            sequences=(Sequence((3, 8, 1), (), 9), Sequence((), (0, 0, 0), 0), Sequence((2, 0), (99999,), 6)),
            num_kv_heads=3,
            group_size=2,
            head_dim=head_dim,
            scale=scale,
            dtype=dtype,
            poison="infinity",
            values=NEEDLES,
            seed=seed,
        )
        case.check()
        check_oracles(case, Declaration())
        right = answer(case, Declaration()).exact
        for b in (0, 2):
            values = case.value_values(case.token_ids(b))
            for head, at in enumerate(needle_rows(case, b)):
                (position,) = at
                for query in (2 * head, 2 * head + 1):
                    assert right[b, query].tolist() == values[position, head].tolist()
                assert values.min() > 0 and values.max() < 256, (
                    "bfloat16 holds 8 bits; no output is a zero of some sign"
                )


def test_needles_of_what_is_drawn_are_exact() -> None:
    exact = 0
    for case in few():
        if not case.has_needles():
            continue
        needles = replace(case, values=NEEDLES)
        needles.check()
        check_oracles(needles, STRIDED)
        right = answer(needles, STRIDED).exact
        for b, n in enumerate(case.context_lens):
            if n:
                values = needles.value_values(needles.token_ids(b))
                for head, at in enumerate(needle_rows(needles, b)):
                    (position,) = at
                    heads = right[b, head * case.group_size : (head + 1) * case.group_size]
                    assert (heads == values[position, head]).all()
                    exact += 1
    assert exact > 200


def test_needles_lie_everywhere() -> None:
    """In the first and the last position as in any other, or a kernel that forgets one is never seen."""
    seen = Counter[int]()
    row = (Sequence((0, 1), (), 6),)
    for seed in range(300):
        case = PagedDecodeAttentionCase(block_size=4, num_blocks=2, sequences=row, values=NEEDLES, seed=seed)
        (at,) = needle_rows(case, 0)
        seen.update(at)
    assert set(seen) == set(range(6)) and min(seen.values()) > 25


def twin_needles(case: PagedDecodeAttentionCase) -> dict[str, tuple[PagedDecodeAttentionCase, list[int]]]:
    rows = list(range(len(case.sequences)))
    return {
        "reversed": (case.batch(rows[::-1]), rows[::-1]),
        "doubled": (case.batch(rows * 2), rows * 2),
        **{f"{b} alone": (case.batch([b]), [b]) for b in rows},
        "contiguous": (case.contiguous(), rows),
        "elsewhere": (case.elsewhere(case.in_pool()[::-1]), rows),
        "in other pages": (case.repaged(case.block_size + 1), rows),
    }


def test_twins_have_the_same_needles() -> None:
    compared = Counter[str]()
    for case in few()[:70]:
        if not case.has_needles():
            continue
        needles = replace(case, values=NEEDLES)
        before = [needle_rows(needles, b) for b in range(len(case.sequences))]
        right = answer(needles, STRIDED).exact
        for name, (twin, rows) in twin_needles(needles).items():
            if name == "in other pages" and not pages_are_one_s_own(case):
                continue
            twin.check()
            assert twin.has_needles()
            assert [needle_rows(twin, b) for b in range(len(rows))] == [before[b] for b in rows], name
            assert np.array_equal(answer(twin, STRIDED).exact, right[rows]), name
            compared[name] += 1
    assert compared["in other pages"] > 25 and compared["1 alone"] > 20 and compared["contiguous"] > 25


ROW, OTHER = Sequence((0, 1), (), 4), Sequence((2, 3), (), 4)


@pytest.mark.parametrize(
    ("rows", "changes", "holds"),
    [
        ((ROW, OTHER), {}, True),
        ((ROW, ROW), {}, True),  # all of it shared: the same needles
        ((ROW, Sequence((), (0, 0), 0)), {}, True),
        ((), {}, True),
        ((ROW, Sequence((0, 3), (), 4)), {}, False),  # two sequences' tokens in one row
        ((ROW, Sequence((0,), (9,), 2)), {}, False),  # a shorter row would have needles of its own among row 0's
        ((ROW, Sequence((0, 1), (), 3)), {}, False),
        ((ROW, OTHER), {"tokens_of": ((5, 5), (6, 6))}, True),
        ((ROW, OTHER), {"tokens_of": ((5, 5), (5, 5))}, True),
        ((ROW, OTHER), {"tokens_of": ((5, 6), (7, 7))}, False),
        ((ROW, OTHER), {"scale": 2.0**-7}, True),
        ((ROW, OTHER), {"scale": 2.0**-8}, False),
        ((ROW, OTHER), {"scale": 0.0}, False),
        ((ROW, OTHER), {"scale": -(2.0**-7)}, True),
    ],
)
def test_has_needles(rows: tuple[Sequence, ...], changes: dict[str, Any], holds: bool) -> None:
    case = replace(PagedDecodeAttentionCase(block_size=2, num_blocks=4, sequences=rows, dtype="float16"), **changes)
    case.check()
    assert case.has_needles() is holds
    needles = replace(case, values=NEEDLES)
    if not holds:
        with pytest.raises(InvalidCase, match=r"^values='needles' is not exact for this case$"):
            needles.check()
        return
    needles.check()
    check_oracles(needles, Declaration())
    for b, row in enumerate(rows):
        assert all(len(at) == 1 for at in needle_rows(needles, b)) or row.context_len == 0


# ------------------------------------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens_of": ((0,),)}, "tokens_of does not name the pages of each sequence"),
        ({"tokens_of": ((0, 0), (1,))}, "tokens_of does not name the pages of each sequence"),
        ({"tokens_of": ((0, 0), (1, 1), ())}, "tokens_of does not name the pages of each sequence"),
        ({"queries_of": (0,)}, "queries_of does not name each row"),
        ({"queries_of": (0, 1, 2)}, "queries_of does not name each row"),
        (
            {"sequences": (ROW, ROW), "tokens_of": ((3, 3), (3, 4))},
            "tokens_of gives block 1 the tokens of sequences 3 and 4",
        ),
    ],
)
def test_labels_that_contradict_the_pages(changes: dict[str, Any], sentence: str) -> None:
    case = PagedDecodeAttentionCase(block_size=2, num_blocks=4, sequences=(ROW, OTHER))
    case.check()
    with pytest.raises(InvalidCase, match=f"^{sentence}$"):
        replace(case, **changes).check()


@pytest.mark.parametrize("values", sorted(set(DRAWN_VALUES)))
@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout("NSH2D"), CacheLayout("NHSD", (0, 3, 0, 0))], ids=str)
def test_every_recipe_follows_the_labels(values: str, layout: CacheLayout) -> None:
    case = replace(SHARING, values=values, k_layout=layout, v_layout=layout)
    before = gathered(case)
    unshared = case.unshared()
    assert unshared is not None
    assert gathered(case.batch([4, 2, 0, 1])) == [before[b] for b in (4, 2, 0, 1)]
    assert gathered(unshared.batch([1, 3])) == [before[1], before[3]]
