"""Cache layouts: every token lies where its strides say and poison everywhere else; what is drawn; what is simpler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration
from pagefuzz.oracles.answers import check_oracles
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.cache_layouts import CONTIGUOUS, HND, NHD, ORDERS, PACKED, CacheLayout, WithCaches, _layouts
from pagefuzz.strategies.case import FAR_ELEMENTS, InvalidCase, Limits, Sequence
from pagefuzz.strategies.number_formats import FORMATS, STORAGE, encode
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.tensors import Buffer
from pagefuzz.strategies.values import is_sentinel

WRITE, DECODE, BOTH = "reshape_and_cache", "paged_decode_attention", "write_then_decode"
STRIDED = Declaration(cache_layouts=("strided",))
DEFAULT = Declaration()

each_operation = pytest.mark.parametrize("operation", [WRITE, DECODE, BOTH])

SIZES: dict[str, Any] = {"block_size": 3, "num_blocks": 4, "num_kv_heads": 2, "head_dim": 2}
DECODES = PagedDecodeAttentionCase(
    **SIZES, sequences=(Sequence((2, 0), (1,), 5), Sequence((2,), (9, -1), 3)), poison="nan", seed=5, group_size=2
)
WRITES = ReshapeAndCacheCase(**SIZES, slots=(11, -1, 4, 0), values="bit_patterns", seed=5)

GAPS = [*product((0, 1), repeat=4), (3, 2, 1, 0), (0, 64, 0, 2), (7, 0, 5, 0)]
ALONE = [CacheLayout(order, gaps) for order in (NHD, HND) for gaps in GAPS]
PAIRS = [
    *((layout, layout) for layout in ALONE),
    *((layout, ALONE[(5 * place + 3) % len(ALONE)]) for place, layout in enumerate(ALONE)),
    *((layout, layout) for order in PACKED for gaps in GAPS for layout in [CacheLayout(order, (*gaps, gaps[0]))]),
    *((layout, layout) for order in ORDERS for layout in [CacheLayout(order)]),
]
each_layout = pytest.mark.parametrize("layouts", PAIRS, ids=lambda pair: f"{pair[0]}, {pair[1]}")


def lying(case: Any, layouts: tuple[CacheLayout, CacheLayout]) -> Any:
    found = replace(case, k_layout=layouts[0], v_layout=layouts[1])
    found.check()
    return found


def places(case: WithCaches) -> dict[str, np.ndarray]:
    """int64[N, bs, KVH, D] of each cache: where in its buffer each element lies, by cutting the buffer up into entries
    from the outside, and so by another way than strides."""
    found = {}
    sizes = {"N": case.num_blocks, "S": case.block_size, "H": case.num_kv_heads, "D": case.head_dim, "2": 2}
    for name, layout in (("k_cache", case.k_layout), ("v_cache", case.v_layout)):
        widths: list[int] = []
        inner = 1
        for dim, gap in reversed(list(zip(layout.order, layout.padding or (0,) * 9, strict=False))):
            widths.insert(0, inner + gap)
            inner = widths[0] * sizes[dim]
        index: np.ndarray = np.arange(inner)
        for dim, width in zip(layout.order, widths, strict=True):
            index = index[..., : sizes[dim] * width].reshape(*index.shape[:-1], sizes[dim], width)
        index = index[..., 0]
        order = layout.order
        if "2" in order:
            index = np.take(index, int(name == "v_cache"), axis=order.index("2"))
            order = order.replace("2", "")
        found[name] = index.transpose([order.index(dim) for dim in NHD])
    return found


def content(buffer: Buffer) -> tuple[np.ndarray, np.ndarray]:
    """Every element of a small buffer, and which of them are filled."""
    bits: np.ndarray = np.zeros(buffer.size, dtype=STORAGE[buffer.dtype])
    filled = np.zeros(buffer.size, dtype=bool)
    for first, piece in buffer.pieces:
        assert not filled[first : first + len(piece)].any(), "two pieces overlap"
        bits[first : first + len(piece)], filled[first : first + len(piece)] = piece, True
    return bits, filled


@cache
def drawn(operation: str, *layouts: str) -> list[Any]:
    """600 cases for a declaration of these cache layouts, the default if there is none."""
    declared = Declaration(cache_layouts=layouts) if layouts else DEFAULT
    cases: list[Any] = []
    for seed in range(4):
        each_case(STRATEGIES[operation](declared, Limits()), 150, seed, cases.append)
    return cases


# ------------------------------------------------------------------------------------------------------- where they lie


@each_layout
def test_the_strides_lead_to_where_the_layout_says(layouts: tuple[CacheLayout, CacheLayout]) -> None:
    for base in (DECODES, WRITES):
        case = lying(base, layouts)
        tensors = case.arguments().tensors
        taken: dict[str, set[int]] = {}
        for name, where in places(case).items():
            tensor = tensors[name]
            assert tensor.shape == where.shape == (4, 3, 2, 2)
            index = np.indices(where.shape)
            assert np.array_equal(tensor.offset + np.tensordot(tensor.strides, index, 1), where)
            assert len(np.unique(where)) == where.size, "two elements of one cache share a place"
            assert tensor.last_element() == where.max() < tensor.buffer.size
            mine = taken.setdefault(tensor.buffer.name, set())
            assert mine.isdisjoint(where.reshape(-1).tolist()), "keys and values overlap"
            mine.update(where.reshape(-1).tolist())
        assert set(taken) == ({"kv_cache"} if case.packed else {"k_cache", "v_cache"})
        assert (tensors["k_cache"].buffer is tensors["v_cache"].buffer) == case.packed
        assert all(tensors[name].buffer.is_cache for name in ("k_cache", "v_cache"))


@each_layout
def test_a_decode_finds_its_tokens_and_poison_everywhere_else(layouts: tuple[CacheLayout, CacheLayout]) -> None:
    case = lying(DECODES, layouts)
    tensors, where = case.arguments().tensors, places(case)
    memory = {name: content(tensors[name].buffer) for name in ("k_cache", "v_cache")}
    owned = {name: np.zeros(tensors[name].buffer.size, dtype=bool) for name in ("k_cache", "v_cache")}
    if case.packed:
        owned["v_cache"] = owned["k_cache"]
    for name, values in (("k_cache", case.key_values), ("v_cache", case.value_values)):
        bits, _ = memory[name]
        for b, row in enumerate(case.sequences):
            right = encode(values(case.token_ids(b)), case.dtype)
            for position in range(row.context_len):
                element = where[name][row.blocks[position // 3], position % 3]
                assert np.array_equal(bits[element], right[position])
                owned[name][element] = True
    for name, (bits, filled) in memory.items():
        assert filled.all(), "the whole of a small pool is filled"
        assert (bits[~owned[name]] == FORMATS["float32"].nan).all()
        assert not (bits[owned[name]] == FORMATS["float32"].nan).any()
    check_oracles(case, STRIDED)


@each_layout
def test_a_write_finds_earlier_numbers_everywhere(layouts: tuple[CacheLayout, CacheLayout]) -> None:
    case = lying(WRITES, layouts)
    tensors, where = case.arguments().tensors, places(case)
    for name in ("k_cache", "v_cache"):
        bits, filled = content(tensors[name].buffer)
        assert filled.all() and not is_sentinel(bits).any()
        assert len(np.unique(bits)) > 0.9 * len(bits), "no two places hold the same, gaps included"
        buffer, elements = case.watched()[name]
        assert buffer == tensors[name].buffer.name
        addressed = [slot for slot in case.slots if slot >= 0]
        assert elements.tolist() == [where[name][slot // 3, slot % 3].reshape(-1).tolist() for slot in addressed]
    check_oracles(case, STRIDED)


@pytest.mark.parametrize("values", ["rows_modulo", "heads_by_value"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_probe_s_rows_past_the_length_weigh_what_they_say(order: str, values: str) -> None:
    """Keys of free pages are 0 and values 8 wherever they lie."""
    case = replace(lying(DECODES, (CacheLayout(order), CacheLayout(order))), values=values, poison="zeros")
    tensors, where = case.arguments().tensors, places(case)
    for name, number in (("k_cache", 0.0), ("v_cache", 8.0)):
        bits, _ = content(tensors[name].buffer)
        free = bits[where[name][[1, 3]]]
        assert (free == encode(np.array([number]), "float32")).all()


@each_operation
@pytest.mark.parametrize("layout", [CacheLayout(HND), CacheLayout(NHD, (1, 0, 0, 0)), CacheLayout("NSH2D")], ids=str)
def test_what_a_kernel_is_handed_does_not_depend_on_the_layout(operation: str, layout: CacheLayout) -> None:
    """The numbers read through the strides are those of the contiguous case, wherever a token lies."""
    compared = 0
    for case in drawn(operation)[:60]:
        if case.num_blocks * case.block_elements() > 1 << 16:
            continue
        other = lying(case, (layout, layout))
        slots = [(block, slot) for block, count in getattr(case, "owned", {}).items() for slot in range(count)]
        for name in ("k_cache", "v_cache") if slots else ():
            block, slot = np.array(slots).T
            mine, theirs = (
                content(each.arguments().tensors[name].buffer)[0][places(each)[name][block, slot]]
                for each in (case, other)
            )
            assert np.array_equal(mine, theirs)
            compared += 1
        for name in ("q", "block_tables", "context_lens", "key", "value", "slot_mapping"):
            tensors = [each.arguments().tensors.get(name) for each in (case, other)]
            if tensors[0] is not None and tensors[1] is not None:
                assert np.array_equal(content(tensors[0].buffer)[0], content(tensors[1].buffer)[0])
                assert tensors[0].strides == tensors[1].strides
    assert compared > 30 or operation == WRITE


@pytest.mark.parametrize("base", [DECODES, WRITES], ids=lambda case: case.operation)
def test_no_gaps_is_the_contiguous_case(base: Any) -> None:
    same = lying(base, (CacheLayout(NHD, (0, 0, 0, 0)), CacheLayout(NHD, (0, 0, 0, 0))))
    assert same.cache_kind() == "contiguous"
    for name in ("k_cache", "v_cache"):
        mine, theirs = (case.arguments().tensors[name] for case in (base, same))
        assert (mine.shape, mine.strides, mine.offset) == (theirs.shape, theirs.strides, theirs.offset)
        assert mine.strides == (12, 4, 2, 1) and mine.buffer.size == theirs.buffer.size == 48
        assert np.array_equal(content(mine.buffer)[0], content(theirs.buffer)[0])


# ---------------------------------------------------------------------------------------------------------------- words


@each_layout
def test_every_element_has_its_name(layouts: tuple[CacheLayout, CacheLayout]) -> None:
    case = lying(WRITES, layouts)
    for name in ("k_cache", "v_cache"):
        tensor = case.arguments().tensors[name]
        names = {}
        for each, where in places(case).items():
            if case.packed or each == name:
                for (block, offset, head, dim), element in np.ndenumerate(where):
                    of_which = f" of {each}" if case.packed else ""
                    names[int(element)] = f"block {block}, offset {offset}, kv head {head}, dim {dim}{of_which}"
        block = tensor.strides[0]
        for element in range(tensor.buffer.size):
            gap = f"block {element // block}, in a gap between its rows"
            assert case.cache_words(tensor.buffer.name, element) == names.get(element, gap)


def test_a_size_of_one_does_not_confuse_the_names() -> None:
    for sizes in product((1, 2), repeat=4):
        named: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
        base = ReshapeAndCacheCase(**named)
        for layouts in PAIRS[:: 7 if sizes != (1, 1, 1, 1) else 1]:
            case = lying(base, layouts)
            for name, where in places(case).items():
                buffer = case.arguments().tensors[name].buffer.name
                for index, element in np.ndenumerate(where):
                    said = case.cache_words(buffer, int(element))
                    assert said.startswith("block {}, offset {}, kv head {}, dim {}".format(*index)), (case, said)


def test_a_layout_in_words() -> None:
    assert str(CacheLayout()) == "[N, bs, KVH, D]"
    assert str(CacheLayout(HND, (0, 8, 0, 0))) == "[N, KVH, bs, D] with gaps (8 after each KVH)"
    assert str(CacheLayout("NSH2D", (3, 0, 0, 1, 0))) == "[N, bs, KVH, 2, D] with gaps (3 after each N, 1 after each 2)"
    packed = lying(DECODES, (CacheLayout("N2SHD"),) * 2)
    assert "k_cache and v_cache are views of one tensor [N, 2, bs, KVH, D]" in packed.lines()
    unlike = lying(WRITES, (CacheLayout(HND), CONTIGUOUS))
    assert "k_cache is a view of [N, KVH, bs, D], v_cache of [N, bs, KVH, D]" in unlike.lines()
    assert not [line for line in DECODES.lines() if "view" in line]


# --------------------------------------------------------------------------------------------------------- declarations

KINDS: list[tuple[tuple[CacheLayout, CacheLayout], str]] = [
    ((CONTIGUOUS, CONTIGUOUS), "contiguous"),
    ((CacheLayout(HND), CacheLayout(HND)), "hnd"),
    ((CacheLayout("N2SHD"),) * 2, "packed"),
    ((CacheLayout("NSH2D"),) * 2, "packed"),
    ((CacheLayout(HND), CONTIGUOUS), "strided"),
    ((CacheLayout(NHD, (1, 0, 0, 0)),) * 2, "strided"),
    ((CacheLayout(HND, (0, 0, 2, 0)),) * 2, "strided"),
    ((CacheLayout("N2SHD", (0, 8, 0, 0, 0)),) * 2, "strided"),
    ((CacheLayout(NHD, (0, 0, 0, 1)),) * 2, ""),
    ((CONTIGUOUS, CacheLayout(HND, (0, 0, 0, 1))), ""),
]


@pytest.mark.parametrize("base", [DECODES, WRITES], ids=lambda case: case.operation)
@pytest.mark.parametrize(("layouts", "kind"), KINDS, ids=[f"{pair[0]}, {pair[1]}" for pair, _ in KINDS])
def test_beyond_each_declaration(base: Any, layouts: tuple[CacheLayout, CacheLayout], kind: str) -> None:
    case = lying(base, layouts)
    assert case.cache_kind() == kind
    for declared in [(one,) for one in CACHE_LAYOUTS] + [("contiguous", "hnd"), CACHE_LAYOUTS]:
        within = kind in declared or ("strided" in declared and kind != "")
        said = case.beyond(Declaration(cache_layouts=declared))
        assert said == ("" if within else f"{kind or 'dim-strided'} caches")
    assert (f"caches {kind or 'dim-strided'}") in case.features()


@pytest.mark.parametrize("operation", [WRITE, DECODE])
def test_a_head_dim_of_one_may_have_any_stride(operation: str) -> None:
    base = replace(WRITES if operation == WRITE else DECODES, head_dim=1)
    case = lying(base, (CacheLayout(NHD, (0, 0, 0, 1)),) * 2)
    assert case.cache_kind() == "strided" and case.beyond(STRIDED) == ""


@each_operation
def test_nothing_but_contiguous_caches_for_the_default(operation: str) -> None:
    assert {case.layouts for case in drawn(operation)} == {(CONTIGUOUS, CONTIGUOUS)}


@each_operation
@pytest.mark.parametrize("layouts", [("hnd",), ("contiguous", "packed"), ("hnd", "packed")], ids=", ".join)
def test_only_what_is_declared_is_drawn(operation: str, layouts: tuple[str, ...]) -> None:
    cases = drawn(operation, *layouts)
    assert {case.cache_kind() for case in cases} == set(layouts)
    assert all(case.beyond(Declaration(cache_layouts=layouts)) == "" for case in cases)


@each_operation
def test_every_kind_of_layout_is_drawn_for_strided(operation: str) -> None:
    cases = drawn(operation, "strided")
    kinds = Counter(case.cache_kind() for case in cases)
    assert set(kinds) == set(CACHE_LAYOUTS)
    assert all(count > 0.1 * len(cases) for count in kinds.values()), kinds
    assert 0.35 * len(cases) < kinds["contiguous"] < 0.65 * len(cases), kinds
    for case in cases:
        case.check()
        assert case.beyond(STRIDED) == ""
    strided = [case for case in cases if case.cache_kind() == "strided"]
    seen = Counter[str]()
    for case in strided:
        for layout in case.layouts:
            seen.update(f"gap after each {dim}" for dim in layout.order if layout.padding_of(dim))
            seen[layout.order] += 1
        seen["keys unlike values"] += case.k_layout != case.v_layout
        seen["a gap in one of them only"] += any(case.k_layout.padding) != any(case.v_layout.padding)
        heads, slots, blocks = (size == 1 for size in (case.num_kv_heads, case.block_size, case.num_blocks))
        odd = [cache.strides for cache in case.caches().values()]
        seen["odd stride of one head"] += heads and any(strides[2] % max(case.head_dim, 2) for strides in odd)
        seen["odd stride of one slot"] += slots and any(strides[1] % max(case.head_dim, 2) for strides in odd)
        seen["gap after the one block"] += blocks and any(layout.padding_of("N") for layout in case.layouts)
        single = case.head_dim == 1 and any(strides[3] > 1 for strides in odd)
        seen["odd stride of one dim"] += single and not case.packed
        seen["odd stride of one dim in one tensor"] += single and case.packed
        seen["rows at odd addresses"] += any(strides[1] % 2 for strides in odd) and case.head_dim % 2 == 0
    for what in (*ORDERS, *(f"gap after each {dim}" for dim in "NSHD"), "keys unlike values", "rows at odd addresses"):
        assert seen[what] > 0, (what, seen)
    assert seen["a gap in one of them only"] > 0 and len(strided) > 60, seen
    assert all(seen[f"odd stride of one {dim}"] > 0 for dim in ("head", "slot", "dim", "dim in one tensor")), seen


@each_operation
def test_far_caches_of_every_layout(operation: str) -> None:
    """Offsets past 2^31 elements, in the words of the layout's own strides, and both oracles find the tokens there."""
    far = [case for case in drawn(operation, "strided") if case.is_far() and case.cache_kind() != "contiguous"]
    assert len(far) > 15 and len({case.cache_kind() for case in far}) == 3
    for case in far:
        if operation == WRITE:
            assert max(int(elements.max()) for _, elements in case.watched().values()) >= FAR_ELEMENTS
        else:
            furthest = [cache.offset + max(case.owned) * cache.strides[0] for cache in case.caches().values()]
            assert max(furthest) >= FAR_ELEMENTS
        for name in ("k_cache", "v_cache"):
            tensor = case.arguments().tensors[name]
            assert tensor.last_element() < tensor.buffer.size
            assert sum(len(bits) for _, bits in tensor.buffer.pieces) < 1 << 22
        check_oracles(case, STRIDED)


