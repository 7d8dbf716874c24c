"""What e4m3 adds to the forward kernel for sm_90: scales of operands, and probabilities as operands of 8 bits."""

from .gluon import aggregate, constexpr_function, field, gl, jit

SHIFT = gl.constexpr(
    8.0
)  # probabilities are 2^8 times as large: up to 256 of e4m3's 448, and normal from 2^-14 of the largest on


@aggregate
class Scales:
    """What the bytes are to be multiplied with: QScale [B, H / q_group], KScale and VScale [B, H / group] by strides, each or
    None."""

    QScale: gl.tensor | gl.constexpr
    KScale: gl.tensor | gl.constexpr
    VScale: gl.tensor | gl.constexpr
    q_group: gl.tensor
    group: gl.tensor
    strides: gl.tuple  # of q's, k's and v's batch entries and heads

    @constexpr_function
    def __init__(self, QScale, KScale, VScale, q_group, group, strides):
        self.QScale, self.KScale, self.VScale = field(QScale), field(KScale), field(VScale)
        self.q_group, self.group, self.strides = q_group, group, strides

    @jit
    def of_scores(self, work):
        """The factor of a work tile's scores."""
        q = _factor(self.QScale, work.batch, work.head // self.q_group, self.strides[0], self.strides[1])
        k = _factor(self.KScale, work.batch, work.head // self.group, self.strides[2], self.strides[3])
        return q * k

    @jit
    def of_values(self, work):
        """The factor of its result."""
        return _factor(self.VScale, work.batch, work.head // self.group, self.strides[4], self.strides[5])


@jit
def _factor(Scale, i_b, i_h, stride_b, stride_h):
    """The factor of a head, 1 where there is none."""
    if Scale is None:
        return 1.0
    else:
        return gl.load(Scale + i_b.to(gl.int64) * stride_b + i_h.to(gl.int64) * stride_h)


@jit
def packed(p):
    """Probabilities [64, KEYS] fp32, at most 448 -> [64, KEYS / 16, 4] int32, each four of e4m3, rounded to nearest even.

    Of each 16 keys a thread of a quad has 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 in the accumulator and 4t to 4t + 3 in the operand: the
    keys change places, without an exchange, and V^T has them in the same order (kernels.transpose_values)."""
    first, second = p.reshape([64, p.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    a, c = first.split()
    b, d = second.split()
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def operand(words, zero, P_LAYOUT: gl.constexpr):
    """What `packed` made as the left operand [64, KEYS] of a product; zero: a number that is 0, as nobody but the caller knows.

    Bytes that live across a loop would each have a register, so words do.  They are made while the product before reads its own,
    and a mere move would be left out by the assembler, which then makes the one wait for the other: hence the instruction."""
    p = gl.join(gl.join(words, words), gl.join(words, words)).reshape([64, words.shape[1] * 16])
    p = gl.convert_layout(p, P_LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $5;", "=r,r,r,r,r,r,r,r,r", [p, zero], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
