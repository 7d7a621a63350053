"""What docs/findings.md says can be seen with the scripts in docs/findings, where the packages are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagefuzz.kernels.peers import PEERS, Peer

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "findings.md").read_text()
SCRIPTS = sorted((DOCS / "findings").glob("*.py"))
LONGEST = 40
PACKAGES = {"sglang": "sglang", "flag-gems": "flag_gems", "vllm": "vllm", "pytorch": "torch"}
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))


def _peer(script: Path) -> Peer:
    package = next(package for prefix, package in PACKAGES.items() if script.stem.startswith(f"{prefix}-"))
    return next(peer for peer in PEERS if peer.package == package)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_shows(script: Path) -> None:
    peer = _peer(script)
    if not peer.is_installed():
        pytest.skip(f"{peer.package} is not installed: {peer.command}")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    said = run.stdout + run.stderr
    assert run.returncode == 1, f"no longer so? exit status {run.returncode}:\n{said}"
    assert "Traceback" not in said, f"the script itself fails:\n{said}"


def test_scripts_are_short_and_use_nothing_of_this_project() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) <= LONGEST, script.name
        assert "pagefuzz" not in text, script.name


def test_every_section_has_its_script_and_every_script_its_section() -> None:
    assert sorted(SECTIONS) == [script.stem for script in SCRIPTS] and len(SECTIONS) >= 11
    for name, text in SECTIONS.items():
        assert f"(findings/{name}.py)" in text
        for word in ("smallest case", "what happens", "why", "contract:", "reported:"):
            assert word in text.lower(), (name, word)
        assert f"[{name}](#{name})" in PAGE, f"{name} is missing in the table"


def test_links_lead_to_anchors() -> None:
    for anchor in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchor in SECTIONS
    for file in sorted((DOCS.parent / "kernels/peers").glob("*.known.toml")):
        for anchor in re.findall(r"docs/findings\.md#([\w-]+)", file.read_text()):
            assert anchor in SECTIONS, f"{file.name}: docs/findings.md#{anchor}"
