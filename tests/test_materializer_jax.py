"""KVMaterializer on jax: a pytree, pure, one jitted function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkv
from cases import DTYPES, Case, assert_cache_right, assert_right, to_numpy
from fkv._frameworks import is_on_host
from fkv._materializer import _jitted, _materialize

CASE = Case(T=5, L=2, H=2, D=16, P=32)
HIDDEN, FEATURES = 24, 3
HIGHEST = jax.lax.Precision.HIGHEST


def make(dtype="float32", seed=0, bias=False, target=False, **options):
    """A materializer, and the arrays of it in NumPy."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.normal(size=shape) * 0.3).astype(DTYPES[dtype])

    side = CASE.make(seed=seed)
    arrays = {name: side[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    arrays["kv_weight"] = normal(CASE.L, 2 * CASE.H * CASE.D, HIDDEN)
    if bias:
        arrays["bias"] = normal(CASE.L, 2 * CASE.H * CASE.D)
    if target:
        arrays["fc_weight"] = normal(HIDDEN, FEATURES * HIDDEN)
        arrays["hidden_norm_weight"] = 1 + normal(HIDDEN)
        options["hidden_norm_eps"] = 1e-5
    given = {name: jnp.asarray(array) for name, array in arrays.items()}
    return fkv.KVMaterializer.from_weights(**given, **options), arrays


def inputs(tokens=5, dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, HIDDEN)).astype(DTYPES[dtype]))
    return hidden, jnp.asarray(rng.integers(0, CASE.P, tokens).astype("int32"))


def assert_matches(m, arrays, hidden, positions, k, v):
    """K and V of kv as the materializer projects it, and that kv within its rounding."""
    kv = to_numpy(m.project(hidden))
    x, weight = np.asarray(hidden, np.float64), arrays["kv_weight"].astype(np.float64)
    exact, sizes = (np.einsum("th,lnh->tln", f(x), f(weight)) for f in (np.asarray, np.abs))
    if "bias" in arrays:
        bias = arrays["bias"].astype(np.float64)
        exact, sizes = exact + bias, sizes + np.abs(bias)
    # HIDDEN products and sums in float32; the dot and the bias are each rounded to the dtype.
    unit = float(jnp.finfo(hidden.dtype).eps) / 2
    assert (np.abs(kv - exact) <= ((HIDDEN + 1) * 2.0**-24 + 2 * unit + unit**2) * sizes).all()
    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    assert_right({"kv": kv, **side, "positions": to_numpy(positions)}, k, v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_right(dtype, bias):
    m, arrays = make(dtype, bias=bias)
    hidden, positions = inputs(dtype=dtype)
    before = jax.tree.map(np.asarray, m)
    k, v = m(hidden, positions)
    assert_matches(m, arrays, hidden, positions, k, v)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, m)
    assert all(jax.tree.leaves(same))


def test_it_passes_through_jit_as_an_argument():
    """One compilation for all materializers of one shape: the weights are no constants of it."""
    traces = []

    @jax.jit
    def call(m, hidden, positions):
        traces.append(1)
        k, v = m(hidden, positions)
        return k, v, m

    hidden, positions = inputs()
    for seed in (0, 1):
        m, arrays = make(seed=seed, target=True)
        k, v, back = call(m, hidden, positions)
        assert_matches(m, arrays, hidden, positions, k, v)
        assert isinstance(back, fkv.KVMaterializer)
        assert_matches(back, arrays, hidden, positions, *back(hidden, positions))
    assert len(traces) == 1
    call(make(seed=0)[0], hidden, positions)  # another structure
    assert len(traces) == 2


def test_projection_and_kernel_are_one_jitted_function():
    m, _ = make()
    hidden, positions = inputs()
    text = str(_jitted(_materialize).trace(m, hidden, positions).jaxpr)
    assert text.count("dot_general[") == 1  # one matrix product for all layers
    m(hidden, positions)
    compiled = _jitted(_materialize)._cache_size()
    m(*inputs(seed=2))
    make(seed=3)[0](hidden, positions)
    assert _jitted(_materialize)._cache_size() == compiled


