# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportArgumentType=false
"""Device code. A program does BLOCK_T tokens x BLOCK_H heads of one layer.

A pair (i, i + R/2) has to meet in one thread. Where all of K rotates, its two halves are loaded
apart. Else whole rows are loaded and stored, as the parts of one are too narrow for that, and each
element's partner is loaded beside it, from the L1 cache: a row is CHUNKS pieces of BLOCK_W, and
whole pieces change places.

K and V go to k_out and v_out, row t to row t, or into the slots of a cache.

All offsets are 64-bit. The integer arguments are only ever multiplied with tensors: Triton turns
an argument that equals 1 into a constant, on which a cast would not compile.
"""

import triton
import triton.language as tl


@triton.jit
def _store(pointer, value, mask, ROUND_TO: tl.constexpr):
    """Round float32 to the output's dtype, to nearest even, and store.

    What does not fit in float8 becomes the largest that does, as the hardware's conversion has it.
    """
    if ROUND_TO is None:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
    elif ROUND_TO == "bfloat16":  # the interpreter truncates: round on the bits
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value == value, nearest, 0x7FC0)
        tl.store(pointer, nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:  # the interpreter is wrong about float8: the same, to bytes
        E4M3: tl.constexpr = ROUND_TO == "float8_e4m3fn"
        MANTISSA: tl.constexpr = 3 if E4M3 else 2
        BIAS: tl.constexpr = 7 if E4M3 else 15
        LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
        DROPPED: tl.constexpr = 23 - MANTISSA
        size = tl.minimum(tl.abs(value), LARGEST)
        bits = size.to(tl.uint32, bitcast=True)
        nearest = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
        nearest -= (127 - BIAS) << MANTISSA
        # Below the smallest normal number, float32's own addition rounds to a multiple of the step.
        STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
        MAGIC: tl.constexpr = STEP * 2.0**23
        steps = (size + MAGIC).to(tl.uint32, bitcast=True) & 0x7FFFFF
        nearest = tl.where(size < STEP * (1 << MANTISSA), steps, nearest)
        nearest |= (value.to(tl.uint32, bitcast=True) >> 31) << 7
        nearest = tl.where(value == value, nearest, 0x7F)
        tl.store(pointer, nearest.to(tl.uint8), mask=mask)


@triton.jit
def _cache_pointer(
    base_ptr,
    layer,
    stride_layer,
    IS_SEQUENCE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Of one layer: in the array of all, or from the addresses of an array each."""
    if IS_SEQUENCE:
        address = tl.load(base_ptr + layer)
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        pointer = address.to(tl.pointer_type(DTYPE))
    else:
        pointer = base_ptr + layer * stride_layer
    return pointer


@triton.jit
def _scale_of(scale_ptr, layer, stride):
    """Of one layer times a power of two, that power, and the reciprocal of the product.

    The power keeps remainders within float32's range. NaN for what is no scale.
    """
    scale = tl.load(scale_ptr + layer * stride)
    scale = tl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))
    power = tl.where(scale < 2.0**-60, 2.0**100, tl.where(scale > 2.0**100, 2.0**-60, 1.0))
    scale *= power
    return scale, power, tl.div_rn(1.0, scale)


@triton.jit
def _divided(x, scale, power, reciprocal, IN_SOFTWARE: tl.constexpr):
    """x / scale, so that it rounds to the float8 that a correctly rounded quotient rounds to.

    By the reciprocal and one correction: beside each value halfway between two float8, and for each
    significand of a scale, that was seen to be the correctly rounded quotient. A division's own
    code made float8 as slow to write as bfloat16.
    """
    x *= power
    if IN_SOFTWARE:  # the interpreter's fma rounds twice
        quotient = tl.div_rn(x, scale)
    else:
        product = x * reciprocal
        corrected = tl.fma(tl.fma(-scale, product, x), reciprocal, product)
        quotient = tl.where(tl.abs(product) < 2.0**60, corrected, product)  # not infinities, NaN
    return quotient


@triton.jit
def _columns(x, FULL_ROTARY: tl.constexpr):
    """What belongs to the columns of a tile, as one."""
    if FULL_ROTARY:
        x = x[None, :]
    return x[None, :, :]


@triton.jit(do_not_specialize=["total_ctx", "table_rows", "num_slots"])
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
    slot_mapping_ptr,  # from here on None or 0 where there is no cache
    commit_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_slots,
    stride_slots_row,
    stride_slots_t,
    stride_lens,
    stride_k_scale,
    stride_v_scale,
    stride_k_page,
    stride_v_page,
    N_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # a power of two that covers D
    CHUNKS: tl.constexpr,  # of BLOCK_W elements each, that cover R/2, or D where R < D
    BLOCK_W: tl.constexpr,
    ROUND_TO: tl.constexpr,  # in software; None where the hardware does it
    PAGE_SIZE: tl.constexpr,  # 0: no cache
    WINDOW: tl.constexpr,  # of commit_lens, or 0
    IS_SEQUENCE: tl.constexpr,  # k_out_ptr and v_out_ptr are tables of addresses
    CACHE_ALIGNED: tl.constexpr,  # those addresses are, to 16 bytes
    CACHE_DTYPE: tl.constexpr,
    CONVERT_V: tl.constexpr,
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
    stored = token_mask
    k_token = token * stride_k_t
    v_token = token * stride_v_t
    if PAGE_SIZE > 0:
        slots_row = layer
        slots_column = token
        if WINDOW > 0:
            slots_row = token // WINDOW
            slots_column = token % WINDOW
            count = tl.load(commit_lens_ptr + slots_row * stride_lens, mask=token_mask, other=0)
            stored = slots_column < count
        slots = slot_mapping_ptr + slots_row * stride_slots_row + slots_column * stride_slots_t
        slot = tl.load(slots, mask=token_mask, other=-1).to(tl.int64)
        stored = stored & (slot >= 0) & (slot < num_slots)
        k_token = (slot // PAGE_SIZE) * stride_k_page + (slot % PAGE_SIZE) * stride_k_t
        v_token = (slot // PAGE_SIZE) * stride_v_page + (slot % PAGE_SIZE) * stride_v_t
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
    if k_scale_ptr is not None:  # divides all of K, as the weight multiplies it
        _, power, reciprocal = _scale_of(k_scale_ptr, layer, stride_k_scale)
        reciprocal *= power
        reciprocal = tl.where(reciprocal > 2.0**100, 2.0**100, reciprocal)  # no infinities
        weight *= reciprocal
        partner_weight *= reciprocal
    eps = tl.load(eps_ptr + layer * stride_eps_l)

    stored = stored[:, None, None]
    v_layer = _cache_pointer(v_out_ptr, layer, stride_v_l, IS_SEQUENCE, CACHE_ALIGNED, CACHE_DTYPE)
    v_row = v_layer + v_token[:, None, None] + head * stride_v_h
    if CONVERT_V:
        v = v.to(tl.float32)
        if v_scale_ptr is not None:
            v_scale, power, reciprocal = _scale_of(v_scale_ptr, layer, stride_v_scale)
            v = _divided(v, v_scale, power, reciprocal, ROUND_TO is not None)
        _store(v_row + v_dim, v, v_mask & stored, ROUND_TO)
    else:
        tl.store(v_row + v_dim, v, mask=v_mask & stored)

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
    k_layer = _cache_pointer(k_out_ptr, layer, stride_k_l, IS_SEQUENCE, CACHE_ALIGNED, CACHE_DTYPE)
    k_row = k_layer + k_token[:, None, None] + head * stride_k_h
    k_first = k_row + _columns(dim, FULL_ROTARY)
    k_mask = k_mask & stored
    if FULL_ROTARY:
        rotated = k * cos - k_partner * sin
        partner_rotated = k_partner * cos + k * sin
    else:
        rotated = k * cos + k_partner * sin
    _store(k_first, rotated, k_mask, ROUND_TO)
    if FULL_ROTARY:
        _store(k_first + HALF, partner_rotated, k_mask, ROUND_TO)
