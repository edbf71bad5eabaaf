"""Faults that people reported of kernels that do this job, each as a small input.

The letters are the report's kind: N numbers, M memory and launch, X torch and jax, T Triton, J jax
and Pallas. What a line of CASES, test_errors or test_wrong_kernels holds is not here again.
"""

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fkv
from cases import Case, assert_right, nan_outputs, to_framework, to_numpy
from fkv._spec import Layout, make_spec

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SMALL = Case(T=5, L=2, H=2, D=16, P=32)


def place(problem, framework):
    return {name: to_framework(array, framework) for name, array in problem.items()}


def run(problem, route):
    framework, backend = route
    outputs = nan_outputs(problem, framework)
    return fkv.materialize(**place(problem, framework), **outputs, backend=backend)


def run_process(code, **environment):
    """Output of a fresh process; its death is an assertion error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Numbers


@pytest.mark.parametrize("rotary_dim", [48, 32, 80])
def test_n_04_nothing_is_left_unwritten_and_nothing_else_is_written(rotary_dim, backend):
    """A fused store forgot the tail that is not rotated."""
    problem = Case(T=3, L=2, H=3, D=80, R=rotary_dim).make()
    shape, size, pad = (2, 3, 3, 80), 2 * 3 * 3 * 80, 64
    buffers = [torch.full((size + 2 * pad,), torch.inf, device=DEVICE) for _ in range(2)]
    k_out, v_out = (buffer[pad:-pad].view(shape).fill_(torch.nan) for buffer in buffers)
    fkv.materialize(**place(problem, "torch"), k_out=k_out, v_out=v_out, backend=backend)
    assert_right(problem, k_out, v_out)
    for buffer in buffers:
        assert torch.isinf(torch.cat([buffer[:pad], buffer[-pad:]])).all()


def test_n_08_float16_squares_leave_float16(route):
    problem = SMALL.make("float16")
    problem["kv"] = np.where(problem["kv"] > 0, 300, -60000).astype("float16")
    k, v = run(problem, route)
    assert_right(problem, k, v)
    assert np.isfinite(to_numpy(k)).all()


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e20, "float32"), (1e20, "bfloat16"), (3e38, "float32")]
)
def test_n_09_rows_whose_squares_leave_float32_come_out_0(value, dtype, route):
    """The documented limit, instead of NaN or garbage."""
    problem = SMALL.make(dtype)
    problem["kv"][:] = value
    k, v = run(problem, route)
    assert (to_numpy(k) == 0).all()
    assert (to_numpy(v) == problem["kv"][0, 0, 0]).all()


def test_n_09_tiny_rows(route):
    problem = SMALL.make()
    problem["kv"][:] = 1e-30
    assert_right(problem, *run(problem, route))


def test_n_10_zero_rows(route):
    """eps 1e-6 gives 0, eps 0 gives NaN like the definition."""
    problem = Case(T=5, L=2, H=2, D=16, eps=(1e-6, 0.0)).make()
    problem["kv"][:] = 0
    k, v = run(problem, route)
    assert_right(problem, k, v)
    assert (to_numpy(k)[0] == 0).all()
    assert np.isnan(to_numpy(k)[1]).all()


def test_n_11_nan_and_infinity_stay_in_their_row(route):
    problem = Case(T=4, L=2, H=2, D=16).make()
    clean = [to_numpy(array) for array in run(problem, route)]
    problem["kv"][1, 0, 3] = np.nan  # K of token 1, layer 0, head 0
    problem["kv"][2, 1, 16 + 5] = np.inf  # K of token 2, layer 1, head 1
    problem["kv"][0, 0, 32 + 1] = np.nan  # V of token 0, layer 0, head 0
    k, v = (to_numpy(array) for array in run(problem, route))
    same = np.ones(k.shape, bool)
    same[0, 1, 0] = same[1, 2, 1] = False
    np.testing.assert_array_equal(k[same], clean[0][same])
    assert np.isnan(k[0, 1, 0]).all()
    # NaN at the infinity and at its partner, 0 elsewhere.
    np.testing.assert_array_equal(k[1, 2, 1], fkv.reference.materialize(**problem)[0][1, 2, 1])
    exact_v = fkv.reference.materialize(**problem)[1]
    np.testing.assert_array_equal(v.view("u4"), exact_v.view("u4"))


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_n_14_multiply_add_fusion_either_way(fusion):
    code = (
        "import fkv.triton, torch\n"
        "from cases import *\n"
        "problem = Case(T=5, D=64).make()\n"
        "arrays = {n: to_framework(a, 'torch') for n, a in problem.items()}\n"
        "print(assert_right(problem, *fkv.materialize(**arrays)) <= 1)"
    )
    assert run_process(code, TRITON_DEFAULT_FP_FUSION=fusion).strip() == "True"


@pytest.mark.parametrize("name", ["kv", "k_norm_weight", "cos_sin_cache"])
def test_n_15_float64_is_refused(name):
    """jax makes float64 float32 before fkv sees it; torch does not."""
    arrays = place(SMALL.make(), "torch")
    arrays[name] = arrays[name].double()
    with pytest.raises(ValueError, match=f"^`{name}`: expected dtype .*, got float64$"):
        fkv.materialize(**arrays)


def test_n_17_pairs_are_i_and_i_plus_half(backend):
    """Unit vectors turned by 90 degrees: e_i -> e_{i+3}, e_{i+3} -> -e_i, the tail stays."""
    if backend == "pallas":
        D, R = 32, 16
    else:
        D, R = 8, 6
    half = R // 2
    problem = {
        "kv": np.concatenate([np.eye(D), np.zeros((D, D))], 1).reshape(D, 1, 2 * D),
        "k_norm_weight": np.ones((1, D)),
        "eps": np.zeros(1),
        "cos_sin_cache": np.concatenate([np.zeros((1, half)), np.ones((1, half))], 1),
    }
    problem = {name: array.astype("float32") for name, array in problem.items()}
    problem["positions"] = np.zeros(D, "int32")
    k = to_numpy(run(problem, ("torch", backend))[0])[0, :, 0]
    expected = np.eye(D)
    expected[:half, :R] = np.eye(R)[half:]
    expected[half:R, :R] = -np.eye(R)[:half]
    np.testing.assert_array_equal(np.sign(k), expected)
    assert_right(problem, *run(problem, ("torch", backend)))


def test_d_09_the_last_row_of_the_table(backend):
    """Rows behind it are NaN here, and are not read."""
    problem = Case(T=5, D=64, P=8).make()
    problem["positions"][:] = (0, 7, 7, 1, 0)
    arrays = place(problem, "torch")
    wide = torch.full((64, 64), torch.nan, device=DEVICE)
    wide[:8] = arrays["cos_sin_cache"]
    arrays["cos_sin_cache"] = wide[:8]
    assert_right(problem, *fkv.materialize(**arrays, backend=backend))


@pytest.mark.parametrize("bad", [8, -1, 2**31, 2**32 + 3, -(2**63)])
def test_d_09_positions_outside_the_table(bad, backend):
    """Refused on the host; on a GPU, NaN rows for that token and no other."""
    problem = Case(T=5, D=64, P=8, positions_dtype="int64").make()
    problem["positions"][1] = bad
    arrays = place(problem, "torch")
    if ON_GPU:
        k, v = fkv.materialize(**arrays, backend=backend)
        assert_right(problem, k, v)
        assert k[:, 1].isnan().all()
    else:
        message = rf"^`positions`: expected 0 <= position < 8, got {bad} at token 1 "
        with pytest.raises(ValueError, match=message):
            fkv.materialize(**arrays, backend=backend)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 5), (5, 1), (), (4,), (6,)])
def test_d_08_positions_of_another_shape(shape, framework):
    arrays = place(SMALL.make(), framework)
    arrays["positions"] = to_framework(np.zeros(shape, "int32"), framework)
    with pytest.raises(ValueError, match=r"^`positions`: expected shape \[total_ctx=5\]"):
        fkv.materialize(**arrays)


# Memory and launch


def strided_kv():
    """Views of [5, 2, 64] that are not packed, by name; whether Triton takes them."""
    wide = torch.randn(5, 2, 200, device=DEVICE)
    packed = torch.randn(5, 2, 64, device=DEVICE)
    return {
        "slice": (wide[..., 72:136], True),
        "swapped": (torch.randn(2, 5, 64, device=DEVICE).transpose(0, 1), True),
        "every_second": (torch.randn(5, 2, 128, device=DEVICE)[..., ::2], False),
        "last_dim_major": (torch.randn(64, 5, 2, device=DEVICE).permute(1, 2, 0), False),
        "expanded": (torch.randn(1, 2, 64, device=DEVICE).expand(5, 2, 64), True),
        "every_third_token": (torch.randn(15, 2, 64, device=DEVICE)[::3], True),
        "packed": (packed, True),
    }


@pytest.mark.parametrize("name", strided_kv())
def test_m_01_strides_of_kv(name, backend):
    """X-02 for Pallas: right values or an error that names kv, never numbers read as packed."""
    kv, taken = strided_kv()[name]
    problem = SMALL.make() | {"kv": kv.cpu().numpy()}
    arrays = place(problem, "torch") | {"kv": kv}
    if taken and (backend == "triton" or kv.is_contiguous()):
        assert_right(problem, *fkv.materialize(**arrays, backend=backend))
    else:
        with pytest.raises(ValueError, match=r"^`kv`: expected a contiguous "):
            fkv.materialize(**arrays, backend=backend)


@pytest.mark.parametrize("name", ["k_norm_weight", "eps", "cos_sin_cache", "positions"])
def test_m_01_strides_of_the_side_tensors(name):
    problem = SMALL.make()
    arrays = place(problem, "torch")
    every_second = arrays[name].repeat_interleave(2, dim=-1)[..., ::2]
    assert every_second.stride(-1) == 2
    assert_right(problem, *fkv.materialize(**arrays | {name: every_second}))
    turned = arrays[name].t().contiguous().t()  # columns contiguous; a vector stays as it is
    assert_right(problem, *fkv.materialize(**arrays | {name: turned}))


@pytest.mark.parametrize("layout", ["halves", "interleaved", "head_major", "inside"])
def test_m_03_m_05_strides_of_the_outputs(layout, backend):
    """Each output has its own strides, and what surrounds it is not touched."""
    problem = Case(T=5, L=2, H=3, D=64).make()
    if layout == "halves":  # K and V are the halves of each row
        buffer = torch.full((2, 5, 3, 128), 9.0, device=DEVICE)
        k_out, v_out = buffer[..., :64], buffer[..., 64:]
    elif layout == "interleaved":  # a row of K, a row of V
        buffer = torch.full((2, 5, 3, 2, 64), 9.0, device=DEVICE)
        k_out, v_out = buffer[..., 0, :], buffer[..., 1, :]
    elif layout == "head_major":
        buffer = torch.full((2, 2, 3, 5, 64), 9.0, device=DEVICE)
        k_out, v_out = buffer.transpose(2, 3)
    else:
        buffer = torch.full((2, 7, 4, 80), 9.0, device=DEVICE)
        k_out, v_out = torch.empty(2, 5, 3, 64, device=DEVICE), buffer[:, 1:6, :3, 8:72]
    k, v = fkv.materialize(**place(problem, "torch"), k_out=k_out, v_out=v_out, backend=backend)
    assert k is k_out
    assert v is v_out
    assert_right(problem, k, v)
    if layout == "inside":
        v_out.fill_(9.0)
        assert (buffer == 9).all()


@pytest.mark.parametrize(
    ("argument", "axis"),
    [("kv", 0), ("k_out", 0), ("k_out", 1), ("v_out", 0), ("v_out", 1), ("cos_sin_cache", 0)],
)
def test_m_06_each_address_past_32_bits(argument, axis):
    """2**30 elements apart, so that the third is past 2**31, in memory that is not touched.

    A stride of 2**31 would itself come in 64 bits, and hide a product in 32.
    """
    problem = Case(T=3, L=3, H=2, D=16, P=3, table_dtype="bfloat16").make("bfloat16")
    problem["positions"][:] = (2, 0, 1)
    arrays = place(problem, "torch") | nan_outputs(problem, "torch")
    packed = arrays[argument]
    strides = list(packed.stride())
    strides[axis] = 2**30
    far = torch.empty(2 * 2**30 + 1000, dtype=torch.bfloat16, device=DEVICE)
    arrays[argument] = far.as_strided(packed.shape, strides).copy_(packed)
    assert_right(problem, *fkv.materialize(**arrays))


@pytest.mark.parametrize(("T", "L", "H"), [(65537 * 128, 1, 1), (1, 1, 2**20), (1, 65536, 1)])
def test_m_07_one_grid_axis(T, L, H, backend):
    launch = importlib.import_module(f"fkv.{backend}._launch")
    shapes = ((T, L, 2 * H * 16), (L, 16), (L,), (8, 16))
    layouts = [Layout(shape, None, "float32", "cuda:0") for shape in shapes]
    layouts.append(Layout((T,), None, "int32", "cuda:0"))
    spec = make_spec("torch", [*layouts, None, None])
    (blocks,) = launch.choose_grid(spec, launch.choose_tiles(spec, False))
    assert 65535 < blocks < 2**31


@pytest.mark.parametrize(
    "case", [Case(T=65537, L=1, H=1, D=2), Case(T=1, L=1, H=65536, D=2)][: 2 if ON_GPU else 1]
)
def test_m_07_more_tokens_or_heads_than_a_grid_axis(case):
    """Half a minute each in the interpreter, where one shows as much as two."""
    problem = case.make()
    assert_right(problem, *fkv.materialize(**place(problem, "torch")))


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_m_09_memory_that_is_not_aligned(offset, backend):
    problem = Case(T=6, D=64).make("bfloat16")

    def shifted(tensor):
        return torch.cat([tensor.new_zeros(offset), tensor.flatten()])[offset:].view(tensor.shape)

    whole = place(problem, "torch")
    arrays = {name: shifted(tensor) for name, tensor in whole.items()}
    if backend == "triton" or not ON_GPU:
        assert_right(problem, *fkv.materialize(**arrays, backend=backend))
        return
    for name, tensor in arrays.items():  # TMA and XLA want more than a view can promise
        message = (
            f'^`{name}`: expected memory aligned to 256 bytes for backend="pallas" on a GPU, '
            rf"got a view {offset * tensor.element_size()} bytes past that \({name}.clone\(\), "
        )
        with pytest.raises(ValueError, match=message):
            fkv.materialize(**whole | {name: tensor}, backend=backend)


def test_m_10_no_tokens_and_still_checked(route):
    framework, backend = route
    arrays = place(Case(T=0, L=2, H=2, D=16).make(), framework)
    sizes = {"num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16}
    shapes = {
        "kv": (0, 2, 7),
        "k_norm_weight": (1, 3),
        "eps": (3,),
        "cos_sin_cache": (40, 8),
        "positions": (1,),
    }
    for name, shape in shapes.items():
        dtype = "int32" if name == "positions" else "float32"
        bad = arrays | {name: to_framework(np.zeros(shape, dtype), framework)}
        with pytest.raises(ValueError, match=f"^`{name}`: expected "):
            fkv.materialize(**bad, **sizes, backend=backend)
    if framework == "torch":
        out = torch.empty(2, 5, 2, 16, device=DEVICE)
        with pytest.raises(ValueError, match=r"^`k_out`: expected shape"):
            fkv.materialize(**arrays, k_out=out, backend=backend)


def test_m_11_two_empty_arrays_not_one(route):
    framework, backend = route
    k, v = fkv.materialize(**place(Case(T=0).make(), framework), backend=backend)
    assert k is not v


@pytest.mark.parametrize("case", [Case(T=0, D=16), Case(L=0, D=16)])
def test_m_11_two_empty_tensors_of_two_storages(case, backend):
    k, v = fkv.materialize(**place(case.make(), "torch"), backend=backend)
    assert k.untyped_storage()._cdata != v.untyped_storage()._cdata


# torch and jax


def test_x_03_axes_of_size_1(backend):
    for case in (Case(T=1, L=1, H=1, D=16), Case(T=1, L=3, D=16), Case(T=5, L=1, D=16)):
        problem = case.make()
        arrays = place(problem, "torch")
        odd = arrays["kv"].as_strided(
            arrays["kv"].shape,
            [
                s if n > 1 else 7
                for n, s in zip(arrays["kv"].shape, arrays["kv"].stride(), strict=True)
            ],
        )
        assert_right(problem, *fkv.materialize(**arrays | {"kv": odd}, backend=backend))


def test_x_04_parameters(backend):
    problem = SMALL.make()
    arrays = place(problem, "torch")
    for name in ("k_norm_weight", "cos_sin_cache"):
        arrays[name] = torch.nn.Parameter(arrays[name])
    k, v = fkv.materialize(**arrays, backend=backend)
    assert not k.requires_grad
    assert_right(problem, k, v)
    with torch.no_grad():
        arrays["kv"].requires_grad_()
        assert_right(problem, *fkv.materialize(**arrays, backend=backend))


def test_x_05_lazily_conjugated(backend):
    arrays = place(SMALL.make(), "torch")
    z = torch.randn(5, 2, 64, dtype=torch.complex64, device=DEVICE)
    with pytest.raises(ValueError, match=r"^`kv`: expected a tensor with its values in memory"):
        fkv.materialize(**arrays | {"kv": z.conj().imag}, backend=backend)


def test_m_09_outputs_that_are_not_aligned(backend):
    problem = Case(T=6, D=64).make("bfloat16")
    k_out, v_out = (
        torch.full((1 + 6 * 2 * 3 * 64,), torch.nan, dtype=torch.bfloat16, device=DEVICE)[1:]
        for _ in range(2)
    )
    outputs = {"k_out": k_out.view(2, 6, 3, 64), "v_out": v_out.view(2, 6, 3, 64)}
    fkv.materialize(**place(problem, "torch"), **outputs, backend=backend)
    assert_right(problem, *outputs.values())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "int16"])
def test_x_08_positions_of_another_dtype(dtype, framework):
    arrays = place(SMALL.make(), framework)
    arrays["positions"] = to_framework(np.zeros(5, dtype), framework)
    message = f"^`positions`: expected dtype int32 or int64, got {dtype}$"
    with pytest.raises(ValueError, match=message):
        fkv.materialize(**arrays)


def test_x_18_capsules():
    arrays = place(SMALL.make(), "torch")
    with pytest.raises(
        TypeError, match=r"^`kv`: expected a torch.Tensor or a jax.Array, got PyCapsule"
    ):
        fkv.materialize(**arrays | {"kv": torch.utils.dlpack.to_dlpack(arrays["kv"])})


# Triton, threads, processes


def test_t_03_threads(backend):
    def work(seed):
        problem = SMALL.make("bfloat16", seed)
        return max(assert_right(problem, *run(problem, ("torch", backend))) for _ in range(2))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= 1


def test_t_07_import_starts_nothing_and_a_fork_works():
    code = (
        "import fkv, torch, os\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    from cases import *\n"
        "    problem = Case(T=5, D=16).make()\n"
        "    arrays = {n: to_framework(a, 'torch') for n, a in problem.items()}\n"
        "    assert_right(problem, *fkv.materialize(**arrays))\n"
        "    os._exit(0)\n"
        "print(os.waitpid(pid, 0)[1])"
    )
    assert run_process(code).strip() == "0"


def test_t_08_sizes_that_are_integers_of_another_kind(framework):
    problem = SMALL.make()
    arrays = place(problem, framework)
    k, v = fkv.materialize(
        **arrays, num_kv_heads=np.int64(2), head_dim=np.int32(16), rotary_dim=torch.tensor(16)
    )
    assert_right(problem, k, v)


@pytest.mark.parametrize("size", [torch.tensor(True), np.bool_(True), torch.tensor(1.0), True])
def test_t_08_sizes_that_are_no_integers(size):
    arrays = place(Case(T=5, L=2, H=1, D=16).make(), "torch")
    with pytest.raises(TypeError, match=r"^`num_kv_heads`: expected an integer or None, got "):
        fkv.materialize(**arrays, num_kv_heads=size)


def test_t_06_torch_compile_around_a_call_that_is_disabled(backend):
    """What the README says to do."""
    problem = SMALL.make()
    arrays, outputs = place(problem, "torch"), nan_outputs(problem, "torch")
    call = torch.compiler.disable(fkv.materialize)
    compiled = torch.compile(lambda **a: [x + 0 for x in call(**a)], backend="aot_eager")
    assert_right(problem, *compiled(**arrays, **outputs, backend=backend))
    assert_right(problem, *outputs.values())


# jax and Pallas


@pytest.mark.parametrize("backend_of_call", ["triton", "pallas"])
def test_x_15_the_second_device_of_jax(backend_of_call):
    code = (
        "import jax, fkv\n"
        "from cases import *\n"
        "problem = Case(T=4, D=16).make()\n"
        "arrays = {n: to_framework(a, 'jax') for n, a in problem.items()}\n"
        "second = jax.devices()[1]\n"
        "there = jax.device_put(arrays, second)\n"
        f"k, v = fkv.materialize(**there, backend={backend_of_call!r})\n"
        "assert k.devices() == v.devices() == {second}\n"
        "assert_right(problem, k, v)\n"
        "try:\n"
        f"    fkv.materialize(**there | {{'eps': arrays['eps']}}, backend={backend_of_call!r})\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    message = "`eps`: expected device cpu:1, got cpu (where `kv` is)"
    assert run_process(code, CUDA_VISIBLE_DEVICES="", **environment).strip() == message


@pytest.mark.parametrize("backend_of_call", ["triton", "pallas"])
def test_x_16_sharded_arrays(backend_of_call):
    code = (
        "import jax, numpy as np, fkv\n"
        "from cases import *\n"
        "mesh = jax.make_mesh((2,), ('x',))\n"
        "P = jax.sharding.PartitionSpec\n"
        "arrays = {n: to_framework(a, 'jax') for n, a in Case(T=4, D=16).make().items()}\n"
        "for spec in (P('x'), P()):\n"
        "    kv = jax.device_put(arrays['kv'], jax.sharding.NamedSharding(mesh, spec))\n"
        "    try:\n"
        f"        fkv.materialize(**arrays | {{'kv': kv}}, backend={backend_of_call!r})\n"
        "    except ValueError as error:\n"
        "        print(error)"
    )
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    message = (
        "`kv`: expected an array on one device, got one sharded over 2 devices "
        "(jax.shard_map over the KV heads, or jax.device_put to one device)"
    )
    assert run_process(code, CUDA_VISIBLE_DEVICES="", **environment).splitlines() == [message] * 2
