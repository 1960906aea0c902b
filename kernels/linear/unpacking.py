"""The numbers of a weight's words as float16, within kernels.

4-bit integers become float16 by their bits: 0x6400 is 1024, and its lowest bit counts one, its fifth sixteen (after Kim
et al. 2022, "Who Says Elephants Can't Run").
"""

from specahead.kernels.backends import constant, jit, tl

# For each of the four numbers of a word: take it from two words, and turn these two e4m3 numbers into float16.
UNPACK_EIGHT_BITS = constant(
    tuple(
        f"{{ .reg .b32 two; .reg .b16 low; prmt.b32 two, $1, $2, {0x40 + 0x11 * number}; cvt.u16.u32 low, two; "
        "cvt.rn.f16x2.e4m3x2 $0, low; }"
        for number in range(4)
    )
)
# Of two bytes the lower halves with 1024 added, and $3 added, which takes that and the zero off; or their upper halves,
# by a sixteenth of 1024 and 16 times the number.
_HALVES = (
    "lop3.b32 two, two, 0x000f000f, 0x64006400, 0xea; add.f16x2 $0, two, $3;",
    "lop3.b32 two, two, 0x00f000f0, 0x64006400, 0xea; mov.b32 by, 0x2c002c00; fma.rn.f16x2 $0, two, by, $3;",
)
# For each of the eight numbers of a word: take its byte from two words, and these two numbers from the bytes.
UNPACK_FOUR_BITS = constant(
    tuple(
        f"{{ .reg .b32 two, by; prmt.b32 two, $1, $2, {0x400 + 0x101 * (number // 2)}; {_HALVES[number % 2]} }}"
        for number in range(8)
    )
)


@jit
def part_of(words, NUMBER: tl.constexpr, IN_PTX: tl.constexpr):
    """One of the four e4m3 numbers of each word, as float16."""
    if IN_PTX:
        return tl.inline_asm_elementwise(UNPACK_EIGHT_BITS[NUMBER], "=r,r,r", [words], tl.float16, is_pure=True, pack=2)
    return (words >> (8 * NUMBER)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit
def in_order(words, IN_PTX: tl.constexpr):
    """All numbers of an EightBitWeight's words [lines, words], in the order of inputs: [lines, 4 * words] float16.

    On Hopper no number leaves its thread. With all numbers in order a step needs one product, and the compiler turns
    some of them into float16 while others are multiplied. Four products would each be waited for.
    """
    evens = tl.join(part_of(words, 0, IN_PTX), part_of(words, 2, IN_PTX))
    odds = tl.join(part_of(words, 1, IN_PTX), part_of(words, 3, IN_PTX))
    lines: tl.constexpr = words.shape[0]
    blocks = tl.reshape(tl.join(evens, odds), [lines, words.shape[1] // 32, 32, 2, 2])
    return tl.reshape(tl.permute(blocks, [0, 1, 3, 4, 2]), [lines, 4 * words.shape[1]])


@jit
def number_of(words, zeros_ptr, of_group, NUMBER: tl.constexpr, WORD: tl.constexpr, IN_PTX: tl.constexpr):
    """One of the WORD numbers of each word of a GroupedWeight, as float16: of 4-bit integers less the zero.

    of_group: [rows of words], the places of their scales and zeros.
    """
    if WORD == 4:
        number = part_of(words, NUMBER, IN_PTX)
    else:
        zeros = tl.load(zeros_ptr + of_group).to(tl.float16)[:, None]
        if IN_PTX:
            off = tl.broadcast_to(-zeros - (64 if NUMBER % 2 else 1024), words.shape)
            asm: tl.constexpr = UNPACK_FOUR_BITS[NUMBER]
            number = tl.inline_asm_elementwise(asm, "=r,r,r,r", [words, off], tl.float16, is_pure=True, pack=2)
        else:
            bits = (words >> (4 * NUMBER)) & 0xF | 0x6400
            number = bits.to(tl.int16).to(tl.float16, bitcast=True) - (zeros + 1024)
    return number
