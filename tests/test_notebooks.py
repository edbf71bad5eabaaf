"""The notebooks run from top to bottom, and are in git without what they print."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
IN_TREE = sorted(
    path
    for pattern in ("*.ipynb", "[!.]*/**/*.ipynb")
    for path in ROOT.glob(pattern)
    if ".ipynb_checkpoints" not in path.parts
)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.needs("torch", "jax", "nbclient")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    missing = [
        name
        for name in ("ipykernel", "matplotlib", "safetensors")
        if not importlib.util.find_spec(name)
    ]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{' and '.join(missing)}: not installed")
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    # Only without folders of kernels to look in is "python3" certain to be this interpreter.
    specs = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, km=kernel, timeout=120, resources=resources)
    client.execute(cleanup_kc=True)  # closes what it leaves open when the kernel is given


@pytest.mark.parametrize("path", IN_TREE, ids=lambda path: path.stem)
def test_is_stripped(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
