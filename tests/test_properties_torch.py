"""What only torch has, drawn: strides, outputs, overlaps. Right or refused, and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fkv
from cases import Case, assert_right, nan_outputs, to_framework, to_numpy
from test_properties import INPUTS, cases, dtypes, on_host, pallas_geometries, refuse

OUTPUTS = ("k_out", "v_out")
SMALL = st.integers(0, 3)
ON_GPU = torch.cuda.is_available()


@st.composite
def strides(draw, shape, row=False, shared=False):
    """Strides for `shape`, its dims in any order, with gaps between them.

    A `row` stays contiguous in its last dim. Where they may be `shared`, as those of an input,
    one address can serve several elements.
    """
    drawn, step = [1] * len(shape), 1
    dims = range(len(shape))
    if row:
        dims, step = dims[:-1], max(1, shape[-1])
    for dim in draw(st.permutations(dims)):
        drawn[dim] = draw(st.sampled_from([step, step + 3, 2 * step, *[0, 1] * shared]))
        step = max(step, drawn[dim] * shape[dim])
    return tuple(drawn)


@st.composite
def contiguous_strides(draw, shape):
    """Those of a contiguous tensor; in a dim of one element any stride will do."""
    packed = torch.empty(shape, device="meta").stride()
    any_will_do = [n == 1 or 0 in shape for n in shape]
    return tuple(draw(SMALL) if free else s for free, s in zip(any_will_do, packed, strict=True))


class Memory:
    """Buffers with tensors in them, to see that a call writes its outputs and nothing else."""

    def __init__(self):
        self.buffers, self.before = [], []

    def lay(self, array, shape, strides, offset=0):
        """A view of a new buffer, which repeats the values of `array`."""
        size = 0 if 0 in shape else 1 + np.dot(np.subtract(shape, 1), strides)
        self.before.append(np.resize(array, offset + size))
        self.buffers.append(to_framework(self.before[-1], "torch"))
        return self.buffers[-1].as_strided(shape, strides, offset)

    def check(self, *outputs):
        for buffer, before in zip(self.buffers, self.before, strict=True):
            same = to_numpy(buffer).view("u1") == before.view("u1")
            same = same.reshape(len(before), before.itemsize).all(axis=1)
            for out in outputs:
                if out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                    same[addresses(out)] = True
            assert same.all(), f"{np.count_nonzero(~same)} elements outside the outputs changed"


def addresses(view):
    """The places of its elements in its buffer."""
    offset = view.storage_offset()
    grid = np.indices(view.shape, sparse=True)
    return sum((i * s for i, s in zip(grid, view.stride(), strict=True)), offset).ravel()


def draw_outputs(data, memory, problem, shape):
    """None, one or both outputs, each in a buffer of its own or as a part of a packed one."""
    nan = np.full(1, np.nan, problem["kv"].dtype)
    if data.draw(st.booleans(), "packed"):
        L, T, H, D = shape
        both = (L, T, H, 2, D)
        packed = memory.lay(nan, both, data.draw(strides(both, row=True), "strides of both"))
        views = packed.unbind(3)
    else:
        drawn = [data.draw(strides(shape, row=True), f"strides of {name}") for name in OUTPUTS]
        views = [memory.lay(nan, shape, drawn[i], data.draw(SMALL, "offset")) for i in range(2)]
    names = data.draw(st.sets(st.sampled_from(OUTPUTS)), "outputs")
    return {name: view for name, view in zip(OUTPUTS, views, strict=True) if name in names}


def check_result(memory, arguments, outputs, problem, backend):
    results = fkv.materialize(**arguments, **outputs, backend=backend)
    assert_right(problem, *results)
    for name, result in zip(OUTPUTS, results, strict=True):
        assert result is outputs.get(name, result)
    memory.check(*outputs.values())


@settings(deadline=None, max_examples=60)
@given(case=cases(), dtype=dtypes, data=st.data())
def test_any_strides_on_triton(case, dtype, data):
    memory, arguments = Memory(), {}
    for name, array in case.make(dtype).items():
        drawn = data.draw(strides(array.shape, row=name == "kv", shared=True), name)
        arguments[name] = memory.lay(array, array.shape, drawn, data.draw(SMALL, "offset"))
    problem = {name: to_numpy(view).copy() for name, view in arguments.items()}
    outputs = draw_outputs(data, memory, problem, (case.L, case.T, case.H, case.D))
    check_result(memory, arguments, outputs, problem, "triton")


@pytest.mark.needs("jax")
@settings(deadline=None, max_examples=16)
@given(case=cases(pallas_geometries(), T=(0, 40), L=(0, 2)), dtype=dtypes, data=st.data())
def test_any_strides_on_pallas(case, dtype, data):
    """Inputs must be contiguous, and aligned on a GPU; outputs need not."""
    memory, arguments = Memory(), {}
    strided = data.draw(st.none() | st.sampled_from(INPUTS), "strided")
    for name, array in case.make(dtype).items():
        drawn = strides(array.shape, row=name == "kv", shared=True)
        drawn = data.draw(drawn if name == strided else contiguous_strides(array.shape), name)
        offset = data.draw(SMALL, "offset") if name == strided or not ON_GPU else 0
        arguments[name] = memory.lay(array, array.shape, drawn, offset)
    problem = {name: to_numpy(view).copy() for name, view in arguments.items()}
    outputs = draw_outputs(data, memory, problem, (case.L, case.T, case.H, case.D))
    aligned = [view.data_ptr() % 256 == 0 or not view.is_cuda for view in arguments.values()]
    aligned[-1] |= arguments["positions"].dtype == torch.int64  # it is converted
    if all(view.is_contiguous() for view in arguments.values()) and all(aligned):
        check_result(memory, arguments, outputs, problem, "pallas")
    else:
        refuse(arguments | outputs | {"backend": "pallas"}, ValueError)
        memory.check()


@settings(deadline=None, max_examples=100)
@given(
    T=st.integers(0, 6),
    L=st.integers(1, 3),
    H=st.integers(1, 3),
    D=st.integers(2, 9),
    data=st.data(),
)
def test_overlap(T, L, H, D, data):
    """All in one buffer, wherever: inputs may overlap each other, outputs nothing."""
    case = Case(T=T, L=L, H=H, D=D, R=2, P=5)
    problem = case.make()
    shapes = {name: array.shape for name, array in problem.items() if name != "positions"}
    shapes |= dict.fromkeys(OUTPUTS, (L, T, H, D))
    drawn, end = {}, 0
    for name, shape in shapes.items():
        layout = strides(shape, row=name in ("kv", *OUTPUTS), shared=name in INPUTS)
        offset = data.draw(st.just(end) | st.integers(0, end), f"offset of {name}")
        drawn[name] = data.draw(layout, f"strides of {name}"), offset
        end = max(end, offset + 1 + np.dot(np.subtract(shape, 1).clip(0), drawn[name][0]))
    memory = Memory()
    buffer = memory.lay(np.abs(problem["kv"]) if T else np.float32(1), (end,), (1,))
    views = {name: buffer.as_strided(shapes[name], *drawn[name]) for name in shapes}
    arguments = {"positions": to_framework(problem["positions"], "torch")} | views
    problem |= {name: to_numpy(views[name]).copy() for name in shapes if name in INPUTS}
    outputs = {name: arguments.pop(name) for name in OUTPUTS}

    used = [addresses(view) for view in views.values()]
    k, v = used[-2:]
    if np.isin(np.append(k, v), np.concatenate(used[:-2])).any() or np.isin(k, v).any():
        refuse(arguments | outputs, ValueError)
        memory.check()
    else:
        check_result(memory, arguments, outputs, problem, "triton")


# What can be wrong with a tensor: where, and how it is made from a right one.
EVERYWHERE = (*INPUTS, *OUTPUTS)
MISTAKES = {
    "float64": (EVERYWHERE, lambda x: x.double()),
    "float8": (EVERYWHERE, lambda x: x.to(torch.float8_e4m3fn)),
    "conjugate": (EVERYWHERE, lambda x: x.to(torch.complex64).conj()),
    "negative_view": (EVERYWHERE, torch._neg_view),
    "sparse": (EVERYWHERE, torch.Tensor.to_sparse),
    "meta": (EVERYWHERE, lambda x: x.to("meta")),
    "numpy": (EVERYWHERE, to_numpy),
    "jax": (EVERYWHERE, lambda x: to_framework(to_numpy(x), "jax")),
    "gradient": (("kv", *OUTPUTS), torch.Tensor.requires_grad_),
    "strided_row": (("kv", *OUTPUTS), lambda x: torch.stack([x, x], dim=-1)[..., 0]),
    "expanded": (OUTPUTS, lambda x: x[:, :1].expand_as(x)),
    "too_close": (OUTPUTS, lambda x: x.as_strided(x.shape, (1, *x.stride()[1:]))),
}
NEEDS_JAX = pytest.param("jax", marks=pytest.mark.needs("jax"))


@pytest.mark.parametrize("mistake", [NEEDS_JAX if m == "jax" else m for m in MISTAKES])
@settings(deadline=None, max_examples=30)
@given(case=cases(T=(2, 70), L=(2, 3)), dtype=dtypes, data=st.data())
def test_mistake_is_refused(mistake, backend, case, dtype, data):
    problem = case.make(dtype)
    outputs = nan_outputs(problem, "torch")
    arguments = {name: to_framework(array, "torch") for name, array in problem.items()} | outputs
    where, make = MISTAKES[mistake]
    name = data.draw(st.sampled_from(where))
    arguments |= {name: make(arguments[name]), "backend": backend}
    refuse(arguments, TypeError, ValueError, outputs=outputs.values())


@settings(deadline=None, max_examples=30)
@given(case=cases(pallas_geometries(), T=(1, 70)), dtype=dtypes, data=st.data())
def test_position_past_32_bits(backend, case, dtype, data):
    """Some of these would be a row of the table if only their low 32 bits were looked at."""
    problem = case.make(dtype)
    problem["positions"] = problem["positions"].astype("int64")
    token = data.draw(st.integers(0, case.T - 1))
    problem["positions"][token] += 2**32 * data.draw(st.sampled_from([1, -1, 2, 2**30, -(2**31)]))
    arguments = {name: to_framework(array, "torch") for name, array in problem.items()}
    arguments |= nan_outputs(problem, "torch") | {"backend": backend}
    if on_host(arguments):
        refuse(arguments, ValueError)
    else:
        assert_right(problem, *fkv.materialize(**arguments))  # NaN in the rows of that token
