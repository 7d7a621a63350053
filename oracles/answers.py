"""The right answers of a case, and where a run differs from them, in the words of the case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.dense import paged_decode_attention as dense_paged_decode_attention
from pagefuzz.oracles.dense import reshape_and_cache as dense_reshape_and_cache
from pagefuzz.oracles.dense import slot_mapping as dense_slot_mapping
from pagefuzz.oracles.dense import write_then_decode as dense_write_then_decode
from pagefuzz.oracles.dense.paged_decode_attention import AttentionAnswer
from pagefuzz.oracles.invariant import Violation
from pagefuzz.oracles.loop import paged_decode_attention as loop_paged_decode_attention
from pagefuzz.oracles.loop import reshape_and_cache as loop_reshape_and_cache
from pagefuzz.oracles.loop import slot_mapping as loop_slot_mapping
from pagefuzz.oracles.loop import write_then_decode as loop_write_then_decode
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.case import Case, arguments_of
from pagefuzz.strategies.number_formats import FORMATS, decode
from pagefuzz.strategies.paged_decode_attention import NEEDLES

DENSE: dict[str, Callable[..., Any]] = {
    "slot_mapping": lambda case, declared: dense_slot_mapping.right_answer(case),
    "reshape_and_cache": lambda case, declared: dense_reshape_and_cache.right_answer(case),
    "paged_decode_attention": dense_paged_decode_attention.right_answer,
    "write_then_decode": dense_paged_decode_attention.right_answer,  # wherever the tokens come from
}
LOOP: dict[str, Callable[..., Any]] = {
    "slot_mapping": loop_slot_mapping.right_answer,
    "reshape_and_cache": loop_reshape_and_cache.right_answer,
    "paged_decode_attention": loop_paged_decode_attention.right_answer,
    "write_then_decode": loop_write_then_decode.right_answer,
}
# What the addressed slots hold after a call, by cache: [tokens, KVH * D] bits.
WRITTEN: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "reshape_and_cache": dense_reshape_and_cache.right_answer,
    "write_then_decode": dense_write_then_decode.written,
}
AGREEMENT = 2.0**-40  # of the float64 oracles, relative to the largest value that took part


class OracleDisagreement(RuntimeError):
    """The dense and the loop oracle differ: a fault of the suite, never of the kernel."""


@lru_cache(maxsize=16)
def answer(case: Case, declared: Declaration) -> Any:
    """The right answer of a case: int64[T] slots; {cache: [tokens, KVH * D] bits}; or an AttentionAnswer."""
    return DENSE[case.operation](case, declared)


def check_oracles(case: Case, declared: Declaration) -> None:
    """Raise OracleDisagreement if the two oracles of the case's operation differ on it."""
    left, right = answer(case, declared), LOOP[case.operation](case)
    if isinstance(left, AttentionAnswer):
        walked = np.array(right, dtype=np.float64).reshape(left.exact.shape)
        scale = max(1.0, float(np.abs(left.exact).max(initial=0.0)))
        # Two float64 sums of the same scores differ by a few 2^-53 of them, and that moves every weight.
        allowed = AGREEMENT * scale + 2.0**-20 * left.bound
        agree = bool((np.abs(left.exact - walked) <= allowed).all())
    elif isinstance(left, dict):
        agree = all(left[name].tolist() == right[name] for name in left)
    else:
        agree = left.tolist() == right
    if not agree:
        raise OracleDisagreement(f"the dense and the loop oracle differ on {case.one_line()}")


@dataclass(frozen=True)
class Difference:
    """The first place where a run differs from the right answer. `index` is into the output, or (token, element)."""

    index: tuple[int, ...]
    seen: str
    right: str
    where: str

    def violation(self) -> Violation:
        return Violation(self.seen, self.right, self.where)


def first_difference(
    case: Any, run: Observation, declared: Declaration, rows: tuple[int, ...] | None = None
) -> Difference | None:
    """Where a finished run first differs from the right answer, or None.

    Attention is held to the bound of the declared precision, at the sequences `rows` (default: those with a token);
    slots and copies are held bit for bit.
    """
    right = answer(case, declared)
    if isinstance(right, AttentionAnswer):
        return _attention_difference(case, run, right, rows) or written_difference(case, run)
    if isinstance(right, dict):
        return written_difference(case, run)
    assert run.output is not None
    wrong = np.flatnonzero(run.output.bits != right)
    if not len(wrong):
        return None
    t = int(wrong[0])
    token = case.tokens[t]
    where = f"token {t} (sequence {token.seq_id}, position {token.position})"
    return Difference((t,), f"slot {int(run.output.bits[t])}", f"slot {int(right[t])}", where)


