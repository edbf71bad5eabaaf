"""What writing into a cache costs: fkv.write_cache, beside fkv.materialize and SGLang's two ways.

At random slots of caches of four times the tokens, of the first geometry of the grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import fkv
from fkv import _bench
from fkv._bench import EPS, GEOMETRIES, Bench, Call
from fkv.reference import error_bound, materialize, worst_error

TOTAL_CTX = (16, 2048, 16384, 65536)
SLOTS_PER_TOKEN = 4
PAGE_SIZE = 16
K_SCALE, V_SCALE = 0.03, 0.02  # of layer 0; they grow from layer to layer
UNTOUCHED = 0x55  # each byte of a cache before the call


class Variant(NamedTuple):
    dtype: str = "bfloat16"
    layout: str = "flat"  # or NHD or HND, of pages, or list, of a flat cache a layer
    scaled: bool = False


VARIANTS = {
    "flat": Variant(),
    "a list of layers": Variant(layout="list"),
    "pages of 16, NHD": Variant(layout="NHD"),
    "pages of 16, HND": Variant(layout="HND"),
    "float8_e4m3fn": Variant("float8_e4m3fn"),
    "float8_e4m3fn, scaled": Variant("float8_e4m3fn", scaled=True),
}
ITEMSIZE = {"bfloat16": 2, "float8_e4m3fn": 1}


class Problem:
    """The inputs, caches that nothing has been written to, and what write_cache makes of them."""

    def __init__(self, inputs: dict[str, Any], variant: Variant) -> None:
        import torch

        self.inputs, self.variant = inputs, variant
        kv, weight = inputs["kv"], inputs["k_norm_weight"]
        (self.total_ctx, self.n_layers, width), self.head_dim = kv.shape, weight.shape[1]
        self.num_kv_heads = width // (2 * self.head_dim)
        self.num_slots = SLOTS_PER_TOKEN * PAGE_SIZE * -(-self.total_ctx // PAGE_SIZE)
        random = torch.Generator(kv.device).manual_seed(1)
        slots = torch.randperm(self.num_slots, generator=random, device=kv.device)
        self.slots = slots[: self.total_ctx]
        self.scales: dict[str, Any] = {}
        if variant.scaled:
            steps = 1 + torch.arange(self.n_layers, device=kv.device, dtype=torch.float32) / 7
            self.scales = {"k_scale": K_SCALE * steps, "v_scale": V_SCALE * steps}
        self.options: dict[str, Any] = {"layout": "HND" if variant.layout == "HND" else "NHD"}
        self.caches = [self._cache(), self._cache()]

    def _cache(self) -> Any:
        import torch

        rows, pages = (self.num_kv_heads, self.head_dim), self.num_slots // PAGE_SIZE
        shape = {
            "NHD": (pages, PAGE_SIZE, *rows),
            "HND": (pages, rows[0], PAGE_SIZE, rows[1]),
        }.get(self.variant.layout, (self.num_slots, *rows))
        width = shape[-1] * ITEMSIZE[self.variant.dtype]
        cache = torch.full(
            (self.n_layers, *shape[:-1], width),
            UNTOUCHED,
            dtype=torch.uint8,
            device=self.inputs["kv"].device,
        )
        return cache.view(getattr(torch, self.variant.dtype))

    def triton(self) -> Call:
        given: list[Any] = [[*c] if self.variant.layout == "list" else c for c in self.caches]
        options = self.inputs | self.scales | self.options
        names = ("k_cache", "v_cache", "slot_mapping")
        options |= dict(zip(names, (*given, self.slots), strict=True))
        return lambda: fkv.write_cache(**options)

    def pallas(self) -> Call:
        """Under jax.jit, which is given the caches and returns them."""
        import jax
        import torch

        arrays = _bench.to_jax(self.inputs | self.scales)
        scales = {name: arrays.pop(name) for name in self.scales}
        slots = _bench.to_jax({"positions": self.slots.to(torch.int32)})["positions"]
        caches = [_jax_copy(cache) for cache in self.caches]
        kernel = jax.jit(
            lambda k_cache, v_cache, inputs, slots, scales: fkv.write_cache(
                **inputs,
                k_cache=k_cache,
                v_cache=v_cache,
                slot_mapping=slots,
                **scales,
                **self.options,
            ),
            donate_argnums=(0, 1),
        )

        def call() -> Any:
            caches[:] = kernel(*caches, arrays, slots, scales)
            return caches

        return call

    def check(self, results: Any, rounds_twice: bool = False) -> dict[str, Any]:
        """K and V of a sample, and that nothing else has been touched."""
        import torch

        k, v = (self._by_slot(cache) for cache in results)
        tokens = torch.from_numpy(_bench.sampled_tokens(self.total_ctx)).to(self.slots.device)
        where, inputs = self.slots[tokens], self.inputs
        sample = inputs | {name: inputs[name][tokens] for name in ("kv", "positions")}
        numbers = {name: _bench.to_numpy(tensor) for name, tensor in sample.items()}
        k_scale = self.scales.get("k_scale")
        k_scale = None if k_scale is None else _bench.to_numpy(k_scale)
        exact, _ = materialize(**numbers)
        if k_scale is not None:
            exact = exact / k_scale[:, None, None, None]
        bound = error_bound(**numbers, dtype=self.variant.dtype, k_scale=k_scale)
        if rounds_twice:  # to bfloat16 before RoPE too: 2**-9 of each pair's length
            pairs = np.hypot(*np.split(exact, 2, axis=-1))
            bound += 2.0**-9 * np.concatenate([pairs, pairs], axis=-1)
        worst = worst_error(_bench.to_numpy(k[:, where]), exact, bound)
        same_v = torch.equal(_bits(v[:, where]), _bits(self._expected_v(sample["kv"])))
        others = torch.ones(self.num_slots, dtype=torch.bool, device=self.slots.device)
        others[self.slots] = False
        untouched = all(
            bool((_bits(layer)[others] == UNTOUCHED).all()) for cache in (k, v) for layer in cache
        )
        right = worst <= 1 and same_v and untouched
        return {"worst": worst if np.isfinite(worst) else None, "same_v": same_v, "right": right}

    def _expected_v(self, kv: Any) -> Any:
        import torch

        dtype = getattr(torch, self.variant.dtype)
        shape = (len(kv), self.n_layers, 2, self.num_kv_heads, self.head_dim)
        v = kv.view(shape)[:, :, 1].transpose(0, 1).float()
        if "v_scale" in self.scales:
            v = v / self.scales["v_scale"][:, None, None, None]
        largest = torch.finfo(dtype).max
        return v.clamp(-largest, largest).to(dtype)

    def _by_slot(self, cache: Any) -> Any:
        """[L, num_slots, H, D] of torch."""
        import torch

        if isinstance(cache, list):
            cache = torch.stack(cache)
        if not isinstance(cache, torch.Tensor):
            import jax

            integer = f"uint{8 * cache.dtype.itemsize}"
            bits = torch.from_dlpack(jax.lax.bitcast_convert_type(cache, integer))
            cache = bits.view(getattr(torch, self.variant.dtype))
        if self.variant.layout == "HND":
            cache = cache.transpose(2, 3)
        return cache.reshape(self.n_layers, self.num_slots, self.num_kv_heads, self.head_dim)

    def moved_bytes(self) -> int:
        """kv and the used rows of the table read once, the cells of the caches written once."""
        import torch

        kv, table = self.inputs["kv"], self.inputs["cos_sin_cache"]
        rows = len(torch.unique(self.inputs["positions"]))
        written = kv.numel() * ITEMSIZE[self.variant.dtype]
        return kv.numel() * kv.element_size() + written + rows * table[0].nbytes


def measure(bench: Bench, total_ctx: int) -> Iterator[dict[str, Any]]:
    """The rows of all variants, and of the other ways to fill a flat cache of bfloat16."""
    geometry = GEOMETRIES[0]
    inputs = _bench.make_inputs(geometry, total_ctx)
    for name, variant in VARIANTS.items():
        problem = Problem(inputs, variant)
        calls = {}
        if "triton" in bench.backends:
            calls["triton"] = problem.triton()
        if "pallas" in bench.backends and variant.layout != "list":
            calls["pallas"] = problem.pallas()
        if variant == Variant():
            calls |= others(bench, problem)
        moved = problem.moved_bytes()
        common = {**geometry._asdict(), "total_ctx": total_ctx, "bytes": moved, "cache": name}

        def checked(who: str, call: Call, problem: Problem = problem) -> dict[str, Any]:
            if who.endswith("materialize"):
                return _bench.check(call, geometry, inputs)
            for cache in problem.caches:
                _bits(cache).fill_(UNTOUCHED)
            return problem.check(call(), rounds_twice=who == "sglang writer")

        yield from bench.rows(calls, checked, common)


def others(bench: Bench, problem: Problem) -> dict[str, Call]:
    """fkv.materialize alone, SGLang's writer, and SGLang's kernel with a write for each layer."""
    import torch

    inputs, calls = problem.inputs, {}
    shape = (problem.n_layers, problem.total_ctx, problem.num_kv_heads, problem.head_dim)
    out = [inputs["kv"].new_full(shape, torch.nan) for _ in range(2)]
    if "triton" in bench.backends:
        calls["triton materialize"] = lambda: fkv.materialize(**inputs, k_out=out[0], v_out=out[1])
    if "pallas" in bench.backends:
        arrays = _bench.to_jax(inputs)
        calls["pallas materialize"] = lambda: fkv.materialize(**arrays)
    (k_cache, v_cache), slots = problem.caches, problem.slots
    kv, weight, _, table, positions = inputs.values()
    if bench.sglang_writer is not None:
        rows = [
            [k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)]
            for k, v in zip(k_cache, v_cache, strict=True)
        ]
        meta, write = torch.tensor(rows, device=kv.device), bench.sglang_writer
        rest = (problem.n_layers, kv.shape[2] // 2, problem.head_dim, EPS)

        def writer() -> Any:
            write(kv, meta, weight, table, positions, slots, *rest)
            return problem.caches

        calls["sglang writer"] = writer
    if bench.sglang is not None:
        sizes = (problem.num_kv_heads, problem.head_dim, table.shape[1])
        sglang = bench.sglang

        def kernel_and_writes() -> Any:
            k, v = sglang(*inputs.values(), *sizes, k_out=out[0], v_out=out[1])
            for layer in range(problem.n_layers):
                k_cache[layer][slots] = k[layer]
                v_cache[layer][slots] = v[layer]
            return problem.caches

        calls["sglang kernel and writes"] = kernel_and_writes
    return calls


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8)


def _jax_copy(tensor: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jnp.array(jax.dlpack.from_dlpack(tensor), copy=True)
