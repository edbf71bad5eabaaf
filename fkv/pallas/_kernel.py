"""Device code. A block of one warpgroup does BLOCK_T tokens x BLOCK_H heads of one layer.

The TMA copies the K and V rows of its heads and its tokens' rows of the table to shared memory, and
the results back; it clips rows past total_ctx. V never leaves shared memory. K passes through
registers, its two rotary halves and its tail apart, so that a pair (i, i + R/2) meets in one lane.

For a cache, a token's heads lie together in shared memory, K after the registers, V as it came or
after registers that convert it, and are copied to the token's slot in one piece.

Lowering semantics are Lane, in which shared memory is what this file says, plain rows: the compiler
infers swizzles under the other ones, and reads rows that single copies wrote with the wrong one.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fkv._spec import Spec

MAX_COLUMNS = 256  # of one TMA copy
UNROLLED = 8  # positions that are loaded before the first one is used


@dataclass(frozen=True)
class Tiles:
    """Heads and tokens of a block, and the register tile: WIDTH columns, VECTOR of them a lane."""

    block_t: int
    block_h: int
    width: int
    vector: int
    columns: int  # of K or V in one TMA copy
    gather: bool  # the kernel gathers the table's rows; else XLA has done it, a row a token

    @property
    def layout(self) -> Any:
        rows = 32 * self.vector // self.width  # of a warp
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4 * rows, self.width), (rows, self.width), (self.vector,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )


def columns_of(size: int, multiple: int, least: int = 1) -> int:
    """The widest equal parts of a row, at least so many, that the TMA copies in one piece each."""
    parts = range(least, size + 1)
    return next(
        size // n
        for n in parts
        if size % n == 0 and size // n <= MAX_COLUMNS and size // n % multiple == 0
    )


def materialize_kernel(spec: Spec, tiles: Tiles, grid: tuple[int], interpret: Any) -> Any:
    """The kernel for one problem: (kv [T, L, 2, H, D], weight, eps, table, positions) -> (k, v).

    With a cache: (the same, slot_mapping, what is given of commit_lens, k_scale and v_scale, and
    Refs of k_cache and v_cache) -> (). The slots are [T] or [L, T], a cache [L, num_slots, H, D]
    or, HND, [L, num_pages, H, page_size, D].
    """
    block_t, block_h, cache = tiles.block_t, tiles.block_h, spec.cache
    head_dim, rotary_dim, dtype = spec.head_dim, spec.rotary_dim, jnp.dtype(spec.dtype)
    half, blocks_h = rotary_dim // 2, spec.num_kv_heads // block_h
    out_dtype = dtype if cache is None else jnp.dtype(cache.dtype)
    columns = tiles.columns
    table_columns = columns_of(rotary_dim, tiles.width)
    # What goes through registers at a time lies within one part of a row, and of the table's row.
    cuts = {0, half}
    for part in (columns, table_columns):
        cuts |= {at % half for at in range(0, rotary_dim, part)}
    pairs = _slices(sorted(cuts))
    k1_pieces = pairs
    k2_pieces = [pl.ds(piece.start + half, piece.size) for piece in pairs]
    parts = range(0, head_dim, columns)
    k3_pieces = _slices(sorted({rotary_dim, head_dim} | {at for at in parts if at > rotary_dim}))
    v_pieces = _slices([*parts, head_dim])

    def within(tile: Any, h: int, piece: Any) -> Any:
        """A piece of one head, of all tokens."""
        part, at = divmod(piece.start, columns)
        return tile.at[part, :, h, pl.ds(at, piece.size)]

    def load(ref: Any, reduced: int | None = None) -> jax.Array:
        if interpret:
            return ref[...].astype(jnp.float32)
        layout = tiles.layout if reduced is None else tiles.layout.reduce(reduced)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def store(ref: Any, x: jax.Array) -> None:
        if interpret or not hasattr(plgpu, "store"):  # in jax 0.11 an assignment is not optimized
            ref[...] = x
        else:
            plgpu.store(ref, x, optimized=False)

    def broadcast(vector: jax.Array, width: int, dim: int) -> jax.Array:
        tile = lax.broadcast_in_dim(vector, (block_t, width), (dim,))
        return tile if interpret else plgpu.layout_cast(tile, tiles.layout)

    def rounded(x: jax.Array) -> jax.Array:
        """From float32. Float8 saturates and has one NaN, as the hardware's conversion has it."""
        if not interpret or out_dtype.itemsize > 1:
            return x.astype(out_dtype)
        largest = float(jnp.finfo(out_dtype).max)
        clipped = jnp.clip(x, -largest, largest).astype(out_dtype)
        bits = jnp.where(jnp.isnan(x), 0x7F, lax.bitcast_convert_type(clipped, jnp.uint8))
        return lax.bitcast_convert_type(bits.astype(jnp.uint8), out_dtype)

    def scale_of(ref: Any, layer: Any) -> tuple[Any, Any, Any]:
        """Times a power of two, that power, and the reciprocal of the product.

        The power keeps remainders within float32's range. NaN for what is no scale.
        """
        scale = ref[layer]
        scale = jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.nan)
        power = jnp.where(scale > 2.0**100, 2.0**-60, 1.0)
        power = jnp.where(scale < 2.0**-60, 2.0**100, power)
        return scale * power, power, reciprocal(scale * power)

    def reciprocal(x: Any) -> Any:
        """The nearest to it. What a division compiles to is 2 units in the last place off.

        A product and a sum compile to one fma, so that a remainder is exact. The last step is for
        an x just below a power of two. For each significand and start this was seen to be right.
        """
        result = 1.0 / x
        if interpret:
            return result
        for _ in range(2):
            result = result + result * (1.0 - x * result)
        above = result * (1 + 2.0**-23)
        return jnp.where(jnp.abs(1.0 - x * above) < jnp.abs(1.0 - x * result), above, result)

    def divided(x: jax.Array, scale: Any, power: Any, inverse: Any) -> jax.Array:
        """So that it rounds to the float8 that a correctly rounded quotient rounds to.

        By the reciprocal and one correction: beside each value halfway between two float8, and for
        each significand of a scale, that was seen to be the correctly rounded quotient.
        """
        x = x * power
        if interpret:
            return x / scale
        product = x * inverse
        corrected = product + inverse * (x - scale * product)
        return jnp.where(jnp.abs(product) < 2.0**60, corrected, product)  # not infinities, NaN

    def body(
        kv_ref: Any,
        weight_ref: Any,
        eps_ref: Any,
        table_ref: Any,
        positions_ref: Any,
        *others: Any,
        k_tile: Any,
        v_tile: Any,
        k_rounded: Any,
        v_rounded: Any,
        table_tile: Any,
        nan_tile: Any,
        k_barrier: Any,
        v_barrier: Any,
        table_barrier: Any,
    ) -> None:
        *cache_refs, k_out_ref, v_out_ref = others
        # The layers of a token, and its heads, follow one another, as they do in kv.
        block = lax.axis_index("block")
        layer = block // blocks_h % spec.n_layers
        token = block // (blocks_h * spec.n_layers) * block_t
        head = block % blocks_h * block_h
        tokens, heads = pl.ds(token, block_t), pl.ds(head, block_h)

        def fetch(kind: int, tile: Any, barrier: Any) -> None:
            for i, piece in enumerate(v_pieces):
                plgpu.copy_gmem_to_smem(
                    kv_ref.at[tokens, layer, kind, heads, piece], tile.at[i], barrier
                )

        def fetch_table(source: Any, rows: Any) -> None:
            for i, at in enumerate(range(0, rotary_dim, table_columns)):
                plgpu.copy_gmem_to_smem(
                    table_ref.at[source, pl.ds(at, table_columns)],
                    table_tile.at[i, rows],
                    table_barrier,
                )

        def angles(pieces: list[Any]) -> list[jax.Array]:
            where = [(divmod(piece.start, table_columns), piece.size) for piece in pieces]
            return [load(table_tile.at[i, :, pl.ds(at, size)]) for (i, at), size in where]

        def weights(pieces: list[Any]) -> list[jax.Array]:
            rows = [load(weight_ref.at[layer, piece], reduced=0) for piece in pieces]
            if k_scale is not None:  # divides all of K, as the weight multiplies it
                _, power, inverse = k_scale
                inverse = jnp.where(inverse * power > 2.0**100, 2.0**100, inverse * power)
                rows = [row * inverse for row in rows]
            return [broadcast(row, row.shape[0], 1) for row in rows]

        def positions_of(first_row: Any) -> list[jax.Array]:
            rows = (token + first_row + row for row in range(UNROLLED))
            return [positions_ref[jnp.minimum(row, spec.total_ctx - 1)] for row in rows]

        def follow(first_row: Any, positions: list[jax.Array]) -> None:
            for i, position in enumerate(positions):
                row = first_row + i
                inside = (position >= 0) & (position < spec.table_rows)
                nan_tile[row] = jnp.where(inside, 0.0, jnp.nan)
                if tiles.gather:  # and never read outside
                    safe = jnp.where(inside, position, 0).astype(jnp.int32)
                    fetch_table(pl.ds(safe, 1), pl.ds(row, 1))

        def places() -> list[tuple[Any, Any]]:
            """Of each row: is it written, and to which slot."""
            assert cache is not None
            slots_ref, found = cache_refs[0], []
            for row in range(block_t):
                t = jnp.minimum(token + row, spec.total_ctx - 1)
                slot = slots_ref[layer, t] if cache.is_mapped_by_layer else slots_ref[t]
                written = (token + row < spec.total_ctx) & (slot >= 0) & (slot < cache.num_slots)
                if cache.window:
                    count = cache_refs[1][lax.div(t, cache.window)]
                    written &= lax.rem(t, cache.window) < count
                found.append((written, slot.astype(jnp.int32)))
            return found

        def write(tile: Any, out_ref: Any) -> None:
            """All tokens at once, or each to its slot."""
            for i, piece in enumerate(v_pieces):
                if cache is None:
                    target = out_ref.at[layer, tokens, heads, piece]
                    plgpu.copy_smem_to_gmem(tile.at[i], target)
                    continue
                for row, (written, slot) in enumerate(where):
                    if cache.layout == "HND":
                        page, offset = (f(slot, cache.page_size) for f in (lax.div, lax.rem))
                        target = out_ref.at[layer, page, heads, offset, piece]
                    else:
                        target = out_ref.at[layer, slot, heads, piece]
                    pl.when(written)(
                        functools.partial(plgpu.copy_smem_to_gmem, tile.at[i, row], target)
                    )

        # The start of a chain of loads first, and everything is on its way before the first use.
        positions = positions_of(0)
        fetch(0, k_tile, k_barrier)
        fetch(1, v_tile, v_barrier)
        follow(0, positions)
        where, k_scale, v_scale = [], None, None
        if cache is not None:
            where = places()
            scales = iter(cache_refs[2 if cache.window else 1 :])
            k_scale, v_scale = (
                scale_of(next(scales), layer) if is_scaled else None
                for is_scaled in cache.is_scaled
            )

        @pl.loop(1, block_t // UNROLLED)
        def _(group: jax.Array) -> None:
            follow(group * UNROLLED, positions_of(group * UNROLLED))

        if not tiles.gather:
            fetch_table(tokens, slice(None))
        w1, w2, w3 = weights(k1_pieces), weights(k2_pieces), weights(k3_pieces)
        eps = eps_ref[layer]
        plgpu.commit_smem()

        plgpu.barrier_wait(v_barrier)
        if v_rounded is not None:
            for h in range(block_h):
                for piece in v_pieces:
                    v = load(within(v_tile, h, piece))
                    v = v if v_scale is None else divided(v, *v_scale)
                    store(within(v_rounded, h, piece), rounded(v))
            plgpu.commit_smem()
        write(v_tile if v_rounded is None else v_rounded, v_out_ref)

        plgpu.barrier_wait(table_barrier)
        cos, sin = angles(k1_pieces), angles(k2_pieces)
        nan_outside = load(nan_tile, reduced=1)
        plgpu.barrier_wait(k_barrier)
        out_tile = k_tile if k_rounded is None else k_rounded
        for h in range(block_h):
            k1, k2, k3 = (
                [load(within(k_tile, h, piece)) for piece in pieces]
                for pieces in (k1_pieces, k2_pieces, k3_pieces)
            )
            squares = sum(jnp.sum(k * k, axis=1) for k in (*k1, *k2, *k3))
            scale = lax.rsqrt(squares * (1.0 / head_dim) + eps) + nan_outside
            for i in range(len(k1_pieces)):
                a = k1[i] * broadcast(scale, k1[i].shape[1], 0) * w1[i]
                b = k2[i] * broadcast(scale, k2[i].shape[1], 0) * w2[i]
                store(within(out_tile, h, k1_pieces[i]), rounded(a * cos[i] - b * sin[i]))
                store(within(out_tile, h, k2_pieces[i]), rounded(b * cos[i] + a * sin[i]))
            for i in range(len(k3_pieces)):
                c = k3[i] * broadcast(scale, k3[i].shape[1], 0) * w3[i]
                store(within(out_tile, h, k3_pieces[i]), rounded(c))
        plgpu.commit_smem()
        write(out_tile, k_out_ref)
        plgpu.wait_smem_to_gmem(0)

    num_parts, num_table_parts = head_dim // columns, rotary_dim // table_columns
    tile = (num_parts, block_t, block_h, columns)
    rounded_tile: Any = None if out_dtype == dtype else plgpu.SMEM(tile, out_dtype)
    table_tile = (num_table_parts, block_t, table_columns)
    out = jax.ShapeDtypeStruct(spec.out_shape, dtype)
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=(out, out) if cache is None else (),
        scratch_types=dict(
            k_tile=plgpu.SMEM(tile, dtype),
            v_tile=plgpu.SMEM(tile, dtype),
            k_rounded=rounded_tile,
            v_rounded=rounded_tile,
            table_tile=plgpu.SMEM(table_tile, jnp.dtype(spec.table_dtype)),
            nan_tile=plgpu.SMEM((block_t,), jnp.float32),
            k_barrier=plgpu.Barrier(num_arrivals=num_parts),
            v_barrier=plgpu.Barrier(num_arrivals=num_parts),
            table_barrier=plgpu.Barrier(
                num_arrivals=num_table_parts * (block_t if tiles.gather else 1)
            ),
        ),
        grid=grid,
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=None if interpret else lane,
    )


def _slices(cuts: list[int]) -> list[Any]:
    """Between each cut and the next one."""
    return [pl.ds(start, stop - start) for start, stop in itertools.pairwise(cuts)]