def _attention_difference(
    case: Any, run: Observation, right: AttentionAnswer, rows: tuple[int, ...] | None
) -> Difference | None:
    assert run.output is not None
    values = decode(run.output.bits, run.output.dtype)
    largest = float(decode(np.array([FORMATS[case.dtype].largest], dtype=FORMATS[case.dtype].bits), case.dtype)[0])
    with np.errstate(invalid="ignore"):
        error = np.abs(values - right.exact)
        fits = error <= right.bound
        # A non-finite output is right only where the exact value, give or take the bound, overflows the dtype.
        overflow = np.isinf(values) & (np.abs(right.exact) + right.bound > largest)
    wrong = ~(fits | (overflow & (np.sign(values) == np.sign(right.exact))))
    judged = [b for b, n in enumerate(case.context_lens) if n] if rows is None else list(rows)
    for b in judged:
        if wrong[b].any():
            h, d = (int(i) for i in np.argwhere(wrong[b])[0])
            many = int(wrong[judged].sum())
            return Difference(
                (b, h, d),
                f"out[{b}, {h}, {d}] = {values[b, h, d]:.9g}",
                f"{right.exact[b, h, d]:.9g}, give or take {right.bound[b, h, d]:.3g}",
                f"sequence {b} (context length {case.context_lens[b]}), head {h}, dim {d}"
                + (f"; {many} of {wrong[judged].size} elements are wrong" if many > 1 else ""),
            )
    return None


def written_difference(case: Any, run: Observation) -> Difference | None:
    """Where an addressed slot of a finished run first holds other bits than its token, or None."""
    if not case.watched():
        return None
    right = WRITTEN[case.operation](case)
    addressed = [t for t, slot in enumerate(case.slots) if slot >= 0]
    for name, rows in right.items():
        for place, t in enumerate(addressed):
            seen = run.watched[name][place]
            wrong = np.flatnonzero(seen != rows[place])
            if len(wrong):
                head, dim = divmod(int(wrong[0]), case.head_dim)
                digits = rows.dtype.itemsize * 2
                return Difference(
                    (t, int(wrong[0])),
                    f"{name} holds {hex_bits(seen[wrong[0]], digits)}",
                    f"{hex_bits(rows[place][wrong[0]], digits)}, the bits of the token",
                    f"token {t}, {slot_words(case, case.slots[t])}, kv head {head}, dim {dim}; "
                    f"{len(wrong)} of {len(seen)} elements of the token are wrong",
                )
    return None


def hex_bits(bits: Any, digits: int) -> str:
    """Bits in hexadecimal, as wide as the dtype."""
    return f"0x{int(bits):0{digits}x}"


def slot_words(case: Any, slot: int) -> str:
    """A slot as a person looks for it: slot 13 (block 3, offset 1)."""
    return f"slot {slot} (block {slot // case.block_size}, offset {slot % case.block_size})"


def addressed(case: Any, buffer: str) -> np.ndarray:
    """The elements of a buffer that the call must write."""
    rows = [elements.reshape(-1) for where, elements in case.watched().values() if where == buffer]
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


def stray_change(case: Any, run: Observation) -> Violation | None:
    """The first element outside the addressed slots that a run changed, or that a refused store would have."""
    if run.wild is not None and run.wild.kind != "load":
        return Violation(str(run.wild), "stores stay inside what the call may write", _place(case, run.wild))
    for name, change in run.changes.items():
        stray = np.flatnonzero(~np.isin(change.elements, addressed(case, name)))
        if len(stray):
            first = int(stray[0])
            digits = change.after.dtype.itemsize * 2
            return Violation(
                f"{len(stray)} element{'s' if len(stray) > 1 else ''} changed that the call must leave alone, first "
                f"{hex_bits(change.before[first], digits)} -> {hex_bits(change.after[first], digits)}",
                "nothing but the addressed slots changes" if case.watched() else "the call changes none of its inputs",
                element_words(case, name, int(change.elements[first])),
            )
    return None


