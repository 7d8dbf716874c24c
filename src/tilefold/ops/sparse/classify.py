"""The launches that say of each block of a mask whether it is empty, partial or full, and list those that are not empty."""

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DtypeError, Unsupported
from ...types import TILE as WHOLE
from ...types import Rule, Rules
from ..bound import launch_of
from ..call import UNBOUNDED, Call, check_hooks, check_mod_args
from ..dense.attention_tiles import is_listed, steps_of
from ..device import device_of
from ..integers import runtime_ints
from ..reads import Reads, reads

if TYPE_CHECKING:
    from ..launch import Launch

KEPT = 4  # lists of a call's shapes and mask_mod: layers may take turns with their args
ENTRIES = 128  # that are written at a time
TILE = 8, 128  # queries and keys that are looked at at a time, at most,
WARPS = 1  # by so many warps: of several, each block would wait for the slowest


def block_kinds(
    mask_mod: Any, args: tuple[Any, ...], grid: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """uint8 [batch, heads, Q blocks, KV blocks]: 0 no query sees a key, 2 all see all, 1 else; grid: batch, heads, seq_q, seq_k.

    Nothing but the result is allocated, and nothing is read on the host."""
    if mask_mod is None:
        raise DtypeError("mask_mod must be a @triton.jit function, got None")
    check_mod_args("mask", mask_mod, args)
    if torch.compiler.is_compiling():
        raise Unsupported(
            "blocks of a mask_mod inside torch.compile: make the lists outside, and give them to the function"
        )
    device_of(device)
    check_hooks(Call(mask_mod=mask_mod, mask_args=args), device)
    kinds = torch.empty((*grid[:2], *blocks_of(grid[2:], block)), dtype=torch.uint8, device=device)
    if kinds.numel() > 0:
        _classify(kinds.numel(), block, 0, device)(
            (kinds, *_sizes(kinds, grid), 0, 0, ((mask_mod, runtime_ints(args)),))
        )
    return kinds


def blocks_of(lengths: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks queries and keys have."""
    return -(-lengths[0] // block[0]), -(-lengths[1] // block[1])


def _sizes(kinds: torch.Tensor, grid: tuple[int, int, int, int]) -> tuple[int, ...]:
    return grid[2], grid[3], grid[1], *kinds.shape[2:]


def _classify(blocks: int, block: tuple[int, int], kind: int, device: torch.device) -> "Launch":
    at_once = {"BLOCK_M": min(block[0], TILE[0]), "BLOCK_N": min(block[1], TILE[1])}
    constants = {"KIND": kind, "Q_BLOCK": block[0], "KV_BLOCK": block[1], **at_once}
    return _launch("classify_blocks", blocks, constants, device, WARPS)


def _launch(name: str, programs: int, constants: dict[str, Any], device: torch.device, warps: int = 4) -> "Launch":
    from ...kernels.sparse import classify

    return launch_of(getattr(classify, name), programs, constants, device, num_warps=warps)


def lists_of_kinds(kinds: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices, counts, wanted) of blocks that are not empty, as `map_to_lists` has them; nothing is read on the host."""
    wanted = torch.empty(kinds.shape[:3], dtype=torch.int32, device=kinds.device)
    indices = torch.empty((*kinds.shape[:3], capacity), dtype=torch.int32, device=kinds.device)
    if wanted.numel() > 0 and kinds.shape[3] > 0:
        made = _launch("list_blocks", wanted.numel(), {"MARKED": False, "ENTRIES": ENTRIES}, kinds.device)
        made((kinds, indices, wanted, kinds.shape[3], capacity, capacity, 1))
    else:
        wanted.zero_()
        indices.zero_()
    return indices, wanted.clamp(max=capacity), wanted


class TileLists:
    """The lists of KV tiles of a mask_mod's calls: for each query tile, which it shows, and which of those whole (list_blocks).
    A mask tensor is a mask_mod that reads it, where `is_listed` says so.

    sizes: batch, heads, seq_q, seq_k.  One list serves all batch entries, heads that the source of mask_mod does not name and the
    mask does not tell apart.  The result is kept until an arg changes: another tensor (but not another view of the same memory),
    another version of it (in-place operations of torch count), another number.  It is made anew in a graph that is captured, for
    tensors without versions, and for `anew`.

    Of `masks.blocks` the table alone decides, and the lists are kept with it.  Where its blocks hold whole tiles, a partial tile
    is asked about what the table does not say (`inner`), and a query tile without any has one behind the last."""

    def __init__(
        self,
        call: Call,
        sizes: tuple[int, int, int, int],
        tile: tuple[int, int],
        window: tuple[int, int],
        device: torch.device,
        anew: bool,
    ) -> None:
        from ..dense.attention_parts import kind_of

        self.tile, self.device, self.anew = tile, device, anew
        self.masked = call.mask is not None and is_listed(call.mask, sizes[1])
        self.by_table = window == (-1, -1) and not self.masked and _is_table(call.mask_mod)
        read = reads(call.mask_mod) if call.mask_mod is not None else Reads(False, False, False)
        own = steps_of(call.mask) if self.masked else (0, 0)  # type: ignore[arg-type]
        batch, heads = sizes[0] if read.batch or own[0] else 1, sizes[1] if read.head or own[1] else 1
        if self.by_table:
            batch, heads = call.mask_args[0].shape[:2]
        self.grid = batch, heads, *sizes[2:]
        self.kinds = batch, heads, *blocks_of(sizes[2:], tile)
        aligned = self.by_table and "_tiles" in _first_of(call.mask_mod).function and not any(WHOLE % n for n in tile)
        self.alone = self.by_table and type(_tree_of(call.mask_mod)) is Rule  # no mask is asked in partial blocks
        self.rest = Rules(("all", _tree_of(call.mask_mod)[2][2])) if aligned and not self.alone else None
        self.band = [UNBOUNDED if side < 0 else side for side in window]
        self.classify = _classify(math.prod(self.kinds), tile, kind_of(window), device)
        self._kept: dict[Any, tuple[list[Any], torch.Tensor]] = {}
        self._plan_lists()

    def _plan_lists(self) -> None:
        self.shape = *self.kinds[:3], 1 + self.kinds[3]
        self.list = _launch("list_blocks", math.prod(self.shape[:3]), {"MARKED": True, "ENTRIES": ENTRIES}, self.device)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of batch entries, heads and lists; 0 where one serves all."""
        batch, heads, lists, size = self.shape
        return heads * lists * size * (batch > 1), lists * size * (heads > 1), size

    def of(self, call: Call) -> torch.Tensor:
        """[batch or 1, heads or 1, query tiles, 1 + KV tiles] int32, for the mask_mod and mask_args of a call."""
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=torch.int32, device="meta")
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        if stream and torch.cuda.is_current_stream_capturing():
            return self._make(call)
        args, kept = (*call.mask_args, call.mask) if self.masked else call.mask_args, self._kept
        kind: tuple[Any, ...] = ()
        if self.by_table:
            args, kept = (args[0], *args[5:7]), args[0].__dict__.setdefault("_tilefold_lists", {})
            kind = type(self), self.tile, self.grid, self.shape
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if self.anew or any(t.is_inference() for t in tensors):
            return self._make(call)
        numbers = tuple([arg for arg in args if not isinstance(arg, torch.Tensor)])
        owners = [t if t._base is None else t._base for t in tensors]
        memory = [(id(owner), t.data_ptr(), t._version) for owner, t in zip(owners, tensors, strict=True)]
        key = stream, kind, numbers, *memory
        found = kept.get(key)
        if found is None or any(one() is not owner for one, owner in zip(found[0], owners, strict=True)):
            found = [weakref.ref(owner) for owner in owners], self._make(call)
            kept.pop(key, None)
            kept[key] = found
            if len(kept) > KEPT:
                del kept[next(iter(kept))]
        return found[1]

    def _make(self, call: Call) -> torch.Tensor:
        return self._listed(self._classified(call))

    def _classified(self, call: Call) -> torch.Tensor:
        """The kinds of all tiles, by the user's mask_mods and a mask that counts."""
        from ...device import mods
        from ..dense.attention_parts import mask_mods_of

        if self.by_table:
            kinds = call.mask_args[0]
            whole = kinds > 0 if self.alone else kinds == 2
            return _kinds_of_tiles(kinds > 0, whole, call.mask_args[5:7], self.tile, self.grid[2:])
        kinds = torch.empty(self.kinds, dtype=torch.uint8, device=self.device)
        asked = mask_mods_of(mods, call if self.masked else call._replace(mask=None))
        self.classify((kinds, *_sizes(kinds, self.grid), *self.band, asked))
        return kinds

    def _listed(self, kinds: torch.Tensor) -> torch.Tensor:
        lists = torch.empty(self.shape, dtype=torch.int32, device=self.device)
        size = self.shape[3]
        self.list((kinds, lists[..., 1:], lists, size - 1, size - 1, size, size))
        if self.rest is not None:
            lists[..., 1].masked_fill_(~(kinds != 0).any(-1), 2 * self.kinds[3])
        return lists

    def inner(self, call: Call) -> Call:
        """The call whose mask_mod is what is asked in partial tiles."""
        if self.rest is None:
            return call
        taken = 2 * _first_of(call.mask_mod).takes
        return call._replace(mask_mod=self.rest, mask_args=call.mask_args[taken:])


class QueryLists(TileLists):
    """The other way round, for a backward pass: for each KV tile the query tiles to which the mask_mod shows it (list_queries).

    KV heads have lists where the mod names heads: of a tile that it shows to one of the group, whole if to all whole."""

    def __init__(self, kv_heads: int, *args: Any) -> None:
        self.kv_heads = kv_heads
        super().__init__(*args)

    def _plan_lists(self) -> None:
        batch, heads, q_blocks, kv_blocks = self.kinds
        self.shape = batch, min(heads, self.kv_heads), kv_blocks, 1 + 2 * q_blocks
        if heads > self.kv_heads:  # a tile that the table shows to one of the group is asked about it
            self.rest = None
        self.list = _launch("list_queries", math.prod(self.shape[:3]), {"ENTRIES": ENTRIES}, self.device)

    def _listed(self, kinds: torch.Tensor) -> torch.Tensor:
        if self.kinds[1] > self.shape[1]:
            groups = kinds.unflatten(1, (self.shape[1], -1))
            kinds = torch.where(groups.amin(2) == 2, 2, groups.amax(2).clamp(max=1)).to(torch.uint8)
        lists = torch.empty(self.shape, dtype=torch.int32, device=self.device)
        self.list((kinds, (kinds > 0).cumsum(-1, dtype=torch.int32), lists, *self.kinds[2:]))
        return lists


def _is_table(mask_mod: Any) -> bool:
    """Whether a mask is `masks.blocks` and no more, whose args stand first."""
    if not isinstance(mask_mod, Rules) or len(mask_mod.tree) != 2:
        return False
    first = _first_of(mask_mod)
    name = first.function if type(first) is Rule and isinstance(first.function, str) else ""
    tree = _tree_of(mask_mod)
    return name.startswith("listed") if type(tree) is Rule else tree[0] == "any" and name.startswith("whole")


def _tree_of(mask_mod: Any) -> Any:
    """The first of a mask's rules, or of its trees of them."""
    return mask_mod.tree[1]


def _first_of(mask_mod: Any) -> Any:
    """The first rule of that, or a tree."""
    tree = _tree_of(mask_mod)
    return tree if type(tree) is Rule else tree[1]


def _kinds_of_tiles(
    some: torch.Tensor,
    whole: torch.Tensor,
    block: tuple[int, ...],
    tile: tuple[int, int],
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Kinds of tiles by which blocks are not empty, and which whole: a tile is empty, or whole, where all the blocks are that it
    has a part of."""
    for dim, (size, step, length) in enumerate(zip(block, tile, lengths, strict=True), 2):
        first = torch.arange(0, length, step, device=some.device)
        after = ((first + step).clamp(max=length) - 1) // size + 1
        first = first // size
        pad = (*(0, 0) * (3 - dim), 1, 0)
        counts = [torch.nn.functional.pad(each.cumsum(dim, dtype=torch.int32), pad) for each in (some, whole)]
        shown, wholly = (each.index_select(dim, after) - each.index_select(dim, first) for each in counts)
        some, whole = shown > 0, wholly == (after - first).view(-1, *(1,) * (3 - dim))
    return some.to(torch.uint8) + whole.to(torch.uint8)