@each_operation
def test_the_oracles_agree_on_every_layout(operation: str) -> None:
    for case in drawn(operation, "strided")[:200]:
        check_oracles(case, STRIDED)


# ------------------------------------------------------------------------------------------------------------ alignment


def addresses(case: Any, blocks: tuple[int, ...]) -> list[int]:
    """Of blocks in both caches, in bytes modulo 64."""
    strides = [cache.strides[0] * case.itemsize() for cache in case.caches().values()]
    return [block * stride % 64 for block in blocks for stride in strides]


def test_blocks_that_move_keep_their_addresses_modulo_64_bytes() -> None:
    moved = Counter[str]()
    for case in drawn(DECODE, "strided"):
        if not case.owned:
            continue
        others = {"elsewhere": case.elsewhere(case.in_pool()[::-1], free=2)}
        others["compact"], others["unshared"] = case.compact(), case.unshared()
        for name, other in others.items():
            if other is None:
                continue
            other.check()
            for row, twin in zip(case.sequences, other.sequences, strict=True):
                assert addresses(case, row.blocks) == addresses(other, twin.blocks), name
                moved[name] += row.blocks != twin.blocks and case.cache_kind() != "contiguous"
    assert all(moved[name] > 10 for name in ("elsewhere", "compact", "unshared")), moved