def stray_store(case: Any, run: Observation) -> Violation | None:
    """The first traced store to an element outside the addressed slots. Where memory is as it was, it has put back the
    bits that lay there: whoever writes there meanwhile, the next owner of a slot say, loses what it wrote."""
    for name, stored in (run.stores or {}).items():
        if not len(stored):
            continue
        tensor = arguments_of(case).tensors[name]
        elements = stored + tensor.offset
        stray = elements[~np.isin(elements, addressed(case, tensor.buffer.name))]
        if len(stray):
            many = f"{len(stray)} elements" if len(stray) > 1 else "1 element"
            return Violation(
                f"a store to {many} that the call must leave alone; the bits are the same afterwards, but the store "
                "happens, and undoes what another program or stream writes there meanwhile",
                "nothing but the addressed slots is stored to" if case.watched() else "the call stores to no input",
                element_words(case, tensor.buffer.name, int(stray[0])),
            )
    return None


def is_right(case: Any, run: Observation, declared: Declaration) -> bool:
    """Whether a run finished with the right answer and changed nothing else."""
    return run.finished and stray_change(case, run) is None and first_difference(case, run, declared) is None


def _place(case: Any, wild: Any) -> str:
    return element_words(case, wild.tensor, wild.index) if wild.tensor else ""


def element_words(case: Any, name: str, element: int) -> str:
    """An element of a buffer, or of the tensor of that name, as a person looks for it."""
    tensors = arguments_of(case).tensors
    tensor = next((each for each in tensors.values() if each.buffer.name == name), tensors.get(name))
    if tensor is None:
        return name
    where = f"{name}, element {element}"
    buffer = tensor.buffer
    if name != buffer.name:
        element += tensor.offset
    if element < 0:
        return f"{where}: {-element} before the start of {buffer.name}"
    if element >= buffer.size:
        return f"{where}: {element - buffer.size} past the end of {buffer.name}, which has {buffer.size}"
    if name == "block_tables":
        b, column = divmod(element, case.width + case.table_padding)
        if column >= case.width:
            return f"{where}: in the gap behind row {b}, which is {case.width} wide"
        return f"{where} = row {b}, column {column} of {case.width}"
    return f"{where} = {case.cache_words(buffer.name, element)}" if buffer.is_cache else where


def unfinished(twin: Observation, what: str) -> Violation:
    """That a twin did not finish where the case itself did."""
    return Violation(f"{twin.instead} {what}", "it runs, as it does without that")


def bits_differ(
    case: Any, run: Observation, twin: Observation, declared: Declaration, what: str, otherwise: str = "here"
) -> Violation | None:
    """Where the result of a twin that must equal the case's differs from it, or that only the case finished.

    what: of the twin, in words that end a sentence; otherwise: the case's own, the same way. Bit for bit if the kernel
    is declared deterministic, else only that not one of the two is right and the other wrong. Only for operations whose
    result does not name blocks. Rows that are left untouched are not looked at.
    """
    if run.finished and not twin.finished:
        return unfinished(twin, what)
    if not run.finished or run.same_result(twin):
        return None
    if not declared.deterministic:
        here, there = (first_difference(case, each, declared) for each in (run, twin))
        return _one_is_wrong(here, there, what, otherwise)
    if run.output is None or twin.output is None:
        return _cache_differs(case, run, twin, what, otherwise)
    if run.output.bits.ndim != 3:
        t = int(np.flatnonzero(run.output.bits != twin.output.bits)[0])
        seen = f"slot {run.output.bits[t]} {otherwise}, slot {twin.output.bits[t]} {what}"
        return Violation(seen, "the same slot", f"token {t}")
    rows = range(len(case.context_lens))
    return rows_differ(case, run, twin, rows, declared, what, otherwise)


def _one_is_wrong(mine: Difference | None, theirs: Difference | None, what: str, otherwise: str) -> Violation | None:
    if mine and not theirs:
        return Violation(f"{mine.seen} {otherwise}", f"{mine.right}; the kernel is right {what}", mine.where)
    if theirs and not mine:
        return Violation(f"{theirs.seen} {what}", f"{theirs.right}; the kernel is right {otherwise}", theirs.where)
    return None


