"""Tiles, grid, launch."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from fkv._errors import sentence
from fkv._spec import FLOAT8, FLOATS, Spec

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:  # Triton decides between compiler and interpreter when it is imported
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError(
            sentence(
                "backend",
                "triton in interpreter mode, as there is no CUDA device",
                "triton imported as a compiler",
                "import fkv.triton before triton, or set TRITON_INTERPRET=1",
            )
        )
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from fkv.triton._kernel import materialize_kernel  # noqa: E402

ALIGNMENT = 16  # bytes: what Triton compiles another variant for
NO_CACHE = (None,) * 4  # slot_mapping, commit_lens, k_scale, v_scale
DTYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
}
MANY_DEVICES = torch.cuda.device_count() > 1

_interpreter_lock = threading.Lock()  # the interpreter keeps its state in globals


class Tiles(NamedTuple):
    block_t: int
    block_h: int
    num_warps: int


def run(
    spec: Spec,
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on the current stream of the tensors' device; refuse first what it can't do."""
    plan = _plan(spec)
    k = torch.empty(spec.out_shape, dtype=kv.dtype, device=kv.device) if k_out is None else k_out
    v = torch.empty(spec.out_shape, dtype=kv.dtype, device=kv.device) if v_out is None else v_out
    _launch(plan, (kv, k_norm_weight, eps, cos_sin_cache, positions, k, v), ())
    return k, v


