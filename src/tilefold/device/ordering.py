"""Scores of blocks as integers that order as the scores do: the bound above which enough of a row lies, and the row's sort and
Gini coefficient.

A row of REGS * LANES scores lies over a warp (or a few) with neighbouring columns in neighbouring lanes, as they are read:
[ROWS, REGS, LANES].  The sort puts position p into lane p // REGS, register p % REGS: most of its steps stay within a thread.
"""

import triton
import triton.language as tl

FIRST_SCORE: tl.constexpr = tl.constexpr(
    3
)  # the code of 0.0; below it: 2 no score, 1 an empty block, 0 outside of the row
INFINITE: tl.constexpr = tl.constexpr(0x7F800003)  # the code of +inf
LARGEST: tl.constexpr = tl.constexpr(float(1 << 18))  # parts of the largest mass: 4096 of it fit int32
QUANTA: tl.constexpr = tl.constexpr(float(1 << 30))  # whole parts into which the mass of a row is cut


@triton.jit
def rows_of_program(ROWS: tl.constexpr):
    """The numbers of this program's rows: a scalar for one row, int32 [ROWS, 1, 1] for more.

    What is one number a row is a scalar where a program has one row, as on every GPU: it has no place in the lanes, so the two
    ways in which a row lies there never meet in one expression, and the compiler moves nothing from one to the other."""
    if ROWS == 1:
        return tl.program_id(0)
    else:
        return tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]


