"""Saved failures: one JSON file each, and the same case as a token that fits on a command line.

A file is data: it is decoded strictly into the case's own fields, each within its bounds, and checked; nothing in it is
ever evaluated.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import stat
import zlib
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

import pagefuzz
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies import CASES
from pagefuzz.strategies.case import Case, InvalidCase

FORMAT = 1
MOST_BYTES = 1 << 20
TOKEN_PREFIX = "pf1."
FAILURES, FIXED = Path(".pagefuzz/failures"), Path(".pagefuzz/fixed")
Word = Annotated[str, Meta(max_length=200)]


class Unreadable(ValueError):
    """A saved case that cannot be used; the message is one sentence that names it."""


class OtherVersion(Unreadable):
    """A saved case that a newer pagefuzz wrote."""


class SavedCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failing case and what is known about it.

    pagefuzz: the version of the format. kind: failure, or "not repeatable". invariant: the id that was named. case: the
    shrunk case. found_as: the case as it was drawn. versions: of what it was found with. passes: how often in a row it
    has passed since.
    """

    pagefuzz: int = FORMAT
    kind: Literal["failure", "not repeatable"] = "failure"
    operation: Word
    kernel: Word
    invariant: Word
    case: dict[str, Any]
    found_as: dict[str, Any] = {}
    seen: str = ""
    right: str = ""
    where: str = ""
    device: str = ""
    versions: dict[str, str] = {}
    passes: Annotated[int, Meta(ge=0, le=1)] = 0


def save(
    folder: Path,
    kernel: str,
    kind: Literal["failure", "not repeatable"],
    invariant: str,
    case: Case,
    found_as: Case,
    violation: Violation,
    device: str,
) -> tuple[Path, bool]:
    """Write a failure; returns its file, and whether that was there before. One case of one kernel has one file.

    Raises OSError where the folder cannot be written to.
    """
    saved = SavedCase(
        kind=kind,
        operation=case.operation,
        kernel=kernel,
        invariant=invariant,
        case=asdict(case),
        found_as=asdict(found_as),
        seen=violation.seen,
        right=violation.right,
        where=violation.where,
        device=device,
        versions=versions(),
    )
    digest = hashlib.sha256(msgspec.json.encode([kernel, invariant, saved.case])).hexdigest()[:10]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{kernel[:80]}-{invariant}-{digest}")
    path = folder / f"{name}.json"
    return path, not write(path, saved, new=True)


def write(path: Path, saved: SavedCase, new: bool = False) -> bool:
    """Write a saved case so that an interrupted run leaves the old file or the new one, never half of one.

    With `new`, a file that is there already stays as it is; returns whether this call wrote.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(saved), indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text + b"\n")
        if new:
            with suppress(FileExistsError):
                os.link(temporary, path)  # unlike replace, it tells one of several workers that it was first
                return True
            if kernel_of(path) is not None:
                return False
        temporary.replace(path)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, source: str = "") -> tuple[SavedCase, Case]:
    """Read a saved case; `source` is what messages call it (default: its path).

    Raises Unreadable in one sentence, OtherVersion where a newer pagefuzz wrote it.
    """
    source = source or one_line(str(path), 200)
    try:
        # Neither a pipe that nobody writes to nor a device without an end may hold the run up.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable(f"{source} is not a regular file.")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"{source} cannot be read: {error.strerror}.") from None
    if len(data) > MOST_BYTES:
        raise Unreadable(f"{source} has more than {MOST_BYTES} bytes, and no saved case does.")
    return decode(data, source)


def one_line(text: object, most: int = 300) -> str:
    """`text` as it may be printed: one line of printable characters, and no more than `most` of them."""
    start = str(text)[: most + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def kernel_of(path: Path) -> str | None:
    """The kernel that a saved case names, or None where the file cannot be read."""
    try:
        return read(path)[0].kernel
    except Unreadable:
        return None


def decode(data: bytes, source: str) -> tuple[SavedCase, Case]:
    """Decode the JSON text of a saved case; `source` is what messages call it."""
    try:
        head = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise Unreadable(f"{source} is not JSON, or damaged: {one_line(error)}.") from None
    found = head.get("pagefuzz") if isinstance(head, dict) else None
    if type(found) is not int or found < 1:
        raise Unreadable(f"{source} is not a saved case of pagefuzz: it has no format version.")
    if found > FORMAT:
        raise OtherVersion(_newer(source, found))
    try:
        saved = msgspec.convert(head, SavedCase)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Unreadable(f"{source} is damaged: {one_line(error)}.") from None
    if saved.found_as:
        to_case(saved.operation, saved.found_as, source)
    return saved, to_case(saved.operation, saved.case, source)


def _newer(source: str, found: object) -> str:
    return (
        f"{source} has format {one_line(found, 20)}, and pagefuzz {pagefuzz.__version__} reads up to {FORMAT}: "
        "update pagefuzz."
    )


def to_case(operation: str, plain: dict[str, Any], source: str) -> Case:
    """The checked case of an operation from plain data. Raises Unreadable."""
    kind = CASES.get(operation)
    if kind is None:
        raise Unreadable(f"{source}: unknown operation {one_line(operation, 80)!r}; known are {', '.join(CASES)}.")
    try:
        case = msgspec.convert(plain, kind)
        unknown = _unknown(plain, asdict(case))
        if unknown:
            raise Unreadable(f"{source}: a case of {operation} has no field {one_line(unknown, 80)!r}.")
        case.check()
    except (msgspec.ValidationError, RecursionError) as error:
        raise Unreadable(f"{source}: the case is damaged: {one_line(error)}.") from None
    except InvalidCase as error:
        raise Unreadable(f"{source}: the case contradicts itself: {one_line(error)}.") from None
    return case


def _unknown(plain: Any, kept: Any) -> str:
    """The first field in `plain` that was not kept, or ""."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            if found := name if name not in kept else _unknown(value, kept[name]):
                return str(found)
    elif isinstance(plain, list):
        return next(filter(None, map(_unknown, plain, kept)), "")
    return ""


