"""Known failures: what a kernel is known to break is counted, not red.

They are told as data, in a file of the adapter's name beside the adapter: `my_adapter.known.toml` for `my_adapter.py`.
So they come along wherever the adapter does, and no command has to name them. One entry a failure:

    [[known]]
    kernel = "my_decode*"                                   # a name or shell pattern, as --kernel takes it
    invariants = ["I13", "I4"]                              # all of those that it makes the kernel break
    when = { has = ["context length 0"], D = { at_least = 64 } }    # the cases; or when = "always"
    seen = "nan"                                            # optional: a part of what the report says was seen
    unit_roundoff = { weights = "input" }                   # optional: right, if this much rounding were declared
    reason = "the last step divides by the sum of no weights"
    link = "https://example.org/issues/1"                   # optional
    devices = ["cuda"]                                      # optional: torch device types; else on all

A condition holds if everything in it does. `has` and `lacks` are lists of the words that the summary prints behind
"drawn for". Any other key is a size by its letter (T, B, M, n, bs, N, KVH, H, D, ..., n for the context length of some
sequence) or a product of sizes ("M * bs"); its value is a number, a list of numbers, or a `Range`.

A failing case is known if each invariant that it breaks is explained by some entry whose condition holds, for the case
or for a twin that this invariant compares it with. If one is not, the case is red, and the report names that one.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagefuzz.fuzz.saved import one_line
from pagefuzz.kernels.registry import ROUNDED, Declaration, Kernel, RegistrationError, checked_unit_roundoff
from pagefuzz.oracles.invariant import Violation, invariants, invariants_of
from pagefuzz.strategies import CASES
from pagefuzz.strategies.case import Case

SUFFIX = ".known.toml"
ALWAYS = "always"
Positive = Annotated[int, Meta(ge=1)]


class Unusable(ValueError):
    """A file of known failures that cannot be used; the message is one sentence that names the file and the entry."""


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a size is compared with: everything that is given must hold. power_of_two: whether it is one."""

    at_least: int | None = None
    at_most: int | None = None
    multiple_of: Positive | None = None
    not_multiple_of: Positive | None = None
    power_of_two: bool | None = None

    def __contains__(self, size: int) -> bool:
        return (
            (self.at_least is None or size >= self.at_least)
            and (self.at_most is None or size <= self.at_most)
            and (self.multiple_of is None or size % self.multiple_of == 0)
            and (self.not_multiple_of is None or size % self.not_multiple_of != 0)
            and (self.power_of_two is None or (size > 0 and size & (size - 1) == 0) == self.power_of_two)
        )


@dataclass(frozen=True)
class Condition:
    """A condition on a case: words that it has, words that it lacks, and sizes, each a product of letters with the
    values that it may have."""

    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    sizes: tuple[tuple[tuple[str, ...], Range | tuple[int, ...]], ...] = ()

    def holds(self, case: Case) -> bool:
        words = case.features()
        if not self.has <= words or self.lacks & words:
            return False
        sizes = case.sizes()
        return all(
            any(math.prod(factors) in allowed for factors in product(*(sizes[letters] for letters in name)))
            for name, allowed in self.sizes
        )


@dataclass(frozen=True)
class Entry:
    """A known failure.

    label: the file and the number of the entry. pattern, kernels: the kernel as it was written, and those that it names
    on this device. invariants: the ids that the failure makes the kernels break. seen: a part of what the violation
    says was seen; "" for anything. unit_roundoff: what the failure rounds beyond what is declared; with that declared
    too, nothing is violated. Empty where that is not asked.
    """

    label: str
    pattern: str
    kernels: frozenset[str]
    invariants: tuple[str, ...]
    when: Condition
    reason: str
    link: str = ""
    seen: str = ""
    unit_roundoff: Mapping[str, str] = field(default_factory=dict)

    def why(self) -> str:
        """The reason and the link, in one line."""
        return f"{self.reason} ({self.link})" if self.link else self.reason

    def loosened(self, declared: Declaration) -> Declaration:
        """A declaration with what this failure rounds as well."""
        return replace(declared, unit_roundoff={**declared.unit_roundoff, **self.unit_roundoff})


