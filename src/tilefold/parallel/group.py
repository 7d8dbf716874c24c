"""The ranks that share a sequence: one group of all, and where there are two levels one within a node and one across."""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError
from ..plan.parallel.sharding import Sharding


class Ranks:
    """Process groups of context parallelism, made by `ranks_of`.

    flat: all ranks of the sequence.  inner: those of this rank's node (fast links, heads are exchanged there); outer: those of
    the same place in every node.  Both None where there is one level.  Rank r of flat is place r % inner of node r // inner.

    Groups are held weakly: torch.distributed keeps them until they are destroyed, and a group that outlives that by a reference
    from elsewhere can end the process with SIGABRT, when its threads meet an interpreter that shuts down."""

    __slots__ = ("_groups",)

    def __init__(self, flat: Any, inner: Any = None, outer: Any = None) -> None:
        self._groups = tuple(None if group is None else weakref.ref(group) for group in (flat, inner, outer))

    def _group(self, which: int) -> Any:
        held = self._groups[which]
        group = None if held is None else held()
        if held is not None and group is None:
            raise Unsupported("the process group of these ranks was destroyed: make Ranks of a new one with ranks_of")
        return group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(self._groups)

    def __repr__(self) -> str:
        flat, inner, outer = (held and held() for held in self._groups)
        return f"Ranks({flat=}, {inner=}, {outer=})"

    @property
    def flat(self) -> Any:
        """The group of all ranks of the sequence."""
        return self._group(0)

    @property
    def inner(self) -> Any:
        """The group of this rank's node, None where there is one level."""
        return self._group(1)

    @property
    def outer(self) -> Any:
        """The group of the same place in every node, None where there is one level."""
        return self._group(2)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return dist.get_world_size(self.flat)

    @property
    def rank(self) -> int:
        """This process among them."""
        return dist.get_rank(self.flat)

    @property
    def per_node(self) -> int:
        """Ranks within a node, 1 where that is not known."""
        return 1 if self.inner is None else dist.get_world_size(self.inner)

    @property
    def timeout(self) -> float | None:
        """Seconds after which the group's operations give up, None if the backend does not say."""
        try:
            backend = self.flat._get_backend(torch.device("cpu" if dist.get_backend(self.flat) == "gloo" else "cuda"))
            return float(backend.options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            return None


def carried_by(group: Any) -> tuple[str, ...] | None:
    """The types of device whose tensors a group exchanges, None if torch does not say."""
    try:
        pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        return tuple(kind for kind, _ in pairs) or None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def check_device(name: str, t: torch.Tensor, group: Any) -> None:
    """DeviceError unless the group exchanges tensors of that device."""
    carried = carried_by(group)
    if carried is not None and t.device.type not in carried:
        raise DeviceError(
            f"{name} is on {t.device}, but the process group ({dist.get_backend(group)}) exchanges tensors on "
            f"{', '.join(carried)}"
        )


def check_sharding(sharding: object, ranks: Ranks | None = None, name: str = "sharding") -> None:
    """DtypeError unless it is a Sharding, ShapeError unless it is over these ranks."""
    if not isinstance(sharding, Sharding):
        raise DtypeError(f"{name} must be a Sharding, made by tilefold.parallel.shard, got {type(sharding).__name__}")
    if ranks is not None and sharding.ranks != ranks.size:
        raise ShapeError(f"{name} is over {sharding.ranks} ranks, the group has {ranks.size}")


_MADE: weakref.WeakKeyDictionary[Any, dict[Any, Ranks]] = weakref.WeakKeyDictionary()  # by the world they were made in


def ranks_of(group: Any = None, ranks_per_node: int | None = None) -> Ranks:
    """The Ranks of a ProcessGroup (None: all processes), of a DeviceMesh of one dimension, or of two: (nodes, ranks of a node).

    ranks_per_node: cuts one group into nodes of so many consecutive ranks.  Groups that have to be made for two levels are made
    once and kept; the first call with them is a collective: all ranks of the group call it.  A Ranks is returned as it is.

    Raises DtypeError, ValueRangeError, Unsupported, naming the argument."""
    if isinstance(group, Ranks):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise Unsupported("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    flat, nodes = _flat_of(group, ranks_per_node)
    if ranks_per_node is None and nodes is None:
        return Ranks(flat)
    members = dist.get_process_group_ranks(flat) if nodes is None else [r for node in nodes for r in node]
    size = ranks_per_node if ranks_per_node is not None else len(nodes[0]) if nodes else 1
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or len(members) % size:
        raise ValueRangeError(f"ranks_per_node must divide the {len(members)} ranks of the group, got {size!r}")
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = None if flat is None else weakref.ref(flat), tuple(members), size
    if key not in made:
        made[key] = _two_levels(flat, members, size)
    return made[key]


def _flat_of(group: Any, ranks_per_node: int | None) -> tuple[Any, list[list[int]] | None]:
    """The one group, or None if it has to be made; and the nodes of a mesh of two dimensions."""
    if group is None:
        return dist.group.WORLD, None
    if isinstance(group, dist.ProcessGroup):
        return group, None
    if type(group).__name__ != "DeviceMesh":
        raise DtypeError(f"group must be a ProcessGroup, a DeviceMesh, a Ranks or None, got {type(group).__name__}")
    if group.ndim == 1:
        return group.get_group(), None
    if group.ndim != 2 or ranks_per_node is not None:
        raise ValueRangeError(
            f"a mesh has one dimension, or two (nodes, ranks of a node) and no ranks_per_node; got {group.ndim} dimensions"
        )
    return None, group.mesh.tolist()


def _two_levels(flat: Any, members: list[int], size: int) -> Ranks:
    me = members.index(dist.get_rank())
    made = functools.partial(dist.new_group, use_local_synchronization=True, sort_ranks=False)
    if flat is None:
        flat = made(members)
    node, place = me // size, me % size
    inner = made(members[node * size : (node + 1) * size])
    outer = made(members[place::size])
    return Ranks(flat, inner, outer)
