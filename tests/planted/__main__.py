"""Plants what ends a process or never ends in adapters, and fuzzes them as a user does, again and again.

    python tests/planted [--device cpu|cuda] [--times N] [--fault NAME] [-n WORKERS]        # or: make planted

Each time is one run of the real command line on all of the faults, an adapter each, in a folder of its own with two
workers, and one that replays what it saved. This is asked: is it the verdict that it should be, is the case the
smallest there is, does the saved file show the same again, did the right kernels of the same run pass, is no process
left. Exit status 1 unless all of that holds every time. A fault's seconds are those of its item.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKER = "PAGEFUZZ_PLANTED"  # in the environment of all processes of one time
LONGEST = 300.0  # seconds that one command may take


def _import_pagefuzz() -> None:
    """Make this tree the one that is imported, whatever is installed."""
    spec = importlib.util.spec_from_file_location("pagefuzz", ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["pagefuzz"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def marked(mark: str) -> list[int]:
    """The processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or another user's
    return found


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, or -1 if it took too long; what it printed; processes that it left."""

    code: int
    text: str
    left: list[str]


def pytest(folder: Path, mark: str, *options: str) -> Done:
    """Run the command line in `folder`, with `mark` in the environment."""
    name, _, value = mark.partition("=")
    environ = {**os.environ, name: value, "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "120"}
    for outer in [name for name in environ if name.startswith(("PYTEST_", "TRITON_INTERPRET")) or name == "CI"]:
        del environ[outer]
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "fuzz"), *options]
    with tempfile.TemporaryFile("w+", errors="replace") as said:  # no pipe, which whoever is left would hold open
        run = subprocess.Popen(command, cwd=folder, env=environ, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            code = run.wait(timeout=LONGEST)
            left = {pid: command_of(pid) for pid in marked(mark)}
        except subprocess.TimeoutExpired:
            code, left = -1, dict.fromkeys(marked(mark), "")
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            run.wait()
        said.seek(0)
        return Done(code, said.read(), [command for command in left.values() if command])


def command_of(pid: int) -> str:
    try:
        return f"{pid} " + " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))[:80]
    except OSError:
        return ""  # gone by now


def faults(name: str, device: str) -> list[Any]:
    """Those of a device whose names match."""
    from pagefuzz.tests.planted.faults import FAULTS

    return [fault for fault in FAULTS if fault.device == device and fnmatch.fnmatchcase(fault.name, name)]


@dataclass
class Tally:
    """What came of one fault, or of the runs as a whole."""

    right: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, seed: int, wrong: list[str], seconds: float) -> None:
        self.right += not wrong
        self.seconds.append(seconds)
        self.wrong += [f"seed {seed}: {what}" for what in wrong]


def once(chosen: list[Any], device: str, seed: int) -> tuple[list[str], dict[str, tuple[list[str], float]]]:
    """Plant faults in one run, and replay what it saved. What went wrong with the run as a whole, and with each fault,
    with the seconds that its item took."""
    from pagefuzz.fuzz.saved import read
    from pagefuzz.tests.planted.faults import LIMIT

    whole: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder, mark = Path(name), f"{MARKER}={name}"
        options = ["--device", device, "--case-limit", str(LIMIT), "-n", "2"]
        options += ["--memory-limit", "0.25"] if device == "cpu" else []
        for fault in chosen:
            (folder / f"{fault.name}.py").write_text(fault.adapter())
            options += ["--adapter", f"{fault.name}.py"]
        profile = ("--hypothesis-profile", "planted", f"--hypothesis-seed={seed}", "-v", "--durations=0")
        run = pytest(folder, mark, *options, *profile)
        replay = pytest(folder, mark, *options, "--replay", ".pagefuzz/failures")
        for what, done in (("run", run), ("replay", replay)):
            if done.code != 1:
                whole.append(f"the {what} ended with {done.code}: {done.text[-1500:]}")
            if done.left:
                whole.append(f"the {what} left processes behind: {'; '.join(done.left)}")
        results = {
            item: result for result, item in re.findall(r"(PASSED|FAILED|SKIPPED|ERROR).*\[(\w+)-000\]", run.text)
        }
        whole += [
            f"the right kernel beside {fault.name}: {results.get(f'good_{fault.name}', 'it never ran')}"
            for fault in chosen
            if results.get(f"good_{fault.name}") != "PASSED"
        ]
        saved = [read(path) for path in (folder / ".pagefuzz/failures").glob("*.json")]
        if strangers := {found.kernel for found, _ in saved} - {fault.name for fault in chosen}:
            whole.append(f"saved was a failure of {', '.join(strangers)}")
        by_fault = {}
        for fault in chosen:
            mine = [(found, case) for found, case in saved if found.kernel == fault.name]
            wrong = [] if results.get(fault.name) == "FAILED" else [f"its item: {results.get(fault.name)}"]
            wrong += judged(fault, mine, run.text, replay.text)
            seconds = re.search(rf"([\d.]+)s call .*\[{fault.name}-000\]", run.text)
            by_fault[fault.name] = wrong, float(seconds[1]) if seconds else 0.0
    return whole, by_fault


def judged(fault: Any, saved: list[Any], run: str, replay: str) -> list[str]:
    """What is wrong with what was saved and said of one fault."""
    wrong = []
    for what, said in (("report", seen(run, fault.name)), ("replay", seen(replay, fault.name, "still fails: "))):
        if not re.match(fault.seen, said):
            wrong.append(f"the {what} says {said!r}")
    if len(saved) != 1:
        return [*wrong, f"{len(saved)} failures were saved"]
    found, case = saved[0]
    if found.invariant != "I0" or not re.match(fault.seen, found.seen):
        wrong.append(f"saved was {found.invariant}, {found.seen!r}")
    return wrong if is_smallest(case) else [*wrong, f"shrunk to {case.one_line()}"]


def is_smallest(case: Any) -> bool:
    """Whether nothing is left but one token, at the first position that goes wrong."""
    from pagefuzz.strategies.slot_mapping import Token
    from pagefuzz.tests.planted.faults import SMALLEST

    lengths = [row.context_len for row in case.sequences]
    return case.block_size == 1 and lengths == [SMALLEST + 1] and case.tokens == (Token(0, SMALLEST),)


def seen(text: str, kernel: str, before: str = "") -> str:
    """What the report on a kernel says was seen."""
    found = re.search(rf"{before}I0 violated by {kernel}: .*\n\n  seen +(.*)", text)
    return found[1].strip() if found else ""


def plant(chosen: list[Any], device: str, times: int, workers: int) -> int:
    """Plant all of them so many times; prints a table and returns how many of its lines are not right every time."""
    from pagefuzz.fuzz.saved import versions

    print(", ".join(f"{package} {found}" for package, found in versions().items()))
    whole = "the run as a whole"
    tallies = {name: Tally() for name in (*(fault.name for fault in chosen), whole)}
    seeds = range(1, times + 1)
    with ThreadPoolExecutor(workers) as pool:
        for seed, (wrong, by_fault) in zip(
            seeds, pool.map(lambda seed: once(chosen, device, seed), seeds), strict=True
        ):
            for name, (said, seconds) in by_fault.items():
                tallies[name].add(seed, said, seconds)
            tallies[whole].add(seed, wrong, sum(seconds for _, seconds in by_fault.values()))
            right = sum(not said for said, _ in by_fault.values())
            rest = "harmed" if wrong else "unharmed"
            print(f"seed {seed}: {right} of {len(chosen)} faults right, the rest of the run {rest}", flush=True)
    print(f"{'fault':24}{'right':>12}{'median':>10}   what went wrong")
    for name, tally in tallies.items():
        print(f"{name:24}{f'{tally.right} of {times}':>12}{statistics.median(tally.seconds):>8.1f} s")
        for what in tally.wrong:
            print(f"{'':24}   {what}")
    return sum(tally.right < times for tally in tallies.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="times that each is planted (default 20)")
    parser.add_argument("--fault", default="*", metavar="NAME", help="faults by name, a shell pattern (default all)")
    parser.add_argument("-n", type=int, default=1, metavar="WORKERS", help="runs at once (default 1)")
    arguments = parser.parse_args()
    if arguments.times < 1 or arguments.n < 1:
        parser.error("--times and -n must be above 0")
    _import_pagefuzz()
    chosen = faults(arguments.fault, arguments.device)
    if not chosen:
        every = ", ".join(fault.name for fault in faults("*", arguments.device))
        parser.error(f"no fault on {arguments.device} is named {arguments.fault}; there are {every}")
    return int(plant(chosen, arguments.device, arguments.times, arguments.n) > 0)


if __name__ == "__main__":
    sys.exit(main())
