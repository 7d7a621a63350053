"""The kill matrix: which planted bugs die, by what, after how many examples, and what other checks make of them.

    python tests/mutants/matrix.py [--seeds 1 2 3 4 5] [--workers N] [--only PATTERN] [--markdown FILE] [--json FILE]
    python tests/mutants/matrix.py --idle [--examples N] [--markdown FILE] [--json FILE]
    python tests/mutants/matrix.py --device cuda [--minutes N] [--seeds ...] [--examples N] [--workers N] [--shrink]
    python tests/mutants/matrix.py --again FILE [--markdown FILE]

Every mutant goes through the quick profile of `pytest fuzz/` with each of the seeds, in processes of its own making.
Exit status 1, and a sentence each, where a mutant survives, kills its process, hangs, is not seen by the invariant that
it names or mostly named by another one, or takes too long; 130 where the run is interrupted, 2 where it cannot begin.
--idle says how many mutants would live without each invariant, oracle, view, tail, poison, ...

--device runs the mutants compiled, each in a process of its own, and writes beside each other what names them there and
interpreted. A mutant that lives there is a finding, and no failure. What is known is written to the JSON while it runs;
--again makes the page of that.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = "pagefuzz.tests.mutants.catalogue"
SEEDS = [1, 2, 3, 4, 5]
LIMIT = 900.0  # a survivor takes all of the budget
IDLE_EXAMPLES = 400
# On a device: seeds, examples a seed, seconds a mutant, and seconds between two states of the JSON.
DEVICE_SEEDS, DEVICE_EXAMPLES, DEVICE_SECONDS, WRITTEN_EVERY = [1, 2, 3], 500, 30.0, 2.0
DEVICE_PAGE, DEVICE_JSON = ROOT / "docs" / "mutants-on-a-gpu.md", ROOT / ".pagefuzz" / "mutants-on-a-gpu.json"


def import_this_tree() -> None:
    """Make the tree importable as pagefuzz, whatever its folder is called and whether it is installed."""
    spec = importlib.util.spec_from_file_location("pagefuzz", ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["pagefuzz"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def chosen(catalogue: str, pattern: str) -> dict[str, Any]:
    """The mutants of a catalogue whose names match a shell pattern."""
    from pagefuzz.tests.mutants.jobs import mutants

    return {name: mutant for name, mutant in mutants(catalogue).items() if fnmatch.fnmatch(name, pattern)}


def jobs_of(
    mutants: dict[str, Any], seeds: list[int], examples: int | None, checks: bool, shrinks: bool = True
) -> list[dict[str, Any]]:
    """Every job of a matrix, the dear ones of decodes first."""
    from pagefuzz.tests.mutants.other_checks import CHECKS

    jobs: list[dict[str, Any]] = []
    for name in sorted(mutants, key=lambda name: "triton_paged" not in getattr(mutants[name], "kernel", "")):
        asked = {"mutant": name, "what": "kill", "examples": examples, "shrinks": shrinks}
        jobs += [{**asked, "seed": seed} for seed in seeds]
        jobs += [{"mutant": name, "what": "others", "check": check} for check in (CHECKS if checks else ())]
    return jobs


def work(
    jobs: list[dict[str, Any]], catalogue: str, workers: int, limit: float, *more: str
) -> Generator[tuple[Any, Any]]:
    """Every job with its result, as they end. more: options of the processes."""
    from pagefuzz.tests.workers import command_of, run

    command = command_of(Path(__file__).resolve(), "--work", "--catalogue", catalogue, *more)
    said, terminal = time.monotonic(), sys.stderr.isatty()
    for done, (job, result) in enumerate(run(command, jobs, workers, limit), 1):
        yield job, result
        if time.monotonic() - said > (0.5 if terminal else 30):
            said = time.monotonic()
            print(f"{done} of {len(jobs)} jobs", end="\r" if terminal else "\n", file=sys.stderr, flush=True)


def matrix(
    catalogue: str = CATALOGUE,
    pattern: str = "*",
    seeds: list[int] | None = None,
    examples: int | None = None,
    workers: int = 1,
    limit: float = LIMIT,
    checks: bool = True,
    shrinks: bool = True,
) -> Any:
    """The Report of a run."""
    from pagefuzz.tests.mutants.jobs import budget
    from pagefuzz.tests.mutants.report import Report

    mutants, seeds = chosen(catalogue, pattern), seeds or SEEDS
    started = time.monotonic()
    rows = rows_of(mutants)
    for job, result in work(jobs_of(mutants, seeds, examples, checks, shrinks), catalogue, workers, limit):
        row = rows[job["mutant"]]
        if job["what"] == "kill":
            row.kills.append({"seed": job["seed"], **result})
        else:
            row.others[job["check"]] = result
    for row in rows.values():
        row.kills.sort(key=lambda kill: kill["seed"])
    operations = dict.fromkeys(row.operation for row in rows.values())
    about = {**about_run(workers), "seeds": seeds, "examples": {name: examples or budget(name) for name in operations}}
    return Report({**about, "seconds": round(time.monotonic() - started)}, list(rows.values()))


def rows_of(mutants: dict[str, Any]) -> dict[str, Any]:
    """An empty Row for each mutant."""
    from pagefuzz.tests.mutants.report import Row

    return {
        name: Row(
            name,
            mutant.operation,
            getattr(mutant, "kernel", ""),
            mutant.origin,
            mutant.invariant,
            list(getattr(mutant, "also", ())),
        )
        for name, mutant in mutants.items()
    }


def on_device(asked: argparse.Namespace, device_name: str) -> tuple[Any, bool]:
    """The DeviceReport of a run, and whether it was interrupted. Its JSON is written every few seconds."""
    from pagefuzz.tests.mutants import device_report as reports
    from pagefuzz.tests.mutants.report import write

    mutants = chosen(asked.catalogue, asked.only)
    there = reports.interpreted(reports.PAGE.read_text())
    began = time.monotonic()
    until = began + 60 * asked.minutes
    job = {"what": "kills", "seeds": asked.seeds, "examples": asked.examples, "shrinks": asked.shrink}
    jobs = [
        {**job, "mutant": name, "seconds": asked.seconds, "until": until}
        for name in reports.likely_kills_first(mutants, there)
    ]
    about = {**about_run(asked.workers), "device": device_name, "seeds": asked.seeds, "examples": asked.examples}
    rows = rows_of(mutants)
    report = reports.DeviceReport(about, list(rows.values()), there)
    options = ["--device", asked.device, "--workers", str(asked.workers), *(["--apart"] if asked.apart else [])]
    written, interrupted = began, False
    try:
        with closing(work(jobs, asked.catalogue, asked.workers, asked.limit, *options)) as results:
            for done, result in results:
                lost = [{"seed": seed, **result} for seed in asked.seeds]  # its process died, or it took too long
                rows[done["mutant"]].kills = result.get("kills", lost)
                about["seconds"] = round(time.monotonic() - began)
                if asked.json is not None and time.monotonic() - written > WRITTEN_EVERY:
                    written = time.monotonic()
                    write(report, None, asked.json)
    except KeyboardInterrupt:
        interrupted = True
    about["seconds"] = round(time.monotonic() - began)
    return report, interrupted


def without_files(arguments: list[str]) -> list[str]:
    """A command line without the names of the files that are written: they are the user's, and change no figure."""
    kept, names = [], ("--json", "--markdown")
    for place, word in enumerate(arguments):
        if word.split("=")[0] not in names and (place == 0 or arguments[place - 1] not in names):
            kept.append(word)
    return kept