# -------------------------------------------------------------------------------------------------------------- simpler


def is_valid(case: Any) -> bool:
    try:
        case.check()
    except InvalidCase:
        return False
    return True


@each_operation
def test_simpler_layouts_are_valid_and_declared(operation: str) -> None:
    tried = invalid = outside = 0
    for case in drawn(operation, "strided")[:300:2]:
        for simpler in case.simpler():
            assert simpler != case
            tried += 1
            invalid += not is_valid(simpler)
            outside += simpler.beyond(STRIDED) != ""
    assert tried > 2000 and invalid <= 0.005 * tried and outside == 0, (tried, invalid, outside)


@each_operation
def test_every_layout_leads_to_the_contiguous_one(operation: str) -> None:
    for case in drawn(operation, "strided")[:300]:
        if case.layouts != (CONTIGUOUS, CONTIGUOUS):
            assert any(simpler.layouts == (CONTIGUOUS, CONTIGUOUS) for simpler in case.simpler())


@pytest.mark.parametrize("base", [DECODES, WRITES], ids=lambda case: case.operation)
@each_layout
def test_a_fault_of_a_layout_shrinks_to_the_least_of_it(base: Any, layouts: tuple[CacheLayout, CacheLayout]) -> None:
    """Where the first accepted step never is the contiguous layout, it ends with no gap, or one of one element."""
    case = lying(base, layouts)
    seen = {case}

    def steps() -> Iterator[Any]:
        return (step for step in case.simpler() if is_valid(step) and step.cache_kind() == kind)

    kind = case.cache_kind()
    while (step := next(steps(), None)) is not None:
        assert step not in seen
        seen.add(step)
        case = step
        assert len(seen) < 200
    gaps = [gap for layout in case.layouts for gap in layout.padding if gap]
    assert set(gaps) <= {1}
    if kind in ("strided", ""):
        assert len(gaps) <= (2 if case.k_layout == case.v_layout else 1), case.one_line()
    else:
        assert not gaps


