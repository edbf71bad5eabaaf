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
from fkv._spec import FLOATS, Spec

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

from fkv.triton._kernel import materialize_kernel  # noqa: E402

ALIGNMENT = 16  # bytes: what Triton compiles another variant for
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
    tensors = (kv, k_norm_weight, eps, cos_sin_cache, positions, k, v)
    if plan.grid == (0,):
        return k, v
    if plan.interpreted:
        with _interpreter_lock, np.errstate(all="ignore"):  # as quiet as a GPU about infinities
            plan.launch(tensors)
    elif MANY_DEVICES and torch.cuda.current_device() != kv.device.index:
        with torch.cuda.device(kv.device):
            plan.launch(tensors)
    else:
        plan.launch(tensors)
    return k, v


class _Plan:
    """What a launch needs besides the tensors, and the compiled kernel once there is one.

    Triton's launcher looks at each argument to find the variant it has compiled. All but the
    tensors' addresses follows from the Spec, and of those only whether they are aligned matters.
    """

    def __init__(self, spec: Spec) -> None:
        self.interpreted = is_interpreted(spec.device)
        tiles = choose_tiles(spec, self.interpreted)
        self.grid = choose_grid(spec, tiles)
        self.arguments = (spec.total_ctx, spec.table_rows, *spec.strides)
        self.constants = constants(spec, tiles, self.interpreted)
        self.all_arguments = (*self.arguments, *self.constants.values())
        self.options = {"num_warps": tiles.num_warps}
        self.compiled: Any = None  # for tensors that are all aligned
        self.device = 0 if self.interpreted else int((spec.device or "").partition(":")[2])

    def launch(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """On the current stream of the current device."""
        a, b, c, d, e, f, g = pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = not (a | b | c | d | e | f | g) % ALIGNMENT
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
                *self.all_arguments,
            )
            return
        kernel: Any = materialize_kernel
        compiled = kernel[self.grid](*tensors, *self.arguments, **self.constants, **self.options)
        if aligned and not self.interpreted:
            self.compiled = compiled


@functools.lru_cache(maxsize=4096)
def _plan(spec: Spec) -> _Plan:
    return _Plan(spec)


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


def constants(spec: Spec, tiles: Tiles, interpreted: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel."""
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
        ROUND_BITS=interpreted and spec.dtype == "bfloat16",
    )
