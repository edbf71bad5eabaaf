"""What only a GPU shows of KVMaterializer: graphs, memory, what waits. Skipped elsewhere."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fkv
from cases import Case, assert_cache_right, assert_right, to_framework, to_numpy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASE = Case(T=64, L=5, H=8, D=128, P=512)
HIDDEN, SLOTS = 256, 300
SIDE = ("k_norm_weight", "eps", "cos_sin_cache")


def make(framework="torch", seed=0, **options):
    """A materializer in bfloat16, and its arrays in NumPy."""
    rng = np.random.default_rng(seed)
    problem = CASE.make("bfloat16", seed)
    arrays = {name: problem[name] for name in SIDE}
    arrays["kv_weight"] = rng.normal(size=(CASE.L, 2 * CASE.H * CASE.D, HIDDEN)) / 16
    arrays["kv_weight"] = arrays["kv_weight"].astype(problem["kv"].dtype)
    given = {name: to_framework(array, framework) for name, array in arrays.items()}
    return fkv.KVMaterializer.from_weights(**given, **options), arrays


def inputs(tokens=CASE.T, seed=0):
    random = torch.Generator("cuda").manual_seed(seed)
    on = {"generator": random, "device": "cuda"}
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, **on)
    return hidden, torch.randint(CASE.P, [tokens], **on), torch.randperm(SLOTS, **on)[:tokens]


def pools():
    shape = (SLOTS, CASE.H, CASE.D)
    return tuple(
        [torch.full(shape, 7, dtype=torch.bfloat16, device="cuda") for _ in range(CASE.L)]
        for _ in "kv"
    )


def assert_matches(m, arrays, hidden, positions, k, v):
    """K and V of the projection, which is that of torch's own product."""
    kv = to_numpy(m.project(hidden))
    weight = torch.from_numpy(arrays["kv_weight"].astype("f4")).cuda()
    exact = torch.einsum("th,lnh->tln", hidden.double(), weight.double()).cpu().numpy()
    np.testing.assert_allclose(kv.astype("f8"), exact, rtol=2**-7, atol=2**-7)
    problem = {"kv": kv, "positions": to_numpy(positions)}
    assert_right(problem | {name: arrays[name] for name in SIDE}, k, v)


def captured(m, hidden, positions, slots, caches):
    """A graph of all three calls, and what they leave."""
    copies = [torch.empty_like(x) for x in m(hidden, positions)]

    def keep(layer, k, v):
        copies[0][layer].copy_(k)
        copies[1][layer].copy_(v)

    def call():
        m.materialize(hidden, positions, keep)
        m.write_cache(hidden, positions, *caches, slots)
        return m(hidden, positions)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        owned = call()
    return graph, owned, copies


def test_graph_replay_sees_new_inputs_and_new_weights():
    """Also after the workspace has grown for a larger call outside of the graph."""
    m, arrays = make(max_position_hint=CASE.P)
    given, caches = inputs(), pools()
    graph, owned, copies = captured(m, *given, caches)
    m.materialize(*inputs(1000)[:2], lambda layer, k, v: None)
    for seed in (1, 2):
        if seed == 2:
            _, arrays = make(seed=2)
            for name in ("kv_weight", "k_norm_weight", "eps"):
                getattr(m._weights, name).copy_(to_framework(arrays[name], "torch"))
            arrays["cos_sin_cache"] = to_numpy(m.cos_sin_cache)
        for old, new in zip(given, inputs(seed=seed), strict=True):
            old.copy_(new)
        for x in (*owned, *copies):
            x.fill_(torch.nan)
        for x in (*caches[0], *caches[1]):
            x.fill_(7)
        graph.replay()
        hidden, positions, slots = given
        assert_matches(m, arrays, hidden, positions, *owned)
        assert_matches(m, arrays, hidden, positions, *copies)
        problem = {"kv": to_numpy(m.project(hidden)), "positions": to_numpy(positions)}
        problem |= {name: arrays[name] for name in SIDE} | {"slot_mapping": to_numpy(slots)}
        before = np.full((CASE.L, SLOTS, CASE.H, CASE.D), 7, problem["kv"].dtype)
        assert_cache_right(
            problem | {"k_cache": before, "v_cache": before, "layout": "NHD"}, *caches
        )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_with_a_hint_nothing_waits_and_nothing_is_allocated():
    m, arrays = make(max_position_hint=CASE.P)
    (hidden, positions, slots), caches, seen = inputs(), pools(), []

    def call():
        m.materialize(hidden, positions, lambda layer, k, v: seen.append((k, v)))
        m.write_cache(hidden, positions, *caches, slots)

    call()
    torch.cuda.synchronize()
    seen.clear()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    k, v = (torch.stack(x) for x in zip(*seen[-CASE.L :], strict=True))
    assert_matches(m, arrays, hidden, positions, k, v)