def write(spec: Spec, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """The same into the caches, which come last."""
    num_inputs = spec.arguments.num_inputs
    inputs, caches = tensors[:5], tensors[num_inputs:]
    is_aligned = True
    k_and_v = caches
    if spec.cache is not None and spec.cache.is_sequence:
        addresses = tuple([cache.data_ptr() for cache in caches])
        k_and_v, is_aligned = _address_tables(addresses, caches[0].device)
    plan = _plan(spec, is_aligned)
    _launch(plan, (*inputs, *k_and_v), tensors[5:num_inputs])
    return caches


def _launch(plan: _Plan, tensors: tuple[torch.Tensor, ...], optional: Any) -> None:
    if plan.grid == (0,):
        return
    if plan.interpreted:
        with _interpreter_lock, np.errstate(all="ignore"):  # as quiet as a GPU about infinities
            plan.launch(tensors, optional)
    elif MANY_DEVICES and torch.cuda.current_device() != plan.device:
        with torch.cuda.device(plan.device):
            plan.launch(tensors, optional)
    else:
        plan.launch(tensors, optional)


@functools.cache
def _address_tables(
    addresses: tuple[int, ...], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
    """Where the K and V caches of all layers are, on the device, and whether all are aligned.

    Kept for good, a few bytes a layer: a CUDA graph may hold on to them.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        expected = "caches that an earlier call has seen, while a CUDA graph is captured"
        cure = "call once before the capture: that puts their addresses on the GPU"
        raise ValueError(sentence("k_cache", expected, "new ones", cure))
    half = len(addresses) // 2
    k = torch.tensor(addresses[:half], dtype=torch.int64, device=device)
    v = torch.tensor(addresses[half:], dtype=torch.int64, device=device)
    return (k, v), not any(address % ALIGNMENT for address in addresses)


class _Plan:
    """What a launch needs besides the tensors, and the compiled kernel once there is one.

    Triton's launcher looks at each argument to find the variant it has compiled. All but the
    tensors' addresses follows from the Spec, and of those only whether they are aligned matters.
    """

    def __init__(self, spec: Spec, is_aligned: bool) -> None:
        self.interpreted = is_interpreted(spec.device)
        tiles = choose_tiles(spec, self.interpreted)
        self.grid = choose_grid(spec, tiles)
        self.arguments = (spec.total_ctx, spec.table_rows, *spec.strides)
        self.cache_arguments = cache_arguments(spec)
        self.constants = constants(spec, tiles, self.interpreted, is_aligned)
        self.all_constants = tuple(self.constants.values())
        # Without a cache all that follows the tensors is the same in each call.
        self.fixed = (*self.arguments, *NO_CACHE, *self.cache_arguments, *self.all_constants)
        cache = spec.cache
        in_bytes = cache is not None and cache.dtype in FLOAT8 and not cache.is_sequence
        self.views_bytes = self.interpreted and in_bytes  # the interpreter has no float8
        self.options = {"num_warps": tiles.num_warps}
        self.compiled: Any = None  # for tensors that are all aligned
        self.device = 0 if self.interpreted else int((spec.device or "").partition(":")[2])

    def launch(self, tensors: tuple[torch.Tensor, ...], optional: Any) -> None:
        """On the current stream of the current device."""
        a, b, c, d, e, f, g = pointers = [tensor.data_ptr() for tensor in tensors]
        bits, fixed = a | b | c | d | e | f | g, self.fixed
        if optional:
            others = [None if tensor is None else tensor.data_ptr() for tensor in optional]
            for pointer in others:
                bits |= pointer or 0
            fixed = (*self.arguments, *others, *self.cache_arguments, *self.all_constants)
        aligned = not bits % ALIGNMENT
        if aligned and self.compiled is not None:
            compiled = self.compiled
            compiled.run(
                *self.grid,
                1,
                1,
                torch._C._cuda_getCurrentRawStream(self.device),  # as Triton asks for it
                compiled.function,
                compiled.packed_metadata,
                None,  # launch metadata and hooks
                None,
                None,
                *pointers,
                *fixed,
            )
            return
        kernel: Any = materialize_kernel
        if self.views_bytes:
            tensors = (*tensors[:5], *(out.view(torch.uint8) for out in tensors[5:]))
        others = optional or NO_CACHE
        compiled = kernel[self.grid](
            *tensors,
            *self.arguments,
            *others,
            *self.cache_arguments,
            **self.constants,
            **self.options,
        )
        if aligned and not self.interpreted:
            self.compiled = compiled


@functools.lru_cache(maxsize=4096)
def _plan(spec: Spec, is_aligned: bool = True) -> _Plan:
    return _Plan(spec, is_aligned)


def is_interpreted(device: str | None) -> bool:
    """Interpreted where torch has no GPU; then and only then the tensors are on the CPU."""
    if (device is None or not device.startswith("cpu")) == INTERPRETED:
        got, cure = f"device {device}", "compiled, as there is a GPU: kv.cuda(), and all the others"
        raise ValueError(sentence("kv", 'a CUDA tensor for backend="triton"', got, cure))
    return INTERPRETED


def choose_tiles(spec: Spec, interpreted: bool) -> Tiles:
    """Sizes from the Spec alone, never from total_ctx: T must not trigger a compilation."""
    block_d = triton.next_power_of_2(spec.head_dim)
    if interpreted:  # an operation costs the same for any size
        return Tiles(64, min(64, triton.next_power_of_2(spec.num_kv_heads)), 1)
    # Measured on an H200 in bfloat16 with some 60 tiles for 6 geometries: within 2 % of the best
    # for T >= 2048, of those that are not slow at T = 16.
    # A lane has 16 bytes of each half of K; in the first case, of K and of its partners.
    if spec.rotary_dim < spec.head_dim:
        elements, num_warps = 1024 // FLOATS[spec.dtype], 1
    elif spec.head_dim < block_d:  # some lanes are idle
        elements, num_warps = 2048 // FLOATS[spec.dtype], 1
    else:
        elements, num_warps = 2048 // FLOATS[spec.dtype], 2
    most_h = elements // block_d // (1 if num_warps == 2 else 2)
    block_h = min(8, triton.next_power_of_2(spec.num_kv_heads), max(1, most_h))
    return Tiles(max(1, elements // (block_h * block_d)), block_h, num_warps)


def choose_grid(spec: Spec, tiles: Tiles) -> tuple[int]:
    """One axis, as CUDA's second and third stop at 65535 blocks: layers of heads of tokens."""
    blocks_h = triton.cdiv(spec.num_kv_heads, tiles.block_h)
    return (triton.cdiv(spec.total_ctx, tiles.block_t) * blocks_h * spec.n_layers,)


def paging(spec: Spec) -> tuple[int, int, int]:
    """Tokens of a page, 0 for no cache; how far apart the pages of k_cache and of v_cache are.

    Where token follows token across pages, each slot is a page of its own: no division.
    """
    if spec.cache is None:
        return 0, 0, 0
    tokens, strides, pages = spec.cache.page_size, spec.strides, spec.cache.strides
    if not spec.cache.is_flat and (pages.k_page, pages.v_page) == (
        tokens * strides.k_t,
        tokens * strides.v_t,
    ):
        return 1, strides.k_t, strides.v_t
    return tokens, pages.k_page, pages.v_page


def cache_arguments(spec: Spec) -> tuple[int, ...]:
    """The run-time arguments of the kernel that a cache adds, but for its tensors."""
    if spec.cache is None:
        return (0,) * 8
    *others, _, _ = spec.cache.strides
    return (spec.cache.num_slots, *others, *paging(spec)[1:])


def constants(
    spec: Spec, tiles: Tiles, interpreted: bool, is_aligned: bool = True
) -> dict[str, Any]:
    """The compile-time arguments of the kernel."""
    cache = spec.cache
    dtype = spec.dtype if cache is None else cache.dtype
    in_software = interpreted and dtype in ("bfloat16", *FLOAT8)
    is_sequence = cache is not None and cache.is_sequence
    element = tl.uint8 if in_software and dtype in FLOAT8 else DTYPES[dtype]
    half, tail = spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim
    if tail:  # the widest power of two in which partners change places as a whole
        width = math.gcd(half, tail, 1 << 62)
        chunks = triton.next_power_of_2(spec.head_dim // width)
    else:
        width, chunks = triton.next_power_of_2(half), 1
    return dict(
        N_LAYERS=spec.n_layers,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        ROTARY_DIM=spec.rotary_dim,
        BLOCK_T=tiles.block_t,
        BLOCK_H=tiles.block_h,
        BLOCK_D=triton.next_power_of_2(spec.head_dim),
        CHUNKS=chunks,
        BLOCK_W=width,
        ROUND_TO=dtype if in_software else None,
        PAGE_SIZE=paging(spec)[0],
        WINDOW=0 if cache is None else cache.window,
        IS_SEQUENCE=is_sequence,
        CACHE_ALIGNED=is_aligned,
        CACHE_DTYPE=element,
        CONVERT_V=dtype != spec.dtype,
    )
