"""The reported faults that need jax alone; see test_faults.py."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkv
from cases import Case, assert_right, to_framework, to_numpy

SMALL = Case(T=5, L=2, H=2, D=16, P=32)


@pytest.fixture
def problem():
    return SMALL.make()


@pytest.fixture
def arrays(problem):
    return {name: to_framework(array, "jax") for name, array in problem.items()}


def test_x_12_deleted_array(arrays):
    arrays["kv"].delete()
    message = (
        r"^`kv`: expected an array with its values in memory, got a deleted array "
        r"\(donated to an earlier call, or deleted\)$"
    )
    with pytest.raises(ValueError, match=message):
        fkv.materialize(**arrays)


def test_x_19_inside_jit(problem, arrays):
    assert_right(problem, *jax.jit(lambda arrays: fkv.materialize(**arrays))(arrays))
    # Some traced, some not.
    jitted = jax.jit(lambda kv: fkv.materialize(**arrays | {"kv": kv}))
    assert_right(problem, *jitted(arrays["kv"]))


def test_x_19_bad_shape_inside_jit(arrays):
    arrays["eps"] = jnp.float32(1e-6)
    message = r"^`eps`: expected shape \[n_layers=2\], got \[\] "
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda arrays: fkv.materialize(**arrays)).lower(arrays)


@pytest.mark.needs("torch")
def test_x_19_traced_arrays_cannot_go_to_triton(arrays):
    message = (
        r'^`kv`: expected an array with values for backend="triton", got a traced jax.Array '
        r'\(inside jax.jit use backend="pallas", or call outside of it\)'
    )
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda arrays: fkv.materialize(**arrays, backend="triton"))(arrays)


def test_j_03_j_05_one_kernel_function_many_lengths():
    for tokens in (2, 5, 3, 4, 1):
        problem = Case(T=tokens, L=1, D=16).make()
        arrays = {name: to_framework(array, "jax") for name, array in problem.items()}
        assert_right(problem, *fkv.materialize(**arrays))


def test_j_07_no_gradient(arrays):
    def loss(kv):
        return fkv.materialize(**arrays | {"kv": kv})[0].sum()

    message = r"^`kv`: expected no differentiation, got jax.grad or jax.jvp "
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(loss)(arrays["kv"])
    stopped = jax.grad(lambda kv: loss(jax.lax.stop_gradient(kv)) + kv.sum())(arrays["kv"])
    assert (stopped == 1).all()


def test_j_08_one_compilation_for_each_length():
    """Documented: pad T to a few sizes where it varies."""
    from fkv.pallas._launch import _compiled

    _compiled.cache_clear()
    for tokens in (1, 2, 3, 1, 2, 3):
        problem = Case(T=tokens, L=1, H=1, D=16).make()
        fkv.materialize(**{name: to_framework(a, "jax") for name, a in problem.items()})
    assert _compiled.cache_info().misses == 3


def test_j_08_nothing_compiles_after_a_warmup(arrays):
    from fkv.pallas._launch import _compiled

    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    _compiled.cache_clear()
    fkv.warmup(**side, num_kv_heads=2, total_ctx=[5, 6], dtype="float32")
    fkv.materialize(**arrays)
    assert _compiled.cache_info().misses == 2


@pytest.mark.parametrize("bad", [32, -1, -32, 2**31 - 1, -(2**31)])
def test_j_09_positions_outside_the_table_inside_jit(bad, problem, arrays):
    """NaN rows for that token, never the rows of another position."""
    problem["positions"][2] = bad
    arrays["positions"] = to_framework(problem["positions"], "jax")
    k, v = jax.jit(lambda arrays: fkv.materialize(**arrays))(arrays)
    assert_right(problem, k, v)
    assert np.isnan(to_numpy(k)[:, 2]).all()


def test_vmap(problem, arrays):
    """A batch of requests over one table, as the definition says."""
    batch = jnp.stack([arrays["kv"], arrays["kv"][::-1]])
    k, v = jax.vmap(lambda kv: fkv.materialize(**arrays | {"kv": kv}))(batch)
    for index in range(2):
        one = problem | {"kv": to_numpy(batch[index])}
        assert_right(one, k[index], v[index])


def test_x_09_j_09_jax_with_64_bits():
    """float64 is refused; int64 positions are right, and never cut to 32 bits."""
    code = (
        "import jax, fkv, numpy as np\n"
        "from cases import *\n"
        "problem = Case(T=4, D=16, P=8, positions_dtype='int64').make()\n"
        "arrays = {n: to_framework(a, 'jax') for n, a in problem.items()}\n"
        "assert str(arrays['positions'].dtype) == 'int64'\n"
        "assert_right(problem, *fkv.materialize(**arrays))\n"
        "for name in ('kv', 'k_norm_weight', 'eps', 'cos_sin_cache'):\n"
        "    try:\n"
        "        fkv.materialize(**arrays | {name: arrays[name].astype('float64')})\n"
        "    except ValueError as error:\n"
        "        assert f'`{name}`: expected dtype' in str(error) and 'got float64' in str(error)\n"
        "        print(name)\n"
        "for bad in (2**32 + 1, 3 - 2**32, -(2**63), 2**63 - 1):\n"
        "    problem['positions'][1] = bad\n"
        "    arrays['positions'] = to_framework(problem['positions'], 'jax')\n"
        "    k, v = jax.jit(lambda arrays: fkv.materialize(**arrays))(arrays)\n"
        "    assert_right(problem, k, v)\n"
        "    assert np.isnan(to_numpy(k)[:, 1]).all()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kv", "k_norm_weight", "eps", "cos_sin_cache"]


@pytest.mark.parametrize("name", ["kv", "k_norm_weight", "eps", "cos_sin_cache", "positions"])
def test_x_12_each_argument_deleted(name, arrays, backend):
    arrays[name].delete()
    with pytest.raises(ValueError, match=f"^`{name}`: expected an array with its values in memory"):
        fkv.materialize(**arrays, backend=backend)
