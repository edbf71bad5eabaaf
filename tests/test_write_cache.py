"""write_cache against the reference, which writes into copies of the caches."""

import functools
import importlib

import numpy as np
import pytest

import fkv
from cases import (
    CACHE_CASES,
    CACHE_DTYPES,
    DTYPES,
    CacheCase,
    Case,
    assert_cache_right,
    lay,
    to_framework,
    to_numpy,
    to_stack,
)
from conftest import BACKENDS, _mode, routes

CACHES = ("k_cache", "v_cache")
FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # dtype -> the largest value
# An interpreted call of Pallas takes two seconds. These have all that its kernel tells apart.
ON_PALLAS = {
    "jax": ("flat", "one_window", "heads_first", "e4m3", "e4m3_heads_first", "e5m2"),
    "torch": ("flat", "e4m3", "heads_first"),
}


def pytest_generate_tests(metafunc):
    if "combination" in metafunc.fixturenames:
        found = [
            (name, route)
            for route in routes(metafunc.config)
            for name, case in CACHE_CASES.items()
            if route[1] == "triton"
            or name in ON_PALLAS[route[0]]
            or not (case.T and case.L and case.pallas)
            or _mode("pallas") == "compiled"
        ]
        ids = [f"{'->'.join(route)}-{name}" for name, route in found]
        metafunc.parametrize("combination", found, ids=ids)


def few(backend, number):
    """That many where a call takes seconds, else all."""
    return number if _mode(backend) == "interpreted" and backend == "pallas" else None


class Guarded:
    """torch tensors inside of larger ones, to see that a call leaves what surrounds them."""

    def __init__(self):
        self.buffers = []

    def lay(self, array, pad=1024):
        """The NumPy array as a tensor between two guard bands of that many elements."""
        around = np.resize(np.arange(1, 100).astype(array.dtype), pad)
        whole = to_framework(np.concatenate([around, array.ravel(), around]), "torch")
        self.buffers.append((whole, around))
        return whole[pad : pad + array.size].view(array.shape)

    def check(self):
        for whole, around in self.buffers:
            bits = to_numpy(whole).view("u1")
            size = around.nbytes
            np.testing.assert_array_equal(bits[:size], around.view("u1"))
            np.testing.assert_array_equal(bits[len(bits) - size :], around.view("u1"))


def write(problem, route, *, as_sequence=False):
    """Call it, and see to all that holds of every call; the new caches."""
    framework, backend = route
    arguments, guarded = lay(problem, framework), Guarded()
    for name in CACHES:
        if as_sequence:
            layers = problem[name]
            arguments[name] = [
                guarded.lay(x) if framework == "torch" else to_framework(x, framework)
                for x in layers
            ]
        elif framework == "torch":
            arguments[name] = guarded.lay(problem[name])
    k, v = fkv.write_cache(**arguments, backend=backend)
    guarded.check()
    if framework == "torch":
        assert k is arguments["k_cache"]
        assert v is arguments["v_cache"]
    else:
        assert type(k) is type(arguments["k_cache"])
    for name, before in problem.items():  # bit for bit; jax's caches are inputs too
        if isinstance(before, np.ndarray) and (framework == "jax" or name not in CACHES):
            after = to_stack(arguments[name])
            before = before.astype(after.dtype)  # jax narrows integers
            np.testing.assert_array_equal(after.view("u1"), before.view("u1"))
    return k, v


def write_unchecked(problem, backend):
    """The backend's own write, below the checks of values, which would refuse on the host."""
    from fkv._frameworks import FRAMEWORKS, cache_spec_of
    from fkv._spec import cache_arguments

    home = next(f for f in FRAMEWORKS if f.name == BACKENDS[backend])
    arguments = cache_arguments(None, None)
    given = lay(problem, home.name)
    arrays = [given.get(name) for name in arguments.names]
    signature = home.signature(arrays, arguments)
    spec = cache_spec_of(home, arguments, signature, problem["layout"], None, None, None)
    return importlib.import_module(f"fkv.{backend}").write(spec, *arrays)