def test_without_a_hint_a_graph_is_refused():
    m, _ = make()
    hidden, positions, slots = inputs()
    caches = pools()
    m.write_cache(hidden, positions, *caches, slots)
    message = r"^`max_position_hint`: expected a number in a CUDA graph, got None "
    for call in (
        lambda: m(hidden, positions),
        lambda: m.write_cache(hidden, positions, *caches, slots),
    ):
        with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        torch.cuda.synchronize()


def test_positions_past_the_table():
    """An error where they are read back, NaN rows with a hint."""
    hidden, positions, slots = inputs()
    positions[5] = CASE.P
    with pytest.raises(ValueError, match=r"^`positions`: expected 0 <= position < 512, got 512 "):
        make()[0](hidden, positions)
    caches = pools()
    with pytest.raises(ValueError, match=r"^`positions`: expected 0 <= position < 512, got 512 "):
        make()[0].write_cache(hidden, positions, *caches, slots)
    assert all((x == 7).all() for cache in caches for x in cache)
    m, arrays = make(max_position_hint=CASE.P)
    k, v = m(hidden, positions)
    assert k[:, 5].isnan().all()
    assert_matches(m, arrays, hidden, positions, k, v)


def test_memory_is_flat_over_many_calls():
    """2,000 of mixed T, after one of the largest."""
    m, arrays = make(max_position_hint=CASE.P)
    hidden, positions, slots = inputs(SLOTS)
    caches, sizes = pools(), np.random.default_rng(0).integers(1, SLOTS + 1, 2000)

    def call(tokens):
        given = hidden[:tokens], positions[:tokens]
        m.materialize(*given, lambda layer, k, v: None)
        m.write_cache(*given, *caches, slots[:tokens])
        return m(*given)

    def used():
        torch.cuda.synchronize()
        gc.collect()
        stats = torch.cuda.memory_stats()
        return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]

    for tokens in (SLOTS, *sizes[:50]):
        call(tokens)
    before = used()
    for tokens in sizes:
        call(int(tokens))
    assert used() == before
    k, v = call(77)
    assert_matches(m, arrays, hidden[:77], positions[:77], k, v)


def test_jax_writes_into_donated_caches():
    """The projection and the kernel in one jitted function, with the materializer an argument."""
    m, arrays = make("jax")
    hidden, positions, slots = (to_framework(to_numpy(x), "jax") for x in inputs())
    write = jax.jit(fkv.KVMaterializer.write_cache, donate_argnums=(3, 4))
    shape = (CASE.L, SLOTS, CASE.H, CASE.D)
    caches = [jnp.full(shape, 7, jnp.bfloat16) for _ in "kv"]
    given = [x.unsafe_buffer_pointer() for x in caches]
    problem = {"kv": to_numpy(m.project(hidden)), "positions": to_numpy(positions)}
    problem |= {name: arrays[name] for name in SIDE} | {"slot_mapping": to_numpy(slots)}
    before = np.full(shape, 7, problem["kv"].dtype)
    k, v = write(m, hidden, positions, *caches, slots)
    assert [k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()] == given
    assert_cache_right(problem | {"k_cache": before, "v_cache": before, "layout": "NHD"}, k, v)
