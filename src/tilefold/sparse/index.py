"""BlockIndex: which KV blocks each query block attends, as a frozen record of lists on the device."""

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..check import check_whole
from ..errors import ShapeError, ValueRangeError
from ..ops.watch import is_transformed
from .convert import Pair, compressed_rows, kinds_of_mask_mod, map_of_flex, map_of_mask, map_of_predicate
from .lists import as_int32, csr_to_lists, lists_to_map, map_to_lists, padded, sizes_by_row, sort_lists, topk_to_lists
from .validate import check_csr, check_grid, check_lists, check_record, check_tensor, check_within_capacity, lengths_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from ..types import ModArgs, ModFunction
    from .predicates import MaskFunction, Predicate

__all__ = ["BlockIndex"]

_BLOCK = 64


@dataclass(frozen=True, eq=False, repr=False)
class BlockIndex:
    """For every query block the list of KV blocks that it attends; every tensor may be shared over batch and heads by
    a size of 1.  Tensors have a contiguous last dimension.

    Args:
        indices: int32 [batch or 1, heads or 1, Q blocks, capacity]: KV block numbers, distinct within a list, in any
            order (the order of the fold).  Entries past a row's count are never meant and should be in range.
        counts: int32 [batch or 1, heads or 1, Q blocks], 0 to capacity: how many entries of each row are meant.
        block_q, block_k: tokens per query and per KV block, powers of two, at least 16.
        seq_q, seq_k: tokens; Q blocks = ceil(seq_q / block_q) and KV blocks = ceil(seq_k / block_k): the last block
            may be a tail.
        block_sizes: valid tokens at the start of each KV block, int32 [KV blocks], [batch or 1, KV blocks] or [batch
            or 1, heads or 1, KV blocks], 0 to block_k (the last block: to what seq_k leaves it); None: all.  Block j
            always begins at token j * block_k; never more than seq_k allows is read.
        query_sizes: the same for query blocks; a query past it is a row without a live key.
        masked: the lists came from a mask that also cuts inside blocks.  The record does not hold that mask: calls raise
            Unsupported unless they are given a mask_mod or causal=True.  False: listed blocks are meant whole.
        check: read all values on the host and raise ValueRangeError naming the row that breaks this contract.  Without
            it no value is ever read on the host, and a number out of range is the caller's error.

    Heads are those of the queries.  The record copies nothing; its tensors should not change after it is made (changed
    in place by torch, the cached transpose is made anew; changed by a kernel, make a new record).  All constructors
    depend on shapes alone: with a fixed capacity they run under CUDA-graph capture and in
    torch.compile(fullgraph=True).  A pytree node: its tensors are the leaves.

    Memory: 4 bytes * (Q blocks * (capacity + 1)) * batch * heads, each counted 1 where shared.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError: naming the field.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    block_q: int
    block_k: int
    seq_q: int
    seq_k: int
    block_sizes: torch.Tensor | None = None
    query_sizes: torch.Tensor | None = None
    check: InitVar[bool] = False
    masked: bool = field(default=False, kw_only=True)
    _kept: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self, check: bool) -> None:
        check_record(self)
        self._kept["captured"] = _capturing(self.indices)
        if check:
            self.validate()

    # ------------------------------------------------------------ facts

    @property
    def q_blocks(self) -> int:
        return -(-self.seq_q // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.seq_k // self.block_k)

    @property
    def capacity(self) -> int:
        """The most blocks that a list can hold."""
        return self.indices.shape[3]

    @property
    def batch(self) -> int:
        """The batch size, 1 if every tensor is shared over the batch."""
        return self._common(0)

    @property
    def heads(self) -> int:
        """The number of query heads, 1 if every tensor is shared over them."""
        return self._common(1)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def geometry(self) -> tuple[int, int, int, int]:
        """(block_q, block_k, seq_q, seq_k), all in tokens: with `tensors()` the whole record."""
        return self.block_q, self.block_k, self.seq_q, self.seq_k

    def _common(self, axis: int) -> int:
        shapes = [self.indices.shape, self.counts.shape]
        shapes += [sizes_by_row(t).shape for t in (self.block_sizes, self.query_sizes) if t is not None]
        return next((shape[axis] for shape in shapes if shape[axis] != 1), 1)

    def __repr__(self) -> str:
        extras = [name for name in ("block_sizes", "query_sizes") if getattr(self, name) is not None]
        extras += ["masked"] if self.masked else []
        return (
            f"BlockIndex(batch {self.batch}, heads {self.heads}, {self.q_blocks} x {self.kv_blocks} blocks of "
            f"{self.block_q} x {self.block_k} tokens, lengths {self.seq_q} x {self.seq_k}, capacity {self.capacity}"
            f"{''.join(f', {name}' for name in extras)}, on {self.device})"
        )

    # ------------------------------------------------------------ as tensors

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(indices, counts, block_sizes, query_sizes): what an operator's schema can carry, beside `geometry`."""
        return self.indices, self.counts, self.block_sizes, self.query_sizes

    def with_tensors(
        self,
        indices: torch.Tensor,
        counts: torch.Tensor,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
    ) -> "BlockIndex":
        """A record of the same geometry over other tensors."""
        return BlockIndex(indices, counts, *self.geometry, block_sizes, query_sizes, masked=self.masked)

    def to(self, device: torch.device | str) -> "BlockIndex":
        """The record on another device; itself if it is there."""
        if torch.device(device) == self.device:
            return self
        indices, counts, *sizes = self.tensors()
        return self.with_tensors(
            indices.to(device), counts.to(device), *(None if t is None else t.to(device) for t in sizes)
        )

    def expand(self, batch: int, heads: int) -> "BlockIndex":
        """Views with batch and heads in full and stride 0 where shared: indices [B, H, Q blocks, capacity], sizes [B,
        H, blocks].

        Nothing is copied.  Raises ShapeError if the lists are for another batch size or number of heads."""
        for name, mine, wanted in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if mine not in (1, wanted):
                raise ShapeError(f"index has {name} {mine}, expected {wanted}, or 1 to share its lists")
        both = (self.block_sizes, self.query_sizes)
        sizes = (None if t is None else sizes_by_row(t).expand(batch, heads, -1) for t in both)
        return self.with_tensors(
            self.indices.expand(batch, heads, -1, -1), self.counts.expand(batch, heads, -1), *sizes
        )

    def validate(self) -> "BlockIndex":
        """Itself, after reading every value on the host: ValueRangeError names the first row that breaks the contract."""
        check_lists(self)
        return self

    # ------------------------------------------------------------ map and transpose

    def to_map(self) -> torch.Tensor:
        """bool [batch or 1, heads or 1, Q blocks, KV blocks], true where the block is listed.

        Memory beside the result: 13 bytes a list entry and a second byte a map element."""
        return lists_to_map(self.indices, self.counts, self.kv_blocks)

    def transpose(self) -> "BlockIndex":
        """The index of KV block to query blocks: lists [batch or 1, heads or 1, KV blocks, Q blocks], ascending,
        lengths and sizes swapped.  Transposing twice gives the same lists, ascending.

        On the device, deterministic, no host synchronisation; kept on the record until its tensors change.  Memory: 4
        bytes a map element (Q blocks * KV blocks * batch * heads, each counted 1 where shared) for the result, and 10
        more plus 13 a list entry while it is made.  Kept only when it belongs with the record: both made eagerly, or
        both while capturing a CUDA graph; under torch.compile it is part of the graph."""
        if torch.compiler.is_compiling() or is_transformed():
            return self._transposed()  # tensors of a graph, or of a level of torch.func, that end with it
        versions = tuple(None if t is None or t.is_inference() else t._version for t in self.tensors())
        kept = self._kept.get("transposed")
        if kept is not None and kept[0] == versions:
            return kept[1]  # type: ignore[no-any-return]
        result = self._transposed()
        if _capturing(self.indices) == self._kept["captured"]:
            self._kept["transposed"] = versions, result
        return result

    def _transposed(self) -> "BlockIndex":
        indices, counts, _ = map_to_lists(self.to_map().transpose(-1, -2), self.q_blocks)
        swapped = (self.block_k, self.block_q, self.seq_k, self.seq_q, self.query_sizes, self.block_sizes)
        return BlockIndex(indices, counts, *swapped, masked=self.masked)

    # ------------------------------------------------------------ constructors

    @classmethod
    def from_map(
        cls,
        keep: torch.Tensor,
        *,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        seq_q: int | None = None,
        seq_k: int | None = None,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
        capacity: int | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """From a bool map [batch or 1, heads or 1, Q blocks, KV blocks], true where the block is attended.

        seq_q, seq_k: tokens, by default whole blocks.  capacity: room in each list, by default all KV blocks; a row
        with more keeps its lowest ones (check=True: ValueRangeError instead).  Lists are ascending.  Memory while it
        runs: 5 bytes a map element and 4 a list entry.  The other arguments are the record's."""
        check_grid("keep", keep, "batch|1 heads|1 q_blocks kv_blocks", (torch.bool,))
        seq_q, seq_k = lengths_of("keep", keep.shape[2], keep.shape[3], (seq_q, seq_k), (block_q, block_k))
        room = keep.shape[3] if capacity is None else check_whole("capacity", capacity)
        indices, counts, wanted = map_to_lists(keep, room)
        if check:
            check_within_capacity("keep", wanted, room)
        return cls(indices, counts, block_q, block_k, seq_q, seq_k, block_sizes, query_sizes, check)

    @classmethod
    def from_indices(
        cls,
        indices: torch.Tensor,
        counts: torch.Tensor | None = None,
        *,
        seq_k: int,
        seq_q: int | None = None,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
        sort: bool = True,
        check: bool = False,
    ) -> "BlockIndex":
        """From lists in any order, int32 or int64 [batch or 1, heads or 1, Q blocks, capacity], and counts (None: all
        are meant).

        sort: put them in ascending order, which makes results independent of the given order to the last bit (16 bytes
        a list entry while it runs); without it int32 tensors are taken as they are, uncopied.  seq_k in tokens; seq_q:
        whole blocks by default."""
        check_grid("indices", indices, "batch|1 heads|1 q_blocks capacity", (torch.int32, torch.int64))
        if counts is None:
            counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device=indices.device)
        check_tensor(
            "counts", counts, "batch|1 heads|1 q_blocks", (torch.int32, torch.int64), beside=("indices", indices)
        )
        seq_q, seq_k = lengths_of("indices", indices.shape[2], None, (seq_q, seq_k), (block_q, block_k))
        lists, few = as_int32(indices), as_int32(counts)
        made = cls(lists, few, block_q, block_k, seq_q, seq_k, block_sizes, query_sizes)
        if check:
            check_lists(made, (indices, counts))
        if not sort:
            return made
        return made.with_tensors(sort_lists(lists, few, made.kv_blocks), few, block_sizes, query_sizes)

    @classmethod
    def from_topk(
        cls,
        scores: torch.Tensor,
        k: int,
        *,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        seq_q: int | None = None,
        seq_k: int | None = None,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """The k KV blocks of highest score for each query block; scores floating point [batch or 1, heads or 1, Q
        blocks, KV blocks].

        k from 0 to KV blocks.  Equal scores go to the lower block; -inf and NaN are never listed (a row with fewer
        scores has a shorter list), +inf always comes first.  Lists are ascending.  Memory while it runs: 17 bytes a
        score and 16 a list entry."""
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        check_grid("scores", scores, "batch|1 heads|1 q_blocks kv_blocks", floats)
        seq_q, seq_k = lengths_of("scores", scores.shape[2], scores.shape[3], (seq_q, seq_k), (block_q, block_k))
        if check_whole("k", k) > scores.shape[3]:
            raise ValueRangeError(f"k is {k}, expected 0 to {scores.shape[3]}, the number of KV blocks of scores")
        indices, counts = topk_to_lists(scores.detach(), k)
        return cls(indices, counts, block_q, block_k, seq_q, seq_k, block_sizes, query_sizes, check)

    @classmethod
    def from_csr(
        cls,
        crow: torch.Tensor,
        col: torch.Tensor | None = None,
        *,
        seq_k: int,
        seq_q: int | None = None,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
        capacity: int | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """From compressed rows, int32 or int64, as `crow_indices()` and `col_indices()` of a torch CSR or BSR tensor
        give them.  With check=True rows that leave out an entry are refused, too: crow must rise from 0 to the number of
        entries.

        crow [Q blocks + 1], [heads, Q blocks + 1] or [batch, heads, Q blocks + 1]; col [entries] with the same leading
        dimensions: each (batch, head) has its own compressed rows, all with as many entries.  Lists keep the order of
        col (torch's is ascending).  capacity: as in `from_map`, by default min(entries, KV blocks).  Memory while it runs: 24
        bytes a list entry."""
        col = compressed_rows(crow, col)
        seq_q, seq_k = lengths_of("crow", crow.shape[-1] - 1, None, (seq_q, seq_k), (block_q, block_k))
        blocks = -(-seq_k // block_k)
        room = min(col.shape[-1], blocks) if capacity is None else check_whole("capacity", capacity)
        if check:
            check_csr(crow, col, blocks)
        indices, counts, wanted = csr_to_lists(padded(crow, 3), padded(col, 3), room)
        if check:
            check_within_capacity("crow", wanted, room)
        return cls(indices, counts, block_q, block_k, seq_q, seq_k, block_sizes, query_sizes, check)

    @classmethod
    def from_flex(
        cls, mask: "BlockMask", *, masked: bool | None = None, capacity: int | None = None, check: bool = False
    ) -> "BlockIndex":
        """From FlexAttention's BlockMask: its partial and its full blocks, ascending, with its lengths and block sizes.

        The element mask inside partial blocks does not come along: give it to the call as mask_mod, or as causal=True if it is no
        more than that.  A call without either raises Unsupported.  masked: what the record says of that; None: True where the
        BlockMask has a mask_mod (check=True: and a partial block); False: partial blocks are attended whole.  capacity: as in
        `from_map`.  Memory while it runs: that of two `to_map` and a `from_map`."""
        keep, blocks, lengths, cut = map_of_flex(mask, check)
        return cls._of_mask(keep, blocks, lengths, cut if masked is None else masked, capacity, check)

    @classmethod
    def from_mask(
        cls,
        mask: "MaskFunction",
        *,
        seq_q: int,
        seq_k: int,
        batch: int = 1,
        heads: int = 1,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        masked: bool | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """From a mask of tokens: every block in which some query sees some key.

        mask: a function of token coordinates (batch, head, q_index, kv_index), int64 [B, 1, 1, 1], [1, H, 1, 1], [queries, 1] and
        [1, seq_k], to a bool tensor that broadcasts with them: what FlexAttention calls a mask_mod.  It is called for some
        queries at a time, so that a call makes at most 2^24 elements, or one block of queries.  One that does not look at batch
        or head gives lists that are shared over them.

        Inside the blocks the mask does not come along, as in `from_flex`.  masked: None: True (check=True: where a block is
        listed that is not seen whole).  capacity and memory as in `from_map`.  device: torch's default if None."""
        lengths, blocks = (seq_q, seq_k), (block_q, block_k)
        keep, cut = map_of_mask(mask, (batch, heads), lengths, blocks, device, check)
        return cls._of_mask(keep, blocks, lengths, cut if masked is None else masked, capacity, check)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: "ModFunction",
        args: "ModArgs" = (),
        *,
        seq_q: int,
        seq_k: int,
        batch: int = 1,
        heads: int = 1,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        masked: bool | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """From a mask_mod as `attention` takes it: every block in which some query sees some key, found by one kernel.

        mask_mod: @triton.jit function of (score, batch, head, q_index, kv_index, args) that returns bool; it must not look at
        score.  args: its mask_args.  batch, heads: those of the call; lists are shared over what the source of mask_mod does not
        name.

        Memory while it runs: a byte a map element; nothing of tokens, nothing read on the host.  Give
        mask_mod and args to the call, too: the record holds neither.  masked: None: True (check=True: where a block is listed
        that is not seen whole).  capacity as in `from_map`.  device: torch's default if None; where kernels run.  Unsupported
        inside torch.compile."""
        from ..ops.sparse.classify import lists_of_kinds

        lengths, blocks = (seq_q, seq_k), (block_q, block_k)
        kinds, cut = kinds_of_mask_mod(mask_mod, args, (batch, heads), lengths, blocks, device, check)
        room = kinds.shape[3] if capacity is None else check_whole("capacity", capacity)
        indices, counts, wanted = lists_of_kinds(kinds, room)
        if check:
            check_within_capacity("mask_mod", wanted, room)
        return cls(indices, counts, *blocks, *lengths, masked=cut if masked is None else masked)

    @classmethod
    def _of_mask(
        cls, keep: torch.Tensor, blocks: Pair, lengths: Pair, masked: bool, capacity: int | None, check: bool
    ) -> "BlockIndex":
        """From the map of a mask of tokens, whose record says whether blocks are cut by it."""
        (block_q, block_k), (seq_q, seq_k) = blocks, lengths
        made = cls.from_map(keep, block_q=block_q, block_k=block_k, seq_q=seq_q, seq_k=seq_k, capacity=capacity,
                            check=check)  # fmt: skip
        return cls(*made.tensors()[:2], *made.geometry, masked=masked)

    @classmethod
    def from_predicate(
        cls,
        predicate: "Predicate",
        *,
        seq_q: int,
        seq_k: int,
        batch: int = 1,
        heads: int = 1,
        block_q: int = _BLOCK,
        block_k: int = _BLOCK,
        block_sizes: torch.Tensor | None = None,
        query_sizes: torch.Tensor | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
    ) -> "BlockIndex":
        """From a function of block coordinates (batch, head, q_block, kv_block), int64 [B, 1, 1, 1], [1, H, 1, 1], [Q
        blocks, 1] and [1, KV blocks], to a bool tensor that broadcasts with them; see `tilefold.sparse` for ready ones.

        A predicate that does not look at batch or head gives lists that are shared over them.  One that was made for lengths,
        blocks or a grid (`causal_blocks`, `video_window`) has to be used with them: ValueRangeError.  seq_q, seq_k in tokens;
        capacity and memory as in `from_map`.  device: torch's default if None."""
        keep = map_of_predicate(predicate, (batch, heads), (seq_q, seq_k), (block_q, block_k), device)
        return cls.from_map(keep, block_q=block_q, block_k=block_k, seq_q=seq_q, seq_k=seq_k, block_sizes=block_sizes,
                            query_sizes=query_sizes, capacity=capacity, check=check)  # fmt: skip


def _capturing(t: torch.Tensor) -> bool:
    """Whether work on t's device is being recorded into a CUDA graph now, so that values come only with a replay."""
    if torch.compiler.is_compiling() or not t.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()
