"""Tiles, grid, launch."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,  # not public yet
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fkv._errors import sentence
from fkv._spec import FLOAT8, FLOATS, Spec
from fkv.pallas._kernel import UNROLLED, Tiles, columns_of, materialize_kernel

SHARED_MEMORY = 222 * 1024  # bytes of one block on Hopper and Blackwell, less 5 KiB for the rest
MULTIPROCESSORS = 132  # of an H200; about as many on the others
COPY_BYTES = 128  # a TMA copy moves a multiple of this

_interpreter_lock = threading.Lock()  # the interpreter keeps its state in globals


def run(
    spec: Spec,
    kv: jax.Array,
    k_norm_weight: jax.Array,
    eps: jax.Array,
    cos_sin_cache: jax.Array,
    positions: jax.Array,
    k_out: jax.Array | None,
    v_out: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Run on the device of the arrays; refuse first what it can't do.

    k_out and v_out are donated: where jax allows it, the results are written into their memory.
    """
    interpreted, kernel = _compiled(spec)
    inputs = (kv, k_norm_weight, eps, cos_sin_cache, positions)
    if not interpreted:
        given = k_out is not None or v_out is not None
        return kernel(*inputs, k_out, v_out) if given else kernel(*inputs)
    if isinstance(kv, jax.core.Tracer):
        return kernel(*inputs)
    with _interpreter_lock:
        try:
            return jax.block_until_ready(kernel(*inputs))
        except BaseException:  # an interrupted kernel leaves its barriers behind
            reset_gpu_interpret_mode_state()
            raise


