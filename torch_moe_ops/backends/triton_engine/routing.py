"""Router logits to expert ids and weights in one launch: the kernel of `torch_moe_ops.routing.reference`'s pipeline.

One program has one token, and one warp for as many experts as fit: the top-k is TOP_K rounds of "largest key, lowest
index that has it", two 32-bit reductions each, which one warp does in two instructions. Sorting packed pairs of key
and index would need 64-bit shuffles and work on all experts for the sake of a few.

Scores are a tile [groups, experts of a group]; without groups there is one group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from torch_moe_ops.backends.triton_engine.dependent import wait_for_previous_kernel

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-(2**31))  # key of what cannot be chosen (any more)
NAN_KEY = tl.constexpr(-(2**31) + 1)  # below every number
NO_INDEX = tl.constexpr(2**31 - 1)
EPSILON = tl.constexpr(1e-20)  # as in torch_moe_ops.routing.reference


@triton.jit
def _exp(x, USE_PTX: tl.constexpr):
    """CUDA's expf, as torch uses it: tl.exp is another approximation, and scores decide ties."""
    if USE_PTX:
        return libdevice.exp(x)
    return tl.exp(x)


@triton.jit
def _log1p(x, USE_PTX: tl.constexpr):
    if USE_PTX:
        return libdevice.log1p(x)
    # log(u) errs as u = 1 + x does; their quotient does not (Goldberg 1991, theorem 4).
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * tl.div_rn(x, tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def _softmax_parts(z, valid, USE_PTX: tl.constexpr):
    """(largest logit, sum of the masses): NaN counts for nothing, equal infinities share."""
    top = tl.max(tl.where(valid & (z == z), z, -INF))
    mass = _softmax_mass(z, top, USE_PTX)
    return top, tl.sum(tl.where(valid & (z == z), mass, 0.0))


@triton.jit
def _softmax_mass(z, top, USE_PTX: tl.constexpr):
    return tl.where(z == top, 1.0, _exp(z - top, USE_PTX))  # inf - inf would be NaN


@triton.jit
def _score(z, top, total, SCORE: tl.constexpr, USE_PTX: tl.constexpr):
    """Elementwise, so that the chosen experts' scores can be had again from their logits."""
    if SCORE == "softmax":
        return tl.div_rn(_softmax_mass(z, top, USE_PTX), tl.zeros_like(z) + total)
    elif SCORE == "sigmoid":
        return tl.div_rn(tl.zeros_like(z) + 1.0, 1.0 + _exp(-z, USE_PTX))
    elif SCORE == "sqrtsoftplus":
        return tl.sqrt_rn(tl.maximum(z, 0.0) + _log1p(_exp(-tl.abs(z), USE_PTX), USE_PTX))
    else:
        return z


@triton.jit
def _ordered(x):
    """int32 in the order of float32, -0.0 equal to 0.0, NaN below all."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    # Negative floats order backwards: flip all bits but the sign.
    return tl.where(x != x, NAN_KEY, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _best_groups(choice, valid, group, member, HAS_BIAS: tl.constexpr, TOPK_GROUP: tl.constexpr):
    """bool tile: experts of the best TOPK_GROUP groups, by their two best scores with a bias, else by the best one."""
    c = tl.where(valid & (choice == choice), choice, -INF)
    best = tl.max(c, axis=1, keep_dims=True)
    if HAS_BIAS:
        first = tl.min(tl.where(c == best, member, NO_INDEX), axis=1, keep_dims=True)
        best += tl.max(tl.where(member == first, -INF, c), axis=1, keep_dims=True)
    # Over the whole tile although a row has one value: reductions of all of it need no other arrangement of threads.
    key = tl.where(valid, _ordered(best), LOWEST)
    for _ in range(TOPK_GROUP):
        at = tl.min(tl.where(key == tl.max(key), group, NO_INDEX))
        key = tl.where(group == at, LOWEST, key)
    return valid & (key == LOWEST)


@triton.jit
def _weights(z, valid, top, total, factor, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, USE_PTX: tl.constexpr):
    """Final weights of the chosen experts from their logits z; top and total as _softmax_parts gave them."""
    w = _score(z, top, total, SCORE, USE_PTX)
    w = tl.where(valid & (w == w), w, 0.0)
    if RENORMALIZE:
        infinite = w == INF
        w = tl.where(tl.max(w) == INF, infinite.to(tl.float32), w)
        w = tl.div_rn(w, tl.zeros_like(w) + (tl.sum(w) + EPSILON))
    return w * factor


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    row_stride,
    column_stride,
    factor,
    SCORE: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_SIZE_PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    HAS_SHARED_WEIGHTS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids [num_tokens, TOP_K + SHARED] int32 and weights likewise float32: TOP_K by descending choice score, ties by
    ascending id, then the SHARED experts behind those of the logits, with weights `shared` [num_tokens, SHARED] or 1.

    logits: [num_tokens, experts] of any strides. SCORE, WEIGHT: what experts are chosen and weighted by; the weight's
    softmax is over all experts where SCORE is one too, else over the chosen ones. Grid: num_tokens.
    """
    wait_for_previous_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * row_stride
    group = tl.arange(0, GROUPS_PADDED)[:, None]
    member = tl.arange(0, GROUP_SIZE_PADDED)[None, :]
    index = group * GROUP_SIZE + member
    valid = (group < GROUPS) & (member < GROUP_SIZE)
    z = tl.load(row + index.to(tl.int64) * column_stride, mask=valid, other=0.0).to(tl.float32)
    top = 0.0
    total = 1.0
    if SCORE == "softmax":
        top, total = _softmax_parts(z, valid, USE_PTX)
    choice = _score(z, top, total, SCORE, USE_PTX)
    if HAS_BIAS:
        choice += tl.load(bias_ptr + index, mask=valid, other=0.0)
    key = tl.where(valid, _ordered(choice), LOWEST)
    if TOPK_GROUP < GROUPS:
        key = tl.where(_best_groups(choice, valid, group, member, HAS_BIAS, TOPK_GROUP), key, LOWEST)

    slot = tl.arange(0, K_PADDED)
    ids = tl.zeros((K_PADDED,), tl.int32)
    for j in range(TOP_K):
        at = tl.min(tl.where(key == tl.max(key), index, NO_INDEX))
        ids = tl.where(slot == j, at, ids)
        key = tl.where(index == at, LOWEST, key)

    stored = slot < TOP_K
    z_chosen = tl.load(row + ids.to(tl.int64) * column_stride, mask=stored, other=0.0).to(tl.float32)
    if WEIGHT == "softmax" and SCORE != "softmax":
        top, total = _softmax_parts(z_chosen, stored, USE_PTX)
    weights = _weights(z_chosen, stored, top, total, factor, WEIGHT, RENORMALIZE, USE_PTX)
    out = token * (TOP_K + SHARED) + slot
    tl.store(ids_ptr + out, ids, mask=stored)
    tl.store(weights_ptr + out, weights, mask=stored)
    if SHARED > 0:
        number = tl.arange(0, SHARED_PADDED)
        is_shared = number < SHARED
        given = tl.full((SHARED_PADDED,), 1.0, tl.float32)
        if HAS_SHARED_WEIGHTS:
            given = tl.load(shared_ptr + token * SHARED + number, mask=is_shared, other=0.0).to(tl.float32)
        behind = token * (TOP_K + SHARED) + TOP_K + number
        tl.store(ids_ptr + behind, GROUPS * GROUP_SIZE + number, mask=is_shared)
        tl.store(weights_ptr + behind, given, mask=is_shared)
