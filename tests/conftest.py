"""Which frameworks the suite runs on, the routes between them, and what the run proved.

`--frameworks jax` runs the part that needs no other framework. A package that is wanted and
missing skips its tests on a desk and fails the run in CI.
"""

import importlib.util
import os
import pathlib
import re

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU

FRAMEWORKS = ("torch", "jax")
TOOLS = ("transformers", "nbclient", "typer")  # of the dev group, wanted with all frameworks
BACKENDS = {"triton": "torch", "pallas": "jax"}
ROUTES = [("torch", "triton"), ("jax", "pallas"), ("torch", "pallas"), ("jax", "triton")]


def pytest_addoption(parser):
    parser.addoption("--frameworks", default=",".join(FRAMEWORKS), help="torch,jax or one of them")
    beside = pathlib.Path(__file__).parents[2]
    parser.addoption("--sglang", type=pathlib.Path, default=beside, help="where it is unpacked")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(*packages): the test imports them inside")
    config.frameworks = config.getoption("--frameworks").split(",")
    unknown = set(config.frameworks) - set(FRAMEWORKS)
    if unknown:
        raise pytest.UsageError(f"--frameworks: expected torch, jax, got {', '.join(unknown)}")
    wanted = set(config.frameworks)
    if wanted == set(FRAMEWORKS):
        wanted |= set(TOOLS)
    config.installed = {name for name in wanted if importlib.util.find_spec(name)}
    missing = sorted(wanted - config.installed)
    if missing and os.environ.get("CI"):
        raise pytest.UsageError(f"CI runs the whole suite, and {', '.join(missing)} is missing")
    config.missing = missing
    if "torch" in config.installed:
        import fkv.triton  # noqa: F401  asks for Triton's interpreter before a test imports Triton


def pytest_ignore_collect(collection_path, config):
    """A test file that imports a package at its top needs that package."""
    if collection_path.suffix != ".py":
        return None
    needed = re.findall(r"^(?:import|from) (\w+)", collection_path.read_text(), re.MULTILINE)
    absent = {*FRAMEWORKS, *TOOLS} - config.installed
    return True if absent & set(needed) else None


def pytest_collection_modifyitems(config, items):
    absent = {*FRAMEWORKS, *TOOLS} - config.installed
    left_out = [
        item for item in items if any(absent & {*m.args} for m in item.iter_markers("needs"))
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config):
    lines = [f"fkv: frameworks {', '.join(f for f in FRAMEWORKS if f in config.installed)}"]
    if config.missing:
        lines.append(
            f"fkv: SKIPPING what needs {', '.join(config.missing)}, which is not installed"
        )
    lines += [f"fkv: {b} kernels {_mode(b)}" for b, f in BACKENDS.items() if f in config.installed]
    return lines


def _mode(backend):
    if backend == "triton":
        from fkv.triton._launch import INTERPRETED

        return "interpreted" if INTERPRETED else "compiled"
    import jax

    return "compiled" if jax.default_backend() == "gpu" else "interpreted"


def routes(config):
    """Those whose both frameworks are there."""
    return [r for r in ROUTES if {r[0], BACKENDS[r[1]]} <= config.installed]


def pytest_generate_tests(metafunc):
    installed = metafunc.config.installed
    if "route" in metafunc.fixturenames:
        found = routes(metafunc.config)
        metafunc.parametrize("route", found, ids=["->".join(route) for route in found])
    if "backend" in metafunc.fixturenames:
        backends = [b for b, framework in BACKENDS.items() if framework in installed]
        metafunc.parametrize("backend", backends)
    if "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework", [f for f in FRAMEWORKS if f in installed])


@pytest.fixture
def record_error(request):
    """record_error(route, worst): for the table at the end of the run."""
    return lambda route, worst: request.node.user_properties.append(("K error", (*route, worst)))


def pytest_terminal_summary(terminalreporter):
    errors = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "K error" and report.when == "call":
                errors.setdefault(tuple(value[:2]), []).append(value[2])
    if errors:
        terminalreporter.section("worst K error, as a multiple of the bound")
    for (framework, backend), worst in errors.items():
        terminalreporter.write_line(
            f"{framework} -> {backend} ({_mode(backend)}): {max(worst):.4f} in {len(worst)} results"
        )
