"""The launcher: what Triton's C function is given for descriptors."""

import torch
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops.launch import Box, Mapped, mapped

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


def test_maps_are_those_of_triton_and_made_once(monkeypatch):
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
    assert len(made) == 2 * len(tensors)


def test_another_shape_at_the_same_address_has_a_map_of_its_own(monkeypatch):
    plain, kept, theirs, ours = launchers(monkeypatch)
    t = torch.zeros(256, 64, dtype=torch.bfloat16)
    for rows in (256, 192, 256, 192, 64):
        for run in (plain, kept):  # descriptors of their own, whose lists are gone when the next ones are made
            run(*HEAD, box(t[:rows], 64).over(t), 7, TensorDescriptor(t, [rows, 64], [64, 1], [32, 64]), t, 5)
    assert ours == theirs


def test_maps_are_forgotten_when_there_are_too_many(monkeypatch):
    _, kept, _, ours = launchers(monkeypatch)
    t = torch.zeros(4096, 64, dtype=torch.bfloat16)
    one, other = box(t[:64], 64), box(t[:64], 32)
    for at in range(Mapped.LIMIT):
        kept(*HEAD, one.over(t[at : at + 64]), 7, other.over(t), t, 5)
        assert ours[-1][len(HEAD)][0] == t[at].data_ptr()
    assert len(kept.known) <= Mapped.LIMIT


def test_launchers_without_descriptors_or_tma_stay_as_they_are():
    bare = driver.wrap_handle_tensordesc(print, {"n": "i32"}, None)
    assert mapped(bare) is bare
    old = driver.wrap_handle_tensordesc(print, SIGNATURE, None)
    assert mapped(old) is old