def about_run(workers: int) -> dict[str, Any]:
    """What a figure depends on."""
    from pagefuzz.fuzz.saved import versions

    load = f"load {os.getloadavg()[0]:.1f}"
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {workers} workers, {load}"
    command = shlex.join(["python", "tests/mutants/matrix.py", *without_files(sys.argv[1:])])
    return {"command": command, "versions": versions(), "machine": machine}


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument(
        "--seeds", type=int, nargs="+", metavar="N", help="of the runs (default 1 to 5; on a device 1 to 3)"
    )
    known.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores; at most 8 on a device)")
    known.add_argument("--only", default="*", metavar="PATTERN", help="mutants by name, a shell pattern")
    known.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for one mutant and seed")
    known.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help=f"default: the quick profile's; {IDLE_EXAMPLES} (idle); {DEVICE_EXAMPLES} (on a device)",
    )
    known.add_argument("--shrink", action=argparse.BooleanOptionalAction, help="default: not on a device")
    known.add_argument("--device", default="cpu", help="cpu (interpreted), cuda, cuda:1, ... (compiled)")
    known.add_argument(
        "--again", type=Path, metavar="FILE", help="write the page of a device's JSON again, and no more"
    )
    known.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="on a device: for the whole run")
    known.add_argument(
        "--seconds",
        type=float,
        default=DEVICE_SECONDS,
        metavar="N",
        help=f"on a device: for all seeds of a mutant (default {DEVICE_SECONDS:g})",
    )
    known.add_argument("--idle", action="store_true", help="what could be switched off, and which mutants then live")
    known.add_argument("--markdown", type=Path, metavar="FILE", help="write the report there")
    known.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    known.add_argument("--catalogue", default=CATALOGUE, metavar="MODULE", help="where MUTANTS are")
    known.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    # The way of a device with --device cpu: for the suite's own tests, where there is no device.
    known.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    return known


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    known = parser()
    asked = known.parse_args()
    if "pagefuzz" not in sys.modules:
        import_this_tree()
    from pagefuzz.tests import workers

    workers.settle(asked.device)
    is_apart = asked.apart or asked.device != "cpu"
    if asked.work:
        from pagefuzz.tests.mutants.jobs import Shop

        workers.serve(Shop(asked.catalogue, asked.device, asked.workers or 1))
    asked.workers = workers.default_workers(asked.device) if asked.workers is None else asked.workers
    asked.seeds = asked.seeds or (DEVICE_SEEDS if is_apart else SEEDS)
    asked.shrink = not is_apart if asked.shrink is None else asked.shrink
    numbers = (asked.workers, asked.limit, *asked.seeds, asked.examples or 1, asked.minutes, asked.seconds)
    if not all(number > 0 for number in numbers):
        known.error("--workers, --limit, --seeds, --examples, --minutes and --seconds must be above 0")
    if asked.again is not None:
        return _again(known, asked)
    if is_apart and asked.idle:
        known.error("--idle looks at interpreted kernels: leave --device out")
    if not is_apart and asked.minutes < math.inf:
        known.error("--minutes is for --device; on the CPU choose with --only, --seeds and --examples")
    for path in (asked.markdown, asked.json):
        if path is not None and not path.resolve().parent.is_dir():
            known.error(f"{path}: there is no folder {path.resolve().parent}")
    try:
        mutants = chosen(asked.catalogue, asked.only)
    except ImportError as error:
        known.error(f"--catalogue {asked.catalogue}: {error}")
    if not mutants:
        known.error(
            f"--only {asked.only}: no mutant has such a name; there are {', '.join(chosen(asked.catalogue, '*'))}"
        )
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        if is_apart:
            return _on_device(asked)
        return _idle(asked) if asked.idle else _matrix(asked)
    except KeyboardInterrupt:
        print("interrupted: no process is left, and nothing is written", file=sys.stderr)
        return 130
    except RuntimeError as error:  # a process that does not start
        print(error, file=sys.stderr)
        return 2


