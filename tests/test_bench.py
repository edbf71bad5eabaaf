"""python -m fkv bench: its arithmetic, its checks, and on a GPU a small run."""

import json

import numpy as np
import pytest
import torch

import fkv.__main__ as command
from fkv import _bench, _bench_cache, _demo, _report
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


def test_fits_take_the_grid_of_the_first_geometry_and_what_is_changed_from_it():
    def row(geometry, total_ctx, who="triton", **changes):
        size = _bench.moved_bytes(geometry, total_ctx, total_ctx)
        times = {"cold_us": {"median": 2 + size / 4e6}, "memory_gb_s": 5000.0}
        return {"who": who, **geometry._asdict(), "total_ctx": total_ctx, "bytes": size} | (
            times | changes
        )

    first, other = _bench.GEOMETRIES[:2]
    wrong = row(first, 64)
    del wrong["cold_us"]
    report = {
        "rows": [*(row(first, t) for t in (1, 16, 4096)), wrong, row(other, 16, bytes=1.0)],
        "scaling": [row(_bench.SCALED[0], 4096), row(_bench.SCALED[0], 4096, "pallas")],
    }
    found = _bench.fits(report, ["triton", "pallas"])
    assert set(found) == {"triton"}  # one row is no line
    line = found["triton"]
    assert line["worst_relative_error"] == pytest.approx(0, abs=1e-9)
    assert line["share_of_copy"] == pytest.approx(0.8)
    assert line["half_fixed_tokens"] == pytest.approx(8e6 / (2 * 5 * 2048 * 2 + 128 * 4))


@pytest.mark.parametrize("times", [[2.0, 2.0, 2.0], [2.2, 2.1, 2.0]])
def test_a_time_that_does_not_grow_has_no_rate(times):
    assert _bench.fit([1e4, 2e4, 4e4], times) is None


def test_spread():
    assert _bench.spread(range(11)) == {"median": 5, "p10": 1, "p90": 9}


@pytest.mark.parametrize(("moved", "runs"), [(1, 50), (6 * 10**9, 20), (10**12, 10)])
def test_runs(moved, runs):
    assert _bench.runs_for(moved) == runs


@pytest.mark.parametrize(
    ("kernels", "times"),
    [
        ([1.0, 2.0, 3.0, 4.0], [3.0, 7.0]),
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0, 3.0], [3.0]),  # 3 kernels of 2 calls
        ([1.0], [0.5]),
        ([], [0.0]),
    ],
)
def test_times_of_two_calls(kernels, times):
    assert _bench.per_call(kernels, 2) == times


def test_share_and_words_of_a_row():
    row = {"who": "triton", "total_ctx": 3, "right": False, "same_v": True, "worst": 1.5}
    assert "wrong 1.5000" in str(_report.timed_cells(row)[-1])
    assert "wrong inf" in str(_report.timed_cells(row | {"worst": None})[-1])
    assert str(_report.timed_cells(row | {"right": None})[-1]) == "-"
    times = {"median": 2.0, "p10": 1.0, "p90": 3.0}
    row |= {"right": True, "cold_us": times, "hot_us": times, "launches": 1}
    cells = _report.timed_cells(row | {"worst": 0.5, "gb_s": 4000.0, "share_of_copy": 0.8})
    assert cells == ["3", "triton", "2.0", "1.0 3.0", "4000", "0.80", "2.0", "", "1", "0.5000"]


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


@pytest.mark.skipif(ON_GPU, reason="there the check is another one")
@pytest.mark.parametrize("worst", [float("inf"), float("nan")])
def test_an_error_without_a_number_is_null(monkeypatch, tmp_path, worst):
    path = tmp_path / "out.json"
    monkeypatch.setattr(_demo, "worst_error", lambda *_: worst)
    status, output = invoke("bench", *SMALL, "--json", str(path))
    assert status == 1
    assert f"wrong {worst}" in output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["worst"], row["right"]) for row in rows] == [(None, False)] * 2


@pytest.mark.skipif(ON_GPU, reason="torch must see none")
def test_a_gpu_that_torch_does_not_see_is_not_timed(monkeypatch):
    diagnose = command.diagnose

    def as_if(backend, installed):
        found = diagnose(backend, installed)
        return found._replace(kernel="compiled") if backend.name == "pallas" else found

    monkeypatch.setattr(command, "diagnose", as_if)
    status, output = invoke("bench", *SMALL)
    assert status == 0, output
    assert "jax sees a GPU, torch does not, and the timer is torch's" in output


