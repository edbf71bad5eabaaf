"""python -m fkv: what it prints, and its exit status."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fkv
from cases import DTYPES
from conftest import BACKENDS, ROUTES
from fkv import _demo, _doctor
from fkv.__main__ import app, console

SMALL = ("--total-ctx=5", "--n-layers=2", "--num-kv-heads=1", "--head-dim=16")


@pytest.fixture(autouse=True)
def _wide_enough(monkeypatch):
    monkeypatch.setattr(console, "width", 100)
    monkeypatch.setenv("COLUMNS", "100")


def invoke(*arguments):
    """(exit status, output in one line without frames)."""
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit | None)  # no traceback
    return result.exit_code, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def demo(*arguments):
    """(exit status, the cells of each route's row, output)."""
    status, output = invoke("demo", *SMALL, *arguments)
    kernel = r"(compiled|interpreted|failed|not \w+)"
    columns = rf"(\S+ -> \S+) (.+?) {kernel} (\d+) (\S+) (\S+) (-|[\d.]+ \w+)"
    rows = {route: cells for route, *cells in re.findall(columns, output)}
    return status, rows, output


def blocked(package, *arguments):
    """The process of `python -m fkv` where `package` is not installed."""
    code = (
        "import runpy, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['fkv', *{arguments!r}]\n"
        "runpy.run_module('fkv', run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def assert_row_is_right(cells, total_ctx=5):
    _, kernel, tokens, worst, same_v, _ = cells
    assert kernel in ("compiled", "interpreted")
    assert int(tokens) == total_ctx
    assert 0 < float(worst) <= 1
    assert same_v == "yes"


@pytest.mark.needs("torch", "jax")
def test_demo_on_all_routes():
    status, rows, output = demo()
    assert status == 0
    assert list(rows) == [" -> ".join(route) for route in ROUTES]
    for cells in rows.values():
        assert_row_is_right(cells)
    assert "4 of 4 routes ran, and all are right." in output
    assert "\x1b" not in output  # neither colour nor progress where there is no terminal


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_demo_of_one_backend(backend, dtype):
    status, rows, output = demo(f"--backend={backend}", f"--dtype={dtype}", "--rotary-dim=16")
    assert status == 0
    assert {route.split()[-1] for route in rows} == {backend}
    assert_row_is_right(rows[f"{BACKENDS[backend]} -> {backend}"])
    assert dtype in output


@pytest.mark.parametrize("spoilt", ["k", "v"])
def test_one_wrong_element_fails_the_demo(backend, spoilt, monkeypatch):
    real = fkv.materialize

    def wrong(*args, **kwargs):
        k, v = real(*args, **kwargs)
        array = k if spoilt == "k" else v
        if BACKENDS[backend] == "torch":
            array[1, 4, 0, 15] += 1
            return k, v
        array = array.at[1, 4, 0, 15].add(1)
        return (array, v) if spoilt == "k" else (k, array)

    monkeypatch.setattr(fkv, "materialize", wrong)
    monkeypatch.setattr("fkv.__main__.ROUTES", [(BACKENDS[backend], backend)])
    status, rows, output = demo()
    (_, _, _, worst, same_v, seconds) = rows[f"{BACKENDS[backend]} -> {backend}"]
    assert status == 1
    assert (float(worst) > 1) == (spoilt == "k")
    assert same_v == ("no" if spoilt == "v" else "yes")
    assert seconds == "-"  # no time of a wrong result
    assert f"Wrong or failed: {BACKENDS[backend]} -> {backend}" in output


@pytest.mark.needs("torch")
def test_outputs_that_are_not_written_fail_the_demo(monkeypatch):
    monkeypatch.setattr(fkv, "materialize", lambda k_out, v_out, **rest: (k_out, v_out))
    status, rows, _ = demo("--backend=triton")
    assert status == 1
    assert rows["torch -> triton"][3:5] == ["inf", "no"]


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_an_error_inside_a_framework_fails_the_demo(backend, error, monkeypatch):
    def broken(**arguments):
        raise error("no luck\nat all")

    monkeypatch.setattr(fkv, "materialize", broken)
    status, rows, output = demo(f"--backend={backend}")
    assert status == 1
    assert rows[f"{BACKENDS[backend]} -> {backend}"][1] == "failed"
    assert f"{error.__name__}: no luck" in output


@pytest.mark.needs("jax")
def test_demo_of_what_pallas_does_not_take():
    status, rows, output = demo("--rotary-dim=10", "--backend=pallas")
    assert status == 1  # it was asked for
    assert rows["jax -> pallas"][1] == "not supported"
    assert "`rotary_dim`: expected rotary_dim/2 and head_dim - rotary_dim to be" in output
    assert "No route ran." in output


@pytest.mark.needs("torch", "jax")
def test_a_route_that_is_not_to_be_had_does_not_fail_the_demo():
    status, rows, output = demo("--rotary-dim=10")
    assert status == 0
    assert rows["torch -> pallas"][1] == "not supported"
    assert_row_is_right(rows["jax -> triton"])
    assert "2 of 4 routes ran, and all are right." in output


@pytest.mark.needs("torch", "jax")
def test_frameworks_that_see_different_devices(monkeypatch):
    monkeypatch.setattr(_demo, "gpus", {"torch": ["NVIDIA H200"], "jax": []}.get)
    monkeypatch.setitem(_demo.CALLS, "compiled", 1)
    status, rows, output = demo()
    assert status == 0
    assert rows["torch -> triton"][:2] == ["NVIDIA H200", "compiled"]
    assert rows["torch -> pallas"][1] == rows["jax -> triton"][1] == "not supported"
    assert "jax -> triton: torch sees a GPU, jax does not" in output


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("package", ["torch", "jax"])
def test_demo_without_a_framework(package):
    done = blocked(package, "demo", *SMALL)
    assert done.returncode == 0
    assert done.stdout.count("not installed") == 3
    extra = {"torch": "fkv[triton]", "jax": "fkv[pallas]"}[package]
    text = " ".join(done.stdout.split())
    assert f"No module named '{package}' (pip install '{extra}')" in text
    assert "1 of 4 routes ran, and all are right." in text


@pytest.mark.parametrize(
    ("arguments", "option", "sentence"),
    [
        (["--head-dim=0"], "--head-dim", ""),
        (["--total-ctx=0"], "--total-ctx", ""),
        (["--total-ctx=x"], "--total-ctx", ""),
        (["--dtype=float64"], "--dtype", ""),
        (["--backend=cuda"], "--backend", ""),
        (
            ["--head-dim=15"],
            "--head-dim",
            "expected rotary_dim to be an even number from 2 to head_dim = 15, got 15",
        ),
        (
            ["--rotary-dim=7"],
            "--rotary-dim",
            "expected rotary_dim to be an even number from 2 to head_dim = 16, got 7",
        ),
        (
            ["--rotary-dim=18"],
            "--rotary-dim",
            "expected rotary_dim to be an even number from 2 to head_dim = 16, got 18",
        ),
        (
            ["--head-dim=128", "--total-ctx=10000000"],
            "--total-ctx",
            "expected a float64 reference within 8 GiB of host memory, got about 191 GiB",
        ),
        (["--rotary-dim=100000", "--head-dim=100000"], "--total-ctx", "of host memory"),
    ],
)
def test_bad_values(arguments, option, sentence):
    status, output = invoke("demo", *SMALL, *arguments)
    assert status == 2
    assert f"Invalid value for '{option}'" in output
    assert sentence in output


def test_help_names_every_option_and_default():
    status, output = invoke("demo", "--help")
    assert status == 0
    for option in ("total-ctx", "n-layers", "num-kv-heads", "head-dim", "rotary-dim", "dtype"):
        assert f"--{option}" in output
    for default in ("32", "5", "8", "128", "bfloat16"):
        assert f"[default: {default}]" in output


def test_doctor_names_every_package_and_backend():
    status, output = invoke("doctor")
    assert status == 0
    for name in ("fkv", "Python", "numpy", "torch", "triton", "jax", "jaxlib", "absl-py"):
        assert re.search(rf" {name} [\d-]", output)
    for backend, framework in BACKENDS.items():
        outcome = rf"(compiled|interpreted) {framework} sees|not available No module named"
        assert re.search(rf" {backend} {framework} .+? ({outcome}) ", output)


@pytest.mark.needs("torch", "jax")
@pytest.mark.parametrize("package", ["torch", "jax"])
def test_doctor_without_a_framework(package):
    done = blocked(package, "doctor")
    assert done.returncode == 0
    extra = {"torch": "fkv[triton]", "jax": "fkv[pallas]"}[package]
    reason = f"No module named '{package}'"
    text = " ".join(done.stdout.split())
    assert re.search(rf"{package} - not available {reason}", text)
    assert f"pip install '{extra}' {reason}" in text


def test_doctor_without_any_backend(monkeypatch):
    def absent(framework):
        raise ModuleNotFoundError(f"No module named {framework!r}", name=framework)

    monkeypatch.setattr(_doctor, "gpus", absent)
    monkeypatch.setattr(_doctor, "_version", lambda name: None)
    status, output = invoke("doctor")
    assert status == 1
    assert " torch - not installed " in output
    assert "pip install 'fkv[triton]'" in output
    assert "pip install 'fkv[pallas]'" in output


@pytest.mark.parametrize("version", ["2.10.1+cu130", "2.9", "1.13.0a0+git12"])
def test_a_package_that_is_too_old(version):
    package = _doctor.Package("torch", version, "2.11", "triton")
    assert package.state == "too old"
    found = _doctor.diagnose(fkv._backends.BACKENDS["triton"], [package])
    assert not found.usable
    assert found.why == f"torch {version} is older than 2.11"
    assert found.cure == "pip install 'fkv[triton]'"


@pytest.mark.parametrize("version", ["2.11", "2.11.0+cu130", "2.14.1", "3.0.dev20270101"])
def test_a_package_that_is_new_enough(version):
    assert _doctor.Package("torch", version, "2.11", "triton").state == "installed"


def test_minimum_versions_are_those_of_pyproject():
    if _doctor._version("fkv") is None:
        pytest.skip("fkv runs from its source, without metadata")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        "numpy": project["dependencies"],
        **dict.fromkeys(("torch", "triton"), extras["triton"]),
    }
    asked |= dict.fromkeys(("jax", "absl-py"), extras["pallas"])
    found = {package.name: package for package in _doctor.packages()}
    for name, lines in asked.items():
        minimum = f">={found[name].minimum}" if found[name].minimum else ""
        assert any(line.partition(";")[0] == name + minimum for line in lines)
    assert project["requires-python"] == f">={found['Python'].minimum}"


@pytest.mark.needs("torch")
def test_cure_for_a_gpu_that_jax_does_not_see(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    triton, pallas = fkv._backends.BACKENDS.values()
    found = [
        _doctor.Diagnosis(triton, ["NVIDIA H200"], "compiled", "", ""),
        _doctor.Diagnosis(pallas, [], "interpreted", "", ""),
    ]
    cure = ("pip install 'jax[cuda13]'", "torch sees a GPU, jax does not")
    assert _doctor.cures(found) == [cure]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_packages_of_the_command_line(package):
    done = blocked(package, "demo")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "fkv: expected typer and rich for the command line, "
        f"got no module named {package!r} (pip install 'fkv[cli]')\n"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_demo_rounds_to_nearest_even(dtype):
    rng = np.random.default_rng(0)
    array = rng.normal(size=4096).astype(np.float32)
    array[:2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # ties
    nearest = array.astype(DTYPES[dtype]).astype(np.float32)
    np.testing.assert_array_equal(_demo._rounded(array, dtype), nearest)
