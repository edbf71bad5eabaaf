"""Device code. A block of one warpgroup does BLOCK_T tokens x BLOCK_H heads of one layer.

The TMA copies the K and V rows of its heads and its tokens' rows of the table to shared memory, and
the results back; it clips rows past total_ctx. V never leaves shared memory. K passes through
registers, its two rotary halves and its tail apart, so that a pair (i, i + R/2) meets in one lane.

Lowering semantics are Lane, in which shared memory is what this file says, plain rows: the compiler
infers swizzles under the other ones, and reads rows that single copies wrote with the wrong one.
"""

from __future__ import annotations

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


def pieces_of(
    start: int, stop: int, multiple: int = 8, widest: int = MAX_COLUMNS, in_registers: bool = True
) -> list[Any]:
    """Equal slices of [start, stop), each as wide as one TMA copy can be.

    What goes through registers must not be 4 or 8 narrow register tiles wide: the rows of a warp
    would collide in the banks of shared memory, which the compiler refuses.
    """
    size = stop - start
    narrow = in_registers and multiple < 64
    most = min(MAX_COLUMNS, widest) // multiple
    counts = [n for n in range(most, 0, -1) if not (narrow and n % 4 == 0)]
    width = next(n * multiple for n in counts if size % (n * multiple) == 0)
    return [pl.ds(at, width) for at in range(start, stop, width)]