@triton.jit
def row_sum(x):
    """[ROWS, A, B] -> one number a row, as `rows_of_program` has them."""
    if x.shape[0] == 1:
        return tl.sum(x)
    else:
        return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def row_max(x):
    if x.shape[0] == 1:
        return tl.max(x)
    else:
        return tl.max(tl.max(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def row_min(x):
    if x.shape[0] == 1:
        return tl.min(x)
    else:
        return tl.min(tl.min(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def any_row(flag):
    """Whether a flag of `rows_of_program` is set for any row."""
    if flag.shape == ():
        return flag
    else:
        return tl.max(flag.to(tl.int32)) > 0


@triton.jit
def earlier_columns(x):
    """int32 [ROWS, REGS, LANES], each 0 or 1, in the order of the columns -> the sum over the columns before each.

    Two runs of LANES columns are summed at once, in the halves of one number."""
    ROWS: tl.constexpr = x.shape[0]
    REGS: tl.constexpr = x.shape[1]
    LANES: tl.constexpr = x.shape[2]
    BOTH: tl.constexpr = min(REGS, 2)
    half = (tl.arange(0, BOTH) * 16)[None, None, :, None]
    runs = tl.sum(x.reshape(ROWS, REGS // BOTH, BOTH, LANES) << half, 2)
    whole = tl.sum(runs, 2, keep_dims=True)
    before = ((tl.cumsum(runs, 2) - runs)[:, :, None, :] >> half) & 0xFFFF
    run = ((whole[:, :, None, :] >> half) & 0xFFFF).reshape(ROWS, REGS, 1)
    return before.reshape(x.shape) + tl.cumsum(run, 1) - run


@triton.jit
def joined_halves(sums, total, BIT: tl.constexpr):
    """Running sums within runs of 2 ** BIT, and the runs' totals -> the same for runs of twice the length."""
    STEP: tl.constexpr = 1 << BIT
    pair = total.reshape(total.numel // (2 * STEP), 2, STEP)
    both = tl.sum(pair, 1, keep_dims=True)
    second = tl.arange(0, 2)[None, :, None] == 1
    sums += tl.where(second, both - pair, 0).reshape(sums.shape)
    return sums, (both + tl.zeros(pair.shape, tl.int32)).reshape(sums.shape)


@triton.jit
def order_sum(x, LOG: tl.constexpr):
    """int32 [ROWS, LANES, REGS] in sorted order -> its running sum within each row: what comes before a position, and itself.

    Built of what the sort is built of, so that the numbers stay in their lanes (tl.cumsum would move them)."""
    sums, total = x, x
    for bit in tl.static_range(LOG):
        sums, total = joined_halves(sums, total, bit)
    return sums


@triton.jit
def load_flat(Pointer, offset, inside):
    """Numbers at `offset`, 0 where not `inside`.  As one flat row: where a stride is unknown the compiler would otherwise spread
    the columns over the lanes in another way than the scores, and move everything."""
    N: tl.constexpr = inside.numel
    return tl.load(Pointer + offset.reshape(N), mask=inside.reshape(N), other=0).reshape(inside.shape)


@triton.jit
def score_codes(Scores, Sizes, p_row, p_sizes, column, inside, stride_sk, scale):
    """uint32 codes [ROWS, REGS, LANES] of the scores at Scores + p_row + column: 3 + the bits of a score >= 0 (-0 is 0), 2 for a
    number that is no score (NaN, below 0), 1 for a block without tokens, 0 where not `inside`.  Ascending as the scores are.

    scale: None; or of logits, whose score is exp(scale * (x - the row's largest)): softmax but for its sum."""
    x = tl.load(Scores + p_row + column, mask=inside, other=-1.0).to(tl.float32)
    if scale is None and column.shape[1] * column.shape[2] > 512:
        # Changes no code, but asks for all loads first: else compilers wait for each.  Short rows would lose registers.
        x = tl.where(tl.max(x, 1, keep_dims=True) > float("-inf"), x, -1.0)
    some = inside
    if Sizes is not None:
        some = some & (load_flat(Sizes, p_sizes + column.to(tl.int64) * stride_sk, inside) > 0)
    if scale is not None:
        x = tl.where(some, x * (scale * 1.4426950408889634), float("-inf"))
        top = row_max(x)
        x = tl.exp2(x - tl.where(top > float("-inf"), top, 0.0))
    bits = tl.where(x > 0, x, 0.0).to(tl.uint32, bitcast=True)
    code = tl.where(x >= 0, bits + FIRST_SCORE, 2)
    if Sizes is not None:
        code = tl.where(some, code, 1)
    return tl.where(inside, code, 0)


@triton.jit
def exchange(x, BIT: tl.constexpr):
    """Of every two positions that differ in BIT, the lower gets the larger number."""
    STEP: tl.constexpr = 1 << BIT
    pair = x.reshape(x.numel // (2 * STEP), 2, STEP)
    other = tl.sum(pair, 1, keep_dims=True) - pair  # one shuffle, or none
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.where(second, tl.minimum(pair, other), tl.maximum(pair, other)).reshape(x.shape)


@triton.jit
def invert_half(x, BIT: tl.constexpr):
    """Every number at a position whose BIT is set becomes its complement: what is ascending there becomes descending."""
    STEP: tl.constexpr = 1 << BIT
    pair = x.reshape(x.numel // (2 * STEP), 2, STEP)
    half = (0 - tl.arange(0, 2)).to(tl.uint32, bitcast=True)[None, :, None]
    return (pair ^ half).reshape(x.shape)


@triton.jit
def sort_descending(x, REGS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr):
    """uint32 [ROWS, REGS, LANES] in any order -> [ROWS, LANES, REGS], rows of 2 ** LOG descending along lanes, then registers.

    Bitonic (Batcher 1968, doi:10.1145/1468075.1468121): LOG * (LOG + 1) / 2 steps.  Instead of sorting every other run the
    other way round its numbers are complemented: all steps have one direction, one instruction a number within a thread."""
    ROWS: tl.constexpr = x.shape[0]
    x = tl.permute(x, (0, 2, 1)).reshape(ROWS * LANES * REGS)
    for run in tl.static_range(1, LOG + 1):
        if run < LOG:
            x = invert_half(x, run)
        for step in tl.static_range(run):
            x = exchange(x, run - 1 - step)
        if run < LOG:
            x = invert_half(x, run)
    return x.reshape(ROWS, LANES, REGS)


@triton.jit
def positions(REGS: tl.constexpr, LANES: tl.constexpr):
    """int32 [1, LANES, REGS]: the place in sorted order."""
    return tl.arange(0, LANES)[None, :, None] * REGS + tl.arange(0, REGS)[None, None, :]


@triton.jit
def finite_bits(code):
    """Bits of the finite scores among the codes, 0 for every other one: the bits of 0.0."""
    bits = code - FIRST_SCORE  # unsigned: what is below 3 wraps to the top
    return tl.where(bits < INFINITE - FIRST_SCORE, bits, 0)


@triton.jit
def row_scale(bits):
    """Bits of finite scores -> the power of two, fp32 a row, that brings the largest to 1 .. 4 (a subnormal one: at most 2), so
    that no sum leaves the range of fp32."""
    exponent = tl.minimum(row_max(bits) >> 23, 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def concentration(code, REGS: tl.constexpr, LANES: tl.constexpr):
    """Sorted codes [ROWS, LANES, REGS] -> the Gini coefficient, fp32 a row.

    sum_i (n - 1 - 2 i) x_i / (n sum x) over the n finite scores x_0 >= x_1 >= ...; 0 where all are equal or sum to 0."""
    finite = code - FIRST_SCORE < INFINITE - FIRST_SCORE
    bits = finite_bits(code)
    low = row_min(tl.where(finite, bits, INFINITE))
    x = bits.to(tl.float32, bitcast=True) * row_scale(bits)
    total = row_sum(x)
    n = row_sum(finite.to(tl.int32))
    infinite = row_sum((code == INFINITE).to(tl.int32))
    weight = (n - 1 + 2 * infinite).to(tl.float32) - 2.0 * positions(REGS, LANES).to(tl.float32)
    spread = row_sum(weight * x)
    some = (total > 0) & (row_max(bits) > low)
    return tl.maximum(tl.where(some, spread / tl.where(some, n.to(tl.float32) * total, 1.0), 0.0), 0.0)


@triton.jit
def quanta(code):
    """int32 masses of codes in whole parts, about 2^30 a row, of which a row without a finite score above 0 has none.

    Sums of them do not depend on any order.  Nor do the parts: they follow from the largest score and a sum of whole numbers."""
    bits = finite_bits(code)
    scale = row_scale(bits)
    x = bits.to(tl.float32, bitcast=True) * scale
    top = row_max(bits).to(tl.float32, bitcast=True) * scale
    unit = tl.where(top > 0, 1.0 / tl.where(top > 0, top, 1.0), 0.0)
    total = row_sum((x * (unit * LARGEST) + 0.5).to(tl.int32)).to(tl.float32) * (1.0 / LARGEST)  # of the largest
    return (x * (unit * QUANTA / tl.maximum(total, 1.0)) + 0.5).to(tl.int32)


@triton.jit
def count_bound(code, goal):
    """A code c a row such that `goal` codes or more are >= c, and fewer than `goal` are > c; above all codes for a goal of 0.

    goal: int32, at most the number of codes above 0.  Bisection from the lowest of them on, which ends early where c cuts off
    exactly `goal` codes."""
    high = row_max(code) + 1
    low = row_min(tl.where(code > 0, code, high))
    found = (goal <= 0) | (row_sum((code > 0).to(tl.int32)) <= goal)
    while any_row(~found):
        middle = (low + high) >> 1
        n = row_sum((code >= middle).to(tl.int32))
        low = tl.where(found | (n < goal), low, middle)
        high = tl.where(found | (n >= goal), high, middle)
        found = found | (n == goal) | (high - low < 2)
    return tl.where(goal > 0, low, 0x7FFFFFFF)


@triton.jit
def mass_bound(code, mass, goal):
    """The largest code c a row for which the masses of all codes >= c sum to at least `goal`; 0 if no sum does, 2^31 - 1, above
    every code, for a goal <= 0.  mass: int32 >= 0 of each code.  A search for its bits from the top."""
    bound = row_max(code) * 0
    bit = bound + 0x40000000
    for _ in range(31):
        enough = row_sum(tl.where(code >= bound + bit, mass, 0)) >= goal
        bound = tl.where(enough, bound + bit, bound)
        bit >>= 1
    return bound