def test_right(combination, record_error):
    name, route = combination
    problem = CACHE_CASES[name].make()
    if route[1] == "pallas" and not CACHE_CASES[name].pallas:
        arguments = lay(problem, route[0])
        with pytest.raises(NotImplementedError, match='backend="triton"'):
            fkv.write_cache(**arguments, backend="pallas")
        for cache in CACHES:
            np.testing.assert_array_equal(
                to_numpy(arguments[cache]).view("u1"), problem[cache].view("u1")
            )
        return
    record_error(route, assert_cache_right(problem, *write(problem, route)))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, cache_dtype):
    """D-07: converted, not copied, with one rounding; bit for bit where the dtypes agree."""
    scaled = "kv" if cache_dtype in FLOAT8 else ""
    case = CacheCase(dtype=dtype, cache_dtype=cache_dtype, scaled=scaled, page_size=4)
    problem = case.make()
    assert_cache_right(problem, *write(problem, ("torch", "triton")))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("positions", ["int32", "int64"])
@pytest.mark.parametrize("slots", ["int32", "int64"])
@pytest.mark.parametrize("window", [0, 7])
def test_p_03_integers(positions, slots, window):
    """Each pair gives the same bits."""
    case = CacheCase(positions_dtype=positions, slots_dtype=slots, lens_dtype=slots, window=window)
    problem = case.make()
    caches = write(problem, ("torch", "triton"))
    assert_cache_right(problem, *caches)
    same = write(CacheCase(slots_dtype="int32", window=window).make(), ("torch", "triton"))
    for mine, its in zip(caches, same, strict=True):
        np.testing.assert_array_equal(to_numpy(mine).view("u1"), to_numpy(its).view("u1"))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["flat", "pages", "heads_first", "e4m3"])
def test_an_array_a_layer(name, framework):
    problem = CACHE_CASES[name].make()
    assert_cache_right(problem, *write(problem, (framework, "triton"), as_sequence=True))


@pytest.mark.needs("torch")
def test_a_tuple_of_layers_that_are_not_aligned():
    """One array starts 2 bytes past a multiple of 16, so no store may be wider."""
    problem = CACHE_CASES["flat"].make()
    arguments, guarded = lay(problem, "torch"), Guarded()
    for name in CACHES:
        arguments[name] = tuple(guarded.lay(x, 64 + (i == 1)) for i, x in enumerate(problem[name]))
    assert arguments["k_cache"][0].data_ptr() % 16 == 0
    assert arguments["k_cache"][1].data_ptr() % 16 == 2
    k, v = fkv.write_cache(**arguments)
    assert k is arguments["k_cache"]
    assert v is arguments["v_cache"]
    assert_cache_right(problem, k, v)
    guarded.check()


