"""The registry of kernels, and what a kernel declares that it supports.

A kernel is any Python callable with the signature of its operation. An adapter registers it:

    from pagefuzz import kernel

    @kernel("paged_decode_attention", dtypes=["float16"], head_dims=[64, 128], block_sizes=[16])
    def my_decode(q, k_cache, v_cache, block_tables, context_lens, scale): ...
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from pagefuzz.kernels.operations import OPERATIONS, Operation

F = TypeVar("F", bound=Callable[..., Any])

LONGEST_NAME = 90  # so that the names of a pair fit a saved file, too
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64")
PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "input")
CACHE_LAYOUTS = ("contiguous", "hnd", "packed", "strided")
ROUNDED = ("scores", "weights", "products", "sums")


class RegistrationError(ValueError):
    """A kernel was registered wrongly; the message is one sentence for the author of the adapter."""


@dataclass(frozen=True, eq=False)
class Declaration:
    """What a kernel supports and promises. Every field has the default of an ordinary, good kernel.

    The strategies draw inside it (I16 draws outside), the invariants hold the kernel to it.

    dtypes: of q, key, value and the caches, out of float32, float16, bfloat16.
    head_dims, group_sizes, block_sizes: None for any; else a collection of ints, or a predicate of one int.
    index_dtypes: of tables, slots, lengths, out of int32, int64.
    token_strides: "any" stride on the token (or batch) dim of q, key and value, or "contiguous".
    table_strides: "any" (a block table may be narrower than its row stride), or "contiguous".
    cache_layouts: how k_cache and v_cache may lie in memory, out of "contiguous": [N, bs, KVH, D] in this order; "hnd":
        views of [N, KVH, bs, D]; "packed": views of one tensor, [N, 2, bs, KVH, D] or [N, bs, KVH, 2D]; "strided": any
        strides of block, slot and kv head, padded blocks, other strides for keys than for values. In all of them the
        last dim is contiguous and no two values share a place. The stride of a dim of size 1 means nothing.
    negative_slots: "any" negative slot is padding, only "minus_one" is, or one is "never" passed.
    empty: what a context length of 0 gives: "zeros", rows left "untouched", or it is "never" passed.
    unowned: "any" value, NaN included, may lie in what a sequence does not own, or only "finite" ones of ordinary size.
    table_reads: "exact" (entries past ceil(n / bs) and pages that nobody owns are not even loaded), or anywhere within
        the "row" and the pool, as long as nothing of it shows in the result (batched gathers that mask afterwards).
    unit_roundoff: what is rounded to less than float32: "scores", "weights" (before the second product), "products"
        (their operands), "sums" (the accumulators), each to one of float32, tf32, float16, bfloat16, float8_e4m3fn, or
        "input" for the dtype of the caches.
    most_slots: None, or the most slots (N x bs) that a cache may have, where work or memory grows with the whole pool.
    batch_invariant: a sequence's bits do not depend on its neighbours: I11 bit for bit.
    deterministic: I7, I8 and I17 hold bit for bit; False: those and the needles of I10 to I12 within the tolerance.
    rejects: True: input outside the contract raises an error before anything is written (ValueError, TypeError, or
        another that its author chose). "check_values": so do index values, with the keyword check_values=True.
    devices: "any", or the torch device types (cpu, cuda, ...) that it runs on.
    """

    dtypes: tuple[str, ...] = FLOAT_DTYPES
    head_dims: Collection[int] | Callable[[int], bool] | None = None
    group_sizes: Collection[int] | Callable[[int], bool] | None = None
    block_sizes: Collection[int] | Callable[[int], bool] | None = None
    index_dtypes: tuple[str, ...] = INDEX_DTYPES
    token_strides: str = "any"
    table_strides: str = "any"
    cache_layouts: tuple[str, ...] = ("contiguous",)
    negative_slots: str = "any"
    empty: str = "zeros"
    unowned: str = "any"
    table_reads: str = "exact"
    unit_roundoff: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    most_slots: int | None = None
    batch_invariant: bool = False
    deterministic: bool = True
    rejects: bool | str = False
    devices: tuple[str, ...] | str = "any"

    def supports_size(self, what: str, size: int) -> bool:
        """Whether `size` is among the declared `what` ("head_dims", "group_sizes" or "block_sizes")."""
        declared = getattr(self, what)
        if declared is None:
            return True
        return bool(declared(size)) if callable(declared) else size in declared

    def runs_on(self, device: str) -> bool:
        """Whether it runs on a torch device ("cuda:1" is a "cuda")."""
        return self.devices == "any" or device.split(":")[0] in self.devices


@dataclass(frozen=True)
class Kernel:
    """One registered implementation of an operation."""

    name: str
    operation: Operation
    call: Callable[..., Any]
    declared: Declaration


_CHOICES: dict[str, tuple[Any, ...]] = {
    "token_strides": ("any", "contiguous"),
    "table_strides": ("any", "contiguous"),
    "negative_slots": ("any", "minus_one", "never"),
    "empty": ("zeros", "untouched", "never"),
    "unowned": ("any", "finite"),
    "table_reads": ("exact", "row"),
    "batch_invariant": (False, True),
    "deterministic": (False, True),
    "rejects": (False, True, "check_values"),
}
_LISTS: dict[str, tuple[str, ...]] = {
    "dtypes": FLOAT_DTYPES,
    "index_dtypes": INDEX_DTYPES,
    "cache_layouts": CACHE_LAYOUTS,
}


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)


def _closest(word: str, words: Iterable[str]) -> str:
    known = list(words)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {_listed(known)}."


def checked_unit_roundoff(said: str, value: Any) -> Mapping[str, str]:
    """`value` as Declaration.unit_roundoff. Raises RegistrationError, in a sentence that begins with `said`."""
    if not isinstance(value, Mapping):
        raise RegistrationError(f"{said} should be a dict such as {{'weights': 'input'}}.")
    for what, precision in value.items():
        if what not in ROUNDED:
            raise RegistrationError(f"{said}: unknown {what!r}; {_closest(str(what), ROUNDED)}")
        if precision not in PRECISIONS:
            raise RegistrationError(f"{said}: {precision!r} is not one of {_listed(PRECISIONS)}.")
    return MappingProxyType(dict(value))


def _checked(kernel_name: str, declarations: Mapping[str, Any]) -> Declaration:
    known = [item.name for item in fields(Declaration)]
    values: dict[str, Any] = {}
    for name, value in declarations.items():
        said = f"kernel {kernel_name!r}: {name}={value!r}"
        if name not in known:
            raise RegistrationError(f"kernel {kernel_name!r}: unknown declaration {name!r}; {_closest(name, known)}")
        if name in _CHOICES:
            if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in _CHOICES[name]):
                raise RegistrationError(f"{said} is not one of {_listed(_CHOICES[name])}.")
        elif name in _LISTS:
            if isinstance(value, str) or not isinstance(value, Collection) or not value:
                raise RegistrationError(f"{said} should be a list out of {_listed(_LISTS[name])}.")
            for item in value:
                if item not in _LISTS[name]:
                    raise RegistrationError(f"{said}: {item!r} is not one of {_listed(_LISTS[name])}.")
            value = tuple(dict.fromkeys(value))
        elif name in ("head_dims", "group_sizes", "block_sizes"):
            if value is not None and not callable(value):
                sizes = isinstance(value, Collection) and not isinstance(value, str | bytes) and len(value) > 0
                if not sizes or not all(type(size) is int and size > 0 for size in value):
                    raise RegistrationError(f"{said} should be a list of positive ints, or a function of one int.")
                value = value if isinstance(value, range) else tuple(value)
        elif name == "most_slots":
            if value is not None and not (type(value) is int and value > 0):
                raise RegistrationError(f"{said} should be a positive int, or None.")
        elif name == "devices":
            listed = isinstance(value, Collection) and not isinstance(value, str) and len(value) > 0
            if value != "any" and not (listed and all(isinstance(item, str) for item in value)):
                raise RegistrationError(f"{said} should be 'any' or a list of torch device types such as ['cuda'].")
            value = value if value == "any" else tuple(value)
        elif name == "unit_roundoff":
            value = checked_unit_roundoff(said, value)
        values[name] = value
    return Declaration(**values)


def _check_signature(kernel_name: str, call: Callable[..., Any], operation: Operation, declared: Declaration) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # a builtin that tells nothing: the first call will
    wanted = operation.parameters
    keywords = {"check_values": True} if declared.rejects == "check_values" else {}
    try:
        signature.bind(*wanted, **keywords)
    except TypeError as error:
        extra = " and the keyword check_values" if keywords else ""
        raise RegistrationError(
            f"kernel {kernel_name!r}: its signature {signature} cannot take ({', '.join(wanted)}){extra} ({error}); "
            f"the contract is {operation.shapes}."
        ) from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in positional]
    for index, name in enumerate(names[: len(wanted)]):
        if name in wanted and wanted[index] != name:
            raise RegistrationError(
                f"kernel {kernel_name!r}: parameter {index + 1} is {name!r} where the contract passes "
                f"{wanted[index]!r}; arguments go by position: {operation.shapes}."
            )


_registry: dict[str, Kernel] = {}


def kernel(operation: str, *, name: str | None = None, **declarations: Any) -> Callable[[F], F]:
    """Register the decorated callable as a kernel of `operation` and hand it back unchanged.

    `name` is how `--kernel` and the reports call it (default: the callable's `__name__`). `declarations` are the fields
    of `Declaration`.

    Raises RegistrationError, in one sentence, for an unknown operation or declaration, a value that a declaration does
    not take, a signature that does not fit, or a name that is taken.
    """
    if operation not in OPERATIONS:
        raise RegistrationError(f"unknown operation {operation!r}; {_closest(str(operation), OPERATIONS)}")

    def register(call: F) -> F:
        kernel_name = name or getattr(call, "__name__", "")
        if not callable(call) or not kernel_name or not isinstance(kernel_name, str):
            raise RegistrationError(f"kernel of {operation!r}: {call!r} is not a callable with a name; pass name=...")
        if len(kernel_name) > LONGEST_NAME:
            raise RegistrationError(
                f"kernel {kernel_name[:40]!r}...: a name of {len(kernel_name)} characters; {LONGEST_NAME} are enough: "
                "pass a shorter name=..."
            )
        declared = _checked(kernel_name, declarations)
        _check_signature(kernel_name, call, OPERATIONS[operation], declared)
        if kernel_name in _registry:
            raise RegistrationError(f"kernel {kernel_name!r} is registered twice; give one of them another name=...")
        _registry[kernel_name] = Kernel(kernel_name, OPERATIONS[operation], call, declared)
        return call

    return register


def registered() -> dict[str, Kernel]:
    """The registered kernels by name, in the order in which they were registered."""
    return dict(_registry)
