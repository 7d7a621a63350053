"""Kernels under NVIDIA's compute-sanitizer: how it is started, and what its log says of a case.

The tool starts the fresh Python that the kernels run in (fuzz/fresh.py) and writes its reports to a file. That process
reads after each run what is new there, and knows which tensors lie at the addresses.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pagefuzz.fuzz.plain_arena import PlainArena
from pagefuzz.fuzz.run import Runner

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHARE = 40  # of a profile's cases one in so many is drawn
SLOWER = 10.0  # times as long as otherwise may a run take
SETTLED, LONGEST = 0.02, 1.0  # seconds in which nothing more may come before a log is read, at first and at most
MOST_LOG = 1 << 28  # bytes after which the process and its log are replaced
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an allocation each, or their bounds are the cache's
_PADDING = "4096"  # bytes behind every allocation, so that what lies next is not another tensor
_OPTIONS = {
    "memcheck": ("--padding", _PADDING),
    "initcheck": ("--check-api-memory-access", "no"),  # what a case left unwritten is copied to be compared
}
_MOST_RAW = 300  # characters of a report in a form that is not known
_NEAR = 1 << 20  # bytes from a tensor at which it is still named
_NO_REPORT = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application",
    "Warning",
    "WARNING",
    "Program hit",  # a call that failed raises in the kernel
)

Places = Sequence[tuple[str, int, int, int]]  # (name, address, bytes, bytes of an element)


class NoSanitizer(ValueError):
    """compute-sanitizer cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Sanitizer:
    """program: the path of compute-sanitizer. tool: one of TOOLS."""

    program: str
    tool: str

    def command(self, log: str) -> list[str]:
        """What stands before the command that it watches."""
        return [
            self.program,
            *("--tool", self.tool),
            *("--log-file", log),
            *("--print-limit", "0"),  # or the cases after the first hundred reports look right
            *("--show-backtrace", "device"),
            *("--target-processes", "application-only"),  # compilers need no watching
            *("--destroy-on-device-error", "kernel"),  # the process is there for the next case
            *("--report-api-errors", "no"),
            *_OPTIONS.get(self.tool, ()),
        ]


def found(tool: str, device: str, isolate: bool | None) -> Sanitizer:
    """The tool on this machine. Raises NoSanitizer where it cannot be used."""
    asked = f"--sanitize {tool}"
    if tool not in TOOLS:
        raise NoSanitizer(f"{asked}: there is no such tool; choose {', '.join(TOOLS)}.")
    if device.split(":")[0] != "cuda":
        raise NoSanitizer(f"{asked}: compute-sanitizer watches CUDA kernels, and the device is {device} (--device).")
    if isolate is False:
        raise NoSanitizer(f"{asked}: kernels run in processes of its own there; leave out --no-isolate.")
    beside = [Path(nvcc).resolve().parent for nvcc in (shutil.which("nvcc"),) if nvcc]
    homes = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in (None, *homes, *beside, Path("/usr/local/cuda/bin")):
        if program := shutil.which("compute-sanitizer", path=None if folder is None else str(folder)):
            return Sanitizer(program, tool)
    raise NoSanitizer(
        f"{asked}: there is no compute-sanitizer on the PATH, beside nvcc or in /usr/local/cuda/bin; it comes with the "
        "CUDA toolkit."
    )


def new_log() -> str:
    """The path of an empty file."""
    handle, path = tempfile.mkstemp(prefix="pagefuzz-sanitizer-", suffix=".log")
    os.close(handle)
    return path


@dataclass
class Log:
    """What the tool says, as far as nobody has read it."""

    path: str
    at: int = 0
    settled: float = SETTLED
    late: bool = field(default=False, init=False)

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def begin(self) -> None:
        """A run begins. What has come since the last was read came late: it is of this run or of the one before."""
        self.late = self.size() > self.at
        if self.late:
            self.settled = min(4 * self.settled, LONGEST)

    def new(self) -> str:
        """Wait until nothing more comes, and read what came. Another process writes it, a moment after the run."""
        size = self.size()
        deadline = time.monotonic() + LONGEST
        while True:
            time.sleep(self.settled)
            if (now := self.size()) == size or time.monotonic() > deadline:
                break
            size = now
        text = read(self.path, self.at)
        self.at = max(self.at, now)
        return text


def read(path: str, at: int) -> str:
    """Up to 1 MiB of a log from byte `at` on."""
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


# ---- what a log says


def said(text: str, tool: str, places: Places = (), late: bool = False) -> str:
    """The first report in a log and how many follow, as `Observation.ended`; "" if it reports nothing.

    places: what lies where, to name the tensor that an address belongs to.
    """
    reports = _reports(text)
    if not reports:
        return ""
    told = (_race(reports[0]) if tool == "racecheck" else _access(reports[0], places)) or _raw(reports[0])
    more = f" ({len(reports)} reports)" if len(reports) > 1 else ""
    of = "; said late, so it may be of the run before this one" if late else ""
    return f"{tool}: {told}{more}{of}"


