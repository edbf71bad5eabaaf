"""What only a GPU shows of write_cache: graphs, launches, memory. Skipped elsewhere."""

import functools

import jax
import numpy as np
import pytest
import torch

import fkv
from cases import CacheCase, assert_cache_right, lay, to_framework, to_numpy
from conftest import BACKENDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASE = CacheCase(T=300, L=5, H=8, D=128, P=512, page_size=16, positions_dtype="int64")
CACHES = ("k_cache", "v_cache")
WAYS = {  # of CASE, as arrays on torch
    "flat": (CacheCase(T=300, L=5, H=8, D=128, P=512), False),
    "pages": (CASE, False),
    "list": (CASE, True),
    "windows": (CacheCase(T=300, L=5, H=8, D=128, P=512, window=6, lens_dtype="int64"), True),
    "float8": (
        CacheCase(T=300, L=5, H=8, D=128, page_size=16, cache_dtype="float8_e4m3fn", scaled="kv"),
        True,
    ),
}


def given_of(problem, as_list=False):
    """The arguments as torch tensors on the GPU, and its caches as one or as a list."""
    arguments = lay(problem, "torch")
    if as_list:
        arguments |= {name: list(arguments[name].unbind()) for name in CACHES}
    return arguments


def refill(arguments, problem):
    """Other values in the same memory."""
    for name, tensor in given_of(problem).items():
        if name == "layout":
            continue
        target = arguments[name]
        if isinstance(target, list):
            for one, its in zip(target, tensor.unbind(), strict=True):
                one.copy_(its)
        else:
            target.copy_(tensor)


