"""The case: plain data that determines every tensor of one call of a kernel, bit for bit, on every machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
from msgspec import Meta

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies.number_formats import FORMATS
from pagefuzz.strategies.tensors import Buffer, Tensor
from pagefuzz.strategies.values import FRESH, POISONS

# Bounds on what a file may ask for. They keep a damaged or hostile one from filling the memory; what is drawn lies far
# inside them.
Size = Annotated[int, Meta(ge=1, le=4096)]
Count = Annotated[int, Meta(ge=0, le=4096)]
Padding = Annotated[int, Meta(ge=0, le=65536)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Name = Annotated[str, Meta(max_length=64)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Blocks = Annotated[int, Meta(ge=1, le=2**40)]
MAX_ELEMENTS = 1 << 22  # materialised elements of one case
MAX_PRODUCTS = 1 << 24  # multiplications of one case: about two seconds of the loop oracle

FAR_ELEMENTS = 2**31  # an offset from here on does not fit int32


class InvalidCase(ValueError):
    """A case that contradicts itself or the contract; the message is one sentence."""


@dataclass(frozen=True)
class Limits:
    """What the arena of this machine can hold: each cache and its garbage ids must land in `cache_bytes`."""

    cache_bytes: int = 1 << 38


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call: tensors and plain numbers by parameter name, in the order of the contract."""

    values: dict[str, Tensor | int | float]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def buffers(self) -> list[Buffer]:
        return list({id(tensor.buffer): tensor.buffer for tensor in self.tensors.values()}.values())


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """What every case has.

    seed: of the values. relations: the invariants with a second run that this case pays for, by id. fault: what of the
    contract is broken on purpose, for I16 ("" for nothing). order: in which the programs of an interpreted launch run:
    0 ascending, 1 descending, any other number the seed of a shuffle.
    """

    operation: ClassVar[str]
    faults: ClassVar[tuple[str, ...]] = ()
    value_faults: ClassVar[tuple[str, ...]] = ()
    index_fields: ClassVar[tuple[str, ...]] = ("index_dtype",)

    seed: Seed = 0
    relations: tuple[Name, ...] = ()
    fault: Name = ""
    order: Seed = 0

    def check(self) -> None:
        """Raise InvalidCase, in one sentence, where the case contradicts itself or the contract."""
        require(
            self.fault in ("", *self.faults, *self.value_faults), f"fault={self.fault!r} is unknown to {self.operation}"
        )

    @abstractmethod
    def arguments(self) -> Arguments:
        """The tensors and numbers of the call."""

    def broken(self, fault: str, declared: Declaration) -> Self:
        """The case with one of its faults. Raises InvalidCase where it has nothing to break in that way."""
        twin = replace(self, fault=fault)
        twin.check()
        twin.arguments()
        return twin

    def watched(self) -> dict[str, tuple[str, np.ndarray]]:
        """What the call must write: by tensor, its buffer, and int64[tokens, elements], where in it each token goes."""
        return {}

    def beyond(self, declared: Declaration) -> str:
        """What of the case the kernel does not declare to support, in a few words; "" if it supports all of it."""
        return ""

    @abstractmethod
    def rows_of_call(self) -> int:
        """B or T: 0 means that there is nothing to do."""

    def words(self) -> Iterator[tuple[str, bool]]:
        """Every word for what a layout of this operation can hold, and whether this one holds it."""
        yield "programs in another order", self.order != 0

    def features(self) -> frozenset[str]:
        """The words for what the layout holds; the summary counts them."""
        return frozenset(word for word, holds in self.words() if holds)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the call, by the letters of the contract, and n: every context length."""
        return {}

    def simpler(self) -> Iterator[Self]:
        """Cases that a person would find simpler, the boldest steps first."""
        if self.order:
            yield replace(self, order=0)
        if self.order > 1:
            yield replace(self, order=1)
        if self.seed:
            yield replace(self, seed=0)

    @abstractmethod
    def is_far(self) -> bool:
        """Whether some element that the call addresses lies 2^31 elements or more into its tensor."""

    @abstractmethod
    def compact(self) -> Self | None:
        """The same tokens with every offset below 2^31 elements, or None if that is so already."""

    def with_harmless_tails(self) -> Self | None:
        """The same case with ids of owned blocks in every table tail, or None where there is no tail."""
        return None

    def lines(self) -> list[str]:
        """The layout drawn as text."""
        return [f"the programs of each launch run {order_words(self.order)}"] if self.order else []

    @abstractmethod
    def shapes(self) -> str:
        """The sizes in one line."""

    def one_line(self) -> str:
        """The whole case in one line: every field that differs from its default."""
        parts = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if getattr(self, item.name) != item.default and item.name != "relations"
        ]
        return f"{self.operation}({', '.join(parts)})"


AnyCase = TypeVar("AnyCase", bound=Case)


def order_words(order: int) -> str:
    """A `Case.order` in words: in ascending order."""
    return {0: "in ascending order", 1: "in descending order"}.get(order, f"in an order shuffled by the seed {order}")


@lru_cache(maxsize=4)
def arguments_of(case: Case) -> Arguments:
    """`case.arguments()`, remembered: what reads them must not write to them."""
    return case.arguments()


def require(condition: bool, sentence: str) -> None:
    """Raise InvalidCase(sentence) unless `condition`."""
    if not condition:
        raise InvalidCase(sentence)


def first_beyond(*limits: tuple[bool, str]) -> str:
    """The words of the first of (supported, words) that is not supported, or ""."""
    return next((words for supported, words in limits if not supported), "")


def fits_pool(declared: Declaration, slots: int) -> bool:
    """Whether the kernel declares to support a cache of so many slots."""
    return declared.most_slots is None or slots <= declared.most_slots


def with_size(case: AnyCase, name: str, size: int) -> AnyCase:
    """`case` with the field `name` set to `size`."""
    changes: dict[str, Any] = {name: size}
    return replace(case, **changes)


def smaller(value: int, least: int = 1) -> list[int]:
    """Sizes to try in place of `value`, the smallest first."""
    tries = {least, least + 1, least + 2, value // 2, value - 1}
    if value > 1 and value & (value - 1):
        tries.add(1 << (value.bit_length() - 1))
    return sorted(size for size in tries if least <= size < value)


@dataclass(frozen=True, kw_only=True)
class WithFloats(Case):
    """A case with floating-point tensors.

    poison: what lies where nobody owns. fresh: what lies in the memory that the kernel allocates for itself.
    """

    dtype: Name = "float32"
    poison: Name = "zeros"
    fresh: Name = "nan"
    values: Name = "ordinary"
    value_recipes: ClassVar[tuple[str, ...]] = ("ordinary",)

    def check(self) -> None:
        super().check()
        require(self.dtype in FORMATS, f"dtype={self.dtype!r} is not one of {', '.join(FORMATS)}")
        require(self.poison in POISONS, f"poison={self.poison!r} is not one of {', '.join(POISONS)}")
        require(self.fresh in FRESH, f"fresh={self.fresh!r} is not one of {', '.join(FRESH)}")
        require(
            self.values in self.value_recipes, f"values={self.values!r} is not one of {', '.join(self.value_recipes)}"
        )

    def beyond(self, declared: Declaration) -> str:
        return super().beyond(declared) or ("" if self.dtype in declared.dtypes else f"dtype {self.dtype}")

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        plain: dict[str, Any] = {"dtype": "float32", "poison": "zeros", "fresh": "nan", "values": "ordinary"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        if self.poison not in ("zeros", "nan"):
            yield replace(self, poison="nan")


@dataclass(frozen=True)
class Sequence:
    """One row of a block table: the physical blocks of its ceil(context_len / block size) pages, then the tail."""

    blocks: tuple[Int64, ...] = field(default=())
    tail: tuple[Int64, ...] = field(default=())
    context_len: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