def token(kernel: str, invariant: str, case: Case) -> str:
    """A case as text for a command line: what differs from the defaults, compressed."""
    plain = {item.name: value for item in fields(case) if (value := getattr(case, item.name)) != item.default}
    text = msgspec.json.encode([case.operation, kernel, invariant, plain])
    return TOKEN_PREFIX + base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip("=")


def is_token(text: str) -> bool:
    """Whether a text is meant as a token, of this format or another."""
    return re.match(r"pf[0-9]+\.", text) is not None


def from_token(text: str) -> tuple[SavedCase, Case]:
    """The case of a token. Raises Unreadable, OtherVersion where a newer pagefuzz wrote it."""
    source = f"token {one_line(text, 12)}"
    if not text.startswith(TOKEN_PREFIX):
        raise OtherVersion(_newer(source, text[2 : text.index(".")]))
    try:
        body = text[len(TOKEN_PREFIX) :]
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MOST_BYTES)
        if not unpacker.eof:
            raise Unreadable(f"{source} is cut short, or too long.")
        operation, kernel, invariant, plain = msgspec.json.decode(data, type=tuple[str, str, str, dict[str, Any]])
    except Unreadable:
        raise
    except (ValueError, zlib.error, RecursionError) as error:  # base64's and msgspec's errors are ValueErrors
        raise Unreadable(f"{source} is damaged: {one_line(error)}; copy the whole of it.") from None
    case = to_case(operation, plain, source)
    return SavedCase(operation=operation, kernel=kernel, invariant=invariant, case=asdict(case)), case


def passed(path: Path, saved: SavedCase, fixed: Path) -> str:
    """Note that a saved failure passes: the second time in a row it moves to `fixed`. Returns a sentence."""
    try:
        if not saved.passes:
            write(path, msgspec.structs.replace(saved, passes=1))
            return "once more, and it moves to .pagefuzz/fixed/"
        fixed.mkdir(parents=True, exist_ok=True)
        path.replace(fixed / path.name)
    except OSError as error:
        return f"this could not be noted: {error.strerror}"
    return "the second time in a row, so it moved to .pagefuzz/fixed/"


def failed_again(path: Path, saved: SavedCase) -> None:
    """Forget earlier passes of a saved failure. The file's new time says that this run has shown it."""
    with suppress(OSError):
        write(path, msgspec.structs.replace(saved, passes=0))


def versions() -> dict[str, str]:
    """What a figure or a failure depends on."""
    found = {"pagefuzz": pagefuzz.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "hypothesis"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
