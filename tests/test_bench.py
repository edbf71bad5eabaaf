"""python -m fkv bench: its arithmetic, its checks, and on a GPU a small run."""

import json

import numpy as np
import pytest
import torch

from fkv import _bench, _demo, _report
from test_cli import blocked, invoke

ON_GPU = torch.cuda.is_available()
SMALL = ("--geometry", "2,2,64,64", "--total-ctx", "3", "--no-peers")


def test_bytes():
    """kv, K and V in bfloat16, the table's rows in float32."""
    assert _bench.moved_bytes(_bench.Geometry(5, 8, 128, 64), 16, 7) == (
        16 * 5 * 2048 * 2 + 2 * 16 * 5 * 1024 * 2 + 7 * 64 * 4
    )


@pytest.mark.parametrize("total_ctx", [1, 256, 257, 5000])
def test_sample_has_both_ends_and_no_token_twice(total_ctx):
    tokens = _bench.sampled_tokens(total_ctx)
    assert len(tokens) == len(set(tokens)) == min(total_ctx, _bench.SAMPLE)
    assert tokens[0] == 0
    assert tokens[-1] == total_ctx - 1
    assert (np.diff(tokens) > 0).all()


def test_fit_finds_a_line():
    sizes = [1e6, 1e7, 1e8, 1e9]
    line = _bench.fit(sizes, [2 + size / 4e6 for size in sizes])
    assert line["fixed_us"] == pytest.approx(2)
    assert line["rate_gb_s"] == pytest.approx(4000)
    assert line["half_fixed_bytes"] == pytest.approx(8e6)
    assert line["worst_relative_error"] == pytest.approx(0, abs=1e-9)


def test_kernels_between_clears():
    kernels = [("clear", 9.0), ("a", 1.0), ("b", 2.0), ("clear", 9.0), ("clear", 9.0), ("a", 3.0)]
    assert _bench.split_at(kernels, {"clear"}) == [[1.0, 2.0], [], [3.0]]


def test_checks_and_json(tmp_path):
    path = tmp_path / "out.json"
    status, output = invoke("bench", *SMALL, "--json", str(path))
    assert status == 0, output
    report = json.loads(path.read_text())
    rows = {row["who"]: row for row in report["rows"]}
    assert {"triton", "pallas"} <= set(rows)
    for who in ("triton", "pallas"):
        assert rows[who]["right"]
        assert 0 < rows[who]["worst"] <= 1
        assert rows[who]["total_ctx"] == 3
        assert ("cold_us" in rows[who]) == ON_GPU
    assert torch.__version__.startswith(report["versions"]["torch"])
    assert [*tmp_path.iterdir()] == [path]
    assert ("interpreted times mean nothing" in output) == (not ON_GPU)


def test_a_wrong_result_has_no_time(monkeypatch, tmp_path):
    path = tmp_path / "out.json"
    for module in (_bench, _demo):
        right = module.error_bound
        monkeypatch.setattr(
            module, "error_bound", lambda *a, right=right, **k: 0.5 * right(*a, **k)
        )
    status, output = invoke("bench", *SMALL, "--json", str(path))
    assert status == 1
    assert "wrong results, which were not timed." in output
    rows = [row for row in json.loads(path.read_text())["rows"] if row["who"] != "copy"]
    assert not any(row["right"] or "cold_us" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--geometry", "5,8,128"), "expected n_layers,num_kv_heads,head_dim,rotary_dim with an"),
        (("--geometry", "5,8,128,63"), "even rotary_dim <= head_dim, got 5,8,128,63"),
        (("--json", "/no/such/folder/out.json"), "expected a file in a folder that exists"),
        (("--sglang", "/no/such/folder"), "expected a folder with sglang/kernels/ops/"),
    ],
)
def test_bad_options(arguments, message):
    status, output = invoke("bench", *arguments)
    assert status == 2
    assert message in output


def test_a_geometry_that_pallas_does_not_take_is_not_wrong(tmp_path):
    path = tmp_path / "out.json"
    arguments = ("--geometry", "1,1,72,72", "--total-ctx", "3", "--no-peers", "--json", str(path))
    status, output = invoke("bench", *arguments)
    assert status == 0, output
    rows = {row["who"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["triton"]["right"]
    assert rows["pallas"]["right"] is None
    assert 'backend="triton"' in rows["pallas"]["note"]


def test_without_torch():
    done = blocked("torch", "bench")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("fkv: expected torch, whose profiler")
    assert "Traceback" not in done.stderr


def test_json_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        _report.write_json({"bad": object()}, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_small_run(tmp_path):
    path = tmp_path / "out.json"
    status, output = invoke("bench", *SMALL, "--total-ctx", "64", "--json", str(path))
    assert status == 0, output
    for row in json.loads(path.read_text())["rows"]:
        assert row["launches"] == 1, row
        assert 0 < row["hot_us"]["median"] < row["cold_us"]["p90"] * 2
        assert row["share_of_copy"] > 0
