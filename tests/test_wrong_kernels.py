"""Proof that the suite can fail: each kernel with one fault planted in it is rejected.

A fault is an edit of the kernel's own source. The edited module stands in for the real one, runs
like it (compiled or interpreted), and must not pass the assertion that the real one passes.
"""

import importlib
import importlib.util
import sys

import numpy as np
import pytest

from cases import Case, assert_right, nan_outputs, to_framework
from conftest import BACKENDS

# name -> backend -> (old, new), ...; each `old` stands in the source.
FAULTS = {
    "cos_and_sin_swapped": {
        "triton": [
            ("k * cos - k_partner * sin", "k * sin - k_partner * cos"),
            ("k * cos + k_partner * sin", "k * sin + k_partner * cos"),
        ],
        "pallas": [("a * cos[i] - b * sin[i]", "a * sin[i] - b * cos[i]")],
    },
    "rotated_backwards": {
        "triton": [
            ("k * cos - k_partner * sin", "k * cos + k_partner * sin"),
            ("k_partner * cos + k * sin", "k_partner * cos - k * sin"),
            ("-sin.to(tl.float32), sin.to(tl.float32))", "sin.to(tl.float32), -sin.to(tl.float32))"),
        ],
        "pallas": [
            ("a * cos[i] - b * sin[i]", "a * cos[i] + b * sin[i]"),
            ("b * cos[i] + a * sin[i]", "b * cos[i] - a * sin[i]"),
        ],
    },
    "second_half_not_rotated": {
        "triton": [
            ("k_partner * cos + k * sin", "k_partner + 0 * cos"),
            ("rotary_mask = dim < ROTARY_DIM", "rotary_mask = dim < HALF"),
        ],
        "pallas": [("b * cos[i] + a * sin[i]", "b")],
    },
    "pairs_interleaved": {
        "triton": [
            ("dim = lane\n        partner = lane + HALF", "dim = 2 * lane\n        partner = 2 * lane + 1"),
            ("k_first + HALF", "k_first + 1"),
            ("partner = tl.where(first, pair + HALF, pair)", "partner = dim ^ 1"),
        ],
    },
    "sine_from_the_cosines": {
        "triton": [("sin_offset = (pair.to(tl.int64) + HALF)", "sin_offset = pair.to(tl.int64)")],
        "pallas": [("angles(k1_pieces), angles(k2_pieces)", "angles(k1_pieces), angles(k1_pieces)")],
    },
    "position_off_by_one": {
        "triton": [("position.to(tl.int64) * stride_table_p", "(position.to(tl.int64) ^ 1) * stride_table_p")],
        "pallas": [("safe = jnp.where(inside, position, 0)", "safe = jnp.where(inside, position ^ 1, 0)")],
    },
    "position_is_the_token": {
        "triton": [("position.to(tl.int64) * stride_table_p", "token * stride_table_p")],
        "pallas": [("safe = jnp.where(inside, position, 0)", "safe = jnp.where(inside, token + row, 0)")],
    },
    "position_outside_reads_row_0": {
        "triton": [
            ("tl.where(inside[:, None], scale, float(\"nan\"))[:, :, None]", "scale[:, :, None]"),
            ("tl.where(inside, scale, float(\"nan\"))[:, None, None]", "scale[:, None, None]"),
        ],
        "pallas": [("jnp.where(inside, 0.0, jnp.nan)", "jnp.where(inside, 0.0, 0.0)")],
    },
    "table_rows_not_looked_at": {
        "triton": [("inside = (position >= 0) & (position < table_rows)", "inside = position >= 0\n    position = tl.minimum(position, table_rows - 1)")],
        "pallas": [
            ("inside = (position >= 0) & (position < spec.table_rows)", "inside = position >= 0"),
            ("safe = jnp.where(inside, position, 0)", "safe = (position * 0)"),
        ],
    },
    "weight_of_layer_0": {
        "triton": [("k_norm_weight_ptr + layer * stride_weight_l", "k_norm_weight_ptr")],
        "pallas": [("weight_ref.at[layer, piece]", "weight_ref.at[0, piece]")],
    },
    "weight_forgotten": {
        "triton": [("k = k * scale * _columns(weight, FULL_ROTARY)", "k = k * scale")],
        "pallas": [("broadcast(scale, k1[i].shape[1], 0) * w1[i]", "broadcast(scale, k1[i].shape[1], 0)")],
    },
    "weight_halves_swapped": {
        "triton": [
            ("k = k * scale * _columns(weight, FULL_ROTARY)", "k = k * scale * _columns(partner_weight, FULL_ROTARY)"),
            ("k_partner * scale * _columns(partner_weight, FULL_ROTARY)", "k_partner * scale * _columns(weight, FULL_ROTARY)"),
        ],
        "pallas": [("w1, w2, w3 = ", "w2, w1, w3 = ")],
    },
    "tail_not_weighted": {
        "triton": [("_columns(weight, FULL_ROTARY)", "_columns(tl.where(rotary_mask, weight, 1.0), FULL_ROTARY)")],
        "pallas": [("broadcast(scale, k3[i].shape[1], 0) * w3[i]", "broadcast(scale, k3[i].shape[1], 0)")],
    },
    "tail_not_in_the_mean": {
        "triton": [("tl.sum(k * k, axis=2)", "tl.sum(tl.where(partner_mask, k * k, 0.0), axis=2)")],
        "pallas": [("for k in (*k1, *k2, *k3)", "for k in (*k1, *k2)")],
    },
    "eps_forgotten": {
        "triton": [("(1.0 / HEAD_DIM) + eps)", "(1.0 / HEAD_DIM))")],
        "pallas": [("(1.0 / head_dim) + eps)", "(1.0 / head_dim))")],
    },
    "eps_of_layer_0": {
        "triton": [("eps_ptr + layer * stride_eps_l", "eps_ptr")],
        "pallas": [("eps_ref[layer]", "eps_ref[0]")],
    },
    "sum_for_mean": {
        "triton": [("squares * (1.0 / HEAD_DIM)", "squares")],
        "pallas": [("squares * (1.0 / head_dim)", "squares")],
    },
    "mean_over_rotary_dim": {
        "triton": [("1.0 / HEAD_DIM", "1.0 / ROTARY_DIM")],
        "pallas": [("1.0 / head_dim", "1.0 / rotary_dim")],
    },
    "kv_of_layer_0": {
        "triton": [("[:, None, None] + layer * stride_kv_l", "[:, None, None]")],
        "pallas": [("kv_ref.at[tokens, layer, kind", "kv_ref.at[tokens, 0, kind")],
    },
    "last_head_dropped": {
        "triton": [("(head < NUM_KV_HEADS)", "(head < NUM_KV_HEADS - 1)")],
        "pallas": [("for h in range(block_h):", "for h in range(block_h - 1):")],
    },
    "last_token_dropped": {
        "triton": [("token_mask = token < total_ctx", "token_mask = token < total_ctx - 1")],
        "pallas": [("grid=grid", "grid=(grid[0] - spec.n_layers,)")],
    },
    "v_is_k": {
        "triton": [("k_row + NUM_KV_HEADS * HEAD_DIM + v_dim", "k_row + v_dim")],
        "pallas": [("fetch(1, v_tile", "fetch(0, v_tile")],
    },
    "v_from_the_next_head": {
        "triton": [("NUM_KV_HEADS * HEAD_DIM + v_dim", "(NUM_KV_HEADS - 1) * HEAD_DIM + v_dim")],
        "pallas": [
            (
                "plgpu.copy_smem_to_gmem(tile.at[i], target)",
                "for h in range(block_h): plgpu.copy_smem_to_gmem(tile.at[i, :, h], out_ref.at[layer, tokens, lax.rem(head + h + (tile is v_tile), spec.num_kv_heads), piece])",
            )
        ],
    },
    "v_through_half_precision": {
        "triton": [("v_row + v_dim, v, mask", "v_row + v_dim, v.to(tl.float32).to(tl.float16).to(v.dtype), mask")],
    },
    "rounded_before_rope": {
        "triton": [("k = k * scale * _columns(weight, FULL_ROTARY)", "k = (k * scale * _columns(weight, FULL_ROTARY)).to(tl.bfloat16).to(tl.float32)")],
        "pallas": [("* w1[i]\n", "* w1[i]\n                a = a.astype(dtype).astype(jnp.float32)\n")],
    },
    "truncating_store": {
        "triton": [
            ("(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "bits >> 16"),  # interpreted
            ("value.to(pointer.dtype.element_ty)", "(value.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True).to(pointer.dtype.element_ty)"),
        ],
        "pallas": [("a * cos[i] - b * sin[i]", "(a * cos[i] - b * sin[i]) * (1 - 2.0**-9)")],
    },
}  # fmt: skip

# Two layers that differ in every side, ragged tiles, and rows small beside eps.
SMALL_ROWS = dict(T=37, L=2, H=2, P=40, scale=1e-3, eps=(1e-6, 1e-5))
PARTIAL = Case(D=64, R=32, **SMALL_ROWS)
FULL = Case(D=64, **SMALL_ROWS)
OF_THE_TAIL = {"tail_not_weighted", "tail_not_in_the_mean", "mean_over_rotary_dim"}


def problem_with_outside_positions(case):
    problem = case.make("bfloat16")
    problem["positions"][[3, 20]] = (-1, case.P)
    return problem


def run(backend, problem):
    """The backend's own run, below the checks of values, which would refuse on the host."""
    from fkv._frameworks import FRAMEWORKS, spec_of
    from fkv._spec import MATERIALIZE

    home = next(f for f in FRAMEWORKS if f.name == BACKENDS[backend])
    outputs = {"k_out": None, "v_out": None} | nan_outputs(problem, home.name)
    arrays = [to_framework(array, home.name) for array in problem.values()] + [*outputs.values()]
    spec = spec_of(home, home.signature(arrays, MATERIALIZE), None, None, None)
    return importlib.import_module(f"fkv.{backend}").run(spec, *arrays)


def plant(backend, edits, folder, monkeypatch):
    """Put an edited copy of the backend's kernel in the place of its kernel."""
    launch = importlib.import_module(f"fkv.{backend}._launch")
    kernel = importlib.import_module(f"fkv.{backend}._kernel")
    with open(kernel.__file__) as file:
        source = file.read()
    for old, new in edits:
        assert old in source, f"the kernel has changed: no {old!r}"
        source = source.replace(old, new)
    path = folder / f"wrong_{backend}_kernel.py"
    path.write_text(source)
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    module_spec.loader.exec_module(module)
    monkeypatch.setattr(launch, "materialize_kernel", module.materialize_kernel)
    forget_kernels(backend)


def forget_kernels(backend):
    """Each backend keeps what it has compiled for a Spec."""
    launch = importlib.import_module(f"fkv.{backend}._launch")
    getattr(launch, {"triton": "_plan", "pallas": "_compiled"}[backend]).cache_clear()


@pytest.fixture(autouse=True)
def _no_wrong_kernels_left(request):
    yield
    for backend, framework in BACKENDS.items():
        if framework in request.config.installed:
            forget_kernels(backend)


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        edits = [
            (fault, on)
            for fault, kernels in FAULTS.items()
            for on in kernels
            if BACKENDS[on] in metafunc.config.installed
        ]
        metafunc.parametrize(("fault", "on"), edits)


@pytest.mark.parametrize("case", [PARTIAL, FULL], ids=["partial", "full"])
def test_unedited_kernel_passes(case, backend, tmp_path, monkeypatch):
    plant(backend, [], tmp_path, monkeypatch)
    problem = problem_with_outside_positions(case)
    assert_right(problem, *run(backend, problem))


def test_wrong_kernel_is_rejected(fault, on, tmp_path, monkeypatch):
    """Also where all of K rotates, if that takes other lines of the kernel."""
    plant(on, FAULTS[fault][on], tmp_path, monkeypatch)
    for case in (PARTIAL, FULL) if on == "triton" and fault not in OF_THE_TAIL else (PARTIAL,):
        problem = problem_with_outside_positions(case)
        k, v = run(on, problem)
        with pytest.raises(AssertionError, match=r"[KV] is wrong"):
            assert_right(problem, k, v)


def test_faults_are_many():
    for backend in BACKENDS:
        assert sum(backend in edits for edits in FAULTS.values()) >= 15


def test_assertion_rejects_what_is_nearly_right():
    """One element of K a unit in the last place off its nearest value; one bit of V."""
    import fkv.reference
    from cases import DTYPES

    problem = Case(T=3, D=16).make("bfloat16")
    exact, v = fkv.reference.materialize(**problem)
    nearest = exact.astype(DTYPES["bfloat16"])
    assert_right(problem, nearest, v)
    for array, message in ((nearest, "K is wrong"), (v, "V is wrong")):
        spoilt = array.copy()
        spoilt.view(np.uint16)[1, 2, 0, 5] += 1 if array is v else 2
        pair = (spoilt, v) if array is nearest else (nearest, spoilt)
        with pytest.raises(AssertionError, match=message):
            assert_right(problem, *pair)
