"""Drawn problems are right, drawn mistakes are refused in one sentence, and nothing else happens.

The strides, outputs and other things that only torch has are in test_properties_torch.py.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkv
from cases import DTYPES, Case, assert_right, nan_outputs, to_framework, to_numpy

INPUTS = ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions")
SIZES = {"num_kv_heads": "H", "head_dim": "D", "rotary_dim": "R"}
REFUSAL = rf"`({'|'.join(INPUTS)}|{'|'.join(SIZES)}|k_out|v_out|backend)`: expected .+, got .+"

dtypes = st.sampled_from([*DTYPES])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def any_geometries(draw):
    """(head_dim, rotary_dim), most of them for Triton alone."""
    half = draw(st.integers(1, 24))
    return 2 * half + draw(st.integers(0, 24)), 2 * half


@st.composite
def pallas_geometries(draw):
    half = 8 * draw(st.integers(1, 8))
    return 2 * half + 8 * draw(st.integers(0, 8)), 2 * half


geometries = any_geometries() | pallas_geometries()


@st.composite
def cases(draw, geometry=geometries, T=(0, 70), L=(0, 3)):
    head_dim, rotary_dim = draw(geometry)
    return Case(
        T=draw(st.integers(*T)),
        L=draw(st.integers(*L)),
        H=draw(st.integers(1, 9)),
        D=head_dim,
        R=rotary_dim,
        P=draw(st.integers(1, 40)),
        scale=draw(st.sampled_from([1.0, 1e-3, 300.0])),
        eps=tuple(draw(st.lists(st.sampled_from([1e-6, 0.0, 0.5]), min_size=1, max_size=3))),
        weight_dtype=draw(dtypes),
        table_dtype=draw(dtypes),
        positions_dtype=draw(st.sampled_from(["int32", "int64"])),
    )


def make(case, dtype, seed):
    """Its problem, with V of any bits: numbers, infinities, NaN of every payload."""
    problem = case.make(dtype, seed)
    v = problem["kv"].view(f"u{DTYPES[dtype].itemsize}")[..., case.H * case.D :]
    rng = np.random.default_rng(seed)
    v[...] = rng.integers(0, np.iinfo(v.dtype).max, v.shape, v.dtype, endpoint=True)
    return problem


def sizes_of(case, names=(*SIZES,), kind=int):
    return {name: kind(getattr(case, SIZES[name])) for name in names}


def refuse(arguments, *kinds, outputs=None):
    """The call is refused with one sentence, and its outputs are bitwise what they were.

    `outputs` stand for those among the arguments, where NumPy cannot look into these.
    """
    if outputs is None:
        outputs = [x for x in map(arguments.get, ("k_out", "v_out")) if hasattr(x, "data_ptr")]
    before = [to_numpy(out).tobytes() for out in outputs]
    with pytest.raises(kinds) as refusal:
        fkv.materialize(**arguments)
    assert refusal.type in kinds
    assert re.fullmatch(REFUSAL, str(refusal.value), re.DOTALL)
    assert [to_numpy(out).tobytes() for out in outputs] == before


def on_host(arrays):
    return "cpu" in str(arrays["kv"].device).lower()


@pytest.mark.needs("torch")
@settings(deadline=None, max_examples=50)
@given(
    case=cases(),
    dtype=dtypes,
    seed=seeds,
    sizes=st.sets(st.sampled_from([*SIZES])),
    kind=st.sampled_from([int, np.int64]),
)
def test_triton_is_right(framework, case, dtype, seed, sizes, kind):
    problem = make(case, dtype, seed)
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    arrays |= sizes_of(case, sizes, kind)
    assert_right(problem, *fkv.materialize(**arrays, backend="triton"))


@pytest.mark.needs("jax")
@settings(deadline=None, max_examples=16)
@given(case=cases(pallas_geometries(), T=(0, 40), L=(1, 2)), dtype=dtypes, seed=seeds)
def test_pallas_is_right(framework, case, dtype, seed):
    problem = make(case, dtype, seed)
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    assert_right(problem, *fkv.materialize(**arrays, backend="pallas"))


@pytest.mark.needs("jax")
@settings(deadline=None, max_examples=50)
@given(case=cases(any_geometries().filter(lambda g: g[1] // 2 % 8 or (g[0] - g[1]) % 8)))
def test_pallas_says_what_it_cannot_take(framework, case):
    problem = case.make()
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    arguments = arrays | nan_outputs(problem, framework) | {"backend": "pallas"}
    refuse(arguments, NotImplementedError)


@st.composite
def wrong_ranks(draw, arrays, **_):
    name = draw(st.sampled_from([*arrays]))
    shapes = st.lists(st.integers(0, 5), max_size=5).filter(lambda s: len(s) != arrays[name].ndim)
    return {name: np.zeros(draw(shapes), arrays[name].dtype)}


@st.composite
def wrong_shapes(draw, arrays, sizes, **_):
    """One dim off. The sizes are given, as without them the rest may well make a valid call."""
    name = draw(st.sampled_from([*arrays]))
    shape = list(arrays[name].shape)
    axis = draw(st.integers(0, len(shape) - 1))
    if (name, axis) == ("cos_sin_cache", 0):  # any number of rows is right, but none
        shape[0] = 0
    else:
        shape[axis] = draw(st.integers(0, 2 * shape[axis] + 2).filter(lambda n: n != shape[axis]))
    return sizes | {name: np.zeros(shape, arrays[name].dtype)}


@st.composite
def wrong_dtypes(draw, arrays, **_):
    name = draw(st.sampled_from([*arrays]))
    wrong = ["bool", "uint8", "int8", "int16", "complex64"]
    wrong += {"positions": [*DTYPES], "eps": ["bfloat16", "float16", "int32"]}.get(name, ["int32"])
    if name in ("k_out", "v_out"):
        wrong += [dtype for dtype in DTYPES if dtype != arrays[name].dtype.name]
    dtype = draw(st.sampled_from(wrong))
    return {name: np.zeros(arrays[name].shape, DTYPES.get(dtype, dtype))}


@st.composite
def wrong_kinds(draw, arrays, **_):
    """What is no array of torch or jax; a memoryview stands for NumPy's."""
    name = draw(st.sampled_from([*arrays]))
    kinds = [1, 1e-6, True, "cpu", b"", [0.0], (), {}, object(), np.float32(1), type(name)]
    kinds += [memoryview(arrays[name].tobytes())] + [None] * (name in INPUTS)
    return {name: draw(st.sampled_from(kinds))}


