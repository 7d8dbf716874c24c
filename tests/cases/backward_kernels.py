"""The Gluon kernels for the gradients of attention on sm_90: which plans choose them, what has to hold of each.

`dense` keeps the order of dq's sums; `spans` is the same kernel where queries come in spans, forced small ones; `reduce` adds dq
in memory, `ordered` in an order, `apart` with programs for each query head of a group; `packed` serves packed sequences."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tilefold
from cases import same
from cases.device import near
from cases.gradient import BOX_BACKWARD, LEARNED, WHERE, gradients, judged, oracle, upstream
from tilefold.plan.backward.attention_backward_hopper import KERNEL
from tilefold.plan.backward.attention_backward_reduce import KERNEL as REDUCE
from tilefold.plan.backward.attention_backward_reduce import ReduceOptions

MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}, {"window": (-1, 64)}]
ALL, KEYS, QUERIES = slice(0, 3), slice(1, 3), slice(0, 1)  # of dq, dk, dv


@dataclass
class Kernel:
    """fixed: what makes a plan this kernel's, beside its name.  changes: of the plan, held to the oracle each.  others: further
    changes, and the gradients that keep their bits with them, every run."""

    name: str = KERNEL
    fixed: dict[str, Any] = field(default_factory=dict)
    changes: tuple[dict[str, Any], ...] = ({},)
    others: tuple[tuple[dict[str, Any], slice], ...] = ()
    ordered: bool = True  # the sums of dq
    portable: str = BOX_BACKWARD
    long: dict[str, Any] = field(default_factory=dict)  # changes where there are thousands of queries

    def plan(self, tensors, where=None, portable=False, call=None, **changes):
        """A plan with the kernel, whether plans take it by themselves or not."""
        named = {} if where is None else dict(zip(WHERE, where, strict=True))
        plan = tilefold.attention_backward_plan(*tensors, **named, **(call or {}))
        return (
            plan.with_tiles(kernel=self.portable)
            if portable
            else plan.with_tiles(kernel=self.name, **self.fixed, **changes)
        )

    def run(self, tensors, dout, dlse, where=None, call=None, **changes):
        """The gradients; call: options of attention."""
        plan = self.plan(tensors, where, call=call, **changes)
        return gradients(tensors, dout, dlse, where, backward_plan=plan, **(call or {}))

    def held(self, tensors, where=None, changes=None, **call):
        """Hold the kernel to the oracle."""
        dout, dlse = upstream(tensors[0], tensors[2], call.get("layout", "bshd"))
        names = ("dq", "dk", "dv", *(f"d{name}" for name in LEARNED if name in call))
        some = self.changes if changes is None else (changes,)
        want = oracle(tensors, dout, dlse, torch.float64, where, **call)
        plain = oracle(tensors, dout, dlse, tensors[0].dtype, where, **call)
        shapes = [tuple(t.shape) for t in tensors] if where is None else [t.tolist() for t in where[:2]]
        for base in some:
            got = self.run(tensors, dout, dlse, where, call, **base)
            judged(got, want, plain, f"{shapes} {tensors[0].dtype} {base} {call}", names)
            for other, alike in self.others_of(where, call):
                again = self.run(tensors, dout, dlse, where, call, **{**base, **other})
                assert same(got[alike], again[alike]), (base, other)
                judged(again, want, plain, f"{shapes} {tensors[0].dtype} {base} {other} {call}", names)

    def others_of(self, where, call):
        return self.others

    def alike(self, first, again):
        """The same bits; of dq, where its sums have no order, to fp32's rounding of them."""
        if self.ordered:
            return same(first, again)
        return same(first[KEYS], again[KEYS]) and near(again[QUERIES], first[QUERIES], 1e-3)


class Spans(Kernel):
    """With whole KV splits dq has the same bits as of one launch, where tiles of keys begin alike: a cut mask meets other tiles,
    which is another order of dq's sums."""

    def others_of(self, where, call):
        whole = ({"queries_at_once": 0}, QUERIES)
        return self.others if "window" in call or call.get("causal") else (*self.others, whole)


class Packed(Kernel):
    """How many lines there are changes nothing."""

    def others_of(self, where, call):
        return (({"keys_at_once": (-(-where[3] // 64) + 1) * 64}, ALL),)


DENSE = Kernel(others=(({"heads_at_once": 1}, ALL), ({"keys_at_once": 64}, KEYS)))
SPANS = Spans(
    changes=({"queries_at_once": 64}, {"queries_at_once": 192}), others=(({}, ALL), ({"keys_at_once": 64}, KEYS)),
    long={"queries_at_once": 512},
)  # fmt: skip
ADDED = Kernel(REDUCE, others=(({"heads_at_once": 1}, KEYS),), ordered=False)
ORDERED = Kernel(REDUCE, {"options": ReduceOptions(ordered=True)}, others=(({}, ALL), ({"heads_at_once": 1}, ALL)))
APART = Kernel(
    REDUCE, {"options": ReduceOptions(ordered=True, apart=True)}, others=(({}, ALL), ({"heads_at_once": 1}, ALL))
)
PACKED = Packed(portable="attention_backward")
KERNELS = {"dense": DENSE, "spans": SPANS, "reduce": ADDED, "ordered": ORDERED, "apart": APART, "packed": PACKED}


def several(rows):
    """Parameters: a kernel, and what each of its rows says."""
    return [
        pytest.param(KERNELS[name], *row, id="-".join(map(str, (name, *row))))
        for name, found in rows.items()
        for row in found
    ]
