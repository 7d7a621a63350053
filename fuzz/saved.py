"""Saved failures: one JSON file each, and the same case as a token that fits on a command line.

A file is data: it is decoded strictly into the case's own fields, each within its bounds, and checked; nothing in it is
ever evaluated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import platform
import stat
import zlib
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import pagefuzz
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies import CASES
from pagefuzz.strategies.case import Case, InvalidCase

FORMAT = 1
MOST_BYTES = 1 << 20
TOKEN_PREFIX = "pf1."
FAILURES, FIXED = Path(".pagefuzz/failures"), Path(".pagefuzz/fixed")


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
    kind: str = "failure"
    operation: str
    kernel: str
    invariant: str
    case: dict[str, Any]
    found_as: dict[str, Any] = {}
    seen: str = ""
    right: str = ""
    where: str = ""
    device: str = ""
    versions: dict[str, str] = {}
    passes: int = 0


def save(
    folder: Path, kernel: str, kind: str, invariant: str, case: Case, found_as: Case, violation: Violation, device: str
) -> tuple[Path, bool]:
    """Write a failure; returns its file, and whether that was there before. One case of one kernel has one file."""
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
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in f"{kernel}-{invariant}-{digest}")
    path = folder / f"{name}.json"
    return path, not write(path, saved, new=True)


def write(path: Path, saved: SavedCase, new: bool = False) -> bool:
    """Write a saved case so that an interrupted run leaves the old file or the new one, never half of one.

    With `new`, a file that is there already stays as it is; returns whether this call wrote.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(saved), indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text + b"\n")
    if not new:
        temporary.replace(path)
        return True
    try:
        os.link(temporary, path)  # unlike replace, of several workers with the same case one is told that it was first
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink()


def read(path: Path) -> tuple[SavedCase, Case]:
    """Read a saved case. Raises Unreadable in one sentence, OtherVersion where a newer pagefuzz wrote it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{path} is not a regular file.")
        if status.st_size > MOST_BYTES:
            raise Unreadable(f"{path} has {status.st_size} bytes; a saved case has at most {MOST_BYTES}.")
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from None
    return decode(data, str(path))


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Unreadable(f"{source} is not JSON, or damaged: {error}.") from None
    found = head.get("pagefuzz") if isinstance(head, dict) else None
    if type(found) is not int:
        raise Unreadable(f"{source} is not a saved case of pagefuzz: it has no format version.")
    if found > FORMAT:
        raise OtherVersion(
            f"{source} has format {found}, and pagefuzz {pagefuzz.__version__} reads up to {FORMAT}: update pagefuzz."
        )
    try:
        saved = msgspec.convert(head, SavedCase)
    except msgspec.ValidationError as error:
        raise Unreadable(f"{source} is damaged: {error}.") from None
    return saved, to_case(saved.operation, saved.case, source)


def to_case(operation: str, plain: dict[str, Any], source: str) -> Case:
    """The checked case of an operation from plain data. Raises Unreadable."""
    kind = CASES.get(operation)
    if kind is None:
        raise Unreadable(f"{source}: unknown operation {operation!r}; known are {', '.join(CASES)}.")
    unknown = sorted(set(plain) - {item.name for item in fields(kind)})
    if unknown:
        raise Unreadable(f"{source}: a case of {operation} has no field {unknown[0]!r}.")
    try:
        case = msgspec.convert(plain, kind)
        case.check()
    except msgspec.ValidationError as error:
        raise Unreadable(f"{source}: the case is damaged: {error}.") from None
    except InvalidCase as error:
        raise Unreadable(f"{source}: the case contradicts itself: {error}.") from None
    return case


def token(kernel: str, invariant: str, case: Case) -> str:
    """A case as text for a command line: what differs from the defaults, compressed."""
    plain = {item.name: value for item in fields(case) if (value := getattr(case, item.name)) != item.default}
    text = msgspec.json.encode([case.operation, kernel, invariant, plain])
    return TOKEN_PREFIX + base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip("=")


def from_token(text: str) -> tuple[SavedCase, Case]:
    """The case of a token. Raises Unreadable."""
    source = f"token {text[:12]}..."
    try:
        packed = base64.b64decode(text[len(TOKEN_PREFIX) :] + "==", altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MOST_BYTES)
        if not unpacker.eof:
            raise Unreadable(f"{source} is cut short, or too long.")
        operation, kernel, invariant, plain = msgspec.json.decode(data, type=tuple[str, str, str, dict[str, Any]])
    except (binascii.Error, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"{source} is damaged: {error}; copy the whole of it.") from None
    case = to_case(operation, plain, source)
    return SavedCase(operation=operation, kernel=kernel, invariant=invariant, case=asdict(case)), case


def passed(path: Path, saved: SavedCase, fixed: Path) -> str:
    """Note that a saved failure passes: the second time in a row it moves to `fixed`. Returns a sentence."""
    if saved.passes + 1 < 2:
        write(path, msgspec.structs.replace(saved, passes=saved.passes + 1))
        return "passes; once more, and it moves to .pagefuzz/fixed/"
    fixed.mkdir(parents=True, exist_ok=True)
    path.replace(fixed / path.name)
    return "passes for the second time: moved to .pagefuzz/fixed/"


def failed_again(path: Path, saved: SavedCase) -> None:
    """Forget earlier passes of a saved failure."""
    if saved.passes:
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