# name -> layout, and the axis of one buffer that tells K from V
PACKED = {
    "halves_of_all": ("HND", 0),
    "halves_of_a_layer": ("NHD", 1),
    "halves_of_a_page": ("NHD", 2),
    "halves_of_a_page_heads_first": ("HND", 2),
    "halves_of_a_row": ("NHD", 4),
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("packing", PACKED)
def test_m_04_halves_of_one_packed_buffer(packing, cache_dtype):
    """Addresses come from the strides: each half gets its own, and nothing else changes."""
    layout, axis = PACKED[packing]
    case = CacheCase(page_size=4, layout=layout, by_layer=True, cache_dtype=cache_dtype)
    problem, guarded = case.make(), Guarded()
    buffer = guarded.lay(np.stack([problem[name] for name in CACHES], axis))
    views = dict(zip(CACHES, buffer.unbind(axis), strict=True))
    assert_cache_right(problem, *fkv.write_cache(**lay(problem, "torch") | views))
    guarded.check()


@pytest.mark.needs("torch")
def test_m_04_rows_of_k_and_v_in_one_wide_row():
    """vLLM's [pages, heads, page_size, 2*D] seen as tokens before heads."""
    problem = CacheCase(T=2, L=2, H=2, D=16, page_size=4).make()
    problem |= {name: np.full((2, 3, 4, 2, 16), 7, "float32") for name in CACHES}
    problem |= {"slot_mapping": np.int64([6, 9])}
    wide = to_framework(np.full((2, 3, 2, 4, 32), 7, "float32"), "torch")
    halves = wide.transpose(2, 3).split(16, dim=-1)
    assert_cache_right(
        problem, *fkv.write_cache(**lay(problem, "torch") | dict(zip(CACHES, halves, strict=True)))
    )
    changed = np.argwhere((to_numpy(wide) != 7).any(axis=(0, 2, 4)))
    np.testing.assert_array_equal(changed, [[1, 2], [2, 1]])  # P-05: page, then offset


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["windows", "e4m3", "e5m2", "heads_first"])
def test_strided_inputs(name):
    """Slot maps, counts and scales that are columns of something wider."""
    problem = CACHE_CASES[name].make()
    arguments = lay(problem, "torch")
    for argument in ("slot_mapping", "commit_lens", "k_scale", "v_scale", "positions"):
        if argument in arguments:
            array = arguments[argument]
            wide = array.new_full((*array.shape[:-1], 3 * array.shape[-1]), 77)
            wide[..., 1::3] = array
            arguments[argument] = wide[..., 1::3]
            assert arguments[argument].stride(-1) == 3
    assert_cache_right(problem, *fkv.write_cache(**arguments))
    if name == "heads_first":  # maps that lie token by token
        arguments = lay(problem, "torch")
        arguments["slot_mapping"] = arguments["slot_mapping"].t().contiguous().t()
        assert_cache_right(problem, *fkv.write_cache(**arguments))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_p_07_addresses_past_32_bits(axis):
    """Layers, pages or tokens 2**30 elements apart, in memory that is not touched."""
    import torch

    problem = CacheCase(T=3, L=3, H=2, D=16, page_size=3).make()
    problem |= {name: problem[name][:, :3] for name in CACHES}
    problem |= {"slot_mapping": np.int64([8, 0, 4])}
    far = to_framework(np.zeros(1), "torch").new_empty(2 * 2**30 + 1000, dtype=torch.bfloat16)
    for name in CACHES:
        arguments = lay(problem, "torch")
        strides = list(arguments[name].stride())
        strides[axis] = 2**30
        packed = arguments[name]
        arguments[name] = far.as_strided(packed.shape, strides).copy_(packed)
        assert_cache_right(problem, *fkv.write_cache(**arguments))


def test_d_11_d_13_p_01_p_06_skipped_tokens(backend):
    """Neither position nor kv of a skipped token is used, and slot 0 is ordinary."""
    case = CacheCase(T=6, H=2, page_size=4, slots_dtype="int32")
    problem = case.make()
    problem |= Case(T=6, H=2).make("bfloat16")
    problem["kv"][[1, 3, 4]] = np.float32([np.nan, np.inf, -np.inf])[:, None, None]
    problem["positions"][:] = (3, 2**31 - 1, 0, -7, -(2**31), 5)
    padded = ([-1, -1, 0, -4, -(2**31), 5], [4, -1, 0, -1, -1, 1], [-1] * 6)
    for slots in padded[: few(backend, 1)]:
        problem["slot_mapping"] = np.int32(slots)
        k, v = write(problem, (BACKENDS[backend], backend))
        assert_cache_right(problem, k, v)
        for cache in (k, v):
            assert np.isfinite(to_numpy(cache).astype("f4")).all()