def materialize_kernel(spec: Spec, tiles: Tiles, grid: tuple[int], interpret: Any) -> Any:
    """The kernel for one problem: (kv [T, L, 2, H, D], weight, eps, table, positions) -> (k, v)."""
    block_t, block_h = tiles.block_t, tiles.block_h
    head_dim, rotary_dim, dtype = spec.head_dim, spec.rotary_dim, jnp.dtype(spec.dtype)
    half, blocks_h = rotary_dim // 2, spec.num_kv_heads // block_h
    # Columns in pieces that the TMA can copy: K's rotary halves and tail, V, and the table.
    k1_pieces = pieces_of(0, half, tiles.width)
    k2_pieces = pieces_of(half, rotary_dim, tiles.width)
    k3_pieces = pieces_of(rotary_dim, head_dim, tiles.width)
    # V of one head is contiguous over tokens. Such a copy turns linear, which is not clipped
    # at total_ctx and runs into the next layer, unless it is narrower than a row.
    widest = head_dim // 2 if spec.num_kv_heads == 1 else head_dim
    v_pieces = pieces_of(0, head_dim, widest=widest, in_registers=False)
    fits = rotary_dim <= MAX_COLUMNS
    table_pieces = [pl.ds(0, rotary_dim)] if fits else k1_pieces + k2_pieces

    def load(ref: Any, reduced: int | None = None) -> jax.Array:
        if interpret:
            return ref[...].astype(jnp.float32)
        layout = tiles.layout if reduced is None else tiles.layout.reduce(reduced)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def broadcast(vector: jax.Array, width: int, dim: int) -> jax.Array:
        tile = lax.broadcast_in_dim(vector, (block_t, width), (dim,))
        return tile if interpret else plgpu.layout_cast(tile, tiles.layout)

    def body(
        kv_ref: Any,
        weight_ref: Any,
        eps_ref: Any,
        table_ref: Any,
        positions_ref: Any,
        k_out_ref: Any,
        v_out_ref: Any,
        *,
        k1_tile: Any,
        k2_tile: Any,
        k3_tile: Any,
        v_tile: Any,
        table_tile: Any,
        nan_tile: Any,
        kv_barrier: Any,
        table_barrier: Any,
    ) -> None:
        # The layers of a token, and its heads, follow one another, as they do in kv.
        block = lax.axis_index("block")
        layer = block // blocks_h % spec.n_layers
        token = block // (blocks_h * spec.n_layers) * block_t
        head = block % blocks_h * block_h
        tokens = pl.ds(token, block_t)
        k_tiles = ((k1_tile, k1_pieces), (k2_tile, k2_pieces), (k3_tile, k3_pieces))

        def fetch(h: int) -> None:
            for tile, pieces, kind in (*((*k, 0) for k in k_tiles), (v_tile, v_pieces, 1)):
                for i, piece in enumerate(pieces):
                    plgpu.copy_gmem_to_smem(
                        kv_ref.at[tokens, layer, kind, head + h, piece],
                        tile.at[h, i],
                        kv_barrier.at[h],
                    )

        def write(tile: Any, pieces: list[Any], out_ref: Any, h: int) -> None:
            for i, piece in enumerate(pieces):
                plgpu.copy_smem_to_gmem(tile.at[h, i], out_ref.at[layer, tokens, head + h, piece])

        def fetch_table(source: Any, rows: Any) -> None:
            for i, piece in enumerate(table_pieces):
                plgpu.copy_gmem_to_smem(
                    table_ref.at[source, piece], table_tile.at[i, rows], table_barrier
                )

        def angles(pieces: list[Any]) -> list[jax.Array]:
            return [
                load(table_tile.at[i, :, pl.ds(piece.start - one.start, piece.size)])
                for piece in pieces
                for i, one in enumerate(table_pieces)
                if one.start <= piece.start < one.start + one.size
            ]

        def weights(pieces: list[Any]) -> list[jax.Array]:
            rows = (load(weight_ref.at[layer, piece], reduced=0) for piece in pieces)
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

        # The start of a chain of loads first, and everything is on its way before the first use.
        positions = positions_of(0)
        for h in range(block_h):
            fetch(h)
        follow(0, positions)

        @pl.loop(1, block_t // UNROLLED)
        def _(group: jax.Array) -> None:
            follow(group * UNROLLED, positions_of(group * UNROLLED))

        if not tiles.gather:
            fetch_table(tokens, slice(None))
        w1, w2, w3 = weights(k1_pieces), weights(k2_pieces), weights(k3_pieces)
        eps = eps_ref[layer]
        plgpu.commit_smem()
        plgpu.barrier_wait(table_barrier)
        cos, sin = angles(k1_pieces), angles(k2_pieces)
        nan_outside = load(nan_tile, reduced=1)

        for h in range(block_h):
            plgpu.barrier_wait(kv_barrier.at[h])
            write(v_tile, v_pieces, v_out_ref, h)
            k1, k2, k3 = (
                [load(tile.at[h, i]) for i in range(len(pieces))] for tile, pieces in k_tiles
            )
            squares = sum(jnp.sum(k * k, axis=1) for k in (*k1, *k2, *k3))
            scale = lax.rsqrt(squares * (1.0 / head_dim) + eps) + nan_outside
            for i in range(len(k1_pieces)):
                a = k1[i] * broadcast(scale, k1[i].shape[1], 0) * w1[i]
                b = k2[i] * broadcast(scale, k2[i].shape[1], 0) * w2[i]
                k1_tile[h, i] = (a * cos[i] - b * sin[i]).astype(dtype)
                k2_tile[h, i] = (b * cos[i] + a * sin[i]).astype(dtype)
            for i in range(len(k3_pieces)):
                c = k3[i] * broadcast(scale, k3[i].shape[1], 0) * w3[i]
                k3_tile[h, i] = c.astype(dtype)
            plgpu.commit_smem()
            for tile, pieces in k_tiles:
                write(tile, pieces, k_out_ref, h)
        plgpu.wait_smem_to_gmem(0)

    def heads(pieces: list[Any]) -> Any:
        size = pieces[0].size if pieces else 0
        return plgpu.SMEM((block_h, len(pieces), block_t, size), dtype) if pieces else None

    table_tile: Any = (len(table_pieces), block_t, table_pieces[0].size)
    num_pieces = len(k1_pieces) + len(k2_pieces) + len(k3_pieces) + len(v_pieces)
    num_table_copies = len(table_pieces) * (block_t if tiles.gather else 1)
    out = jax.ShapeDtypeStruct(spec.out_shape, dtype)
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=(out, out),
        scratch_types=dict(
            k1_tile=heads(k1_pieces),
            k2_tile=heads(k2_pieces),
            k3_tile=heads(k3_pieces),
            v_tile=heads(v_pieces),
            table_tile=plgpu.SMEM(table_tile, jnp.dtype(spec.table_dtype)),
            nan_tile=plgpu.SMEM((block_t,), jnp.float32),
            kv_barrier=plgpu.Barrier(num_arrivals=num_pieces, num_barriers=block_h),
            table_barrier=plgpu.Barrier(num_arrivals=num_table_copies),
        ),
        grid=grid,
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=None if interpret else lane,
    )