@each_operation
def test_layouts_never_go_round_in_circles(operation: str) -> None:
    chance = random.Random(2)
    for case in drawn(operation, "strided")[:100:5]:
        passed = {case}
        for _ in range(150):
            found = [step for step in case.simpler() if is_valid(step)]
            if not found:
                break
            case = chance.choice(found)
            assert case not in passed, case.one_line()
            passed.add(case)
        else:
            raise AssertionError(f"no end: {case.one_line()}")


# ------------------------------------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"k_layout": CacheLayout("DHSN")}, "k_layout: order 'DHSN' is not one of NSHD, NHSD, N2SHD, NSH2D"),
        ({"v_layout": CacheLayout("")}, "v_layout: order '' is not one of NSHD, NHSD, N2SHD, NSH2D"),
        ({"k_layout": CacheLayout(NHD, (1,))}, "k_layout: padding must name every dim of the order"),
        ({"v_layout": CacheLayout(HND, (1, 0, 0, 0, 0))}, "v_layout: padding must name every dim of the order"),
        (
            {"k_layout": CacheLayout("N2SHD")},
            "k_layout and v_layout must be equal where keys and values lie in one tensor",
        ),
        (
            {"k_layout": CacheLayout("N2SHD"), "v_layout": CacheLayout("NSH2D")},
            "k_layout and v_layout must be equal where keys and values lie in one tensor",
        ),
        (
            {"k_layout": CacheLayout(NHD, (65536, 65536, 65536, 65536))},
            "elements are more than a case may hold",
        ),
    ],
)
@pytest.mark.parametrize("base", [DECODES, WRITES], ids=lambda case: case.operation)
def test_layouts_that_contradict_themselves(base: Any, changes: dict[str, Any], sentence: str) -> None:
    if "65536" in str(changes):  # what a gap costs, a slot or a block more of them costs as often
        changes = {**changes, "block_size": 64, "num_kv_heads": 64}
        changes |= {"sequences": (Sequence((0,), (), 1),)} if base is DECODES else {"slots": (0,)}
    with pytest.raises(InvalidCase, match=sentence):
        replace(base, **changes).check()


@pytest.mark.parametrize("layouts", PAIRS[::5], ids=lambda pair: f"{pair[0]}, {pair[1]}")
def test_what_a_layout_takes_is_what_it_says(layouts: tuple[CacheLayout, CacheLayout]) -> None:
    case = lying(WRITES, layouts)
    for name in ("k_cache", "v_cache"):
        tensor = case.arguments().tensors[name]
        assert tensor.buffer.size == case.num_blocks * case.caches()[name].strides[0]
        assert prod(tensor.shape) <= tensor.buffer.size
        assert case.block_elements() >= case.caches()[name].strides[0]


def test_every_drawn_layout_survives_json() -> None:
    """A bool among the paddings equals an int, and is none in a saved file."""
    for single in (False, True):
        for pairs in _layouts(single).values():
            assert all(type(gap) is int for pair in pairs for layout in pair for gap in layout.padding)