def test_one_scale(backend):
    """A scale that is None is 1."""
    left_out = ("k_scale", "v_scale")
    for name in left_out[: few(backend, 1)]:
        problem = CacheCase(T=9, H=2, cache_dtype="float8_e4m3fn", scaled="kv").make()
        del problem[name]
        caches = write(problem, (BACKENDS[backend], backend))
        assert_cache_right(problem, *caches)
        if backend == "triton":
            ones = write(problem | {name: np.ones(2, "f4")}, ("torch", "triton"))
            for mine, its in zip(caches, ones, strict=True):
                np.testing.assert_array_equal(to_numpy(mine).view("u1"), to_numpy(its).view("u1"))


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_x_10_k_is_clamped_and_nan_is_kept(cache_dtype, backend):
    """Scales as small and as large as they can be; all NaN is one byte."""
    problem = CacheCase(T=9, H=2, cache_dtype=cache_dtype, scaled="kv").make()
    problem |= Case(T=9, H=2).make("bfloat16") | {"slot_mapping": np.arange(9)}
    problem["k_scale"][:], problem["v_scale"][:] = (2e-38, 3e38), (3e38, 2e-38)
    problem["kv"][1, 0, 3], problem["kv"][2, 0, -1] = np.nan, -np.inf
    k, v = write(problem, (BACKENDS[backend], backend))
    assert_cache_right(problem, k, v)
    k, v = to_numpy(k), to_numpy(v)
    assert (k[0, 1, 0].view("u1") == 0x7F).all()
    assert np.mean(np.abs(k[0, 2].astype("f4")) == FLOAT8[cache_dtype]) > 0.9
    assert not k[1, 2].astype("f4").any()
    assert v[0, 2, -1, -1].astype("f4") == -FLOAT8[cache_dtype]


def test_j_10_values_that_are_not_looked_at(backend):
    """As on a GPU: a slot past the capacity is not written, wherever it would come to lie, and a
    scale that is none, or a position outside of the table, makes NaN.
    """
    scales = (np.nan, np.inf, 0, -1, -np.inf)
    integers = "int64" if backend == "triton" else "int32"
    case = CacheCase(
        *(21, 2, 2),
        cache_dtype="float8_e4m3fn",
        scaled="kv",
        page_size=4,
        layout="HND",
        slots_dtype=integers,
    )
    for bad in scales[: few(backend, 1)]:
        problem = case.make()
        slots, past = problem["slot_mapping"], problem["k_cache"].shape[1] * 4
        slots[4], slots[7], slots[14] = past, past + 5, 2**31 - 1
        if integers == "int64":  # the low 32 bits of these are slots
            slots[5], slots[8], slots[11] = 2**32 + 3, -(2**32) + 4, 2**63 - 1
        problem["positions"][1] = case.P
        problem["k_scale"][1] = problem["v_scale"][0] = bad
        k, v = write_traced(problem) if backend == "pallas" else write_unchecked(problem, backend)
        assert_cache_right(problem, k, v)
        k, v = to_numpy(k).astype("f4"), to_numpy(v).astype("f4")
        assert np.isnan(k[0, 0, :, 0]).all()  # token 1 has slot 0
        assert np.isnan(k[1, -1, :, -1]).all()
        assert np.isnan(v[0, -1, :, -1]).all()
        assert not np.isnan(v[1]).any()


def write_traced(problem):
    """In jax.jit, where no value is looked at."""
    import jax

    arrays = lay(problem, "jax")
    layout = arrays.pop("layout")
    return jax.jit(functools.partial(fkv.write_cache, layout=layout))(**arrays)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_m_13_one_token_of_those_with_one_slot(layout):
    """Of each head, K and V are the rows of one token."""
    problem = CacheCase(T=150, L=2, H=2, D=64, page_size=4, layout=layout).make()
    problem |= Case(T=150, H=2).make("bfloat16")
    problem["slot_mapping"] = np.resize([2, 2, 9, 2, -1], 150)
    k, v = write(problem, ("torch", "triton"))
    assert_one_token_each(problem, k, v)


