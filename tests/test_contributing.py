"""Follows CONTRIBUTING.md to the letter in a copy of the tree: the invariant runs and tells bad from good."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def _pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the file of step 1 dropped in."""
    copy = tmp_path_factory.mktemp("contributing") / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    name, source = re.search(r"`(oracles/\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL).groups()  # type: ignore[union-attr]  # the page has it
    (copy / name).write_text(source)
    return copy


def test_red_until_a_mutant_names_it(tree: Path) -> None:
    run = _pytest(tree, "tests/test_mutants.py", "-k", "every_invariant")
    assert run.returncode == 1, run.stdout
    assert "I90" in run.stdout


def test_the_mutant_dies_by_it(tree: Path) -> None:
    catalogue = tree / "tests/mutants/catalogue.py"
    mutant = re.search(r"```python\n(Mutant\(.*?)```", PAGE, re.DOTALL).group(1)  # type: ignore[union-attr]  # the page has it
    page = tree / "tests/mutants/mutants.md"
    before = {file: file.read_text() for file in (catalogue, page)}
    catalogue.write_text(before[catalogue].replace("DECODES = (", f"DECODES = (\n{mutant},", 1))
    page.write_text(before[page].rstrip() + "\n| `weights_not_normalised` | the denominator left out |\n")
    run = _pytest(tree, "tests/test_mutants.py")
    for file, text in before.items():
        file.write_text(text)
    assert run.returncode == 0, run.stdout
    assert "failed" not in run.stdout and "weights_not_normalised" not in run.stdout


def test_it_runs_at_once_and_the_good_kernels_pass_it(tree: Path) -> None:
    run = _pytest(tree, "fuzz/test_paged_decode_attention.py", "-k", "000")
    assert run.returncode == 0, run.stdout
    assert "I90" in run.stdout


def test_a_bad_kernel_is_told_so(tree: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from pagefuzz import kernel\n"
        "from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention as good\n\n\n"
        '@kernel("paged_decode_attention")\n'
        "def three_times(*arguments):\n"
        "    return 3 * good(*arguments)\n"
    )
    run = _pytest(tree, "fuzz/", "-x", "--adapter", str(bad))
    assert run.returncode == 1, run.stdout
    assert "I90 violated by three_times: the output lies between" in run.stdout
