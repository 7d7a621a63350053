"""The registry: what `kernel(...)` takes, what it refuses and how it says so, and the defaults of a declaration."""

# The kernels here are what a user would write, without types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import pytest

import pagefuzz
from pagefuzz.kernels import registry
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, RegistrationError, kernel, registered


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})


def decode(q, k_cache, v_cache, block_tables, context_lens, scale):
    raise AssertionError("registering must not call a kernel")


def checked(q, k_cache, v_cache, block_tables, context_lens, scale, *, check_values=False):
    raise AssertionError("registering must not call a kernel")


def write(key, value, k_cache, v_cache, slot_mapping):
    raise AssertionError("registering must not call a kernel")


def slots(block_tables, seq_ids, positions, block_size):
    raise AssertionError("registering must not call a kernel")


def both(key, value, k_cache, v_cache, slot_mapping, q, block_tables, context_lens, scale):
    raise AssertionError("registering must not call a kernel")


CALLS: dict[str, Callable[..., Any]] = {
    "write_then_decode": both,
    "paged_decode_attention": decode,
    "reshape_and_cache": write,
    "slot_mapping": slots,
}


def refusal(operation: Any, call: Any = decode, **declarations: Any) -> str:
    with pytest.raises(RegistrationError) as caught:
        kernel(operation, **declarations)(call)
    assert registered() == {}, "a refused kernel must not stay registered"
    assert isinstance(caught.value, ValueError)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence == sentence.strip() and sentence[-1] in ".?"
    return sentence


# -------------------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_registers_and_hands_the_function_back_unchanged(operation: str) -> None:
    call = CALLS[operation]
    before = dict(vars(call))
    assert kernel(operation)(call) is call
    assert vars(call) == before
    (name, made), *others = registered().items()
    assert not others and name == made.name == call.__name__
    assert made.call is call and made.operation is OPERATIONS[operation]


def test_it_is_what_the_package_exports() -> None:
    assert pagefuzz.kernel is kernel


def test_a_name_of_ones_own() -> None:
    kernel("slot_mapping", name="mine")(slots)
    kernel("slot_mapping", name="mine too")(slots)
    assert list(registered()) == ["mine", "mine too"]


def test_registered_is_a_copy_in_order() -> None:
    kernel("slot_mapping")(slots)
    kernel("reshape_and_cache")(write)
    known = registered()
    known.clear()
    assert list(registered()) == ["slots", "write"]


class Callable_:
    def __call__(self, block_tables, seq_ids, positions, block_size):
        raise AssertionError("registering must not call a kernel")


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c, d: None,
        lambda *arguments: None,
        lambda *arguments, **keywords: None,
        lambda block_tables, seq_ids, positions, block_size, extra=1: None,
        lambda table, seq_ids, where, bs: None,
        functools.partial(lambda a, b, c, d, e: None, 1),
        Callable_(),
        min,  # a builtin that tells nothing of its signature
    ],
    ids=["other names", "star", "star and keywords", "default", "mixed names", "partial", "object", "builtin"],
)
def test_any_callable_that_the_contract_fits(call: Callable[..., Any]) -> None:
    assert kernel("slot_mapping", name="mine")(call) is call
    assert registered()["mine"].call is call


@pytest.mark.parametrize(
    "call",
    [checked, lambda *a, **keywords: None, lambda a, b, c, d, e, f, check_values=False: None],
    ids=["keyword only", "keywords", "by position too"],
)
def test_check_values_is_a_keyword(call: Callable[..., Any]) -> None:
    kernel("paged_decode_attention", name="mine", rejects="check_values")(call)
    assert registered()["mine"].declared.rejects == "check_values"


# ------------------------------------------------------------------------------------------------------------- defaults


