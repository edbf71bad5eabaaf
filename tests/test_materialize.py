"""Every route, case and dtype against the float64 reference."""

import numpy as np
import pytest

import fkv
from cases import CASES, DTYPES, Case, assert_right, nan_outputs, to_framework, to_numpy
from conftest import BACKENDS, routes


def pytest_generate_tests(metafunc):
    """All dtypes on the native routes; one where the same kernels run on arrays carried over."""
    if "combination" in metafunc.fixturenames:
        combinations = [
            (name, dtype, route)
            for route in routes(metafunc.config)
            for name in CASES
            for dtype in DTYPES
            if BACKENDS[route[1]] == route[0] or dtype == "bfloat16"
        ]
        ids = [f"{'->'.join(route)}-{name}-{dtype}" for name, dtype, route in combinations]
        metafunc.parametrize("combination", combinations, ids=ids)


def test_right(combination, record_error):
    name, dtype, route = combination
    framework, backend = route
    problem = CASES[name].make(dtype)
    arrays = {key: to_framework(array, framework) for key, array in problem.items()}
    before = {key: to_numpy(array).copy() for key, array in arrays.items()}
    outputs = nan_outputs(problem, framework)
    if backend == "pallas" and not CASES[name].pallas:
        with pytest.raises(NotImplementedError, match='backend="triton"'):
            fkv.materialize(**arrays, **outputs, backend=backend)
        assert all(np.isnan(to_numpy(out).astype("f4")).all() for out in outputs.values())
        return

    k, v = fkv.materialize(**arrays, **outputs, backend=backend)

    record_error(route, assert_right(problem, k, v))
    if outputs:
        assert k is outputs["k_out"]
        assert v is outputs["v_out"]
    for key, array in arrays.items():  # inputs are bitwise what they were
        np.testing.assert_array_equal(to_numpy(array).view("u1"), before[key].view("u1"))


def test_outputs_are_made_where_none_are_given(route):
    framework, backend = route
    problem = Case(T=5, D=16).make("bfloat16")
    arrays = {key: to_framework(array, framework) for key, array in problem.items()}
    k, v = fkv.materialize(**arrays, backend=backend)
    assert type(k) is type(v) is type(arrays["kv"])
    assert k.device == v.device == arrays["kv"].device
    assert_right(problem, k, v)


def test_native_backend_is_the_default(framework):
    problem = Case(T=5, D=16).make()
    arrays = {key: to_framework(array, framework) for key, array in problem.items()}
    assert_right(problem, *fkv.materialize(**arrays))


def test_positional_arguments_are_in_sglang_order(framework):
    problem = Case(T=5, H=3, D=16, R=16).make()
    arrays = [to_framework(array, framework) for array in problem.values()]
    assert_right(problem, *fkv.materialize(*arrays, 3, 16, 16))


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 257])
def test_repeated_calls_agree_bit_for_bit(tokens, backend):
    problem = Case(T=tokens, L=1, H=2, D=16).make("bfloat16")
    arrays = {key: to_framework(array, BACKENDS[backend]) for key, array in problem.items()}
    first, *others = [fkv.materialize(**arrays, backend=backend) for _ in range(3)]
    assert_right(problem, *first)
    for other in others:
        for mine, its in zip(first, other, strict=True):
            np.testing.assert_array_equal(to_numpy(mine), to_numpy(its))


def test_one_kv_head_at_a_time_gives_the_same_bits(backend):
    """N-03: no head affects another."""
    from conftest import BACKENDS

    case = Case(T=70, L=1, H=5, D=128, R=64)
    problem = case.make("bfloat16")
    arrays = {key: to_framework(array, BACKENDS[backend]) for key, array in problem.items()}
    together = fkv.materialize(**arrays, backend=backend)
    halves = problem["kv"].reshape(case.T, 1, 2, case.H, case.D)
    for head in range(case.H):
        kv = np.ascontiguousarray(halves[:, :, :, head]).reshape(case.T, 1, -1)
        alone = fkv.materialize(
            **arrays | {"kv": to_framework(kv, BACKENDS[backend])}, backend=backend
        )
        for all_heads, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(to_numpy(all_heads)[:, :, head], to_numpy(one)[:, :, 0])


def test_warmup_runs_the_calls_to_come(route, monkeypatch):
    """The same dtypes and sizes; then what it compiled is there (test_gpu, test_faults_jax)."""
    framework, backend = route
    problem = Case(T=3, weight_dtype="bfloat16").make("bfloat16")
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    fkv.warmup(**side, num_kv_heads=3, total_ctx=[1, 3], backend=backend)
    with pytest.raises(ValueError, match=r"^`eps`: expected shape \[n_layers=2\], got \[5\] "):
        fkv.warmup(
            **side | {"eps": to_framework(np.ones(5, "float32"), framework)},
            num_kv_heads=3,
            total_ctx=[1],
            backend=backend,
        )
