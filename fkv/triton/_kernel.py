# pyright: reportPossiblyUnboundVariable=false
"""Device code. A program does BLOCK_T tokens x BLOCK_H heads of one layer.

The two rotary halves of K are loaded apart, so that a pair (i, i + R/2) meets in one thread.
All offsets are 64-bit. The integer arguments are only ever multiplied with tensors: Triton turns
an argument that equals 1 into a constant, on which a cast would not compile.
"""

import triton
import triton.language as tl


@triton.jit
def _store(pointer, value, mask, ROUND_BITS: tl.constexpr):
    """Round float32 to the output's dtype, to nearest even, and store."""
    if ROUND_BITS:  # the interpreter truncates to bfloat16: round on the bits
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value == value, nearest, 0x7FC0)
        tl.store(pointer, nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total_ctx", "table_rows"])
def materialize_kernel(
    kv_ptr,
    k_norm_weight_ptr,
    eps_ptr,
    cos_sin_cache_ptr,
    positions_ptr,
    k_out_ptr,
    v_out_ptr,
    total_ctx,
    table_rows,
    stride_kv_t,
    stride_kv_l,
    stride_weight_l,
    stride_weight_d,
    stride_eps_l,
    stride_table_p,
    stride_table_r,
    stride_positions_t,
    stride_k_l,
    stride_k_t,
    stride_k_h,
    stride_v_l,
    stride_v_t,
    stride_v_h,
    N_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # powers of two that cover D, R/2 and D - R
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    ROUND_BITS: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    BLOCKS_H: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    # The layers of a token, and its heads, follow one another, as they do in kv.
    block = tl.program_id(0)
    layer = (block // BLOCKS_H % N_LAYERS).to(tl.int64)
    token = (block // (BLOCKS_H * N_LAYERS)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (block % BLOCKS_H).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    pair = tl.arange(0, BLOCK_HALF)
    tail = ROTARY_DIM + tl.arange(0, BLOCK_TAIL)

    token_mask = token < total_ctx
    row_mask = token_mask[:, None, None] & (head < NUM_KV_HEADS)[None, :, None]
    pair_mask = row_mask & (pair < HALF)[None, None, :]
    tail_mask = row_mask & (tail < HEAD_DIM)[None, None, :]
    dim_mask = row_mask & (dim < HEAD_DIM)[None, None, :]

    # Everything is loaded before the first use.
    k_row = kv_ptr + (token * stride_kv_t)[:, None, None] + layer * stride_kv_l
    k_row += (head * HEAD_DIM)[None, :, None]
    k1 = tl.load(k_row + pair[None, None, :], mask=pair_mask, other=0.0)
    k2 = tl.load(k_row + HALF + pair[None, None, :], mask=pair_mask, other=0.0)
    if ROTARY_DIM < HEAD_DIM:
        k3 = tl.load(k_row + tail[None, None, :], mask=tail_mask, other=0.0)
    v_row = k_row + NUM_KV_HEADS * HEAD_DIM
    v = tl.load(v_row + dim[None, None, :], mask=dim_mask)

    position = tl.load(positions_ptr + token * stride_positions_t, mask=token_mask, other=0)
    inside = (position >= 0) & (position < table_rows)  # and never read outside
    table_row = cos_sin_cache_ptr + (position.to(tl.int64) * stride_table_p)[:, None]
    table_mask = (token_mask & inside)[:, None] & (pair < HALF)[None, :]
    cos_offset = (pair.to(tl.int64) * stride_table_r)[None, :]
    sin_offset = ((pair.to(tl.int64) + HALF) * stride_table_r)[None, :]
    cos = tl.load(table_row + cos_offset, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(table_row + sin_offset, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]

    weight_row = k_norm_weight_ptr + layer * stride_weight_l
    w1_offset = pair.to(tl.int64) * stride_weight_d
    w2_offset = (pair.to(tl.int64) + HALF) * stride_weight_d
    w1 = tl.load(weight_row + w1_offset, mask=pair < HALF, other=0.0).to(tl.float32)
    w2 = tl.load(weight_row + w2_offset, mask=pair < HALF, other=0.0).to(tl.float32)
    eps = tl.load(eps_ptr + layer * stride_eps_l)

    v_out_row = v_out_ptr + layer * stride_v_l + (token * stride_v_t)[:, None, None]
    v_out_row += (head * stride_v_h)[None, :, None]
    tl.store(v_out_row + dim[None, None, :], v, mask=dim_mask)

    k1 = k1.to(tl.float32)
    k2 = k2.to(tl.float32)
    squares = tl.sum(k1 * k1 + k2 * k2, axis=2)
    if ROTARY_DIM < HEAD_DIM:
        k3 = k3.to(tl.float32)
        squares += tl.sum(k3 * k3, axis=2)
    scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
    scale = tl.where(inside[:, None], scale, float("nan"))[:, :, None]

    k1 = k1 * scale * w1[None, None, :]
    k2 = k2 * scale * w2[None, None, :]
    k_out_row = k_out_ptr + layer * stride_k_l + (token * stride_k_t)[:, None, None]
    k_out_row += (head * stride_k_h)[None, :, None]
    k_out_pair = k_out_row + pair[None, None, :]
    _store(k_out_pair, k1 * cos - k2 * sin, pair_mask, ROUND_BITS)
    _store(k_out_pair + HALF, k2 * cos + k1 * sin, pair_mask, ROUND_BITS)
    if ROTARY_DIM < HEAD_DIM:
        w3_offset = tail.to(tl.int64) * stride_weight_d
        w3 = tl.load(weight_row + w3_offset, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
        _store(
            k_out_row + tail[None, None, :], k3 * scale * w3[None, None, :], tail_mask, ROUND_BITS
        )
