"""What the stages of sparse video attention cost, in closed form."""

from dataclasses import dataclass

from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.cost import Cost

STAGES = ("coarse", "select", "fine", "fuse")
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class VideoShape:
    """Self-attention over `seq` tokens in blocks of `block`, in the dtype of q, k and v ("bfloat16")."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dtype: str = "bfloat16"
    block: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "seq", "dim", "block"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ShapeError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ShapeError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.dtype not in BYTES:
            raise ValueRangeError(f"dtype must be one of {', '.join(BYTES)}, got {self.dtype!r}")

    @property
    def blocks(self) -> int:
        return -(-self.seq // self.block)

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    @property
    def q_bytes(self) -> int:
        """q, and anything else with a row for each query and head."""
        return self.batch * self.heads * self.seq * self.dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """k and v together."""
        return 2 * self.batch * self.kv_heads * self.seq * self.dim * self.itemsize


def stage_costs(shape: VideoShape, listed: int, kind: str = "block") -> dict[str, Cost]:
    """The forward cost of each stage; listed: pairs of blocks that all lists name together.

    kind: how the coarse branch reduces k and v: "block" (each block's rows weighted), "dense" (a matrix over all tokens) or
    "pooled" (queries averaged, too)."""
    if kind not in ("block", "dense", "pooled"):
        raise ValueRangeError(f"kind must be one of block, dense, pooled, got {kind!r}")
    return {
        "coarse": _projections(shape, kind) + _rows(shape, kind),
        "select": _select(shape, listed),
        "fine": _fine(shape, listed),
        "fuse": Cost(3 * shape.q_bytes // shape.itemsize, 3 * shape.q_bytes, 0),
    }


def dense_cost(shape: VideoShape) -> Cost:
    """Dense attention over the same tokens."""
    pairs = shape.batch * shape.heads * shape.seq**2
    return Cost(4 * pairs * shape.dim, 2 * shape.q_bytes + shape.kv_bytes, pairs)


def index_cost(shape: VideoShape, capacity: int) -> Cost:
    """The lists of a map of blocks by themselves: a byte a pair of blocks in, `capacity` entries a list and its length out."""
    rows = shape.batch * shape.heads * shape.blocks
    return Cost(0, rows * (shape.blocks + 4 * capacity + 4), 0)


def _projections(shape: VideoShape, kind: str) -> Cost:
    """k and v to a row a block."""
    rows = 2 * shape.batch * shape.kv_heads * shape.blocks * shape.dim
    depth = shape.seq if kind == "dense" else shape.block
    return Cost(2 * rows * depth, shape.kv_bytes + rows * shape.itemsize, 0)


def _rows(shape: VideoShape, kind: str) -> Cost:
    """Attention over the rows, and the scores: the first product is made twice, once when its maximum and sum are known."""
    queries = shape.blocks if kind == "pooled" else shape.seq
    pairs = shape.batch * shape.heads * queries * shape.blocks
    scores = 4 * shape.batch * shape.heads * shape.blocks**2
    tiles = shape.batch * shape.heads * -(-queries // shape.block)
    drawn = tiles * 3 * shape.blocks * shape.dim * shape.itemsize
    return Cost(6 * pairs * shape.dim, 2 * shape.q_bytes + scores, 2 * pairs, drawn)


def _select(shape: VideoShape, listed: int) -> Cost:
    """The scores in, the lists out; comparisons are no floating-point operations."""
    rows = shape.batch * shape.heads * shape.blocks
    return Cost(0, 4 * (rows * shape.blocks + listed + 3 * rows), 0)


def _fine(shape: VideoShape, listed: int) -> Cost:
    pairs = listed * shape.block**2
    drawn = 2 * listed * shape.block * shape.dim * shape.itemsize
    moved = 2 * shape.q_bytes + shape.kv_bytes + 4 * shape.batch * shape.heads * shape.seq
    return Cost(4 * pairs * shape.dim, moved, pairs, drawn)