def rows_differ(
    case: Any,
    run: Observation,
    twin: Observation,
    rows: Iterable[int],
    declared: Declaration,
    what: str,
    otherwise: str = "here",
) -> Violation | None:
    """The first place where an attention twin has other bits than the run of `case`; its row i is the case's sequence
    rows[i]. Of a kernel that is not declared deterministic: the first row that is right in one of the two and wrong in
    the other.

    Both must have finished. Rows that are left untouched are not looked at.
    """
    assert run.output is not None and twin.output is not None
    for place, b in enumerate(rows):
        n = case.context_lens[b]
        if n == 0 and declared.empty == "untouched":
            continue
        mine, theirs = run.output.bits[b], twin.output.bits[place]
        if np.array_equal(mine, theirs):
            continue
        if not declared.deterministic:
            moved = run.output.bits.copy()
            moved[b] = theirs
            both = (run, replace(run, output=replace(run.output, bits=moved)))
            own, other = (first_difference(case, each, declared, (b,)) for each in both)
            if found := _one_is_wrong(own, other, what, otherwise):
                return found
            continue
        differ = mine != theirs
        h, d = (int(i) for i in np.argwhere(differ)[0])
        digits = mine.dtype.itemsize * 2
        here, there = (
            f"{decode(bits[h, d : d + 1], run.output.dtype)[0]:.9g} ({hex_bits(bits[h, d], digits)})"
            for bits in (mine, theirs)
        )
        where = f"sequence {b} (context length {n}), head {h}, dim {d}"
        if differ.size > 1:
            where += f"; {int(differ.sum())} of its {differ.size} elements differ"
        if case.values == NEEDLES:
            where += "; the values are needles: one token of each sequence and kv head weighs 1, all others 0"
        return Violation(
            f"out[{b}, {h}, {d}] = {here} {otherwise}, {there} {what}",
            f"the same bits{_how_far(mine[h, d], theirs[h, d])}; the oracle says "
            f"{answer(case, declared).exact[b, h, d]:.9g}",
            where,
        )
    return None


def _how_far(left: Any, right: Any) -> str:
    """How far two floats of one dtype are apart, told by their bits, to follow "the same bits"."""
    sign = 1 << (left.dtype.itemsize * 8 - 1)
    places = [int(bits) if int(bits) < sign else sign - int(bits) for bits in (left, right)]
    apart = abs(places[0] - places[1])
    if apart == 0:
        return "; they differ in the sign of zero"
    if apart > 4096:  # not a matter of rounding
        return ""
    return "; they differ in the last bit" if apart == 1 else f"; they differ by {apart} units in the last place"


def blamed(
    case: Any, run: Observation, twin: Any, observed: Callable[[], Observation], declared: Declaration, how: str
) -> Violation | None:
    """What is wrong with a run, if its twin is right: then what the twin does otherwise is the cause.

    observed: gives the twin's run, and is only called where the case's own is wrong. how: the twin is, in words that
    end a sentence.
    """
    if is_right(case, run, declared) or not is_right(twin, observed(), declared):
        return None
    wrong = stray_change(case, run) or (first_difference(case, run, declared) if run.finished else None)
    if wrong is not None:
        return Violation(wrong.seen, f"{wrong.right}; the kernel is right {how}", wrong.where)
    if run.wild is not None:
        right = "every access lies inside a tensor of the launch"
        return Violation(str(run.wild), f"{right}; the kernel is right {how}", _place(case, run.wild))
    seen, right = (f"raised {run.raised}", "no error") if run.raised else (run.misreturned, "what the contract says")
    return Violation(seen, f"{right}; the kernel is right {how}")


def _cache_differs(case: Any, run: Observation, twin: Observation, what: str, otherwise: str) -> Violation:
    """The first element of an addressed slot that two runs left with other bits."""
    addressed = [t for t, slot in enumerate(case.slots) if slot >= 0]
    for name, rows in run.watched.items():
        for t, mine, theirs in zip(addressed, rows, twin.watched[name], strict=True):
            wrong = np.flatnonzero(mine != theirs)
            if len(wrong):
                head, dim = divmod(int(wrong[0]), case.head_dim)
                here, there = (hex_bits(bits[wrong[0]], bits.dtype.itemsize * 2) for bits in (mine, theirs))
                return Violation(
                    f"{name} holds {here} {otherwise}, {there} {what}",
                    "the same bits",
                    f"token {t}, {slot_words(case, case.slots[t])}, kv head {head}, dim {dim}",
                )
    return Violation(f"other bits in the cache {what} than {otherwise}", "the same bits")