def test_the_defaults_are_those_of_an_ordinary_good_kernel() -> None:
    """The table of the contract, word by word."""
    defaults: dict[str, Any] = {
        "dtypes": ("float32", "float16", "bfloat16"),
        "head_dims": None,
        "group_sizes": None,
        "block_sizes": None,
        "index_dtypes": ("int32", "int64"),
        "token_strides": "any",
        "table_strides": "any",
        "cache_layouts": ("contiguous",),
        "negative_slots": "any",
        "empty": "zeros",
        "unowned": "any",
        "table_reads": "exact",
        "unit_roundoff": {},
        "most_slots": None,
        "batch_invariant": False,
        "deterministic": True,
        "rejects": False,
        "devices": "any",
    }
    kernel("paged_decode_attention")(decode)
    made = registered()["decode"].declared
    assert {item.name: getattr(made, item.name) for item in fields(Declaration)} == defaults
    assert [item.name for item in fields(Declaration)] == list(defaults)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("token_strides", ["any", "contiguous"]),
        ("table_strides", ["any", "contiguous"]),
        ("negative_slots", ["any", "minus_one", "never"]),
        ("empty", ["zeros", "untouched", "never"]),
        ("unowned", ["any", "finite"]),
        ("table_reads", ["exact", "row"]),
        ("batch_invariant", [False, True]),
        ("deterministic", [False, True]),
        ("rejects", [False, True]),
    ],
)
def test_every_choice_is_taken(name: str, values: list[Any]) -> None:
    for value in values:
        made = kernel("paged_decode_attention", name=f"mine {value}", **{name: value})
        made(decode)
        assert getattr(registered()[f"mine {value}"].declared, name) == value


def declared(**declarations: Any) -> Declaration:
    kernel("paged_decode_attention", **declarations)(decode)
    return registered()["decode"].declared


@pytest.mark.parametrize(
    ("dtypes", "kept"),
    [
        (["float16"], ("float16",)),
        (("bfloat16", "float32"), ("bfloat16", "float32")),
        (["float16", "float16"], ("float16",)),
        ({"float32": 1}, ("float32",)),
    ],
)
def test_dtypes_are_any_subset(dtypes: Any, kept: tuple[str, ...]) -> None:
    assert declared(dtypes=dtypes).dtypes == kept


@pytest.mark.parametrize(
    ("layouts", "kept"),
    [
        (["hnd"], ("hnd",)),
        (("packed", "contiguous"), ("packed", "contiguous")),
        (["strided", "strided"], ("strided",)),
        (["contiguous", "hnd", "packed", "strided"], ("contiguous", "hnd", "packed", "strided")),
    ],
)
def test_cache_layouts_are_any_subset(layouts: Any, kept: tuple[str, ...]) -> None:
    assert declared(cache_layouts=layouts).cache_layouts == kept


@pytest.mark.parametrize("what", ["head_dims", "group_sizes", "block_sizes"])
@pytest.mark.parametrize(
    ("sizes", "within", "without"),
    [
        (None, [1, 3, 4096], []),
        ([64, 128], [64, 128], [1, 96]),
        ({16}, [16], [8, 32]),
        (range(16, 257, 16), [16, 48, 256], [8, 17, 272]),
        (lambda size: size % 8 == 0, [8, 80], [1, 12]),
        (lambda size: size & 1, [1, 3], [2, 64]),
    ],
    ids=["any", "list", "set", "range", "predicate", "predicate of an int"],
)
def test_sizes(what: str, sizes: Any, within: list[int], without: list[int]) -> None:
    made = declared(**{what: sizes})
    assert [made.supports_size(what, size) for size in within] == [True] * len(within)
    assert [made.supports_size(what, size) for size in without] == [False] * len(without)
    others = {"head_dims", "group_sizes", "block_sizes"} - {what}
    assert all(made.supports_size(other, 7) for other in others)


def test_a_list_that_changes_later_does_not_change_the_declaration() -> None:
    sizes, roundoff = [64], {"weights": "input"}
    made = declared(head_dims=sizes, unit_roundoff=roundoff)
    sizes.append(1)
    roundoff["weights"] = "float16"
    assert not made.supports_size("head_dims", 1)
    assert made.unit_roundoff == {"weights": "input"}
    assert isinstance(made.unit_roundoff, MappingProxyType)


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "input"])
def test_unit_roundoffs(precision: str) -> None:
    rounded = dict.fromkeys(("scores", "weights", "products", "sums"), precision)
    assert declared(unit_roundoff=rounded).unit_roundoff == rounded


def test_most_slots() -> None:
    assert declared(most_slots=64).most_slots == 64