def assert_one_token_each(problem, k, v):
    """Each head of each slot is right for one of the tokens that have it; the rest is as it was."""
    k, v, slots = to_numpy(k), to_numpy(v), problem["slot_mapping"]
    inputs = ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions")
    inputs = {name: problem[name] for name in inputs}
    exact, exact_v = fkv.reference.materialize(**inputs)
    bound = fkv.reference.error_bound(**inputs, dtype=k.dtype.name)
    if problem["layout"] == "HND":
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
    L, N, P, H, D = k.shape
    k, v = k.reshape(L, N * P, H, D), v.reshape(L, N * P, H, D)
    for slot in set(slots[slots >= 0].tolist()):
        tokens = np.flatnonzero(slots == slot)
        near = np.abs(k[:, None, slot].astype("f8") - exact[:, tokens]) <= bound[:, tokens]
        assert near.all(-1).any(1).all(), f"K of slot {slot} is no token's"
        same = (v[:, None, slot] == exact_v[:, tokens]).all(-1)
        assert same.any(1).all(), f"V of slot {slot} is no token's"
    others = np.setdiff1d(np.arange(N * P), slots)
    for name, cache in (("k_cache", k), ("v_cache", v)):
        before = problem[name] if problem["layout"] == "NHD" else problem[name].swapaxes(2, 3)
        before = before.reshape(L, N * P, H, D)
        np.testing.assert_array_equal(cache[:, others].view("u2"), before[:, others].view("u2"))


@pytest.mark.needs("torch")
def test_strides_that_are_never_taken():
    """Layers with one head may differ in its stride."""
    problem = CacheCase(T=4, L=2, H=1, D=16, page_size=4).make()
    arguments = lay(problem, "torch")
    for name in CACHES:
        first, second = arguments[name].unbind()
        arguments[name] = [first, second.as_strided(second.shape, (64, 16, 1, 1))]
    assert_cache_right(problem, *fkv.write_cache(**arguments))


def test_empty_windows(framework):
    """Rows without columns are no tokens."""
    problem = CacheCase(T=0, H=2).make()
    problem |= {"slot_mapping": np.zeros((3, 0), "int32"), "commit_lens": np.zeros(3, "int32")}
    assert_cache_right(problem, *fkv.write_cache(**lay(problem, framework)))


def test_native_backend_and_positional_arguments(framework):
    problem = CacheCase(T=5, L=1, H=2).make()
    *arrays, layout = lay(problem, framework).values()
    assert layout == "NHD"
    assert_cache_right(problem, *fkv.write_cache(*arrays[:5], *arrays[5:], 2, 64, 64))


def all_of_v(dtype, cache_dtype):
    """Every value of `dtype` as V, in two layers, and a float8 cache with scales 1 and 0.37."""
    case = CacheCase(T=128, L=2, H=4, D=128, dtype=dtype, cache_dtype=cache_dtype)
    problem = case.make()
    values = np.arange(2**16, dtype="uint16").view(CACHE_DTYPES[dtype]).reshape(128, -1)
    problem["kv"][:] = 1
    problem["kv"][:, :, 512:] = values[:, None]
    problem["slot_mapping"] = np.arange(128, dtype="int32")[::-1].copy()
    problem["positions"][:] = 0
    problem["v_scale"] = np.float32([1, 0.37])
    return problem, values


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_x_10_every_value_of_v(cache_dtype, backend):
    """Same bytes on both backends: clamped, NaN kept, to nearest even, subnormals and all."""
    dtypes = ("bfloat16", "float16") if "e4m3" in cache_dtype else ("float16", "bfloat16")
    for dtype in dtypes[: few(backend, 1)]:
        problem, values = all_of_v(dtype, cache_dtype)
        k, v = write(problem, (BACKENDS[backend], backend))
        got = to_numpy(v)[:, 127::-1].view("u1").reshape(2, *values.shape)
        for layer, scale in enumerate(problem["v_scale"]):
            with np.errstate(invalid="ignore", over="ignore"):
                expected = nearest(values.astype("f4") / scale, cache_dtype)
            np.testing.assert_array_equal(got[layer], expected)
        assert_cache_right(problem, k, v)


def nearest(values, dtype):
    """The bytes of the float8 values nearest to float32 `values`, by looking at all of them."""
    table = np.arange(128, dtype="u1").view(CACHE_DTYPES[dtype]).astype("f8")
    table = table[np.isfinite(table)]  # not negative, ascending: the byte is the index
    size = np.minimum(np.abs(values.astype("f8")), table[-1])
    above = np.searchsorted(table, size).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    is_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    found = np.where(is_high, above, above - 1) | np.signbit(values) << 7
    return np.where(np.isnan(values), 0x7F, found).astype("u1")