def _reports(text: str) -> list[list[str]]:
    """The lines of each report, without `=========` before them. Those that belong to the one above are indented."""
    found: list[list[str]] = []
    known = False
    for line in text.splitlines():
        mark = re.match(r"={8,9}(?!=)", line)
        words = line[mark.end() :] if mark else ""
        if not words.strip():
            continue
        if words.startswith("  "):
            if known:
                found[-1].append(words.strip())
            continue
        known = not words.strip().startswith(_NO_REPORT)
        if known:
            found.append([words.strip()])
    return found


def _raw(lines: list[str]) -> str:
    return "; ".join(line for line in lines if "Host Frame" not in line)[:_MOST_RAW]


def _location(words: str) -> str:
    """`kernel (file.py:33)` of the forms that versions of the tool have for it."""
    words = re.sub(r"\s*\[\d+ hazards?\]$", "", words.strip())
    if old := re.fullmatch(r"0x[0-9a-fA-F]+ in (.+):(\d+):(.+)", words):
        return f"{_bare(old[3])} ({Path(old[1]).name}:{old[2]})"
    if new := re.fullmatch(r"(.+?)\+0x[0-9a-fA-F]+ in (.+):(\d+)", words):
        return f"{_bare(new[1])} ({Path(new[2]).name}:{new[3]})"
    if plain := re.fullmatch(r"0x[0-9a-fA-F]+ in (.+)|(.+?)\+0x[0-9a-fA-F]+", words):
        return _bare(plain[1] or plain[2])
    return words


def _bare(name: str) -> str:
    """A function without its parameters."""
    return name.partition("(")[0].removeprefix("void ") or name


def _access(lines: list[str], places: Places) -> str:
    """A report of memcheck, initcheck or synccheck; "" if it has another form."""
    head, *rest = lines
    if not re.match(r"(Invalid|Uninitialized|Misaligned|Barrier) ", head):
        return ""
    body = "\n".join(rest)
    at = re.search(r"(?m)^at (.+)$", body)
    by = re.search(r"(?m)^by thread (\([\d,]+\)) in block (\([\d,]+\))", body)
    told = head.rstrip(".") + (f" at {_location(at[1])}" if at else "")
    told += f", block {by[2]}, thread {by[1]}" if by else ""
    touched = re.search(r"(?m)^(?:Access to|Access at|Address) (0x[0-9a-fA-F]+)(.*)$", body)
    if touched and "__global__" in head:
        told += f": {_where(int(touched[1], 16), body, places)}"
        told += ", misaligned" if "misaligned" in touched[2] else ""
    elif touched:
        told += f": address {touched[1]}{touched[2]}"
    elif not at:
        return ""
    return told


def _where(address: int, body: str, places: Places) -> str:
    """What lies at an address."""
    for name, first, count, itemsize in places:
        if first <= address < first + count:
            return f"element {(address - first) // itemsize} of {name}"
    near = re.search(r"nearest allocation at (0x[0-9a-fA-F]+) of size ([\d,]+)", body)
    if near:
        first, count, name = int(near[1], 16), int(near[2].replace(",", "")), ""
        for mine, start, size, _ in places:
            if start == first:
                name, count = mine, size
        if name:
            return _beside(address, first, count, name)
        if min(abs(address - first), abs(address - first - count)) < _NEAR:
            return _beside(address, first, count, f"{count} bytes that the kernel allocated")
    elif places:
        name, first, count, _ = min(places, key=lambda place: _distance(address, place[1], place[2]))
        if _distance(address, first, count) < _NEAR:
            return _beside(address, first, count, name)
    if "out of bounds" in body:
        return f"address {address:#x}, far from every tensor"
    return "memory that the kernel allocated"


def _distance(address: int, first: int, count: int) -> int:
    return first - address if address < first else max(0, address - first - count)


def _beside(address: int, first: int, count: int, name: str) -> str:
    if address < first:
        return f"{first - address} bytes before the start of {name}"
    if address >= first + count:
        return f"{address - first - count} bytes after the end of {name}"
    return f"byte {address - first} of {name}"


def _race(lines: list[str]) -> str:
    """A report of racecheck; "" if it has another form."""
    text = " ".join(lines)
    first = re.match(r"(?:ERROR: |Error: )?Race reported between (\w+) access at (.+?)(?= and \w+ access at |$)", text)
    if not first:
        return ""
    others = re.findall(r" and (\w+) access at (.+?)(?= and \w+ access at |$)", text)
    if not others:
        return ""
    hazards = sum(int(count) for count in re.findall(r"\[(\d+) hazards?\]", text))
    with_it = " and ".join(dict.fromkeys(f"a {kind.lower()} at {_location(at)}" for kind, at in others))
    count = f" ({hazards} hazards)" if hazards else ""
    return f"in shared memory, a {first[1].lower()} at {_location(first[2])} races with {with_it}{count}"


def runner(place: str, tool: str) -> Runner:
    """Runs cases where a tool watches."""
    device = torch.device(place)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    written = tool != "initcheck"
    return Runner(PlainArena(device, filled=written), interpreted=device.type == "cpu", poisoned=written)