def test_devices() -> None:
    assert declared(devices=["cuda", "cpu"]).devices == ("cuda", "cpu")


def test_declarations_of_two_kernels_are_told_apart() -> None:
    """The answers are remembered by case and declaration, so two equal ones must not stand for each other."""
    assert Declaration() != Declaration() and len({Declaration(), Declaration()}) == 2


# ------------------------------------------------------------------------------------------------------ what it refuses


def test_an_unknown_operation() -> None:
    assert refusal("paged_decode_atention") == (
        "unknown operation 'paged_decode_atention'; did you mean 'paged_decode_attention'?"
    )
    assert refusal("matmul") == (
        "unknown operation 'matmul'; known are 'slot_mapping', 'reshape_and_cache', 'paged_decode_attention', "
        "'write_then_decode'."
    )


def test_an_unknown_declaration() -> None:
    assert refusal("paged_decode_attention", head_dim=[64]) == (
        "kernel 'decode': unknown declaration 'head_dim'; did you mean 'head_dims'?"
    )
    assert refusal("paged_decode_attention", xyz=1).startswith(
        "kernel 'decode': unknown declaration 'xyz'; known are 'dtypes', 'head_dims', "
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("token_strides", "all", "'any', 'contiguous'"),
        ("table_strides", None, "'any', 'contiguous'"),
        ("negative_slots", -1, "'any', 'minus_one', 'never'"),
        ("empty", "nan", "'zeros', 'untouched', 'never'"),
        ("unowned", ["any"], "'any', 'finite'"),
        ("table_reads", "Exact", "'exact', 'row'"),
        ("batch_invariant", 1, "False, True"),
        ("batch_invariant", "yes", "False, True"),
        ("deterministic", 0, "False, True"),
        ("rejects", "values", "False, True, 'check_values'"),
        ("rejects", 1, "False, True, 'check_values'"),
    ],
)
def test_a_value_that_is_no_choice(name: str, value: Any, said: str) -> None:
    assert (
        refusal("paged_decode_attention", **{name: value}) == f"kernel 'decode': {name}={value!r} is not one of {said}."
    )


FLOATS, INDEXES = "'float32', 'float16', 'bfloat16'", "'int32', 'int64'"
LAYOUTS = "'contiguous', 'hnd', 'packed', 'strided'"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dtypes", "float16", f" should be a list out of {FLOATS}."),
        ("dtypes", [], f" should be a list out of {FLOATS}."),
        ("dtypes", None, f" should be a list out of {FLOATS}."),
        ("dtypes", ["float16", "fp8"], f": 'fp8' is not one of {FLOATS}."),
        ("dtypes", [16], f": 16 is not one of {FLOATS}."),
        ("dtypes", [["float16"]], f": ['float16'] is not one of {FLOATS}."),
        ("index_dtypes", "int32", f" should be a list out of {INDEXES}."),
        ("index_dtypes", ["int8"], f": 'int8' is not one of {INDEXES}."),
        ("cache_layouts", ["HND"], f": 'HND' is not one of {LAYOUTS}."),
        ("cache_layouts", ["contiguous", "nhd"], f": 'nhd' is not one of {LAYOUTS}."),
        ("cache_layouts", "hnd", f" should be a list out of {LAYOUTS}."),
        ("cache_layouts", (), f" should be a list out of {LAYOUTS}."),
        *(
            (name, value, " should be a list of positive ints, or a function of one int.")
            for name in ("head_dims", "group_sizes", "block_sizes")
            for value in (64, "64", [], [0], [-16], [16.0], [True], ["16"], b"16", range(0), range(0, 64, 16))
        ),
        ("most_slots", 0, " should be a positive int, or None."),
        ("most_slots", 1.5, " should be a positive int, or None."),
        ("most_slots", True, " should be a positive int, or None."),
        ("devices", "cuda", " should be 'any' or a list of torch device types such as ['cuda']."),
        ("devices", [0], " should be 'any' or a list of torch device types such as ['cuda']."),
        ("unit_roundoff", "float16", " should be a dict such as {'weights': 'input'}."),
        ("unit_roundoff", {"weight": "input"}, ": unknown 'weight'; did you mean 'weights'?"),
        (
            "unit_roundoff",
            {"x": "input"},
            ": unknown 'x'; known are 'scores', 'weights', 'products', 'sums'.",
        ),
        (
            "unit_roundoff",
            {"weights": "half"},
            ": 'half' is not one of 'float32', 'tf32', 'float16', 'bfloat16', 'float8_e4m3fn', 'input'.",
        ),
    ],
)
def test_a_value_of_another_kind(name: str, value: Any, said: str) -> None:
    assert refusal("paged_decode_attention", **{name: value}) == f"kernel 'decode': {name}={value!r}{said}"


