"""Pieces of the dense kernels: tiles of per-token vectors, blocks of square matrices, programs that meet."""

from __future__ import annotations

import triton
import triton.language as tl

from regraft.ops.triton.tiles import INTERPRETED


@triton.jit
def keys(at, i, there, width, BD: tl.constexpr):
    """`[C,BD]` from rows of `width` numbers, in the dtype they are stored in; `at` is the first of them."""
    # 32-bit offsets from one address: 64-bit addresses of a whole tile take as many registers as two tiles
    at += i[:, None] * width + tl.arange(0, BD)[None, :]
    return tl.load(at, mask=there[:, None], other=0.0)


@triton.jit
def keys_t(at, i, there, width, BD: tl.constexpr):
    """The transpose of `keys`, `[BD,C]`, loaded as one."""
    at += i[None, :] * width + tl.arange(0, BD)[:, None]
    return tl.load(at, mask=there[None, :], other=0.0)


@triton.jit
def tile(at, i, there, width, BD: tl.constexpr):
    """`keys` in float32."""
    return keys(at, i, there, width, BD).to(tl.float32)


@triton.jit
def tile_t(at, i, there, width, BD: tl.constexpr):
    """`keys_t` in float32."""
    return keys_t(at, i, there, width, BD).to(tl.float32)


@triton.jit
def _parts(x):
    """Three bfloat16 numbers whose sum is x, float32, but for its last bit."""
    high = x.to(tl.bfloat16)
    x -= high.to(tl.float32)
    middle = x.to(tl.bfloat16)
    return high, middle, (x - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _halves(x):
    """What TF32 keeps of x, and the rest of it."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def exact_dot(x, y, acc, PRECISION: tl.constexpr):
    """`acc + x y`, all in float32.

    Triton's own three products in TF32 add their sum to `acc` after they have looked for infinities in it;
    these begin with `acc`.
    """
    if PRECISION == "tf32x3" and not INTERPRETED:
        x_high, x_low = _halves(x)
        y_high, y_low = _halves(y)
        acc = tl.dot(x_low, y_high, acc, input_precision="tf32")
        acc = tl.dot(x_high, y_low, acc, input_precision="tf32")
        acc = tl.dot(x_high, y_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def key_dot(K, x, acc, PRECISION: tl.constexpr):
    """`acc + K x`, x in float32, K keys as they are stored.

    Where these are bfloat16 there is nothing to split in them: three products in that format are as exact as
    six that split both factors, or as three in TF32 of the double cost.
    """
    if K.dtype == tl.bfloat16 and PRECISION == "tf32x3" and not INTERPRETED:
        high, middle, low = _parts(x)
        acc = tl.dot(K, low, acc)
        acc = tl.dot(K, middle, acc)
        acc = tl.dot(K, high, acc)
    else:
        acc = tl.dot(K.to(tl.float32), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dot_key(x, K, acc, PRECISION: tl.constexpr):
    """`acc + x K`, see `key_dot`."""
    if K.dtype == tl.bfloat16 and PRECISION == "tf32x3" and not INTERPRETED:
        high, middle, low = _parts(x)
        acc = tl.dot(low, K, acc)
        acc = tl.dot(middle, K, acc)
        acc = tl.dot(high, K, acc)
    else:
        acc = tl.dot(x, K.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def fresh_t(at, i, there, width, BD: tl.constexpr):
    """`tile_t` of what another program has just written: past the cache of this multiprocessor."""
    at += i[None, :] * width + tl.arange(0, BD)[:, None]
    return tl.load(at, mask=there[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def put(at, i, there, width, x, BD: tl.constexpr):
    """The counterpart of `tile`."""
    at += i[:, None] * width + tl.arange(0, BD)[None, :]
    tl.store(at, x.to(at.dtype.element_ty), mask=there[:, None])


@triton.jit
def square(base, row, col, width, BR: tl.constexpr, BC: tl.constexpr):
    """Addresses of the block `[BR,BC]` at (row, col) of a matrix of `width` columns."""
    return base + (row + tl.arange(0, BR)[:, None]) * width + col + tl.arange(0, BC)[None, :]


@triton.jit
def columns_of(matrix, own, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Columns `own …` of a matrix `[D,D]`, as D/BR blocks `[BR,BD]`."""
    blocks = []
    for m in tl.static_range(D // BR):
        blocks = blocks + [tl.load(square(matrix, m * BR, own, D, BR, BD))]  # noqa: RUF005
    return blocks


@triton.jit
def put_columns(matrix, blocks, own, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """The counterpart of `columns_of`."""
    for m in tl.static_range(D // BR):
        tl.store(square(matrix, m * BR, own, D, BR, BD), blocks[m])


@triton.jit
def arrive(counter):
    """Say that what this program wrote may be read by whoever waits for `counter`, zero at launch."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, arrivals):
    """Until so many programs have arrived. All of them must have begun: work is taken in order of tickets."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    tl.debug_barrier()


@triton.jit
def sum_of_shares(shares, NB: tl.constexpr, C: tl.constexpr):
    """The sum of NB matrices `[C,C]` that as many programs have written."""
    total = tl.load(square(shares, 0, 0, C, C, C), cache_modifier=".cg")
    for other in tl.static_range(1, NB):
        total += tl.load(square(shares + other * (C * C), 0, 0, C, C, C), cache_modifier=".cg")
    return total
