"""The host side of a launch: devices by their drivers' names, arguments by name, what Triton's C function is given."""

import types
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops import device as ops_device
from tilefold.ops import launch as ops
from tilefold.ops.bound import Bound, Box, Slot, attribute, strides_named
from tilefold.ops.dense.attention import example_launch
from tilefold.ops.launch import Launch, Mapped, mapped
from tilefold.plan import AttentionProblem, device_named, plan_attention

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


# ---------------------------------------------------------------- arguments by name


class BoundLaunch:
    """Of a kernel (Q, scale, Bias, cap, BLOCK) without descriptors, which notes its arguments."""

    maps = _compiled = None

    def __init__(self):
        self.fn = types.SimpleNamespace(__name__="kernel", arg_names=["Q", "scale", "Bias", "cap", "BLOCK"])
        self.keywords, self.told = {"BLOCK": 64, "num_warps": 4}, []
        self.names = ("Q", "scale", "Bias", "cap")

    def alike(self, at, old, new):
        return True

    def __call__(self, args):
        self.told.append(list(args))


GIVEN = ("q", "call")
VALUES = {
    "cap": 30.0,
    "scale": 0.5,
    "Q": Slot("q"),
    "Bias": Slot("call", lambda call: call.bias * 2),
    "of_another_kernel": 1,
}


def test_arguments_are_in_the_kernels_order():
    launch = BoundLaunch()
    bound = Bound(launch, GIVEN, VALUES)
    for q, bias in (("q", 1), ("another", 5)):
        bound((q, types.SimpleNamespace(bias=bias)))
        assert launch.told[-1] == [q, 0.5, 2 * bias, 30.0]
    assert bound.example(("q", types.SimpleNamespace(bias=1))) == (launch.fn, ("q", 0.5, 2, 30.0), launch.keywords)


def test_a_parameter_without_a_value_is_what_a_call_gives_by_its_name():
    values = {name: value for name, value in VALUES.items() if name != "Q"}
    bound = Bound(BoundLaunch(), ("Q", "Bias", "cap"), {**values, "Bias": Slot("cap")})
    assert bound.arguments(("q", "b", 7)) == ["q", 0.5, 7, 30.0]


def test_what_is_given_in_the_kernels_order_stands_in_front():
    bound = Bound(BoundLaunch(), ("Q", "scale"), {"Bias": 1, "cap": 30.0})
    assert bound.arguments(("q", 0.5)) == ["q", 0.5, 1, 30.0]
    assert bound.with_values({"cap": 4.0}).arguments(("q", 0.25)) == ["q", 0.25, 1, 4.0]
    everything = Bound(BoundLaunch(), ("Q", "scale", "Bias", "cap"), {})
    assert everything.arguments((1, 2, 3, 4)) == everything.with_values({}).arguments((1, 2, 3, 4)) == [1, 2, 3, 4]


def test_a_parameter_without_a_value_is_named():
    with pytest.raises(KeyError, match="kernel has a parameter 'cap' that its binding does not know"):
        Bound(BoundLaunch(), GIVEN, {name: value for name, value in VALUES.items() if name != "cap"})
    with pytest.raises(ValueError, match="tuple.index"):
        Bound(BoundLaunch(), GIVEN, {**VALUES, "Q": Slot("query")})


def test_other_values():
    """The first one keeps its own."""
    bound = Bound(BoundLaunch(), GIVEN, {**VALUES, "Bias": None})
    other = bound.with_values({"scale": 0.25})
    assert other.arguments(("q", None)) == ["q", 0.25, None, 30.0]
    assert bound.arguments(("q", None)) == ["q", 0.5, None, 30.0]
    assert other.launch is bound.launch
    assert bound.with_values({"of_another_kernel": 2}).arguments(("q", None)) == bound.arguments(("q", None))
    with pytest.raises(KeyError, match="kernel has no parameter 'Q' that is the same in all calls"):
        bound.with_values({"Q": 2})


def test_strides_and_attributes():
    assert strides_named("q", (7, 5, 3), "bmh") == {"stride_qb": 7, "stride_qm": 5, "stride_qh": 3}
    assert strides_named("q", (5, 3), "bmh") == {"stride_qm": 5, "stride_qh": 3}
    assert attribute("call", "packed.cu_q", None) is None
    slot = attribute("call", "packed.cu_q", "there is one")
    assert slot.of == "call" and slot.make(types.SimpleNamespace(packed=types.SimpleNamespace(cu_q=3))) == 3


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("driver", "arch", "name", "own"),
    [
        ("NVIDIA H200", (9, 0), "h200", True),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100", True),
        ("NVIDIA GH200 480GB", (9, 0), "gh200-480gb", False),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie", False),
        ("NVIDIA L40S", (8, 9), "l40s", False),
        ("NVIDIA L4", (8, 9), "l4", True),
    ],
)
def test_only_exact_models_get_their_record(driver, arch, name, own, monkeypatch):
    properties = SimpleNamespace(name=driver, major=arch[0], minor=arch[1], multi_processor_count=77, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = ops_device._probe.__wrapped__(0)
    assert found.name == name
    assert found.sms == 77
    assert found.source.startswith("probed") is not own


@pytest.mark.parametrize("shape", [(1, 16384, 16, 128), (1, 8192, 32, 128), (1, 16384, 32, 64), (1, 23296, 12, 128)])
def test_lengths_do_not_decide_a_compilation(shape):
    """Long sequences take the constants of short ones (the same tile given)."""
    b, n, h, d = shape
    long, short = (AttentionProblem(b, seq, seq, h, h, d, d) for seq in (n, 4096))
    constants = []
    for problem in (long, short):
        _, _, keywords = example_launch(problem, plan_attention(problem, device_named("h200")))
        constants.append({k: v for k, v in keywords.items() if k.isupper()})
    assert constants[0] == constants[1]