@st.composite
def wrong_sizes(draw, sizes, **_):
    """Another integer, or the right one as something else."""
    name = draw(st.sampled_from([*sizes]))
    right = sizes[name]
    integers = (st.integers(-2, 150) | st.integers()).filter(lambda n: n != right)
    others = st.sampled_from([bool(right), float(right), str(right), [right], np.float32(right)])
    return {name: draw(integers | others | st.floats() | st.text(max_size=3))}


@st.composite
def wrong_backends(draw, **_):
    return {"backend": draw(st.text() | st.integers() | st.just(["triton"]))}


mistakes = (wrong_ranks, wrong_shapes, wrong_dtypes, wrong_kinds, wrong_sizes, wrong_backends)


@pytest.mark.parametrize("mistake", mistakes, ids=[mistake.__name__ for mistake in mistakes])
@settings(deadline=None, max_examples=50)
@given(case=cases(), dtype=dtypes, seed=seeds, data=st.data())
def test_mistake_is_refused(mistake, route, case, dtype, seed, data):
    framework, backend = route
    problem = make(case, dtype, seed)
    out = np.full((case.L, case.T, case.H, case.D), np.nan, problem["kv"].dtype)
    outputs = {"k_out": out, "v_out": out}
    drawn = data.draw(mistake(arrays=problem | outputs, sizes=sizes_of(case)))
    given_arrays = problem | (outputs if framework == "torch" else {}) | drawn
    arguments = {
        name: to_framework(array, framework) if isinstance(array, np.ndarray) else array
        for name, array in given_arrays.items()
    }
    refuse({"backend": backend} | arguments, TypeError, ValueError)


@settings(deadline=None, max_examples=20)
@given(case=cases(T=(1, 70)), dtype=dtypes, seed=seeds, data=st.data())
def test_position_outside_the_table(route, case, dtype, seed, data):
    framework, backend = route
    problem = make(case, dtype, seed)
    int32 = np.iinfo("int32")
    outside = st.integers(case.P, int32.max) | st.integers(int32.min, -1)
    problem["positions"][data.draw(st.integers(0, case.T - 1))] = data.draw(outside)
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    arguments = arrays | nan_outputs(problem, framework) | {"backend": backend}
    if on_host(arrays):
        refuse(arguments, ValueError)
    elif backend == "triton" or not (case.R // 2 % 8 or (case.D - case.R) % 8):
        assert_right(problem, *fkv.materialize(**arguments))  # NaN in the rows of that token


@settings(deadline=None, max_examples=20)
@given(case=cases(L=(1, 3)), dtype=dtypes, seed=seeds, data=st.data())
def test_eps_out_of_range(route, case, dtype, seed, data):
    framework, backend = route
    problem = make(case, dtype, seed)
    wrong = st.floats(max_value=0, exclude_max=True, width=32) | st.sampled_from([np.nan, np.inf])
    problem["eps"][data.draw(st.integers(0, case.L - 1))] = data.draw(wrong)
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    if on_host(arrays):  # values on a GPU are not read back
        refuse(arrays | nan_outputs(problem, framework) | {"backend": backend}, ValueError)
