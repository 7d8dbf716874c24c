"""Arguments of launches by name: what stands in the template, what a call gives, what is refused."""

import types

import pytest

from tilefold.ops.bound import Bound, Slot, attribute, strides_named


class Launch:
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
    launch = Launch()
    bound = Bound(launch, GIVEN, VALUES)
    for q, bias in (("q", 1), ("another", 5)):
        bound((q, types.SimpleNamespace(bias=bias)))
        assert launch.told[-1] == [q, 0.5, 2 * bias, 30.0]
    assert bound.example(("q", types.SimpleNamespace(bias=1))) == (launch.fn, ("q", 0.5, 2, 30.0), launch.keywords)


def test_a_parameter_without_a_value_is_what_a_call_gives_by_its_name():
    values = {name: value for name, value in VALUES.items() if name != "Q"}
    assert Bound(Launch(), ("Q", "Bias", "cap"), {**values, "Bias": Slot("cap")}).arguments(("q", "b", 7)) == [
        "q",
        0.5,
        7,
        30.0,
    ]


def test_what_is_given_in_the_kernels_order_stands_in_front():
    bound = Bound(Launch(), ("Q", "scale"), {"Bias": 1, "cap": 30.0})
    assert bound.arguments(("q", 0.5)) == ["q", 0.5, 1, 30.0]
    assert bound.with_values({"cap": 4.0}).arguments(("q", 0.25)) == ["q", 0.25, 1, 4.0]
    everything = Bound(Launch(), ("Q", "scale", "Bias", "cap"), {})
    assert everything.arguments((1, 2, 3, 4)) == everything.with_values({}).arguments((1, 2, 3, 4)) == [1, 2, 3, 4]


def test_a_parameter_without_a_value_is_named():
    with pytest.raises(KeyError, match="kernel has a parameter 'cap' that its binding does not know"):
        Bound(Launch(), GIVEN, {name: value for name, value in VALUES.items() if name != "cap"})
    with pytest.raises(ValueError, match="tuple.index"):
        Bound(Launch(), GIVEN, {**VALUES, "Q": Slot("query")})


def test_other_values():
    """The first one keeps its own."""
    bound = Bound(Launch(), GIVEN, {**VALUES, "Bias": None})
    other = bound.with_values({"scale": 0.25})
    assert other.arguments(("q", None)) == ["q", 0.25, None, 30.0] and bound.arguments(("q", None)) == [
        "q",
        0.5,
        None,
        30.0,
    ]
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
