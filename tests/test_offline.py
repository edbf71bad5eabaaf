"""What the compilers make of the kernels for an H200, seen without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases import CACHE_CASES, CASES, DTYPES

TESTS = Path(__file__).parent


def compile_for_hopper(jobs):
    """A report for each (case, dtype[, arguments that equal 1]); see compile_for_hopper.py.

    The dtype is None for a line of CACHE_CASES.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "compile_for_hopper.py"],
        cwd=TESTS,
        env=environment,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_moves_k_and_v_16_bytes_at_a_time(dtype):
    """K and V at D=128: 16-byte loads and stores, all registers."""
    (report,) = compile_for_hopper([("dflash_qwen3_8b", dtype)])
    assert set(report["stores"]) == {16}
    # eps, a position and a weight are small; what is read for K and V is as much as is written.
    assert report["loads"].count(16) >= report["stores"].count(16)
    assert report["resources"]["STACK"] == report["resources"]["LOCAL"] == 0


@pytest.mark.needs("torch")
def test_triton_compiles_every_case_without_spills():
    jobs = [(name, "bfloat16") for name, case in CASES.items() if case.T and case.L]
    jobs += [(name, "float32") for name in ("head_dim_512", "head_dim_512_full", "head_dim_2")]
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["resources"]["LOCAL"] == 0, job
        assert report["resources"]["STACK"] == 0, job


@pytest.mark.needs("torch")
def test_triton_compiles_with_any_integer_equal_to_1():
    """M-08: Triton makes such an argument a constant, which some code does not survive."""
    integers = ("kv_t", "kv_l", "weight_l", "weight_d", "eps_l", "table_p", "table_r")
    integers += ("positions_t", "k_l", "k_t", "k_h", "v_l", "v_t", "v_h")
    jobs = [("head_dim_16", "bfloat16", [f"stride_{name}"]) for name in integers]
    assert len(compile_for_hopper(jobs)) == len(jobs)


@pytest.mark.needs("torch")
def test_triton_compiles_every_cache_case_without_spills():
    """J-06 and M-08: also with each stride that only a cache has equal to 1."""
    jobs = [(name, None) for name, case in CACHE_CASES.items() if case.T and case.L]
    strides = ("slots_row", "slots_t", "lens", "k_scale", "v_scale", "k_page", "v_page")
    jobs += [("e4m3", None, [f"stride_{name}"]) for name in strides]
    for job, report in zip(jobs, compile_for_hopper(jobs), strict=True):
        assert report["resources"]["LOCAL"] == 0, job
        assert report["resources"]["STACK"] == 0, job
        case = CACHE_CASES[job[0]]
        if case.D == 128 and case.dtype == case.cache_dtype:
            assert set(report["stores"]) == {16}, job


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", [n for n, c in CACHE_CASES.items() if c.pallas and c.T and c.L])
def test_pallas_lowers_every_cache_case_for_cuda(name):
    import jax

    from fkv._spec import Layout, cache_arguments, make_cache_spec
    from fkv.pallas._launch import _write

    problem = CACHE_CASES[name].make()
    layout = problem.pop("layout")
    for argument, array in problem.items():
        if array.dtype == "int64":  # jax has it as int32
            problem[argument] = array.astype("int32")
    arguments = cache_arguments(None, None)
    arrays = [problem.get(argument) for argument in arguments.names]
    layouts = [None if a is None else Layout(a.shape, None, str(a.dtype), None) for a in arrays]
    spec = make_cache_spec("jax", arguments, layouts, layout)
    inputs = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    traced = jax.jit(lambda *arrays: _write(spec, False, arrays)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1  # one kernel


@pytest.mark.needs("jax")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.pallas and c.T and c.L])
def test_pallas_lowers_for_cuda(name, dtype):
    import jax

    from fkv._spec import Layout, make_spec
    from fkv.pallas._launch import _materialize

    problem = CASES[name].make(dtype)
    if problem["positions"].dtype == "int64":
        problem["positions"] = problem["positions"].astype("int32")  # as jax has it
    layouts = [Layout(a.shape, None, str(a.dtype), None) for a in problem.values()]
    spec = make_spec("jax", [*layouts, None, None])
    inputs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in problem.values())
    traced = jax.jit(lambda *arrays: _materialize(spec, False, arrays)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1  # one kernel