def write(spec: Spec, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The same into the caches, which come last; into their memory where they are torch's."""
    if spec.cache is not None and spec.cache.is_sequence:
        array, stack = (
            ("torch.Tensor", "torch") if spec.framework == "torch" else ("jax.Array", "jnp")
        )
        expected = f'one {array} of all layers for backend="pallas"'
        cure = f'{stack}.stack, or backend="triton"'
        raise NotImplementedError(sentence("k_cache", expected, "an array a layer", cure))
    interpreted, kernel = _compiled(spec)
    if not interpreted or isinstance(arrays[0], jax.core.Tracer):
        return kernel(*arrays)
    with _interpreter_lock:
        try:
            return jax.block_until_ready(kernel(*arrays))
        except BaseException:
            reset_gpu_interpret_mode_state()
            raise


@functools.cache
def is_interpreted(device: str | None) -> bool:
    """Interpreted where jax has no GPU; `device` is None while jax traces for its default one."""
    default = jax.default_backend()
    platform = default.replace("gpu", "cuda") if device is None else device.partition(":")[0]
    if platform == "cpu" and default == "cpu":
        return True
    if platform == "cpu":
        cure = "compiled, as there is a GPU: jax.device_put to it"
        raise ValueError(
            sentence("kv", 'an array on a GPU for backend="pallas"', f"device {device}", cure)
        )
    if platform == "cuda":
        index = int(device.partition(":")[2]) if device else 0
        gpu = next(gpu for gpu in jax.local_devices() if gpu.local_hardware_id == index)
        if float(gpu.compute_capability) >= 9:
            return False
        platform = f"{gpu.device_kind}, compute capability {gpu.compute_capability}"
    expected = 'a GPU of compute capability 9.0 (Hopper) or newer for backend="pallas"'
    raise NotImplementedError(sentence("kv", expected, platform, 'backend="triton" takes it'))


@functools.cache
def choose_tiles(spec: Spec, interpreted: bool) -> Tiles:
    """Sizes from the Spec, or NotImplementedError for a head that does not fit the registers."""
    half, tail = spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim
    if half % 8 or tail % 8:
        got = f"rotary_dim={spec.rotary_dim} of head_dim={spec.head_dim}"
        expected = (
            'rotary_dim/2 and head_dim - rotary_dim to be multiples of 8 for backend="pallas"'
        )
        raise NotImplementedError(
            sentence("rotary_dim", expected, got, 'backend="triton" takes any even rotary_dim')
        )
    width = next(width for width in (64, 32, 16, 8) if not (half % width or tail % width))
    # Few rows and all their heads in flight, and few registers: on an H200, of 64 tiles for 5
    # geometries, within 1 % of the best for T >= 2048 in bfloat16.
    block_t = max(UNROLLED, 128 // width)
    vector = block_t * width // 128
    row_bytes = 2 * spec.head_dim * FLOATS[spec.dtype] + spec.rotary_dim * FLOATS[spec.table_dtype]
    if block_t * row_bytes > SHARED_MEMORY:
        expected = 'a head that fits in shared memory for backend="pallas"'
        raise NotImplementedError(
            sentence("head_dim", expected, str(spec.head_dim), 'backend="triton" takes it')
        )
    table_bytes = columns_of(spec.rotary_dim, width) * FLOATS[spec.table_dtype]
    gather = table_bytes % COPY_BYTES == 0
    most = max(1, min(8, 512 // spec.head_dim))
    sizes = [h for h in range(most, 0, -1) if spec.num_kv_heads % h == 0]
    columns = columns_of(spec.head_dim, width)
    if spec.cache is not None:
        sizes = _sizes_of_rows(spec, sizes, columns)
    if interpreted:  # a block costs the same for any size
        block_t, block_h = 32, sizes[0]
    else:  # as many heads in a block as leave a block for each multiprocessor
        heads = pl.cdiv(spec.total_ctx, block_t) * spec.n_layers * spec.num_kv_heads
        block_h = next((h for h in sizes if heads // h >= MULTIPROCESSORS), sizes[-1])
    if spec.cache is None and block_h == spec.num_kv_heads:
        # All heads of neighbouring tokens are contiguous in the result. Such a copy turns linear,
        # which is not clipped at total_ctx and runs into the next layer; parts of rows are not.
        columns = columns_of(spec.head_dim, width, least=2)
    return Tiles(block_t, block_h, width, vector, columns, gather)


def _sizes_of_rows(spec: Spec, sizes: list[int], columns: int) -> list[int]:
    """Of those, the heads whose rows of a token the TMA can copy to a slot; or the fewest ones."""
    assert spec.cache is not None
    row_bytes = columns * (FLOATS | FLOAT8)[spec.cache.dtype]
    num = spec.num_kv_heads
    able = [h for h in range(num, 0, -1) if num % h == 0 and h * row_bytes % COPY_BYTES == 0]
    if not able or row_bytes % 16:
        expected = f"a multiple of 16 bytes a head and of {COPY_BYTES} a token"
        got = f"num_kv_heads={num} of head_dim={spec.head_dim} in {spec.cache.dtype}"
        cure = 'backend="triton" takes any'
        message = sentence("k_cache", f'{expected} for backend="pallas"', got, cure)
        raise NotImplementedError(message)
    return [h for h in sizes if h in able] or able[-1:]


def choose_grid(spec: Spec, tiles: Tiles) -> tuple[int]:
    """One axis, as CUDA's second and third stop at 65535 blocks: layers of heads of tokens."""
    blocks_h = spec.num_kv_heads // tiles.block_h
    return (pl.cdiv(spec.total_ctx, tiles.block_t) * blocks_h * spec.n_layers,)


def _materialize(spec: Spec, interpreted: bool, inputs: tuple[jax.Array, ...]) -> Any:
    kv, weight, eps, table, positions = inputs
    if 0 in spec.out_shape:
        return tuple(jnp.zeros(spec.out_shape, kv.dtype) for _ in range(2))
    tiles = choose_tiles(spec, interpreted)
    kv = kv.reshape(spec.total_ctx, spec.n_layers, 2, spec.num_kv_heads, spec.head_dim)
    if not tiles.gather:
        table = table[jnp.clip(positions, 0, spec.table_rows - 1)]
    interpret = plgpu.InterpretGPUParams() if interpreted else None
    kernel = materialize_kernel(spec, tiles, choose_grid(spec, tiles), interpret)
    return kernel(kv, weight, eps, table, positions)


def _write(spec: Spec, interpreted: bool, arrays: tuple[Any, ...]) -> Any:
    """New caches, or the same memory where it is donated."""
    cache = spec.cache
    assert cache is not None
    kv, weight, eps, table, positions, slots, *optional, k_cache, v_cache = arrays
    if 0 in spec.out_shape or not cache.num_slots:
        return k_cache, v_cache
    tiles = choose_tiles(spec, interpreted)
    kv = kv.reshape(spec.total_ctx, spec.n_layers, 2, spec.num_kv_heads, spec.head_dim)
    if not tiles.gather:
        table = table[jnp.clip(positions, 0, spec.table_rows - 1)]
    slots = slots if cache.is_mapped_by_layer else slots.reshape(-1)
    flat = (spec.n_layers, cache.num_slots, spec.num_kv_heads, spec.head_dim)
    caches = [x if cache.layout == "HND" else x.reshape(flat) for x in (k_cache, v_cache)]
    refs = [jax.new_ref(x) for x in caches]
    interpret = plgpu.InterpretGPUParams() if interpreted else None
    kernel = materialize_kernel(spec, tiles, choose_grid(spec, tiles), interpret)
    given = [x for x in optional if x is not None]
    kernel(kv, weight, eps, table, positions, slots, *given, *refs)
    return tuple(jax.freeze(ref).reshape(k_cache.shape) for ref in refs)


@jax.custom_jvp
def _without_gradient(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return arrays


@_without_gradient.defjvp
def _no_gradient(primals: Any, tangents: Any) -> Any:
    cure = "jax.lax.stop_gradient before the call"
    raise NotImplementedError(sentence("kv", "no differentiation", "jax.grad or jax.jvp", cure))


@functools.lru_cache(maxsize=4096)
def _compiled(spec: Spec) -> tuple[bool, Any]:
    """Is it interpreted, and one jitted function a Spec, which looks at the arrays alone."""
    interpreted = is_interpreted(spec.device)
    choose_tiles(spec, interpreted)

    num_inputs = spec.arguments.num_inputs
    outputs = (num_inputs, num_inputs + 1)

    def materialize(*arrays: Any) -> Any:
        """k_out and v_out are there for their memory only."""
        if spec.cache is None:
            return _materialize(spec, interpreted, _without_gradient(arrays[:num_inputs]))
        return _write(spec, interpreted, _without_gradient(arrays))

    lent = spec.cache is None or (spec.framework == "torch" and not interpreted)
    return interpreted, jax.jit(
        materialize, donate_argnums=outputs if lent else (), keep_unused=True
    )
