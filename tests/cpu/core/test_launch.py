"""The launcher: what Triton's C function is given for descriptors."""

from types import SimpleNamespace

import torch
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops import launch as ops
from tilefold.ops.bound import Bound, Slot
from tilefold.ops.launch import Box, Launch, Mapped, mapped

SIGNATURE = {
    "a": "tensordesc<bf16[64, 64]>",
    "n": "i32",
    "b": "tensordesc<bf16[32, 64]>",
    "p": "*fp32",
    "c": "constexpr",
}
METAS = [{"swizzle": 3, "rows": 64}, {"swizzle": 2, "rows": 32}]
HEAD = tuple(range(driver._BASE_ARGS_FORMAT_LEN))  # grid, stream, function, scratch, hooks


def described(descriptor, meta):
    """What Triton makes of a descriptor, with a map that says what it is of."""
    made.append(descriptor.base.data_ptr())
    of = (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, *meta.values())
    return [of, *descriptor.shape, *descriptor.strides]


made = []


def launchers(monkeypatch):
    """Triton's launcher and ours around one that keeps its arguments, and both lists of arguments."""
    monkeypatch.setattr(driver, "make_tensordesc_arg", described)
    theirs, ours = [], []
    plain = driver.wrap_handle_tensordesc(lambda *args: theirs.append(args), SIGNATURE, METAS)
    kept = mapped(driver.wrap_handle_tensordesc(lambda *args: ours.append(args), SIGNATURE, METAS))
    assert isinstance(kept, Mapped)
    return plain, kept, theirs, ours


def box(t, rows):
    return Box(t, list(t.shape), list(t.stride()), [rows, 64])


def test_maps_are_those_of_triton(monkeypatch):
    plain, kept, theirs, ours = launchers(monkeypatch)
    tensors = [torch.zeros(256, 64, dtype=torch.bfloat16) for _ in range(3)]
    first, second = box(tensors[0], 64), box(tensors[0][:128], 32)
    out = torch.zeros(4)
    calls = [(x, y) for x in tensors for y in tensors] * 2
    for x, y in calls:
        args = first.over(x), 7, second.over(y), out, 5
        plain(*HEAD, *args)
    del made[:]
    for x, y in calls:
        args = first.over(x), 7, second.over(y), out, 5
        kept(*HEAD, *args)
    assert ours == theirs
    assert len(made) == 2 * len(calls)


def bound_to(kept, monkeypatch, **values):
    """A kernel of SIGNATURE's arguments, compiled."""
    monkeypatch.setattr(ops, "current_device", lambda: 0)
    fn = SimpleNamespace(arg_names=list(SIGNATURE), params=[SimpleNamespace(do_not_specialize=True)] * 5)
    launch = Launch(fn, HEAD[:3], {"c": 5}, {}, 0)
    launch._compiled = kept, HEAD[4:9], lambda device: HEAD[3], HEAD[9:]
    return Bound(launch, ("x", "y", "p"), {"n": 7, **values})


def test_maps_of_a_bound_launch_are_made_once(monkeypatch):
    """Also beside an argument that is made anew in each call, and of other lengths."""
    plain, kept, theirs, ours = launchers(monkeypatch)
    tensors = [torch.zeros(256, 64, dtype=torch.bfloat16) for _ in range(3)]
    first, second, out = box(tensors[0], 64), box(tensors[0][:128], 32), torch.zeros(4)
    halved = Slot("p", lambda t: t[:2].shape)
    bound = bound_to(kept, monkeypatch, a=Slot("x", first.over), b=Slot("y", second.over), p=halved)
    pairs = [(x, y) for x in tensors for y in tensors]
    for x, y in pairs * 2:
        plain(*HEAD, first.over(x), 7, second.over(y), (2,), 5)
        bound((x, y, out))
    assert ours == theirs
    del made[:]
    for x, y in pairs:
        bound((x, y, out))
    assert not made
    shorter = box(tensors[0][:192], 64)
    other = bound.with_values({"a": Slot("x", shorter.over), "n": 8})
    for run in (other, bound, other, other, bound):
        run((*pairs[0], out))
        plain(*HEAD, (first if run is bound else shorter).over(pairs[0][0]), 7 if run is bound else 8,
              second.over(pairs[0][1]), (2,), 5)  # fmt: skip
        assert ours[-1] == theirs[-1]


def test_a_profiler_sees_every_launch_of_a_bound_one(monkeypatch):
    _, kept, _, ours = launchers(monkeypatch)
    t = torch.zeros(256, 64, dtype=torch.bfloat16)
    bound = bound_to(kept, monkeypatch, a=Slot("x", box(t, 64).over), b=Slot("y", box(t, 32).over))
    seen = []
    monkeypatch.setattr(Launch, "_first", lambda self, args: seen.append(args))
    for hooked in (False, False, False, True, False):
        monkeypatch.setattr(ops, "_hooked", lambda hooked=hooked: hooked)
        bound((t, t, t))
    assert len(ours) == 4 and len(seen) == 1 and isinstance(seen[0][0], TensorDescriptor)


def test_a_descriptor_of_a_part_has_a_map_of_its_address(monkeypatch):
    """As of a mask, whose booleans are bytes to TMA, or of scratch that holds several tensors."""
    plain, kept, theirs, ours = launchers(monkeypatch)
    tensors = [torch.zeros(320, 64, dtype=torch.bfloat16) for _ in range(2)]
    one, other = box(tensors[0][:256], 64), box(tensors[0][:256], 32)
    bound = bound_to(kept, monkeypatch, a=Slot("x", lambda x: one.over(x[64:])), b=Slot("y", other.over))
    for t in tensors * 3:
        bound((t, t, t))
        plain(*HEAD, one.over(t[64:]), 7, other.over(t), t, 5)
    assert ours == theirs
    del made[:]
    for t in tensors:
        bound((t, t, t))
    assert not made


def test_another_shape_at_the_same_address_has_a_map_of_its_own(monkeypatch):
    plain, kept, theirs, ours = launchers(monkeypatch)
    t = torch.zeros(256, 64, dtype=torch.bfloat16)
    for rows in (256, 192, 256, 192, 64):
        for run in (plain, kept):  # descriptors of their own, whose lists are gone when the next ones are made
            run(*HEAD, box(t[:rows], 64).over(t), 7, TensorDescriptor(t, [rows, 64], [64, 1], [32, 64]), t, 5)
    assert ours == theirs


def test_maps_are_forgotten_when_there_are_too_many(monkeypatch):
    _, kept, _, ours = launchers(monkeypatch)
    monkeypatch.setattr("tilefold.ops.bound.MAPS", 8)
    t = torch.zeros(4096, 64, dtype=torch.bfloat16)
    bound = bound_to(kept, monkeypatch, a=Slot("x", box(t[:64], 64).over), b=Slot("y", box(t[:64], 32).over))
    for at in [*range(40), *range(40)]:
        bound((t[at : at + 64], t, t))
        assert ours[-1][len(HEAD)][0] == t[at].data_ptr()
    assert len(bound._flat.maps[0][3]) <= 8


def test_launchers_without_descriptors_or_tma_stay_as_they_are():
    bare = driver.wrap_handle_tensordesc(print, {"n": "i32"}, None)
    assert mapped(bare) is bare
    old = driver.wrap_handle_tensordesc(print, SIGNATURE, None)
    assert mapped(old) is old
