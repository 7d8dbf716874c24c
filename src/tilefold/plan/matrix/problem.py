"""What a matrix product asks for, as a value: sizes, types, layouts, what follows the product."""

from dataclasses import dataclass

from tilefold.errors import PlanError
from tilefold.plan.cost import Cost

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
OUT_DTYPES = ("float16", "bfloat16", "float32")
BIASES = ("none", "columns", "rows", "full")


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """activation(A B + bias), A [batch, m, k], B [batch, k, n].

    fold: the batch is summed over as well, and the result is one [m, n]. dtype: of A and B; out_dtype: of the result.
    a_major, b_major: the dimension whose elements lie side by side, "m" or "k" of A, "k" or "n" of B.
    a_shared, b_shared: one matrix serves the whole batch. bias: "none", or "columns" (the same for all rows), "rows", "full".
    saved: what the activation is applied to is stored, too, for the backward pass. scaled: factors a row or a column.
    descriptors: bases and strides of A and B are multiples of 16 bytes, as TMA needs them; out_descriptors:
        so are those of the result. tf32: fp32 factors are rounded to 10 bits.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "n"
    a_shared: bool = False
    b_shared: bool = False
    fold: bool = False
    bias: str = "none"
    activation: str = "none"
    saved: bool = False
    scaled: bool = False
    descriptors: bool = True
    out_descriptors: bool = True
    tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "m", "n", "k"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise PlanError(f"problem field {name} must be an int of at least 0, got {value!r}")
        accepted = {
            "dtype": tuple(ITEMSIZE),
            "out_dtype": OUT_DTYPES,
            "a_major": ("m", "k"),
            "b_major": ("k", "n"),
            "bias": BIASES,
            "activation": ACTIVATIONS,
        }
        for name, choices in accepted.items():
            if getattr(self, name) not in choices:
                raise PlanError(
                    f"problem field {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    @property
    def results(self) -> int:
        """Matrices [m, n] that are made."""
        return 1 if self.fold else self.batch

    @property
    def summed(self) -> int:
        """Products that are added up for each element."""
        return self.k * (self.batch if self.fold else 1)

    @property
    def rate(self) -> str:
        """The name of the arithmetic that bounds it, as of Device.matmul_rate."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    @property
    def cost(self) -> Cost:
        """2 m n k operations a matrix; every tensor moved once; exponentials of the activation."""
        size, made = ITEMSIZE[self.dtype], self.results * self.m * self.n
        a = (1 if self.a_shared else self.batch) * self.m * self.k
        b = (1 if self.b_shared else self.batch) * self.k * self.n
        written = made * ITEMSIZE[self.out_dtype] * (2 if self.saved else 1)
        exps = made if self.activation in ("silu", "gelu", "gelu_tanh") else 0
        return Cost(flops=2 * self.batch * self.m * self.n * self.k, bytes=(a + b) * size + written, exps=exps)