def _matrix(asked: argparse.Namespace) -> int:
    from pagefuzz.tests.mutants.report import write

    print(f"seeds {' '.join(map(str, asked.seeds))}", flush=True)
    report = matrix(
        asked.catalogue,
        asked.only,
        asked.seeds,
        asked.examples,
        asked.workers,
        asked.limit,
        shrinks=asked.shrink,
    )
    whole = asked.only == "*" and asked.catalogue == CATALOGUE
    print(report.terminal(shutil.get_terminal_size((200, 50)).columns))
    write(report, asked.markdown, asked.json)
    problems = report.problems(every_invariant=whole)
    print(*(f"FAILED: {sentence}" for sentence in problems), sep="\n", end="\n" if problems else "")
    print(report.headline(), f"{report.about['seconds']} s.", "Failed." if problems else "Nothing fails.")
    return int(bool(problems))


def _again(known: argparse.ArgumentParser, asked: argparse.Namespace) -> int:
    from pagefuzz.tests.mutants import device_report
    from pagefuzz.tests.mutants.report import write

    try:
        report = device_report.read(asked.again)
    except ValueError as error:
        known.error(f"--again {error}")
    write(report, asked.markdown or DEVICE_PAGE, None)
    print(report.headline())
    return 0


def _on_device(asked: argparse.Namespace) -> int:
    from pagefuzz.tests.mutants.report import write
    from pagefuzz.tests.workers import name_of

    try:
        device_name = name_of(asked.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    asked.examples = asked.examples or DEVICE_EXAMPLES
    if asked.only == "*" and asked.catalogue == CATALOGUE and not asked.apart:
        asked.markdown = asked.markdown or DEVICE_PAGE
        if asked.json is None:
            DEVICE_JSON.parent.mkdir(exist_ok=True)
            asked.json = DEVICE_JSON
    report, interrupted = on_device(asked, device_name)
    write(report, asked.markdown, asked.json)
    for title, names in report.groups().items():
        if title != "both":
            print(f"{title}: {', '.join(names) or 'none'}")
    print(*(f"FAILED: {sentence}" for sentence in report.problems()), sep="\n", end="\n" if report.problems() else "")
    print(report.headline(), f"{report.about['seconds']} s.")
    if interrupted:
        print("interrupted: no process is left; what was known is written", file=sys.stderr)
        return 130
    return int(bool(report.problems()))


def _idle(asked: argparse.Namespace) -> int:
    from pagefuzz.tests.mutants import idle
    from pagefuzz.tests.mutants.report import write

    mutants = chosen(asked.catalogue, asked.only)
    seed, examples = asked.seeds[0], asked.examples or IDLE_EXAMPLES
    jobs = [{"mutant": name, "what": "idle", "seed": seed, "examples": examples} for name in mutants]
    started = time.monotonic()
    done = {job["mutant"]: result for job, result in work(jobs, asked.catalogue, asked.workers, asked.limit)}
    about = {**about_run(asked.workers), "seed": seed, "examples": examples}
    found = idle.Idle({**about, "seconds": round(time.monotonic() - started)}, done)
    print(found.text())
    write(found, asked.markdown, asked.json)
    return int(any(how in result for result in done.values() for how in ("crashed", "hung", "error")))


if __name__ == "__main__":
    sys.exit(main())
