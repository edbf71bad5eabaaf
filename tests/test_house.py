"""Who may import whom, and that the two backends rhyme."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fkv

HOUSE = Path(fkv.__file__).parent
BACKENDS = ("triton", "pallas")
RULES = {  # module -> what of fkv it may import
    "__init__": {"reference", "_api", "_materializer"},
    "_api": {"_backends", "_errors", "_frameworks", "_spec"},
    "_backends": {"_errors"},
    "_errors": set(),
    "_frameworks": {"_errors", "_spec"},
    "_spec": {"_errors"},
    "_materializer": {
        *(
            "_api",
            "_backends",
            "_checkpoint",
            "_errors",
            "_frameworks",
            "_layers",
            "_spec",
            "_weights",
        ),
    },
    "_layers": {"_errors", "_frameworks", "_rope", "_spec"},
    "_weights": {"_errors", "_frameworks", "_spec"},
    "_checkpoint": {"_errors", "_rope", "_spec"},
    "_rope": {"_errors"},
    "reference": set(),
    "__main__": {
        *("", "_backends", "_bench", "_bench_cache", "_demo", "_doctor", "_report", "_run"),
    },
    "_run": {"", "_backends", "_checkpoint", "_errors", "_weights"},
    "_bench": {"", "reference"},
    "_bench_cache": {"", "_bench", "reference"},
    "_report": {"_bench", "_bench_cache", "_demo"},
    "_demo": {"", "_backends", "_doctor", "reference"},
    "_doctor": {"", "_backends"},
} | {
    f"{backend}.{name}": {"_errors", "_spec", f"{backend}._kernel", f"{backend}._launch"}
    for backend in BACKENDS
    for name in ("__init__", "_kernel", "_launch")
}


def tree_of(module):
    return ast.parse((HOUSE / f"{module.replace('.', '/')}.py").read_text())


def imports_of(module):
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "fkv":
                yield from (f"fkv.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("module", RULES)
def test_imports(module):
    mine = {
        name.removeprefix("fkv").lstrip(".")
        for name in imports_of(module)
        if name.startswith("fkv")
    }
    assert mine <= RULES[module]


def test_every_module_has_its_rule():
    modules = {
        str(path.relative_to(HOUSE).with_suffix("")).replace("/", ".")
        for path in HOUSE.rglob("*.py")
    }
    assert modules == set(RULES)


def test_reference_imports_numpy_alone():
    roots = {name.partition(".")[0] for name in imports_of("reference")}
    assert roots == {"__future__", "typing", "numpy"}


def loaded_by(code, *names):
    """Which of `names` a fresh process has imported after `code`."""
    check = f"import sys; print(*(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{check}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_import_fkv_imports_no_framework():
    heavy = (
        "torch",
        "jax",
        "jaxlib",
        "triton",
        "typer",
        "rich",
        "absl",
        "ml_dtypes",
        "safetensors",
    )
    assert loaded_by("import fkv", *heavy, "numpy") == {"numpy"}


@pytest.mark.needs("torch")
def test_a_torch_call_does_not_import_jax():
    call = (
        "import torch, fkv\n"
        "d = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "z = lambda *s: torch.zeros(*s, device=d)\n"
        "fkv.materialize(z(1, 1, 32), z(1, 16), z(1) + 1, z(1, 16), z(1).int())"
    )
    assert loaded_by(call, "torch", "triton", "jax") == {"torch", "triton"}


@pytest.mark.needs("jax")
def test_a_jax_call_does_not_import_torch():
    call = (
        "import jax.numpy as jnp, fkv\n"
        "z = jnp.zeros\n"
        "fkv.materialize(z((1, 1, 32)), z((1, 16)), z(1) + 1, z((1, 16)), z(1, 'int32'))"
    )
    assert loaded_by(call, "torch", "triton", "jax") == {"jax"}


@pytest.mark.needs("jax")
def test_a_materializer_of_jax_arrays_does_not_import_torch():
    call = (
        "import jax.numpy as jnp, fkv\n"
        "z = jnp.zeros\n"
        "m = fkv.KVMaterializer.from_weights(z((1, 32, 8)), z((1, 16)), z(1) + 1, z((4, 16)))\n"
        "m(z((1, 8)), z(1, 'int32'))"
    )
    assert loaded_by(call, "torch", "triton", "jax", "safetensors") == {"jax"}


def functions_of(module):
    return [node.name for node in tree_of(module).body if isinstance(node, ast.FunctionDef)]


def test_backends_rhyme():
    triton, pallas = ({p.name for p in (HOUSE / b).glob("*.py")} for b in BACKENDS)
    assert triton == pallas
    steps = ["run", "is_interpreted", "choose_tiles", "choose_grid"]
    for backend in BACKENDS:
        assert [f for f in functions_of(f"{backend}._launch") if f in steps] == steps
        assert "materialize_kernel" in functions_of(f"{backend}._kernel")


def run_blocked(blocked, code):
    """stderr of a process in which the package `blocked` is not installed."""
    finder = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {blocked!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", finder + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


TORCH_CALL = """
import torch, fkv
z = torch.zeros
fkv.materialize(z(1, 1, 32), z(1, 16), z(1), z(1, 16), z(1).int(), backend={!r})
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("wanted", "package"), [("triton", "triton"), ("pallas", "jax")])
def test_packages_that_are_not_installed(wanted, package):
    message = run_blocked(package, TORCH_CALL.format(wanted))
    assert message == (
        f"ImportError: `backend`: expected the packages of fkv[{wanted}] for {wanted!r}, "
        f"got no module named {package!r} (pip install 'fkv[{wanted}]')"
    )


@pytest.mark.needs("torch")
def test_triton_imported_before_its_interpreter_was_asked_for():
    import torch

    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    code = "import os; os.environ.pop('TRITON_INTERPRET', None)\nimport triton\n"
    message = run_blocked("none", code + TORCH_CALL.format("triton"))
    assert message == (
        "ImportError: `backend`: expected triton in interpreter mode, as there is no CUDA device, "
        "got triton imported as a compiler "
        "(import fkv.triton before triton, or set TRITON_INTERPRET=1)"
    )