@pytest.mark.parametrize(
    ("options", "peers_at", "cache_ctx"),
    [
        ((), _bench.PEER_CTX, [16, 2048, 16384, 65536]),
        (("--total-ctx", "64"), [64], [64]),
        (("--total-ctx", "64", "--no-peers"), (), [64]),
        (("--geometry", "2,2,64,64"), _bench.PEER_CTX, None),
        (("--function", "materialize"), _bench.PEER_CTX, None),
        (("--function", "write_cache"), None, [16, 2048, 16384, 65536]),
    ],
)
def test_what_is_asked_for_is_timed(monkeypatch, options, peers_at, cache_ctx):
    seen = [None, None]

    def time_all(geometries, tokens, backends, peers_at, sglang):
        seen[0] = peers_at
        return {"rows": []}

    def time_caches(backends, tokens, sglang):
        seen[1] = tokens
        return []

    compiled = command.diagnose(command.BACKENDS["triton"], [])._replace(kernel="compiled")
    monkeypatch.setattr(command, "diagnose", lambda *_: compiled)
    monkeypatch.setattr(command, "gpus", lambda _: ["a GPU"])
    monkeypatch.setattr(command, "time_all", time_all)
    monkeypatch.setattr(command, "time_caches", time_caches)
    assert invoke("bench", *options)[0] == 0
    assert seen == [peers_at, cache_ctx]


def cache_inputs(total_ctx=21, n_layers=2, num_kv_heads=4, head_dim=64):
    random = torch.Generator().manual_seed(0)
    steps = torch.arange(0, head_dim, 2) / head_dim
    angles = torch.arange(100)[:, None] / 1e4**steps
    inputs = {
        "kv": torch.randn(total_ctx, n_layers, 2 * num_kv_heads * head_dim, generator=random),
        "k_norm_weight": torch.rand(n_layers, head_dim, generator=random) + 0.5,
        "eps": torch.full((n_layers,), 1e-6),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "positions": torch.randint(100, (total_ctx,), generator=random),
    }
    inputs["kv"] = inputs["kv"].bfloat16()
    return {name: tensor.cuda() if ON_GPU else tensor for name, tensor in inputs.items()}


@pytest.mark.parametrize("variant", _bench_cache.VARIANTS)
def test_caches_are_checked_before_they_are_timed(variant):
    problem = _bench_cache.Problem(cache_inputs(), _bench_cache.VARIANTS[variant])
    result = problem.check(problem.triton()())
    assert result["right"], result
    if variant == "float8_e4m3fn, scaled":
        assert problem.check(problem.pallas()())["right"]
    k_cache, v_cache = problem.caches
    assert not problem.check([v_cache, k_cache])["right"]
    free = next(slot for slot in range(problem.num_slots) if slot not in problem.slots)
    page, offset = divmod(free, _bench_cache.PAGE_SIZE)
    if problem.variant.layout == "HND":
        k_cache[1, page, :, offset] = 0
    else:
        problem._by_slot(k_cache)[1, free] = 0
    assert not problem.check(problem.caches)["right"]


def test_bytes_of_a_cache():
    inputs = cache_inputs()
    rows = len(inputs["positions"].unique()) * 64 * 4
    for variant, itemsize in (("flat", 2), ("float8_e4m3fn", 1)):
        problem = _bench_cache.Problem(inputs, _bench_cache.VARIANTS[variant])
        assert problem.moved_bytes() == 21 * 2 * 512 * (2 + itemsize) + rows


def test_json_that_can_not_be_written_is_said_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "diagnose", lambda *_: pytest.fail("too late"))
    status, output = invoke("bench", "--json", str(tmp_path))
    assert status == 2
    assert "expected a file that can be written, got" in output
    assert "(Is a directory)" in output
    assert not [*tmp_path.iterdir()]


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
    assert "pallas: `" in output  # the reason is said, too


def test_without_torch():
    done = blocked("torch", "bench")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("fkv: expected torch, whose profiler")
    assert "Traceback" not in done.stderr


def test_json_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        _report.write_json({"bad": object()}, tmp_path / "out.json")
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_small_run(tmp_path):
    path = tmp_path / "out.json"
    status, output = invoke("bench", *SMALL, "--total-ctx", "64", "--json", str(path))
    assert status == 0, output
    for row in json.loads(path.read_text())["rows"]:
        assert row["launches"] == 1, row
        assert 0 < row["hot_us"]["median"] < row["cold_us"]["p90"] * 2
        assert row["share_of_copy"] > 0


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_small_run_with_peers(tmp_path):
    path = tmp_path / "out.json"
    arguments = ("--geometry", "2,2,64,64", "--total-ctx", "16", "--total-ctx", "64")
    status, output = invoke("bench", *arguments, "--json", str(path))
    assert status == 0, output
    report = json.loads(path.read_text())
    peers = {"torch eager", "torch.compile"}
    for row in report["rows"]:
        assert row["cold_us"]["median"] > 0
        assert row["launches"] == 1 or row["who"] in peers | {"jax.jit"}, row
        assert ("replay_us" in row) == (row["who"] not in ("pallas", "jax.jit")), row
    for total_ctx in (16, 64):
        assert peers <= {row["who"] for row in report["rows"] if row["total_ctx"] == total_ctx}
    assert {row["total_ctx"] for row in report["host"]} == {1, 16}
    assert all(row["us"]["median"] > 0 for row in report["host"])
