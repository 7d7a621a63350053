"""pagefuzz imports in a plain checkout, from an editable install and from the wheel, and hides no user's package."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).resolve().parents[1]
PACKAGES = ("fuzz", "kernels", "oracles", "strategies")

# A kernel file of a user's, who has a package named `kernels`. What it leaves in pagefuzz shows that it was loaded.
ADAPTER = """
import kernels
import pagefuzz
from pagefuzz import kernel

assert kernels.mine, kernels.__file__

@kernel("slot_mapping")
def my_slot_mapping(block_tables, seq_ids, positions, block_size):
    raise RuntimeError("only collected, never run")

pagefuzz.adapter_was_loaded = True
"""

# Runs in an xdist worker, which prepares itself anew.
PROBE = """
import sys
from pathlib import Path

import kernels
import pagefuzz
import pagefuzz.oracles

def test_probe():
    assert str(Path(pagefuzz.__file__).resolve().parent) == {expected!r}
    assert str(Path(pagefuzz.oracles.__file__).resolve().parent.parent) == {expected!r}
    assert any(name.endswith("fuzz.test_slot_mapping") for name in sys.modules)  # collected here, under whatever name
    assert pagefuzz.adapter_was_loaded
    assert kernels.mine, kernels.__file__
"""


def copy_tree(target: Path) -> Path:
    """Copies the tree without what git ignores: a stale ``build`` would get into the wheel."""
    shutil.copytree(TREE, target, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"))
    return target


def clean_environ() -> dict[str, str]:
    """Without what the pytest and the make that run this test tell their children."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON", "MAKE"))}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean_environ(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


class Environment:
    """A virtual environment that sees the packages of this one, pagefuzz excepted, and a `kernels` of the user's."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        # A path named here is searched, but the .pth files in it are not read: no editable install shines through.
        (self.packages / "shared.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        self.add_package("kernels", "mine = True\n")

    def add_package(self, name: str, text: str) -> None:
        (self.packages / name).mkdir()
        (self.packages / name / "__init__.py").write_text(text)

    def pip(self, command: str, *arguments: str | Path) -> None:
        options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
        run(self.python, "-m", "pip", command, *options, *arguments, cwd=self.packages)

    def build_wheel(self, folder: Path) -> Path:
        self.pip("wheel", "--wheel-dir", folder, copy_tree(folder / "tree"))
        return next(folder.glob("pagefuzz-*.whl"))

    def probe(self, user: Path, expected: Path, *pytest_arguments: str, cwd: Path | None = None) -> None:
        """Collects the fuzz tests with the user's adapter in an xdist worker, and runs only the probe there."""
        user.mkdir()
        (user / "my_adapter.py").write_text(ADAPTER)
        (user / "test_probe.py").write_text(PROBE.format(expected=str(expected.resolve())))
        options = ("-n", "1", "-p", "no:cacheprovider", "-k", "test_probe", "--adapter", str(user / "my_adapter.py"))
        # `-m` puts the working directory in front of all other packages.
        command: list[str | Path] = [self.python, "-m", "pytest", *options, *pytest_arguments, user / "test_probe.py"]
        assert "1 passed" in run(*command, cwd=cwd or user)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.mark.parametrize("name", ["pagefuzz", "main", "paged fuzz-1.0"])
def test_a_checkout_needs_no_install_and_wins_over_an_installed_pagefuzz(
    name: str, environment: Environment, tmp_path: Path
) -> None:
    environment.add_package("pagefuzz", "raise ImportError('the installed pagefuzz was imported')\n")
    checkout = copy_tree(tmp_path / "work" / name)
    environment.probe(checkout / "user", checkout, "fuzz/", cwd=checkout)


def test_an_editable_install_is_the_checkout(environment: Environment, tmp_path: Path) -> None:
    checkout = copy_tree(tmp_path / "work" / "paged fuzz-1.0")
    environment.pip("install", "--editable", checkout)
    arguments = ("--import-mode=importlib", "-p", "pagefuzz.fuzz.plugin", "--pyargs", "pagefuzz.fuzz")
    environment.probe(tmp_path / "user", checkout, *arguments)


def test_the_wheel_runs_without_the_tree(environment: Environment, tmp_path: Path) -> None:
    environment.pip("install", environment.build_wheel(tmp_path))
    arguments = ("-p", "pagefuzz.fuzz.plugin", "--pyargs", "pagefuzz.fuzz")
    environment.probe(tmp_path / "user", environment.packages / "pagefuzz", *arguments)


def test_importing_the_installed_package_imports_neither_torch_nor_triton(
    environment: Environment, tmp_path: Path
) -> None:
    environment.pip("install", environment.build_wheel(tmp_path))
    program = """
import importlib.metadata, json, sys
import pagefuzz
print(json.dumps({
    "early": sorted({"torch", "triton"} & set(sys.modules)),
    "versions": [pagefuzz.__version__, importlib.metadata.version("pagefuzz")],
    "kernel": pagefuzz.kernel.__module__,
    "unknown": hasattr(pagefuzz, "kernal"),
}))
"""
    said = json.loads(run(environment.python, "-c", program, cwd=tmp_path))
    assert said["early"] == []
    assert said["versions"][0] == said["versions"][1]
    assert said["kernel"] == "pagefuzz.kernels.registry"
    assert not said["unknown"]


def test_the_wheel_holds_the_packages_and_nothing_else(environment: Environment, tmp_path: Path) -> None:
    wheel = environment.build_wheel(tmp_path)
    tree = tmp_path / "tree"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        notes = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
    wanted = {"__init__.py", "conftest.py", "py.typed"}
    for package in PACKAGES:
        wanted |= {str(path.relative_to(tree)) for path in (tree / package).rglob("*") if path.is_file()}
    assert names == {f"pagefuzz/{name}" for name in wanted}
    assert "pagefuzz/kernels/peers/sglang_triton.known.toml" in names  # data, which setuptools leaves out unless told
    assert "licenses/LICENSE" in notes
    # An entry point would put the suite's options into every pytest session of the environment.
    assert "entry_points.txt" not in notes


def test_the_pins_lie_in_the_ranges() -> None:
    lines = [line.split("#")[0].strip() for line in (TREE / "requirements.txt").read_text().splitlines()]
    pins: dict[str, str] = {
        canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)
    }
    settings = tomllib.loads((TREE / "pyproject.toml").read_text())
    project = settings["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["dev"], *settings["build-system"]["requires"]]
    for need in map(Requirement, needs):
        assert canonicalize_name(need.name) in pins, f"requirements.txt does not pin {need.name}"
        pin = pins[canonicalize_name(need.name)]
        assert need.specifier.contains(pin), f"requirements.txt pins {need.name} {pin}, pyproject.toml wants {need}"
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=clean_environ(), text=True, capture_output=True, timeout=60
    )