@pytest.mark.parametrize("value", [None, 5, []])
def test_devices_that_are_no_list(value: Any) -> None:
    """An empty list would leave a kernel that nothing ever runs."""
    assert refusal("paged_decode_attention", devices=value) == (
        f"kernel 'decode': devices={value!r} should be 'any' or a list of torch device types such as ['cuda']."
    )


def test_a_signature_that_takes_too_little() -> None:
    def short(q, k_cache, v_cache, block_tables, context_lens):
        raise AssertionError

    assert refusal("paged_decode_attention", short) == (
        "kernel 'short': its signature (q, k_cache, v_cache, block_tables, context_lens) cannot take (q, k_cache, "
        "v_cache, block_tables, context_lens, scale) (too many positional arguments); the contract is "
        f"{OPERATIONS['paged_decode_attention'].shapes}."
    )


def test_a_signature_that_asks_for_more() -> None:
    def long(block_tables, seq_ids, positions, block_size, out):
        raise AssertionError

    sentence = refusal("slot_mapping", long)
    assert "cannot take (block_tables, seq_ids, positions, block_size) (missing a required argument: 'out')" in sentence
    assert refusal("slot_mapping", lambda a, b, c, *, d: None, name="mine").startswith("kernel 'mine': its signature")


def test_a_signature_without_check_values() -> None:
    sentence = refusal("paged_decode_attention", rejects="check_values")
    assert "scale) and the keyword check_values (got an unexpected keyword argument 'check_values')" in sentence


def test_parameters_in_another_order() -> None:
    def swapped(value, key, k_cache, v_cache, slot_mapping):
        raise AssertionError

    assert refusal("reshape_and_cache", swapped) == (
        "kernel 'swapped': parameter 1 is 'value' where the contract passes 'key'; arguments go by position: "
        f"{OPERATIONS['reshape_and_cache'].shapes}."
    )


@pytest.mark.parametrize("call", [5, None, "decode", functools.partial(decode)], ids=["int", "None", "str", "nameless"])
def test_what_is_no_callable_with_a_name(call: Any) -> None:
    sentence = refusal("paged_decode_attention", call)
    assert sentence.startswith("kernel of 'paged_decode_attention': ")
    assert sentence.endswith(" is not a callable with a name; pass name=...")


def test_what_is_no_callable_but_has_a_name() -> None:
    assert "5 is not a callable" in refusal("paged_decode_attention", 5, name="mine")


def test_a_name_is_no_longer_than_a_saved_file_holds() -> None:
    kernel("slot_mapping", name="s" * 90)(slots)
    with pytest.raises(RegistrationError, match=r"^kernel 's{40}'\.\.\.: a name of 91 characters; 90 are enough"):
        kernel("slot_mapping", name="s" * 91)(slots)
    assert "s" * 91 not in registered()


def test_a_name_that_is_taken() -> None:
    kernel("slot_mapping", name="mine")(slots)
    with pytest.raises(RegistrationError) as caught:
        kernel("reshape_and_cache", name="mine")(write)
    assert str(caught.value) == "kernel 'mine' is registered twice; give one of them another name=..."
    assert registered()["mine"].call is slots


def test_a_name_that_is_no_text() -> None:
    sentence = refusal("paged_decode_attention", name=5)
    assert sentence.startswith("kernel of 'paged_decode_attention': ") and "name" in sentence


def test_the_decorator_without_an_operation() -> None:
    with pytest.raises(
        RegistrationError, match=r"^unknown operation <function decode at .*>; known are 'slot_mapping'"
    ):
        kernel(decode)  # type: ignore[arg-type]