@pytest.mark.parametrize("way", WAYS)
def test_graph_replay_sees_other_slots_and_counts(way):
    case, as_list = WAYS[way]
    arguments = given_of(case.make(), as_list)
    fkv.write_cache(**arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fkv.write_cache(**arguments)
    for seed in (1, 2):
        fresh = case.make(seed=seed)
        if "commit_lens" in fresh:
            fresh["commit_lens"] = np.roll(fresh["commit_lens"], seed)
            fresh = committed(fresh)
        refill(arguments, fresh)
        graph.replay()
        assert_cache_right(fresh, arguments["k_cache"], arguments["v_cache"])


def committed(problem):
    """With slots, kv and positions that are good, whatever is counted."""
    slots = problem["slot_mapping"]
    problem["slot_mapping"] = np.arange(slots.size, dtype=slots.dtype)[::-1].reshape(slots.shape)
    problem["kv"] = np.nan_to_num(problem["kv"].astype("f4"), nan=0.5).astype(problem["kv"].dtype)
    problem["positions"] %= len(problem["cos_sin_cache"])
    return problem


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("way", WAYS)
def test_no_synchronization_and_no_allocation(way):
    """A list of a cache a layer has a table of addresses, which is kept while the caches live."""
    case, as_list = WAYS[way]
    problem = case.make()
    arguments = given_of(problem, as_list)
    fkv.write_cache(**arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            fkv.write_cache(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_cache_right(problem, arguments["k_cache"], arguments["v_cache"])


@pytest.mark.parametrize("way", WAYS)
def test_one_launch(way):
    """Whatever the integers and the caches are."""
    case, as_list = WAYS[way]
    arguments = given_of(case.make(), as_list)
    fkv.write_cache(**arguments)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        fkv.write_cache(**arguments)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["materialize_kernel"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_jax_writes_into_donated_caches(layout):
    """The results have the addresses of what was given, and no other memory was taken."""
    case = CacheCase(T=300, L=5, H=8, D=128, P=512, page_size=16, layout=layout)
    problem = case.make()
    arguments = lay(problem, "jax")
    del arguments["layout"]
    call = functools.partial(fkv.write_cache, layout=layout)
    call = jax.jit(call, donate_argnames=CACHES)
    compiled = call.lower(**arguments).compile()
    size = arguments["k_cache"].nbytes
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * size
    assert compiled.memory_analysis().temp_size_in_bytes < size
    given = [arguments[name].unsafe_buffer_pointer() for name in CACHES]
    k, v = call(**arguments)
    assert [k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()] == given
    assert all(arguments[name].is_deleted() for name in CACHES)
    assert_cache_right(problem, k, v)


def test_jax_leaves_caches_that_are_not_donated():
    problem = CASE.make()
    arguments = lay(problem, "jax")
    k, v = fkv.write_cache(**arguments)
    assert_cache_right(problem, k, v)
    for name in CACHES:
        np.testing.assert_array_equal(
            to_numpy(arguments[name]).view("u2"), problem[name].view("u2")
        )


def test_pallas_writes_into_torch_memory():
    problem = CASE.make()
    arguments = given_of(problem)
    before = [arguments[name].data_ptr() for name in CACHES]
    k, v = fkv.write_cache(**arguments, backend="pallas")
    assert [k.data_ptr(), v.data_ptr()] == before
    assert_cache_right(problem, k, v)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_what_a_gpu_does_not_refuse(bad, backend):
    """A slot past the capacity is not written; no scale, and a position past the table, is NaN."""
    case = CacheCase(**dict(T=21, L=2, H=2, page_size=4, cache_dtype="float8_e4m3fn", scaled="kv"))
    problem = case.make()
    past = problem["k_cache"].shape[1] * 4
    problem["slot_mapping"][[4, 5, 7]] = past, 2**32 + 3, 2**63 - 1
    problem["positions"][1] = case.P
    problem["k_scale"][1] = problem["v_scale"][0] = bad
    arguments = lay(problem, "torch")
    k, v = fkv.write_cache(**arguments, backend=backend)
    assert_cache_right(problem, k, v)
    k, v = to_numpy(k).astype("f4"), to_numpy(v).astype("f4")
    assert np.isnan(k[0, 0, 0]).all()  # token 1 has slot 0
    assert np.isnan(v[0, 0, 0]).all()
    assert not np.isnan(v[1]).any()


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_both_backends_write_the_same_bytes_of_v(cache_dtype):
    """K may differ where float32 does, in the last bit before float8."""
    case = CacheCase(
        **dict(T=3000, L=3, H=8, D=128, page_size=16, cache_dtype=cache_dtype, scaled="kv")
    )
    problem = case.make()
    problem["kv"] = (problem["kv"].astype("f4") * 8).astype(problem["kv"].dtype)
    caches = [fkv.write_cache(**lay(problem, "torch"), backend=backend) for backend in BACKENDS]
    one, other = ([to_numpy(x).view("u1") for x in pair] for pair in caches)
    np.testing.assert_array_equal(one[1], other[1])
    assert (one[0] != other[0]).mean() < 1e-3


def test_caches_of_more_than_2_to_31_elements(backend):
    """The last slots lie 2.7 * 10**9 elements past the start."""
    T, L, H, D, slots = 64, 2, 8, 128, 1_310_720
    problem = CacheCase(T=T, L=L, H=H, D=D, P=64).make()
    problem["kv"] = np.random.default_rng(0).normal(size=problem["kv"].shape)
    problem["kv"] = problem["kv"].astype(problem["k_cache"].dtype)
    problem["positions"] = np.arange(T)
    problem["slot_mapping"] = slots - T + np.arange(T)[::-1]
    caches = [torch.zeros(L, slots, H, D, dtype=torch.bfloat16, device="cuda") for _ in CACHES]
    arguments = lay(problem, "torch") | dict(zip(CACHES, caches, strict=True))
    fkv.write_cache(**arguments, backend=backend)
    small = problem | {name: np.zeros((L, T, H, D), problem["kv"].dtype) for name in CACHES}
    small["slot_mapping"] = np.arange(T)[::-1].copy()
    assert_cache_right(small, *(cache[:, slots - T :] for cache in caches))
    assert not any(cache[:, : slots - T].any() for cache in caches)


def test_more_than_2_to_31_elements_of_kv(backend):
    """The last token lies past 2**31 elements; only the last ones have a slot."""
    T, L, H, D = 210_000, 5, 8, 128
    tail = CacheCase(T=40, L=L, H=H, D=D, P=64).make()
    tail["kv"] = np.random.default_rng(0).normal(size=tail["kv"].shape).astype(tail["kv"].dtype)
    tail["positions"] %= 64
    tail["slot_mapping"] = np.arange(40)
    kv = torch.full((T, L, 2 * H * D), torch.nan, dtype=torch.bfloat16, device="cuda")
    kv[-40:] = to_framework(tail["kv"], "torch")
    positions = np.full(T, 2**31 - 1)
    positions[-40:] = tail["positions"]
    slots = np.full(T, -1)
    slots[-40:] = tail["slot_mapping"]
    arguments = lay(tail, "torch") | {
        "kv": kv,
        "positions": torch.from_numpy(positions).cuda(),
        "slot_mapping": torch.from_numpy(slots).cuda(),
    }
    assert_cache_right(tail, *fkv.write_cache(**arguments, backend=backend))


@pytest.mark.parametrize("way", WAYS)
def test_memory(way, backend):
    """For compute-sanitizer: ragged tiles, and slots that are nowhere."""
    case, as_list = WAYS[way]
    problem = case.make()
    arguments = given_of(problem, as_list and backend == "triton")
    fkv.write_cache(**arguments, backend=backend)
    assert_cache_right(problem, arguments["k_cache"], arguments["v_cache"])