@pytest.mark.parametrize("jitted", [False, True])
def test_write_cache(jitted):
    """Into new caches, also where jax.jit gets the materializer as an argument."""
    m, arrays = make()
    hidden, positions = inputs()
    positions = positions.at[1].set(-9)  # of the token that is skipped
    slots = jnp.asarray([3, -1, 0, 7, 4])
    before = [jnp.full((CASE.L, 8, CASE.H, CASE.D), x, "float32") for x in (7, 8)]
    write = fkv.KVMaterializer.write_cache
    k, v = (jax.jit(write) if jitted else write)(m, hidden, positions, *before, slots)
    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    problem = {"kv": to_numpy(m.project(hidden)), **side, "positions": to_numpy(positions)}
    problem |= {"k_cache": to_numpy(before[0]), "v_cache": to_numpy(before[1])}
    assert_cache_right(problem | {"slot_mapping": to_numpy(slots), "layout": "NHD"}, k, v)


def test_write_cache_looks_at_values_on_the_host():
    m, _ = make()
    hidden, positions = inputs()
    if is_on_host(positions):
        cache = jnp.zeros((CASE.L, 8, CASE.H, CASE.D))
        message = (
            "`slot_mapping`: expected slot < 8, got 8 at token 4 "
            "(the capacity of the caches; a negative slot skips its token)"
        )
        slots = jnp.asarray([3, -1, 0, 7, 8])
        refused(ValueError, message, m.write_cache, hidden, positions, cache, cache, slots)
        message = (
            f"`positions`: expected 0 <= position < {CASE.P}, got {CASE.P} at token 0 "
            "(the rows of cos_sin_cache)"
        )
        positions = positions.at[0].set(CASE.P)
        refused(ValueError, message, m.write_cache, hidden, positions, cache, cache, slots % 8)


def test_leaves_and_structure():
    m, arrays = make(bias=True, target=True)
    assert len(jax.tree.leaves(m)) == len(arrays)
    halves = jax.tree.map(lambda x: x / 2, m)
    np.testing.assert_array_equal(halves._weights.kv_weight * 2, arrays["kv_weight"])
    assert (m.n_layers, m.num_kv_heads, m.head_dim, m.rotary_dim) == (2, 2, 16, 16)
    assert jax.tree.structure(m) == jax.tree.structure(make(bias=True, target=True, seed=5)[0])
    assert jax.tree.structure(m) != jax.tree.structure(make(bias=True)[0])


def test_made_inside_of_jit():
    _, arrays = make()
    given = {name: jnp.asarray(array) for name, array in arrays.items()}
    hidden, positions = inputs()
    made = jax.jit(lambda given, *x: fkv.KVMaterializer.from_weights(**given)(*x))
    k, v = made(given, hidden, positions)
    assert_matches(make()[0], arrays, hidden, positions, k, v)


@pytest.mark.needs("torch")
def test_the_other_backend():
    m, arrays = make(backend="triton")
    hidden, positions = inputs()
    assert_matches(m, arrays, hidden, positions, *m(hidden, positions))
    with pytest.raises(TypeError, match=r'^`kv`: expected an array with values for backend="tri'):
        jax.jit(lambda m, *x: m(*x))(m, hidden, positions)


def test_no_tokens():
    m, _ = make()
    k, v = m(*inputs(0))
    assert k.shape == v.shape == (2, 0, 2, 16)


