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


@triton.jit
def _columns(x, FULL_ROTARY: tl.constexpr):
    """What belongs to the columns of a tile, as one."""
    if FULL_ROTARY:
        x = x[None, :]
    return x[None, :, :]


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
    FULL_ROTARY: tl.constexpr = ROTARY_DIM == HEAD_DIM
    BLOCKS_H: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    # The layers of a token, and its heads, follow one another, as they do in kv.
    block = tl.program_id(0)
    layer = (block // BLOCKS_H % N_LAYERS).to(tl.int64)
    token = (block // (BLOCKS_H * N_LAYERS)).to(tl.int64) * BLOCK_T
    head = (block % BLOCKS_H).to(tl.int64) * BLOCK_H
    lane = tl.arange(0, BLOCK_W)
    if FULL_ROTARY:  # tiles are [BLOCK_T, BLOCK_H, BLOCK_W]
        token += tl.arange(0, BLOCK_T)
        head = (head + tl.arange(0, BLOCK_H))[None, :, None]
        pair = lane
        dim = lane
        partner = lane + HALF
        dim_mask = lane < HALF
        rotary_mask = dim_mask
    else:  # tiles are [BLOCK_T * BLOCK_H, CHUNKS, BLOCK_W]
        row = tl.arange(0, BLOCK_T * BLOCK_H)
        token += row // BLOCK_H
        head = (head + row % BLOCK_H)[:, None, None]
        chunk = tl.arange(0, CHUNKS)[:, None]
        first = chunk < HALF // BLOCK_W
        pair = tl.where(first, chunk, chunk - HALF // BLOCK_W) * BLOCK_W + lane[None, :]
        dim = chunk * BLOCK_W + lane[None, :]
        partner = tl.where(first, pair + HALF, pair)
        dim_mask = dim < HEAD_DIM
        rotary_mask = dim < ROTARY_DIM

    # Everything is loaded before the first use, and the start of a chain of loads first.
    token_mask = token < total_ctx
    position = tl.load(positions_ptr + token * stride_positions_t, mask=token_mask, other=0)

    row_mask = token_mask[:, None, None] & (head < NUM_KV_HEADS)
    k_row = kv_ptr + (token * stride_kv_t)[:, None, None] + layer * stride_kv_l + head * HEAD_DIM
    k_mask = row_mask & _columns(dim_mask, FULL_ROTARY)
    partner_mask = row_mask & _columns(rotary_mask, FULL_ROTARY)
    k = tl.load(k_row + _columns(dim, FULL_ROTARY), mask=k_mask, other=0.0)
    k_partner = tl.load(k_row + _columns(partner, FULL_ROTARY), mask=partner_mask, other=0.0)
    v_dim = tl.arange(0, BLOCK_D)[None, None, :]
    v_mask = row_mask & (v_dim < HEAD_DIM)
    v = tl.load(k_row + NUM_KV_HEADS * HEAD_DIM + v_dim, mask=v_mask)

    inside = (position >= 0) & (position < table_rows)  # and never read outside
    table_row = cos_sin_cache_ptr + position.to(tl.int64) * stride_table_p
    cos_offset = pair.to(tl.int64) * stride_table_r
    sin_offset = (pair.to(tl.int64) + HALF) * stride_table_r
    if FULL_ROTARY:  # without the axis of heads
        table_mask = (token_mask & inside)[:, None] & rotary_mask[None, :]
        cos = tl.load(table_row[:, None] + cos_offset[None, :], mask=table_mask, other=0.0)
        sin = tl.load(table_row[:, None] + sin_offset[None, :], mask=table_mask, other=0.0)
        cos = cos.to(tl.float32)[:, None, :]
        sin = sin.to(tl.float32)[:, None, :]
    else:
        table_row = table_row[:, None, None]
        table_mask = (token_mask & inside)[:, None, None] & rotary_mask[None, :, :]
        cos = tl.load(table_row + cos_offset[None, :, :], mask=table_mask, other=1.0)
        sin = tl.load(table_row + sin_offset[None, :, :], mask=table_mask, other=0.0)
        cos = cos.to(tl.float32)
        sin = tl.where(first[None, :, :], -sin.to(tl.float32), sin.to(tl.float32))

    weight_row = k_norm_weight_ptr + layer * stride_weight_l
    weight_offset = dim.to(tl.int64) * stride_weight_d
    partner_offset = partner.to(tl.int64) * stride_weight_d
    weight = tl.load(weight_row + weight_offset, mask=dim_mask, other=0.0).to(tl.float32)
    partner_weight = tl.load(weight_row + partner_offset, mask=rotary_mask, other=0.0)
    partner_weight = partner_weight.to(tl.float32)
    eps = tl.load(eps_ptr + layer * stride_eps_l)

    v_row = v_out_ptr + layer * stride_v_l + (token * stride_v_t)[:, None, None] + head * stride_v_h
    tl.store(v_row + v_dim, v, mask=v_mask)

    k = k.to(tl.float32)
    k_partner = k_partner.to(tl.float32)
    if FULL_ROTARY:
        squares = tl.sum(k * k + k_partner * k_partner, axis=2)
        scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
        scale = tl.where(inside[:, None], scale, float("nan"))[:, :, None]
    else:
        squares = tl.sum(tl.sum(k * k, axis=2), axis=1)
        scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
        scale = tl.where(inside, scale, float("nan"))[:, None, None]

    k = k * scale * _columns(weight, FULL_ROTARY)
    k_partner = k_partner * scale * _columns(partner_weight, FULL_ROTARY)
    k_row = k_out_ptr + layer * stride_k_l + (token * stride_k_t)[:, None, None] + head * stride_k_h
    k_first = k_row + _columns(dim, FULL_ROTARY)
    if FULL_ROTARY:
        _store(k_first, k * cos - k_partner * sin, k_mask, ROUND_BITS)
        _store(k_first + HALF, k_partner * cos + k * sin, k_mask, ROUND_BITS)
    else:
        _store(k_first, k * cos + k_partner * sin, k_mask, ROUND_BITS)
