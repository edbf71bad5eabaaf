# pyright: reportPossiblyUnboundVariable=false
"""Device code. A program does BLOCK_T tokens x BLOCK_H heads of one layer.

A pair (i, i + R/2) has to meet in one thread. Where all of K rotates, its two halves are loaded
apart. Else whole rows are loaded and stored, as the parts of one are too narrow for that, and each
element's partner is loaded beside it, from the L1 cache: a row is CHUNKS pieces of BLOCK_W, and
whole pieces change places.

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
    BLOCK_D: tl.constexpr,  # a power of two that covers D
    CHUNKS: tl.constexpr,  # of BLOCK_W elements each, that cover R/2, or D where R < D
    BLOCK_W: tl.constexpr,
    ROUND_BITS: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    BLOCKS_H: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    # The layers of a token, and its heads, follow one another, as they do in kv.
    block = tl.program_id(0)
    layer = (block // BLOCKS_H % N_LAYERS).to(tl.int64)
    token = (block // (BLOCKS_H * N_LAYERS)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (block % BLOCKS_H).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    # [BLOCK_T, BLOCK_H, CHUNKS, BLOCK_W]
    chunk = tl.arange(0, CHUNKS)[:, None]
    lane = tl.arange(0, BLOCK_W)[None, :]
    dim = chunk * BLOCK_W + lane
    if ROTARY_DIM == HEAD_DIM:  # the first half, and the second one as its partner
        partner = dim + HALF
        pair = dim
        dim_mask = dim < HALF
        rotary_mask = dim_mask
    else:
        first = chunk < HALF // BLOCK_W
        partner = tl.where(first, chunk + HALF // BLOCK_W, chunk - HALF // BLOCK_W) * BLOCK_W + lane
        pair = tl.where(first, chunk, chunk - HALF // BLOCK_W) * BLOCK_W + lane
        dim_mask = dim < HEAD_DIM
        rotary_mask = dim < ROTARY_DIM

    position = tl.load(positions_ptr + token * stride_positions_t, mask=token < total_ctx, other=0)
    token = token[:, None, None, None]
    head = head[None, :, None, None]
    row_mask = (token < total_ctx) & (head < NUM_KV_HEADS)

    # Everything is loaded before the first use.
    k_row = kv_ptr + token * stride_kv_t + layer * stride_kv_l + head * HEAD_DIM
    k = tl.load(k_row + dim, mask=row_mask & dim_mask, other=0.0)
    k_partner = tl.load(k_row + partner, mask=row_mask & rotary_mask, other=0.0)
    v_dim = tl.arange(0, BLOCK_D)[None, :]
    v_mask = row_mask & (v_dim < HEAD_DIM)
    v = tl.load(k_row + NUM_KV_HEADS * HEAD_DIM + v_dim, mask=v_mask)

    inside = (position >= 0) & (position < table_rows)  # and never read outside
    table_row = cos_sin_cache_ptr + (position.to(tl.int64) * stride_table_p)[:, None, None, None]
    table_mask = inside[:, None, None, None] & (token < total_ctx) & rotary_mask
    cos_offset = pair.to(tl.int64) * stride_table_r
    sin_offset = (pair.to(tl.int64) + HALF) * stride_table_r
    cos = tl.load(table_row + cos_offset, mask=table_mask, other=1.0).to(tl.float32)
    sin = tl.load(table_row + sin_offset, mask=table_mask, other=0.0).to(tl.float32)

    weight_row = k_norm_weight_ptr + layer * stride_weight_l
    weight = tl.load(weight_row + dim.to(tl.int64) * stride_weight_d, mask=dim_mask, other=0.0)
    partner_offset = partner.to(tl.int64) * stride_weight_d
    partner_weight = tl.load(weight_row + partner_offset, mask=rotary_mask, other=0.0)
    eps = tl.load(eps_ptr + layer * stride_eps_l)

    v_row = v_out_ptr + layer * stride_v_l + token * stride_v_t + head * stride_v_h
    tl.store(v_row + v_dim, v, mask=v_mask)

    k = k.to(tl.float32)
    k_partner = k_partner.to(tl.float32)
    squares = k * k
    if ROTARY_DIM == HEAD_DIM:
        squares += k_partner * k_partner
    squares = tl.sum(tl.sum(squares, axis=3), axis=2)
    scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
    scale = tl.where(inside[:, None], scale, float("nan"))[:, :, None, None]

    k = k * scale * weight.to(tl.float32)
    k_partner = k_partner * scale * partner_weight.to(tl.float32)
    k_row = k_out_ptr + layer * stride_k_l + token * stride_k_t + head * stride_k_h
    if ROTARY_DIM == HEAD_DIM:
        _store(k_row + dim, k * cos - k_partner * sin, row_mask & dim_mask, ROUND_BITS)
        _store(k_row + partner, k_partner * cos + k * sin, row_mask & dim_mask, ROUND_BITS)
    else:
        sin = tl.where(first, -sin, sin)
        _store(k_row + dim, k * cos + k_partner * sin, row_mask & dim_mask, ROUND_BITS)
