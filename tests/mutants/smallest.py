"""The smallest case that a mutant needs, as data: a call says whether a case is as small, str says it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PLAIN = {
    "dtype": ("float32", "a dtype"),
    "values": ("ordinary", "values"),
    "order": (0, "an order of programs"),
    "index_dtype": ("int64", "an index dtype"),
    "extra_rows": (0, "rows that do not count"),
    "q_padding": (0, "q as a view"),
    "table_padding": (0, "a narrowed table"),
    "key_padding": (0, "key as a view"),
    "value_padding": (0, "value as a view"),
    "fused": (False, "a fused QKV view"),
    "scale": (1.0, "a scale"),
    "layouts": (None, "a cache layout"),
}


@dataclass(frozen=True)
class Smallest:
    """Upper bounds on a case; the fields of PLAIN must have their plainest value but for those that `other` names.

    sequences: rows of the block table. tokens: of the longest context, or T of a write. new_tokens: T of a slot
    mapping. heads: query heads. blocks: of the pool (None: any number, as for an offset past 2^31). far: whether an
    offset must pass 2^31 (None: it may). tail: entries of a table row that its sequence does not use.
    """

    sequences: int = 1
    tokens: int = 1
    new_tokens: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    block_size: int = 1
    blocks: int | None = None
    tail: int = 1
    far: bool | None = False
    other: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.other:
            if name not in PLAIN:
                raise ValueError(f"other={self.other!r}: {name!r} is not one of {', '.join(PLAIN)}")

    def __call__(self, case: Any) -> bool:
        rows = getattr(case, "sequences", ())
        contexts = [row.context_len for row in rows]
        tokens = len(case.slots) if hasattr(case, "slots") else max(contexts, default=0)
        bounds = (
            (len(rows), self.sequences),
            (tokens, self.tokens),
            (len(getattr(case, "tokens", ())), self.new_tokens),
            (getattr(case, "num_heads", 0), max(self.heads, self.kv_heads)),
            (getattr(case, "num_kv_heads", 0), self.kv_heads),
            (getattr(case, "head_dim", 0), self.head_dim),
            (case.block_size, self.block_size),
            (0 if self.blocks is None else case.num_blocks, self.blocks or 0),
            (max((len(row.tail) - (not row.blocks) for row in rows), default=0), self.tail),
        )
        plain = all(_plain(case, name, value) for name, (value, _) in PLAIN.items() if name not in self.other)
        return all(size <= most for size, most in bounds) and plain and self.far in (None, case.is_far())

    def __str__(self) -> str:
        """Up to 1 sequence, 2 tokens, block size 2; with a narrowed table."""
        sizes = [
            f"{size} {word}{'s' if size > 1 else ''}"
            for size, word in (
                (self.sequences, "sequence"),
                (self.tokens, "token"),
                (self.new_tokens, "new token"),
                (max(self.heads, self.kv_heads), "head"),
                (self.kv_heads, "kv head"),
            )
            if size > 1 or word == "token"
        ]
        sizes += [f"D = {self.head_dim}"] if self.head_dim > 1 else []
        sizes += [f"bs = {self.block_size}"] if self.block_size > 1 else []
        sizes += [f"{self.blocks} block{'s' if self.blocks > 1 else ''}"] if self.blocks is not None else []
        extras = [PLAIN[name][1] for name in self.other] + (
            {True: ["an offset past 2^31"], None: ["a large block id"]}.get(self.far, [])
        )
        return "up to " + ", ".join(sizes) + (f"; with {', '.join(extras)}" if extras else "")


def _plain(case: Any, name: str, value: Any) -> bool:
    if name == "layouts":
        return bool(getattr(case, "cache_kind", lambda: "contiguous")() == "contiguous")
    return bool(getattr(case, name, value) == value)