def test_project_takes_the_place_of_the_projection():
    """A function of the caller's, traced into the one jitted function."""
    m, arrays = make()
    hidden, positions = inputs()
    side = {name: m._weights._asdict()[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    weight = m._weights.kv_weight.reshape(-1, HIDDEN)
    own = fkv.KVMaterializer.from_weights(
        None,
        **side,
        num_kv_heads=2,
        project=lambda x: jnp.matmul(x, weight.T, precision=HIGHEST),
    )
    assert_matches(m, arrays, hidden, positions, *own(hidden, positions))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_project_target_hidden(dtype):
    m, arrays = make(dtype, target=True)
    rng = np.random.default_rng(2)
    target = rng.normal(size=(4, FEATURES * HIDDEN)).astype(DTYPES[dtype])
    hidden = m.project_target_hidden(jnp.asarray(target))
    assert hidden.dtype == dtype
    fc, norm = (arrays[n].astype(np.float64) for n in ("fc_weight", "hidden_norm_weight"))
    x = target.astype(np.float64) @ fc.T
    sizes = np.abs(target.astype(np.float64)) @ np.abs(fc.T)
    unit, width = float(jnp.finfo(dtype).eps) / 2, FEATURES * HIDDEN
    off = ((width + 1) * 2.0**-24 + unit) * sizes  # of the product: sums in float32, one rounding
    root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    exact = x / root * norm
    # The root moves by at most the root mean square of off; then float32, and one rounding.
    moved = np.sqrt(np.mean(off**2, axis=-1, keepdims=True)) / root
    float32 = ((HIDDEN + 3) / 2 + 6) * 2.0**-24
    noise = (off / root + np.abs(x) / root * moved) * np.abs(norm) / (1 - moved)
    noise += float32 * (np.abs(exact) + noise)
    bound = noise + unit * (np.abs(exact) + noise)
    assert (np.abs(np.asarray(hidden, np.float64) - exact) <= bound).all()
    assert_matches(m, arrays, hidden, inputs(4)[1], *m(hidden, inputs(4)[1]))


def test_positions_past_the_table():
    """An error where their values are on the host; while jax traces there are none."""
    m, _ = make()
    hidden, positions = inputs()
    if jax.default_backend() != "gpu":
        for bad in (32, -1):
            with pytest.raises(ValueError, match=rf"^`positions`: .* got {bad} at token 1 "):
                m(hidden, positions.at[1].set(bad))
    k, v = jax.jit(lambda m, *x: m(*x))(m, hidden, positions.at[1].set(32))
    assert np.isnan(k[:, 1]).all()
    assert np.isfinite(v).all()
    assert np.isfinite(np.delete(k, 1, axis=1)).all()


def refused(kind, message, function, *arguments, **options):
    # jax may have a note to add.
    with pytest.raises(kind, match=rf"^{re.escape(message)}(\n|$)"):
        function(*arguments, **options)


def test_what_is_for_torch():
    m, _ = make()
    hidden, positions = inputs()
    refused(
        TypeError,
        "`write_layer_kv`: expected a materializer of torch tensors, got one of jax arrays "
        "(k, v = m(ctx_hidden, positions))",
        m.materialize,
        hidden,
        positions,
        print,
    )
    refused(
        TypeError,
        "`layers`: expected a materializer of torch tensors, got one of jax arrays "
        "(jax arrays are immutable: KVMaterializer.from_weights with the new ones)",
        m.refresh,
        [],
    )


def test_inputs_that_are_refused():
    """The same inside of jit, while jax traces."""
    m, _ = make()
    hidden, positions = inputs()
    for call in (m, jax.jit(lambda *x: m(*x))):
        refused(
            ValueError,
            "`ctx_hidden`: expected shape [total_ctx, hidden=24], got [5, 20]",
            call,
            hidden[:, :20],
            positions,
        )
        refused(
            ValueError,
            "`ctx_hidden`: expected dtype float32, got bfloat16 (the dtype of the weights)",
            call,
            hidden.astype("bfloat16"),
            positions,
        )
        refused(
            ValueError,
            "`positions`: expected shape [total_ctx=5], got [4] (one row of the table a token)",
            call,
            hidden,
            positions[:4],
        )
    refused(
        TypeError,
        "`positions`: expected a jax.Array as the weights are, got numpy.ndarray",
        m,
        hidden,
        np.zeros(5, "int32"),
    )


def test_weights_that_are_refused():
    _, arrays = make()
    given = {name: jnp.asarray(array) for name, array in arrays.items()}
    refused(
        TypeError,
        "`eps`: expected a jax.Array as `k_norm_weight` is, got numpy.ndarray",
        fkv.KVMaterializer.from_weights,
        **given | {"eps": arrays["eps"]},
    )
    refused(
        ValueError,
        "`eps`: expected finite values >= 0, got nan at layer 0",
        fkv.KVMaterializer.from_weights,
        **given | {"eps": given["eps"] * np.nan},
    )
    refused(
        ValueError,
        "`max_position_hint`: expected at most 32, got 33 (the rows of cos_sin_cache)",
        fkv.KVMaterializer.from_weights,
        **given,
        max_position_hint=33,
    )
    refused(
        NotImplementedError,
        "`rotary_dim`: expected rotary_dim/2 and head_dim - rotary_dim to be multiples of 8 "
        'for backend="pallas", got rotary_dim=8 of head_dim=16 '
        '(backend="triton" takes any even rotary_dim)',
        fkv.KVMaterializer.from_weights,
        **given | {"cos_sin_cache": given["cos_sin_cache"][:, :8]},
    )
