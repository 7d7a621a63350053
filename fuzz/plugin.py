"""The pytest plugin: options, profiles, items, reports, the summary. What it does lies in session.py."""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.errors import InvalidArgument

import pagefuzz
from pagefuzz.kernels.operations import OPERATIONS

# One profile an amount of work: examples for each kernel. Hypothesis' own --hypothesis-profile chooses.
PROFILES: dict[str, dict[str, Any]] = {
    "quick": {"max_examples": 6000},
    "ci": {"max_examples": 6000, "derandomize": True, "database": None},
    "peers": {"max_examples": 1000},
    "nightly": {"max_examples": 100_000},
}
for _name, _profile in PROFILES.items():
    settings.register_profile(_name, deadline=None, **_profile)
settings.load_profile("ci" if os.environ.get("CI", "").lower() not in ("", "0", "false") else "quick")

SESSION = pytest.StashKey[Any]()
SAVED = pytest.StashKey[list[str]]()  # the paths and tokens of what is tried first
REPLAYED = "pagefuzz_replayed"
UNJUDGED = "pagefuzz_not_judged"
STATISTICS = "pagefuzz_statistics"
FUZZ = Path(__file__).resolve().parent
OPERATION_OF = {f"test_{name}": name for name in OPERATIONS}

# The workers share the cores already. Before numpy is imported, which reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefuzz", "fuzzing paged KV-cache kernels")
    group.addoption(
        "--adapter", action="append", default=[], metavar="FILE|MODULE", help="fuzz the kernels that it registers"
    )
    group.addoption(
        "--kernel", action="append", default=[], metavar="PATTERN", help="fuzz the kernels with such a name"
    )
    group.addoption(
        "--device", default=None, metavar="DEVICE", help="any torch device (default: cuda if there, or cpu)"
    )
    group.addoption(
        "--replay",
        action="append",
        default=[],
        metavar="FILE|DIRECTORY|TOKEN",
        help="run saved cases, on the kernel that failed or the one that --kernel names",
    )
    group.addoption(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run kernels in processes of their own (default: all but pagefuzz's own interpreted ones)",
    )
    group.addoption(
        "--sanitize",
        default=None,
        metavar="TOOL",
        help="run kernels under compute-sanitizer (CUDA): memcheck, racecheck, initcheck, synccheck; 1/40 of the cases",
    )
    group.addoption(
        "--case-limit", default=None, metavar="SECONDS", help="what hangs: a longer run of an isolated kernel (10)"
    )
    group.addoption(
        "--memory-limit",
        default=None,
        metavar="GIB",
        help="what an isolated kernel may take on the CPU (half of the memory, for all workers)",
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis' own, which loads a profile that an adapter may have registered
def pytest_configure(config: pytest.Config) -> None:
    from pagefuzz.fuzz import session as sessions

    try:
        config.stash[SESSION] = _session(config)
        config.stash[SAVED] = _saved(config)
    except sessions.UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _session(config: pytest.Config) -> Any:
    from pagefuzz.fuzz import sanitizer
    from pagefuzz.fuzz import session as sessions
    from pagefuzz.kernels.pairs import with_pairs
    from pagefuzz.kernels.registry import registered

    device = _device(config.getoption("--device"), apart=config.getoption("--isolate") is not False)
    adapters, patterns = config.getoption("--adapter"), config.getoption("--kernel")
    threads = len(os.listdir("/proc/self/task"))
    loaded = [sessions.load_adapter(adapter) for adapter in adapters]
    known = registered()
    sessions.load_own()  # always, so that no adapter takes a name that a replay would miss
    if not adapters or config.getoption("--replay"):
        known = registered()
    there, missing = sessions.load_peers(patterns, with_pairs(known))
    known |= {name: registered()[name] for peer in there for name in peer.kernels}
    has_threads = len(os.listdir("/proc/self/task")) > threads
    _load_profile(config)  # an adapter may have registered one
    kernels = {
        name: kernel for name, kernel in sessions.choose(patterns, known).items() if kernel.declared.runs_on(device)
    }
    if not kernels:
        raise sessions.UsageError(f"no chosen kernel declares to run on {device}; choose another with --device.")
    sessions.check_pools(kernels)
    repeat = [part for adapter in adapters for part in ("--adapter", adapter)]
    if config.getoption("--device"):
        repeat += ["--device", device]
    isolate, limit = config.getoption("--isolate"), config.getoption("--case-limit")
    if isolate is not None:
        repeat.append("--isolate" if isolate else "--no-isolate")
    more: dict[str, Any] = {}
    if (tool := config.getoption("--sanitize")) is not None:
        repeat += ["--sanitize", tool]
        try:
            more["sanitizer"] = sanitizer.found(tool, device, isolate)
        except sanitizer.NoSanitizer as error:
            raise sessions.UsageError(str(error)) from None
    if limit is not None:
        repeat += ["--case-limit", limit]
        more["case_limit"] = _positive("--case-limit", limit)
    if (memory := config.getoption("--memory-limit")) is not None:
        repeat += ["--memory-limit", memory]
        more["memory_limit"] = int(_positive("--memory-limit", memory) * 2**30)
    home = Path(config.invocation_params.dir)
    return sessions.Session(
        device=device,
        examples=settings().max_examples,
        seed=_seed(config),
        kernels=kernels,
        home=home,
        pytest=_pytest(config, home),
        repeat=shlex.join(repeat),
        named=bool(patterns),
        missing=missing,
        known=sessions.load_known([*loaded, *map(sessions.adapter_of, there)], device),
        adapters=(*adapters, *(peer.adapter for peer in there)),
        has_threads=has_threads,
        isolate=isolate,
        worker=int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
        workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
        **more,
    )


def _positive(option: str, text: str) -> float:
    from pagefuzz.fuzz.session import UsageError

    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:
        raise UsageError(f"{option} {text}: should be a number above 0.")
    return number


def _pytest(config: pytest.Config, home: Path) -> str:
    """How pytest and the fuzz tests are called from `home`."""
    beside, found = Path(sys.executable).with_name("pytest"), shutil.which("pytest")
    python = os.path.relpath(sys.executable, home) if Path(sys.executable).is_relative_to(home) else sys.executable
    words = ["pytest"] if found and Path(found) == beside else [python, "-m", "pytest"]
    if "pagefuzz.fuzz.plugin" in (config.getoption("plugins") or ()):
        words += ["-p", "pagefuzz.fuzz.plugin", "--pyargs", "pagefuzz.fuzz"]
    else:
        words.append(f"{os.path.relpath(FUZZ, home.resolve())}/")
    return shlex.join(words)


def _load_profile(config: pytest.Config) -> None:
    """Load --hypothesis-profile now: Hypothesis' own plugin does so only later."""
    from pagefuzz.fuzz.session import UsageError

    name = config.getoption("hypothesis_profile", default=None)
    if name:
        try:
            settings.load_profile(name)
        except InvalidArgument as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"--hypothesis-profile {name}: {said}; there are {', '.join(PROFILES)}.") from None


def _device(asked: str | None, apart: bool) -> str:
    """The device to run on; sets TRITON_INTERPRET for it, before anything imports triton.

    apart: this process must leave the device alone, since its forks could not use it then.
    """
    from pagefuzz.fuzz.isolation.forks import in_a_fork
    from pagefuzz.fuzz.session import UsageError

    if "triton" not in sys.modules and asked is not None and asked.startswith("cpu"):
        os.environ["TRITON_INTERPRET"] = "1"
    if apart:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
        if apart and device.type != "cpu":
            in_a_fork(lambda: torch.zeros(1, device=device).item())
        else:
            torch.zeros(1, device=device).item()  # the meta device makes tensors, but has no memory
    except Exception as error:  # each backend has its own way to say that it is not there
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise UsageError(f"--device {asked}: {said}; name another device, such as --device cpu.") from None
    if device.type == "cpu":
        device = torch.device("cpu")
    interpret = device.type == "cpu"
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    triton = sys.modules.get("triton")
    if triton is not None and bool(triton.knobs.runtime.interpret) != interpret:
        raise UsageError(
            f"triton was imported before pagefuzz could choose how it runs on {device.type}; "
            f"set TRITON_INTERPRET={int(interpret)} in the environment."
        )
    return str(device)


def _seed(config: pytest.Config) -> int:
    """The seed of the whole run: the controller's, --hypothesis-seed, 0 where derandomised, or a fresh one."""
    from pagefuzz.fuzz.session import UsageError

    if hasattr(config, "workerinput"):
        return int(config.workerinput["pagefuzz_seed"])
    asked = config.getoption("hypothesis_seed", default=None)
    if asked not in (None, "random"):
        try:
            return int(asked)
        except ValueError:
            raise UsageError(f"--hypothesis-seed {asked}: should be a number.") from None
    return 0 if asked is None and settings().derandomize else random.SystemRandom().randrange(2**32)


def _saved(config: pytest.Config) -> list[str]:
    """The paths and tokens of what is tried first. Read once, by the controller; all workers must collect the same."""
    from pagefuzz.fuzz import saved as saving
    from pagefuzz.fuzz.session import UsageError

    if hasattr(config, "workerinput"):
        return [os.fsdecode(name) for name in config.workerinput["pagefuzz_saved"]]
    session = config.stash[SESSION]
    asked = config.getoption("--replay")
    found: list[str] = []
    for what in asked or [str(saving.FAILURES)]:
        path = session.home / what
        # os.path says False, where Path raises, for a name that is too long or lies where one may not look.
        if saving.is_token(what) and not os.path.lexists(path):
            found.append(what)
        elif os.path.isdir(path):
            try:
                files = sorted(file for file in os.listdir(path) if file.endswith(".json"))
            except OSError as error:
                raise UsageError(f"{what}: the directory cannot be read: {error.strerror}.") from None
            if asked and not files:
                raise UsageError(f"--replay {what}: the directory holds no saved case (*.json).")
            if not asked:
                files = [file for file in files if saving.kernel_of(path / file) in (None, *session.kernels)]
            found += [os.path.join(what, file) for file in files]
        elif os.path.lexists(path):
            found.append(what)
        elif asked:
            shown = saving.one_line(what, 80)
            raise UsageError(f"--replay {shown}: there is no such file or directory, and it is no token.")
    return found


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """xdist, for -n auto: on a device as many workers as it takes turns among without losing time."""
    from pagefuzz.fuzz.session import MOST_SHARING, UsageError, device_module

    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    try:
        device = _device(config.getoption("--device"), apart=True)
    except UsageError:
        return None  # said when the run is configured
    if device == "cpu":
        return None
    count = 1 if ":" in device else int(getattr(device_module(device), "device_count", lambda: 1)())
    return min(MOST_SHARING * count, len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist: what depends on chance or on the disk goes from the controller to the workers."""
    node.workerinput["pagefuzz_seed"] = node.config.stash[SESSION].seed
    node.workerinput["pagefuzz_saved"] = [os.fsencode(name) for name in node.config.stash[SAVED]]


def pytest_report_header(config: pytest.Config) -> list[str]:
    from pagefuzz.fuzz.saved import versions

    session = config.stash[SESSION]
    how = "Triton interpreted, bfloat16 corrected" if session.device == "cpu" else "Triton compiled"
    profile = settings.get_current_profile_name()
    known = sum(1 for entry in session.known if entry.kernels & session.kernels.keys())
    apart = [name for name, kernel in session.kernels.items() if session.is_isolated(kernel)]
    which = "all" if len(apart) == len(session.kernels) else ", ".join(apart) or "none"
    found = versions()
    watched = f" (10 times that under {session.sanitizer.tool})" if session.sanitizer else ""
    packages = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "numpy", "hypothesis"))
    return [
        f"pagefuzz {pagefuzz.__version__}: {', '.join(session.kernels)}",
        f"  device {session.device} ({how}); {packages}; python {found['python']}",
        f"  in processes of their own: {which}; hung after {session.case_limit:g} s{watched}",
        f"  profile {profile}: {session.examples} cases a kernel; --hypothesis-seed={session.seed}",
        *([f"  not red: {known} known failure{'s' * (known > 1)}"] if known else []),
        *(f"  left out: {said}" for said in session.missing),
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of this folder that have nothing to do in this run."""
    if not collection_path.name.startswith("test_") or collection_path.parent.resolve() != FUZZ:
        return None
    if collection_path.stem == "test_saved_failures":
        return True if not config.stash[SAVED] else None
    operation = OPERATION_OF.get(collection_path.stem)
    if config.getoption("--replay"):
        return True
    if operation and not config.stash[SESSION].shards(operation):
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    session = metafunc.config.stash[SESSION]
    if "shard" in metafunc.fixturenames and metafunc.function.__name__ in OPERATION_OF:
        shards = session.shards(OPERATION_OF[metafunc.function.__name__])
        if metafunc.config.getoption("--replay"):
            shards = []
        ids = [f"{name}-{index:03d}" for name, index, _ in shards]
        metafunc.parametrize("shard", shards, ids=ids, indirect=True)
    if "saved_failure" in metafunc.fixturenames:
        saved = metafunc.config.stash[SAVED]
        ids = [_id(index, name) for index, name in enumerate(saved)]
        metafunc.parametrize("saved_failure", saved, ids=ids, indirect=True)


def _id(index: int, name: str) -> str:
    from pagefuzz.fuzz.saved import is_token

    stem = Path(name).stem
    return f"token-{index}" if is_token(name) else stem if stem.isprintable() and len(stem) < 120 else f"file-{index}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Saved failures first; then the first shard of every kernel before the second of any."""
    items.sort(key=lambda item: _order(item))


def _order(item: pytest.Item) -> tuple[int, int]:
    params = getattr(getattr(item, "callspec", None), "params", {})
    if "saved_failure" in params:
        return (0, 0)
    shard = params.get("shard")
    return (1, shard[1]) if isinstance(shard, tuple) else (2, 0)  # a file named by itself may have nothing to do


@pytest.fixture
def shard(request: pytest.FixtureRequest) -> Any:
    """One shard of one kernel's examples: call it to fuzz it."""
    session = request.config.stash[SESSION]
    name, index, examples = request.param

    def fuzz() -> None:
        try:
            statistics = session.fuzz(session.kernels[name], index, examples)
        except AssertionError as error:
            if hasattr(error, "statistics"):
                request.node.user_properties.append((STATISTICS, error.statistics.plain()))
            raise
        request.node.user_properties.append((STATISTICS, statistics.plain()))

    return fuzz


@pytest.fixture
def saved_failure(request: pytest.FixtureRequest) -> Any:
    """One saved case: call it to judge it again."""
    from pagefuzz.fuzz import saved as saving
    from pagefuzz.fuzz.session import KnownFailure, NotJudged
    from pagefuzz.oracles.invariant import InvariantViolated

    session, name = request.config.stash[SESSION], request.param
    replaying = bool(request.config.getoption("--replay"))
    path = None if saving.is_token(name) and not os.path.lexists(session.home / name) else session.home / name
    source = saving.one_line(name, 40 if path is None else 200)

    def judge_again() -> None:
        try:
            try:
                wanted, case = saving.from_token(name) if path is None else saving.read(path, source)
            except saving.OtherVersion as error:
                raise NotJudged(f"other version: {error}") from None
            except saving.Unreadable as error:
                raise NotJudged(f"unreadable: {error}") from None
            said = session.replay(wanted, case, shlex.quote(name))
        except NotJudged as error:
            request.node.user_properties.append((UNJUDGED, f"{source}: {error}"))
            raise
        except AssertionError as error:
            if path is not None and not replaying and isinstance(error, InvariantViolated | KnownFailure):
                saving.failed_again(path, wanted)
            request.node.user_properties.append((REPLAYED, f"{source}: {str(error).splitlines()[0]}"))
            raise
        if path is not None and not replaying:
            said = f"{said}: {saving.passed(path, wanted, session.home / saving.FIXED)}"
        request.node.user_properties.append((REPLAYED, f"{source}: {said}"))

    return judge_again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports of the suite are texts of their own; a traceback would only hide them."""
    from pagefuzz.fuzz.session import Failed, KnownFailure, NotJudged, ShownAlready
    from pagefuzz.oracles.invariant import InvariantViolated

    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Failed | InvariantViolated) and {"shard", "saved_failure"} & set(
        getattr(item, "fixturenames", ())
    ):
        report.longrepr = str(error)
        said = isinstance(error, NotJudged | KnownFailure) and not item.config.getoption("--replay")
        if isinstance(error, ShownAlready) or said:
            # One report a failure, or the one is lost among its repetitions. And in a fuzz run a saved case that cannot
            # be judged, or is a known failure, is said, not failed.
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, str(error))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from pagefuzz.fuzz.known import known_lines
    from pagefuzz.fuzz.summary import summary

    reports = [
        report
        for key, found in terminalreporter.stats.items()
        if key in ("passed", "failed", "skipped")
        for report in found
        if getattr(report, "when", None) == "call"
    ]
    properties = [pair for report in reports for pair in report.user_properties]
    said = [text for name, text in properties if name in (REPLAYED, UNJUDGED)]
    if said:
        terminalreporter.section("saved failures")
        for text in said:
            terminalreporter.write_line(text)
    parts = [part for name, part in properties if name == STATISTICS]
    if parts:
        terminalreporter.section("pagefuzz")
        terminalreporter.write_line(summary(parts, terminalreporter._tw.fullwidth if terminalreporter.isatty else 120))
        session = config.stash[SESSION]
        for line in known_lines(session.known, parts, session.planned()):
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """--replay: 1 if a case fails, 3 if one could not be judged, 5 if none was reached (as pytest says it)."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("--replay") or config.getoption("--collect-only"):
        return
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    failed = reporter.stats.get("failed", [])
    if session.exitstatus == 0 and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    unjudged = [report for report in failed if any(name == UNJUDGED for name, _ in report.user_properties)]
    if unjudged and len(unjudged) == len(failed) and not reporter.stats.get("error"):
        session.exitstatus = 3
