"""python -m fkv run: files in, a file out, whole or not at all."""

import json
import os
import re
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import fkv
from cases import DTYPES, assert_right
from conftest import BACKENDS
from fkv import _run
from fkv.__main__ import app, console
from fkv._rope import rope_table

L, H, D, HIDDEN, FEATURES, ROWS = 2, 1, 16, 8, 3, 64
CONFIG = {
    "num_hidden_layers": L,
    "num_attention_heads": 2,
    "num_key_value_heads": H,
    "head_dim": D,
    "hidden_size": HIDDEN,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": ROWS,
    "rope_theta": 1e4,
}


@pytest.fixture(autouse=True)
def _wide_enough(monkeypatch):
    monkeypatch.setattr(console, "width", 100)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def files(tmp_path):
    """A checkpoint, and a function that writes the file of hidden states."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)

    def normal(*shape, dtype="bfloat16"):
        return rng.normal(size=shape).astype(DTYPES[dtype])

    tensors = {"fc.weight": normal(HIDDEN, FEATURES * HIDDEN), "hidden_norm.weight": normal(HIDDEN)}
    for layer in range(L):
        attention = f"layers.{layer}.self_attn"
        tensors[f"{attention}.k_norm.weight"] = normal(D)
        for name in ("k_proj", "v_proj"):
            tensors[f"{attention}.{name}.weight"] = normal(H * D, HIDDEN)
    save_file(tensors, folder / "model.safetensors")

    def write(tokens=11, name="hidden", dtype="bfloat16", width=None, **others):
        width = width or (HIDDEN if name == "hidden" else FEATURES * HIDDEN)
        path = tmp_path / "hidden.safetensors"
        save_file({name: normal(tokens, width, dtype=dtype)} | others, path)
        return path

    return folder, write, tmp_path / "kv.safetensors"


def run(*arguments):
    """(exit status, output)."""
    result = CliRunner().invoke(app, ["run", *map(str, arguments)])
    assert isinstance(result.exception, SystemExit | None)  # no traceback
    return result.exit_code, result.output


def assert_file_is_right(folder, hidden, out, framework, positions=None):
    """K and V of the file, by the reference, of the kv that a materializer projects."""
    given, made = load_file(hidden), load_file(out)
    m = fkv.KVMaterializer.from_checkpoint(folder, framework=framework)
    tensors = load_file(folder / "model.safetensors")
    (name,) = {*given} - {"positions"}
    x = given[name]
    if framework == "torch":
        import torch

        x = torch.from_numpy(x.view("i2")).view(torch.bfloat16).to(m.device)
    else:
        import jax.numpy as jnp

        x = jnp.asarray(x)
    if name == "target_hidden":
        x = m.project_target_hidden(x)
    kv = m.project(x)
    kv = kv.float().cpu().numpy() if framework == "torch" else np.asarray(kv.astype("f4"))
    norms = [tensors[f"layers.{layer}.self_attn.k_norm.weight"] for layer in range(L)]
    problem = {
        "kv": kv.astype(ml_dtypes.bfloat16),
        "k_norm_weight": np.stack(norms),
        "eps": np.full(L, 1e-6, "f4"),
        "cos_sin_cache": rope_table(CONFIG, ROWS),
        "positions": np.arange(len(kv)) if positions is None else positions,
    }
    assert sorted(made) == ["k", "v"]
    assert_right(problem, made["k"], made["v"])


@pytest.mark.parametrize("name", ["hidden", "target_hidden"])
def test_right(files, backend, name):
    """Chunks of 4 of 11 tokens: two whole ones and a ragged one."""
    folder, write, out = files
    hidden = write(name=name)
    status, output = run(folder, hidden, "--out", out, "--backend", backend, "--chunk=4")
    assert status == 0, output
    assert_file_is_right(folder, hidden, out, BACKENDS[backend])
    assert "run: n_layers 2, num_kv_heads 1, head_dim 16, rotary_dim 16, bfloat16" in output
    assert re.search(rf"{backend} \((compiled|interpreted)\) on .*: 11 tokens in ", output)
    assert f"Wrote {out}: k and v [2, 11, 1, 16], 1.6 kB" in output
    assert [path.name for path in out.parent.glob("*kv*")] == ["kv.safetensors"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_of_the_file(files, dtype):
    folder, write, out = files
    positions = np.random.default_rng(0).integers(0, ROWS, 11).astype(dtype)
    hidden = write(positions=positions)
    assert run(folder, hidden, "--out", out)[0] == 0
    assert_file_is_right(folder, hidden, out, "torch", positions)


def test_chunks_of_any_size_give_the_same_bytes(files):
    folder, write, out = files
    hidden, results = write(), []
    for chunk in (1, 3, 11, 100):
        assert run(folder, hidden, "--out", out, f"--chunk={chunk}")[0] == 0
        results.append(out.read_bytes())
    assert len(set(results)) == 1


def test_no_tokens(files):
    folder, write, out = files
    status, output = run(folder, write(0), "--out", out)
    assert status == 0, output
    assert load_file(out)["k"].shape == (L, 0, H, D)


def test_other_dtype_and_more_rows(files):
    folder, write, out = files
    hidden = write(100, dtype="float32")
    status, _ = run(folder, hidden, "--out", out, "--dtype=float32", "--max-position=100")
    assert status == 0
    assert load_file(out)["v"].dtype == np.float32


def refused(message, *arguments):
    """One line that says so, exit status 1."""
    status, output = run(*arguments)
    assert status == 1
    assert output == f"fkv: {message}\n"


def test_files_that_are_refused(files, tmp_path):
    """And nothing is written."""
    folder, write, out = files
    hidden = write()
    end = ("--out", out)
    missing = tmp_path / "no"
    refused(f"`HIDDEN`: expected a file, got {missing}, which is none", folder, missing, *end)
    got = f"`folder`: expected a folder with config.json, got {missing}"
    status, output = run(missing, hidden, *end)
    assert (status, output) == (1, f"fkv: FileNotFoundError: {got}\n"[:5] + f"{got}\n")
    refused(
        "`--out`: expected a file in a folder that exists, got /no/where/kv",
        folder,
        hidden,
        "--out=/no/where/kv",
    )
    refused(
        f"`--out`: expected a file of its own, got the folder {tmp_path}",
        folder,
        hidden,
        "--out",
        tmp_path,
    )
    refused(
        "`--out`: expected a file of its own, got HIDDEN itself", folder, hidden, "--out", hidden
    )
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    message = f"`--out`: expected a file of its own, got {weights} of the checkpoint"
    refused(message, folder, hidden, "--out", weights)
    assert weights.read_bytes() == before
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    message = f"`--out`: expected a file, got {pipe}, a device or a pipe"
    refused(message, folder, hidden, "--out", pipe)
    assert pipe.is_fifo()
    pipe.unlink()
    broken = tmp_path / "broken"
    broken.write_bytes(b"not that")
    status, output = run(folder, broken, *end)
    assert status == 1
    assert output.startswith(f"fkv: `HIDDEN`: expected a safetensors file, got {broken} (")
    either = "`HIDDEN`: expected either hidden [T, hidden] or target_hidden [T, n_features*hidden]"
    refused(f"{either}, got states", folder, write(name="states"), *end)
    both = write(target_hidden=np.zeros((11, 24), "f4"))
    refused(f"{either}, got hidden and target_hidden", folder, both, *end)
    refused(
        "`HIDDEN`: expected hidden of shape [T, 8], got [11, 9] (from the checkpoint)",
        folder,
        write(width=9),
        *end,
    )
    refused(
        "`HIDDEN`: expected hidden of dtype bfloat16, got float32 "
        "(the dtype of the checkpoint, or --dtype float32)",
        folder,
        write(dtype="float32"),
        *end,
    )
    refused(
        "`HIDDEN`: expected positions of shape [11], int32 or int64, got [10] int64",
        folder,
        write(positions=np.arange(10)),
        *end,
    )
    refused(
        "`HIDDEN`: expected positions of shape [11], int32 or int64, got [11] float32",
        folder,
        write(positions=np.zeros(11, "f4")),
        *end,
    )
    rows = "(the rows of the RoPE table: --max-position makes more)"
    bad = np.arange(11)
    bad[3] = 64
    refused(
        f"`HIDDEN`: expected 0 <= position < 64, got 64 at token 3 {rows}",
        folder,
        write(positions=bad),
        *end,
    )
    refused(
        f"`HIDDEN`: expected 0 <= position < 64, got 99 at token 99 {rows}",
        folder,
        write(100),
        *end,
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    refused(
        "`folder`: expected tensor layers.2.self_attn.k_norm.weight, got none "
        "(the names are those of Qwen3, with or without the prefix model.)",
        folder,
        write(),
        *end,
    )
    assert not out.exists()


def test_a_draft_without_features(files):
    folder, write, out = files
    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if name.startswith("layers.")}
    save_file(kept, folder / "model.safetensors")
    refused(
        "`HIDDEN`: expected hidden [T, hidden], got target_hidden "
        "(target_hidden needs fc.weight and hidden_norm.weight in the checkpoint)",
        folder,
        write(name="target_hidden"),
        "--out",
        out,
    )


def test_no_space(files, monkeypatch):
    folder, write, out = files
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(_run.shutil, "disk_usage", lambda path: usage)
    message = f"`--out`: expected 1.4 kB of free space, got 1.0 kB ({out})"
    refused(message, folder, write(), "--out", out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_left_of_what_was_not_finished(files, monkeypatch, error):
    """And what was there before is there still."""
    folder, write, out = files
    hidden = write()
    out.write_bytes(b"before")
    real, calls = _run._materialize, []

    def fail(job, part):
        calls.append(part)
        if len(calls) == 3:
            raise error
        return real(job, part)

    monkeypatch.setattr(_run, "_materialize", fail)
    result = CliRunner().invoke(app, ["run", str(folder), str(hidden), f"--out={out}", "--chunk=4"])
    assert result.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert len(calls) == 3
    assert out.read_bytes() == b"before"
    assert {path.name for path in out.parent.iterdir()} == {"draft", hidden.name, out.name}
    if error is not KeyboardInterrupt:
        assert result.output == "fkv: OSError: [Errno 28] No space left on device\n"


def test_links_and_modes(files):
    """A link stays one, a file keeps its mode, and a new one gets the usual."""
    folder, write, out = files
    hidden = write()
    link = out.with_name("link")
    link.symlink_to(out)
    mask = os.umask(0o027)
    try:
        assert run(folder, hidden, "--out", link)[0] == 0
        assert link.is_symlink()
        assert out.stat().st_mode & 0o777 == 0o640
        out.chmod(0o600)
        assert run(folder, hidden, "--out", link)[0] == 0
        assert out.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(mask)


def test_a_signal_leaves_nothing(files, monkeypatch):
    folder, write, out = files
    hidden = write()

    def end(job, part):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    monkeypatch.setattr(_run, "_materialize", end)
    before = signal.getsignal(signal.SIGTERM)
    assert run(folder, hidden, "--out", out)[0] == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert {path.name for path in out.parent.iterdir()} == {"draft", hidden.name}


@pytest.mark.parametrize("chunk", ["0", "x"])
def test_bad_options(files, chunk):
    folder, write, out = files
    status, output = run(folder, write(), "--out", out, f"--chunk={chunk}")
    assert status == 2
    assert "Invalid value for '--chunk'" in output


def test_help_names_the_formats():
    status, output = run("--help")
    output = re.sub(r"[│╭╮╰╯─\s]+", " ", output)
    assert status == 0
    for text in ("[T, hidden]", "target_hidden", "positions", "[L, T, H, D]", "--max-position"):
        assert text in output
    assert "[default: 8192]" in output


def test_memory_does_not_grow_with_the_tokens(files):
    """16 times the tokens of a chunk cost no more host memory than 2 times."""
    folder, write, out = files
    code = (
        "import resource, sys\n"
        "from fkv import _run\n"
        "from pathlib import Path\n"
        "folder, hidden, out = map(Path, sys.argv[1:])\n"
        "job = _run.prepare(folder, hidden, out, 512, 'triton', None, 1 << 20)\n"
        "kb = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "seen = []\n"
        "_run.run(job, lambda tokens: seen.append(kb()))\n"
        "print(len(seen), seen[1], seen[-1])"
    )
    hidden = write(512 * 64)
    done = subprocess.run(
        [sys.executable, "-c", code, folder, hidden, out],
        capture_output=True,
        text=True,
        check=True,
    )
    chunks, early, late = map(int, done.stdout.split())
    assert chunks == 64
    # K and V of all tokens are 4 MB, and the hidden states half a one: far less may stay.
    assert late - early < 1024