def entries_of(entries: Iterable[Entry], kernel: str) -> tuple[Entry, ...]:
    """The entries that speak of a kernel."""
    return tuple(entry for entry in entries if kernel in entry.kernels)


def explanation(
    entries: Iterable[Entry],
    invariant: str,
    violation: Violation,
    cases: Sequence[Case],
    beyond: Callable[[Entry], Violation | None],
) -> Entry | None:
    """The first entry that explains why an invariant is violated.

    cases: the case, and the twins that the invariant compares it with, since either of the two runs may be the one that
    is known to be wrong. An entry without a unit round-off goes first, so that it is the one that counts. beyond: how
    the invariant is violated with the unit round-off of an entry declared as well; if it still is, another entry must
    explain that.
    """
    speaking = [entry for entry in entries if invariant in entry.invariants and any(map(entry.when.holds, cases))]
    plain = [entry for entry in speaking if not entry.unit_roundoff]

    def of_plain(found: Violation) -> Entry | None:
        return next((entry for entry in plain if entry.seen in found.seen), None)

    if entry := of_plain(violation):
        return entry
    for entry in speaking:
        if entry.unit_roundoff and entry.seen in violation.seen:
            left = beyond(entry)
            if left is None or of_plain(left):
                return entry
    return None


# ---- reading


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry as it stands in the file."""

    kernel: str
    invariants: list[str]
    when: dict[str, Any] | str
    reason: str
    seen: str | None = None
    unit_roundoff: dict[str, str] | None = None
    link: str | None = None
    devices: list[str] | None = None


_NEEDED = {
    "kernel": "name the kernel, or a shell pattern as --kernel takes it",
    "invariants": 'list the ids of all invariants that this failure breaks, as ["I13", "I4"]',
    "when": f'say for which cases, as {{ has = ["context length 0"] }}, or "{ALWAYS}"',
    "reason": "say why this failure is not red",
}
_WHEN = "`has`, `lacks` and sizes"
_SIZE = f"a number, a list of numbers, or a table of {', '.join(item.name for item in msgspec.structs.fields(Range))}"


def read(path: Path, shown: str, names: Iterable[str], kernels: Mapping[str, Kernel], device: str) -> list[Entry]:
    """The entries of a file that say something about a device. `shown` is what messages call the file, `names` are the
    kernels of its adapter, `kernels` all that there are, pairs included.

    Raises Unusable, in one sentence, for whatever is wrong in the file.
    """
    try:
        written = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Unusable(f"{shown} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # tomllib's and Unicode's errors are ValueErrors
        raise Unusable(f"{shown} is not TOML: {one_line(error)}.") from None
    known = written.pop("known", [])
    if written:
        raise Unusable(f"{shown}: unknown {one_line(next(iter(written)), 80)!r}; every entry begins with [[known]].")
    if not isinstance(known, list) or not all(isinstance(item, dict) for item in known):
        raise Unusable(f"{shown}: `known` should be a list of tables; every entry begins with [[known]].")
    names = set(names)
    mine = {name: kernel for name, kernel in kernels.items() if names & {name, *name.split("+")}}
    here = {name for name, kernel in mine.items() if kernel.declared.runs_on(device)}
    entries = []
    for number, item in enumerate(known, 1):
        label = f"entry {number} of {shown}"
        try:
            entry = _entry(item, label, mine)
        except Unusable as error:
            raise Unusable(f"{label}: {error}") from None
        if entry.kernels & here and Declaration(devices=item.get("devices", "any")).runs_on(device):
            entries.append(replace(entry, kernels=entry.kernels & here))
    return entries


def _entry(item: dict[str, Any], label: str, kernels: Mapping[str, Kernel]) -> Entry:
    known = _Written.__struct_fields__
    for key in item:
        if key not in known:
            raise Unusable(f"unknown {one_line(key, 80)!r}; {_choice(key, known)}")
    for key, hint in _NEEDED.items():
        if key not in item or item[key] in ("", [], {}) or (isinstance(item[key], str) and not item[key].strip()):
            empty = " (an empty condition would hold for every case)" if key == "when" and key in item else ""
            raise Unusable(f"it has no `{key}`{empty}: {hint}.")
    try:
        written = msgspec.convert(item, _Written)
    except msgspec.ValidationError as error:
        raise Unusable(f"{one_line(error)}.") from None
    for key in ("seen", "link"):
        if (value := getattr(written, key)) is not None and not value.strip():
            raise Unusable(f"`{key}` is blank: leave it out, or fill it in.")
    if written.link is not None and not written.link.startswith(("https://", "http://")):
        raise Unusable(f"link = {one_line(written.link, 80)!r} should begin with https:// or http://.")
    if written.unit_roundoff == {}:
        raise Unusable("`unit_roundoff` is empty: leave it out, or say what is rounded, as { weights = 'input' }.")
    for what in written.unit_roundoff or {}:
        if what not in ROUNDED:
            raise Unusable(f"unit_roundoff: unknown {one_line(what, 80)!r}; {_choice(what, ROUNDED)}")
    try:
        roundoff = checked_unit_roundoff("unit_roundoff", written.unit_roundoff or {})
    except RegistrationError as error:
        raise Unusable(str(error)) from None
    if written.devices == []:
        raise Unusable("`devices` is empty: leave it out, or name torch device types, as ['cuda'].")
    chosen = {name: kernel for name, kernel in kernels.items() if fnmatch.fnmatchcase(name, written.kernel)}
    if not chosen:
        raise Unusable(
            f"kernel = {one_line(written.kernel, 100)!r} matches no kernel of this adapter; {_choice('', kernels)}"
        )
    operations = list(dict.fromkeys(kernel.operation.name for kernel in chosen.values()))
    if roundoff:
        _check_excuses(roundoff, chosen)
    ids = [item.id for item in invariants() if any(item in invariants_of(operation) for operation in operations)]
    for name in written.invariants:
        if name not in ids:
            said = f"no invariant {one_line(name, 40)!r} speaks of {' or '.join(operations)}"
            raise Unusable(f"{said}; {_choice('', ids)}")
    return Entry(
        label=label,
        pattern=written.kernel,
        kernels=frozenset(chosen),
        invariants=tuple(dict.fromkeys(written.invariants)),
        when=_condition(written.when, operations),
        reason=one_line(" ".join(written.reason.split())),
        link=one_line(written.link or ""),
        seen=written.seen or "",
        unit_roundoff=roundoff,
    )


def _check_excuses(roundoff: Mapping[str, str], kernels: Mapping[str, Kernel]) -> None:
    """Raise Unusable where a round-off can excuse nothing of any of the kernels."""
    bounded = [kernel for kernel in kernels.values() if "q" in kernel.operation.parameters]
    if not bounded:
        operations = " and ".join(dict.fromkeys(kernel.operation.name for kernel in kernels.values()))
        raise Unusable(f"`unit_roundoff` excuses nothing of {operations}, held bit for bit: leave it out.")
    for kernel in bounded:
        declared = dict.fromkeys(roundoff, "float32") | dict(kernel.declared.unit_roundoff)
        if any(declared[name] != value for name, value in roundoff.items()):
            return
    raise Unusable(
        f"`unit_roundoff` is what {', '.join(each.name for each in bounded)} may round already: it excuses nothing."
    )


def _condition(when: dict[str, Any] | str, operations: Sequence[str]) -> Condition:
    if isinstance(when, str):
        if when != ALWAYS:
            raise Unusable(f'when = {one_line(when, 80)!r} should be a table of {_WHEN}, or "{ALWAYS}".')
        return Condition()
    words: dict[str, frozenset[str]] = {}
    sizes = []
    for key, value in when.items():
        if key in ("has", "lacks"):
            if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
                raise Unusable(f"when: `{key}` should be a list of words such as ['context length 0'].")
            for operation in operations:
                _all_known(value, vocabulary(operation)[0], f"no case of {operation} has the word")
            words[key] = frozenset(value)
            continue
        letters = tuple(part.strip() for part in key.split("*"))
        for operation in operations:
            said = f"there are {_WHEN}, and {operation} has no size"
            _all_known(letters, vocabulary(operation)[1], said)
        sizes.append((letters, _allowed(key, value)))
    return Condition(**words, sizes=tuple(sizes))


def _all_known(words: Iterable[str], known: Sequence[str], said: str) -> None:
    for word in words:
        if word not in known:
            raise Unusable(f"when: {said} {one_line(word, 80)!r}; {_choice(word, known)}")


def _allowed(key: str, value: Any) -> Range | tuple[int, ...]:
    try:
        allowed = msgspec.convert(value, int | tuple[int, ...] | Range)
    except msgspec.ValidationError as error:
        raise Unusable(f"when: {one_line(key, 80)} should be {_SIZE} ({one_line(error)}).") from None
    if allowed in ((), Range()):
        raise Unusable(f"when: {one_line(key, 80)} compares with nothing; it should be {_SIZE}.")
    return (allowed,) if isinstance(allowed, int) else allowed


def _choice(word: str, words: Iterable[str]) -> str:
    known = list(words)
    close = difflib.get_close_matches(word, known, n=1)
    return f"{f'did you mean {close[0]!r}? ' if close else ''}there are {', '.join(known)}."


@cache
def vocabulary(operation: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that a case of an operation may have, and the letters of its sizes."""
    kind = CASES[operation]
    needed = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    ones: dict[str, Any] = dict.fromkeys(needed, 1)
    smallest = kind(**ones)
    return tuple(dict.fromkeys(word for word, _ in smallest.words())), tuple(smallest.sizes())