@pytest.fixture
def unmade(tmp_path: Path) -> Path:
    """A folder with a space and a quote in its name, where nothing but what `make` needs lies."""
    folder = tmp_path / "a user's tree"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(TREE / name, folder)
    return folder


def stand_in_python(folder: Path, version: str, lacks: str = "") -> None:
    """Writes ./stand-in, a python that takes itself for another version and lacks a module."""
    python = folder / "stand-in"
    python.write_text(f'''#!/bin/sh
case "$1" in
--version) echo "Python {version}" ;;
-c) exec "{sys.executable}" -c "import sys
sys.version_info = ({version.replace(".", ", ")})
sys.modules['{lacks}'] = None
exec(sys.argv[1])" "$2" ;;
*) exit 1 ;;
esac
''')
    python.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "lacks", "message"),
    [
        ("3.10.9", "", "pagefuzz needs Python 3.11 or newer, and ./stand-in is Python 3.10.9"),
        ("3.11.0", "ensurepip", "pagefuzz needs Python's venv module, and ./stand-in has none"),
        ("", "", "pagefuzz needs Python 3.11 or newer, and there is no ./stand-in here"),
    ],
    ids=["too old", "no venv", "missing"],
)
def test_make_says_what_the_python_lacks(unmade: Path, version: str, lacks: str, message: str) -> None:
    if version:
        stand_in_python(unmade, version, lacks)
    done = make(unmade, "test", "PYTHON=./stand-in")
    assert done.returncode != 0
    assert message in done.stderr
    assert not (unmade / ".venv").exists()


def test_make_sets_up_again_what_is_half_made_or_stale(unmade: Path) -> None:
    stand_in_python(unmade, "3.12.0")
    python = "PYTHON=./stand-in"
    made_for = unmade / ".venv" / "made-for"

    def sets_up() -> bool:
        return "-m venv --clear .venv" in make(unmade, "--dry-run", "fuzz", python).stdout

    assert sets_up(), "missing"
    made_for.parent.mkdir()
    assert sets_up(), "half-made"
    # What `make` writes at the end, in its own words.
    made_for.write_text(make(unmade, "--eval=words: ; @printenv MADE_FOR", "words", python).stdout)
    assert not sets_up()
    stand_in_python(unmade, "3.13.0")
    assert sets_up(), "another Python"
    stand_in_python(unmade, "3.12.0")
    assert not sets_up()
    with (unmade / "requirements.txt").open("a") as pins:
        pins.write("one-more==1.0\n")
    assert sets_up(), "other pins"


def test_make_hands_quoted_arguments_to_pytest(unmade: Path) -> None:
    stand_in = unmade / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    stand_in.chmod(0o755)
    done = make(unmade, "fuzz", "--old-file=.venv", "-s", "ARGS=--kernel \"triton*\" --kernel 'my kernel'")
    assert done.stdout.endswith("<fuzz/><--kernel><triton*><--kernel><my kernel>"), done
