"""The memoised interpreter gives the bits and the exceptions of the one that has its corrections only.

A few hundred launches and a few cases of the project's own kernels, and faults planted in the key are found.
`make verify-interpreter` runs 20,000 a version.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent / "same_bits"
CASES = 8
OWN_KERNELS = (
    *("--adapter", str(Path(__file__).parents[1] / "kernels" / "own.py")),
    *("--kernel", "triton_*", "--cases", str(CASES)),
)
RANDOM_LAUNCHES = 240
ZOO_ALONE = ("--launches", "0", "--zoo", "[osm][pca]*32*")  # operands, scalars, masks: few, and enough


def _program() -> Any:
    spec = importlib.util.spec_from_file_location("same_bits_program", HERE / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = _program()


def results(folder: Path, *runs: tuple[str, ...]) -> list[list[tuple[str, str]]]:
    """What processes saw that run at once; a run is a mode and options."""
    paths = [folder / str(number) for number in range(len(runs))]
    processes = [program.start(mode, path, *options) for path, (mode, *options) in zip(paths, runs, strict=True)]
    assert [process.wait(timeout=600) for process in processes] == [0] * len(runs)
    return [program.read(path) for path in paths]


def test_every_byte_and_every_exception_is_the_same(tmp_path: Path) -> None:
    options = ("--launches", str(RANDOM_LAUNCHES))
    stock, fast = results(tmp_path, ("stock", *options), ("fast", *options))
    assert program.differences(stock, fast) == []
    assert len(fast) > RANDOM_LAUNCHES + 400
    for kind in ("kernel", "raising", "wild"):  # launches that raise and launches that do not
        raised = [bool(result.split(" ", 3)[3]) for name, result in fast if name.startswith(kind)]
        assert any(raised)
        assert kind != "kernel" or sum(raised) < len(raised) / 2


@pytest.fixture(scope="module")
def stock_zoo(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return results(tmp_path_factory.mktemp("stock"), ("stock", *ZOO_ALONE))[0]


@pytest.mark.parametrize("fault", program.FAULTS)
def test_a_fault_in_the_key_is_found(fault: str, stock_zoo: list[tuple[str, str]], tmp_path: Path) -> None:
    (faulty,) = results(tmp_path, ("fast", *ZOO_ALONE, "--fault", fault))
    assert program.differences(stock_zoo, faulty) != []


def test_the_cases_of_an_adapter_are_the_same_and_a_fault_is_found(tmp_path: Path) -> None:
    stock, fast, faulty = results(
        tmp_path, ("stock", *OWN_KERNELS), ("fast", *OWN_KERNELS), ("fast", *OWN_KERNELS, "--fault", "integer")
    )
    assert program.differences(stock, fast) == []
    for kernel in ("triton_reshape_and_cache", "triton_paged_decode_attention"):
        assert sum(name.startswith(f"{kernel} ") for name, _ in fast) == CASES
    assert all(result.endswith(" ") for _, result in fast)  # none raises
    assert program.differences(stock, faulty) != []


def test_an_adapter_that_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["same_bits", "--adapter", "nowhere.py"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--adapter nowhere.py: there is no such file" in capsys.readouterr().err