# ---- what is said of them


def told(known: Mapping[str, Entry]) -> list[str]:
    """A line for each entry: which invariants of a case it explains, and why."""
    broken: dict[str, list[str]] = {}
    for name in sorted(known, key=lambda name: (len(name), name)):
        broken.setdefault(f"{known[name].why()} [{known[name].label}]", []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in broken.items()]


def known_lines(entries: Sequence[Entry], parts: Iterable[Mapping[str, Any]], planned: Mapping[str, int]) -> list[str]:
    """What became of each entry that speaks of a kernel of this run. `parts` are the plain statistics of the items
    (session.Statistics), `planned` says how many shards of each kernel the whole run has: an entry is only missed where
    all shards of all its kernels were run to their end."""
    matched, held, cases, ended = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for part in parts:
        matched.update(part["known"])
        held.update(part["held"])
        cases[part["kernel"]] += part["cases"]
        ended[part["kernel"]] += not part["violations"]
    lines = []
    for entry in entries:
        if not any(planned.get(name) for name in entry.kernels):
            continue
        what = f"{entry.pattern} breaks {', '.join(entry.invariants)}: {entry.why()} [{entry.label}]"
        if matched[entry.label] or not all(0 < planned.get(name, 0) == ended[name] for name in entry.kernels):
            lines.append(f"known: {matched[entry.label]} cases, {what}")
            continue
        count, drawn = held[entry.label], sum(cases[name] for name in entry.kernels)
        lines.append(
            f"known, but NO MORE SEEN: {what}. Its condition held for {count} of {drawn} cases, and none broke these: "
            "if it is fixed, delete the entry."
            if count
            else f"known, but NEVER DRAWN: {what}. Its condition held for none of {drawn} cases."
        )
    return lines
