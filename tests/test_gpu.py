"""What only a GPU shows: streams, graphs, allocations, devices. Skipped elsewhere."""

import gc
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fkv
from cases import CASES, Case, assert_right, nan_outputs, to_framework, to_numpy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

CASE = Case(T=300, L=5, H=8, D=128, P=512, positions_dtype="int64")


def variants():
    """How many kernels Triton has compiled."""
    from fkv.triton._kernel import materialize_kernel

    return sum(len(caches[0]) for caches in materialize_kernel.device_caches.values())


@pytest.fixture
def problem():
    return CASE.make("bfloat16")


@pytest.fixture
def arrays(problem):
    return {name: to_framework(array, "torch") for name, array in problem.items()}


def test_t_05_graph_replay_sees_new_inputs(problem, arrays):
    outputs = nan_outputs(problem, "torch")
    fkv.materialize(**arrays, **outputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fkv.materialize(**arrays, **outputs)
    for seed in (1, 2):
        fresh = CASE.make("bfloat16", seed)
        for name, array in fresh.items():
            arrays[name].copy_(to_framework(array, "torch"))
        for out in outputs.values():
            out.fill_(torch.nan)
        graph.replay()
        assert_right(fresh, *outputs.values())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_synchronization_and_no_allocation(problem, arrays):
    outputs = nan_outputs(problem, "torch")
    fkv.materialize(**arrays, **outputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            fkv.materialize(**arrays, **outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_right(problem, *outputs.values())


def test_one_launch(arrays, problem):
    """positions are int64: no other kernel converts them, or anything else."""
    outputs = nan_outputs(problem, "torch")
    fkv.materialize(**arrays, **outputs)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        fkv.materialize(**arrays, **outputs)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["materialize_kernel"]


def test_total_ctx_does_not_compile_again(arrays):
    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    for tokens in (300, 1, 2, 15, 16, 17, 64):
        kv, positions = arrays["kv"][:tokens], arrays["positions"][:tokens]
        fkv.materialize(kv, positions=positions, **side)
        if tokens == 300:
            first = variants()
    assert variants() == first


def test_nothing_compiles_after_a_warmup(problem, arrays):
    """Of a geometry that no other test has; see test_no_new_variant for how it is counted."""
    side = {name: arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    fkv.warmup(**side, num_kv_heads=3, total_ctx=[1])
    before = variants()
    kv = arrays["kv"][:, :, : 2 * 3 * 128].contiguous()
    for tokens in (1, 5, 16, 300):
        fkv.materialize(kv[:tokens], positions=arrays["positions"][:tokens], **side)
    assert variants() == before


def test_constants_are_lent_once_and_seen_when_they_change(problem, arrays):
    from fkv._frameworks import _constants

    def borrowed():
        return [_constants[id(arrays[name])][2] for name in ("k_norm_weight", "eps")]

    assert_right(problem, *fkv.materialize(**arrays, backend="pallas"))
    first = borrowed()
    arrays["k_norm_weight"].mul_(2)
    arrays["cos_sin_cache"].data.neg_()  # which has no version
    changed = problem | {name: to_numpy(tensor) for name, tensor in arrays.items()}
    assert_right(changed, *fkv.materialize(**arrays, backend="pallas"))
    assert all(a is b for a, b in zip(first, borrowed(), strict=True))
    # Other memory behind the same tensor is another loan; a tensor that is gone is forgotten.
    arrays["k_norm_weight"].data = arrays["k_norm_weight"] * 3
    changed["k_norm_weight"] = to_numpy(arrays["k_norm_weight"])
    assert_right(changed, *fkv.materialize(**arrays, backend="pallas"))
    known = {id(arrays[name]) for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    assert known <= set(_constants)
    del first
    arrays.clear()
    gc.collect()
    assert not known & set(_constants)


def test_pallas_writes_into_torch_memory(problem, arrays):
    """Pointers agree, so nothing is copied back: NaN stays where jax had written elsewhere."""
    from fkv._frameworks import FRAMEWORKS, carry_in, spec_of
    from fkv._spec import MATERIALIZE
    from fkv.pallas import run

    home = FRAMEWORKS[0]
    outputs = nan_outputs(problem, "torch")
    given = [*arrays.values(), *outputs.values()]
    spec = spec_of(home, home.signature(given, MATERIALIZE), None, None, None)
    results = run(spec, *carry_in(given, spec, home, "jax"))
    for result, out in zip(results, outputs.values(), strict=True):
        assert result.unsafe_buffer_pointer() == out.data_ptr()
    jax.block_until_ready(results)
    assert_right(problem, *outputs.values())


@pytest.mark.parametrize("stream", ["default", "side"])
def test_x_13_results_wait_for_inputs_and_readers_for_results(stream, problem, backend):
    """kv is ready late on torch's stream, and what reads the result is queued at once."""
    on = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    late = torch.randn(4096, 4096, device="cuda")
    arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
    torch.cuda.synchronize()
    wrong = 0
    with torch.cuda.stream(on):
        expected = fkv.materialize(**arrays, backend=backend)
        torch.cuda.synchronize()
        for _ in range(50):
            kv = torch.full_like(arrays["kv"], torch.nan)
            for _ in range(3):
                late @ late
            kv.copy_(arrays["kv"])
            k, v = fkv.materialize(**arrays | {"kv": kv}, backend=backend)
            read = k + 0, v + 0
            del kv, k, v
            torch.empty_like(arrays["kv"]).fill_(torch.nan)  # may reuse the memory of kv
            wrong += sum(not torch.equal(a, b) for a, b in zip(read, expected, strict=True))
    assert wrong == 0


def test_x_13_jax_may_free_its_arrays_after_the_call(problem):
    arrays = {name: to_framework(array, "jax") for name, array in problem.items()}
    expected = fkv.materialize(**arrays, backend="triton")
    spoil = jax.jit(lambda x: jnp.full_like(x, jnp.nan))
    for _ in range(50):
        kv = arrays["kv"] + 0
        k, v = fkv.materialize(**arrays | {"kv": kv}, backend="triton")
        del kv
        spoil(arrays["kv"])  # may get the memory of kv
        np.testing.assert_array_equal(to_numpy(k), to_numpy(expected[0]))
        np.testing.assert_array_equal(to_numpy(v), to_numpy(expected[1]))


@pytest.mark.parametrize("pinned", [False, True])
def test_x_14_host_tensors(arrays, backend, pinned):
    host = {name: array.cpu() for name, array in arrays.items()}
    host = {name: array.pin_memory() for name, array in host.items()} if pinned else host
    with pytest.raises(ValueError, match=r"^`kv`: expected .* got device cpu \(compiled, as"):
        fkv.materialize(**host, backend=backend)
    with pytest.raises(ValueError, match=r"^`positions`: expected device cuda:0, got cpu "):
        fkv.materialize(**arrays | {"positions": host["positions"]}, backend=backend)


def test_x_14_host_arrays_of_jax(problem, backend):
    arrays = {name: to_framework(array, "jax") for name, array in problem.items()}
    host = jax.device_put(arrays, jax.devices("cpu")[0])
    with pytest.raises(ValueError, match=r"^`kv`: expected .* got device cpu \(compiled, as"):
        fkv.materialize(**host, backend=backend)


def test_x_17_import_takes_no_gpu_memory():
    code = (
        "import torch\n"
        "size = int(0.6 * torch.cuda.mem_get_info()[0])\n"
        "held = torch.empty(size, dtype=torch.uint8, device='cuda')\n"
        "free = torch.cuda.mem_get_info()[0]\n"
        "import fkv\n"
        "assert torch.cuda.mem_get_info()[0] == free\n"
        "from cases import *\n"
        "problem = Case().make()\n"
        "arrays = {n: to_framework(a, 'torch') for n, a in problem.items()}\n"
        "assert_right(problem, *fkv.materialize(**arrays, backend='pallas'))"
    )
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, cwd=os.path.dirname(__file__), check=True)


@pytest.mark.parametrize("tokens", [4097, 70_000])
def test_d_12_many_tokens_bit_for_bit(tokens, backend):
    problem = Case(T=tokens, L=2, H=2, D=128, P=512).make("bfloat16")
    arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
    first = fkv.materialize(**arrays, backend=backend)
    assert_right(problem, *first)
    for _ in range(5):
        again = fkv.materialize(**arrays, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("tokens", [9, 21, 37, 1000])
def test_one_head_of_many_layers_does_not_run_over(tokens):
    """Mosaic makes a contiguous store a linear one, which is not clipped at total_ctx."""
    problem = Case(T=tokens, L=16, H=1, D=64).make("bfloat16")
    arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
    for _ in range(20):
        assert_right(problem, *fkv.materialize(**arrays, backend="pallas"))


def test_more_than_2_to_31_elements():
    """32-bit offsets overflow from 209,715 tokens on."""
    T, L, H, D = 210_000, 5, 8, 128
    kv = torch.empty(T, L, 2 * H * D, dtype=torch.bfloat16, device="cuda").normal_()
    problem = Case(T=1, L=L, H=H, D=D, P=64).make("bfloat16")
    arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
    positions = np.random.default_rng(0).integers(0, 64, T)
    arrays |= {"kv": kv, "positions": torch.from_numpy(positions).cuda()}
    for backend in ("triton", "pallas"):
        k, v = fkv.materialize(**arrays, backend=backend)
        for start in (0, T // 2, T - 40):
            part = slice(start, start + 40)
            piece = problem | {"kv": to_numpy(kv[part]), "positions": positions[part]}
            assert_right(piece, k[:, part], v[:, part])


@two_gpus
def test_m_12_x_15_the_second_gpu(problem, backend):
    arrays = {name: to_framework(a, "torch").to("cuda:1") for name, a in problem.items()}
    with torch.cuda.device(0):
        k, v = fkv.materialize(**arrays, backend=backend)
        assert torch.cuda.current_device() == 0
    assert k.device == v.device == torch.device("cuda:1")
    assert_right(problem, k, v)
    with pytest.raises(ValueError, match=r"^`positions`: expected device cuda:1, got cuda:0 "):
        fkv.materialize(**arrays | {"positions": arrays["positions"].to("cuda:0")}, backend=backend)


@pytest.mark.parametrize("name", CASES)
def test_memory(name, backend):
    """For compute-sanitizer: every geometry that the backend takes."""
    case = CASES[name]
    if backend == "triton" or case.pallas:
        problem = case.make("bfloat16")
        arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
        assert_right(problem, *fkv.materialize(**arrays, backend=backend))
