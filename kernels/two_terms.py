"""Products of 16-bit numbers with 8-bit ones by tensor cores that take 8 bits: the 16-bit ones as sums of two terms.

x is hi + lo / 16, where hi is the e4m3 number nearest to x and lo the one nearest to 16 (x - hi): together they have 8
bits of mantissa, as bfloat16. A product of both terms with 8-bit numbers is one product of twice as many rows. So the
8-bit operand, the larger one in attention, is read as it lies in memory and never converted.
"""

from specahead.kernels.backends import jit, tl


@jit
def in_two_terms(x, dtype: tl.constexpr):
    """Return rows [n, m] of float32 up to 448 as [2 n, m] of e4m3: eight rows of hi, then the same rows' lo.

    In this order a thread that holds a number of a product of Hopper's tensor cores holds that of its other term too.
    """
    high = x.to(dtype)
    low = ((x - high.to(tl.float32)) * 16).to(dtype)
    both = tl.reshape(tl.join(high, low), [x.shape[0] // 8, 8, x.shape[1], 2])
    return tl.reshape(tl.permute(both, [0, 3, 1, 2]), [2 * x.shape[0], x.shape[1]])


@jit
def of_two_terms(product):
    """Return the product [n, m] of numbers whose terms' product is [2 n, m]."""
    both = tl.reshape(product, [product.shape[0] // 16, 2, 8, product.shape[1]])
    high, low = tl.split(tl.permute(both, [0, 2, 3, 1]))
    return tl.reshape(high + low * 0.0625, [product.shape[0] // 2, product.shape[1]])
