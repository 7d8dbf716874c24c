"""The layers of a step of generation: the first one's call is made again where a layer's tensors and options are like its own."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", exc_type=ImportError, reason="needs the transformers extra")

from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cases import hold
from tilefold.errors import TilefoldError
from tilefold.integrations import hf_attention
from tilefold.integrations.visible import Visible
from tilefold.ops.cache.decode import Step
from tilefold.reference import attention

KEYS, LENGTHS = 260, (260, 143)  # the first number of keys whose call is the decode kernel's, under every name
LAYER = SimpleNamespace(is_causal=True)


def mask_of(kind):
    """Of a step over a growing cache, one with padding, or one over a static cache that is filled to two lengths."""
    keys = torch.arange(KEYS) >= torch.tensor([[0], [9]]) if kind == "padding" else None
    lengths = torch.tensor(LENGTHS, dtype=torch.int32) if kind == "static" else None
    return Visible((2, 1, 1, KEYS), True, None, KEYS, keys, None, lengths)


def tensors(dtype=torch.float32, heads=2, kv_heads=1, dim=16, dim_v=16):
    """[batch, heads, tokens, dim], K and V as places of a cache with more room."""
    q = torch.randn(2, 1, heads, dim).transpose(1, 2)
    k, v = (torch.randn(2, kv_heads, KEYS + 8, d)[:, :, :KEYS] for d in (dim, dim_v))
    return tuple(x.to(dtype) for x in (q, k, v))


def call(mask, qkv, **options):
    return hf_attention.attention_forward(LAYER, *qkv, mask, **options)[0]


def check(out, mask, qkv, scaling=None, softcap=0.0, s_aux=None, position_bias=None):
    """Against the reference, which is told all anew."""
    seen = torch.ones(2, KEYS, dtype=torch.bool) if mask.keys is None else mask.keys
    if mask.lengths is not None:
        seen = seen & (torch.arange(KEYS) < mask.lengths[:, None])
    options = {"mask": seen[:, None, None], "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    q, k, v = (x.detach().transpose(1, 2) for x in qkv)
    hold(out.detach(), attention, q, k, v, bias=position_bias, **options)


@pytest.fixture
def repeated(monkeypatch):
    """How often a call was made again."""
    count = []
    run = Step.run

    def counted(self, *args):
        count.append(1)
        return run(self, *args)

    monkeypatch.setattr(Step, "run", counted)
    return count


KINDS = pytest.mark.parametrize("kind", ["growing", "padding", "static"])
TWO_KINDS = pytest.mark.parametrize("kind", ["padding", "static"])


@KINDS
@torch.no_grad()
def test_every_layer_has_its_own_result(kind, repeated):
    mask = mask_of(kind)
    for layer in range(3):
        qkv = tensors()
        check(call(mask, qkv), mask, qkv)
        assert len(repeated) == layer


OTHER_TENSORS = {
    "dtype": {"dtype": torch.float16},
    "heads": {"heads": 3},
    "KV heads": {"kv_heads": 2},
    "dim": {"dim": 32},
    "dim of V": {"dim_v": 24},
}
OTHER_OPTIONS = (
    {"scaling": 0.5},
    {"softcap": 2.0},
    {"s_aux": torch.tensor([0.5, -1.0])},
    {"position_bias": torch.linspace(-2, 2, KEYS).expand(1, 2, 1, KEYS)},
)


@TWO_KINDS
@pytest.mark.parametrize("other", OTHER_TENSORS)
@torch.no_grad()
def test_layers_with_other_tensors(kind, other, repeated):
    """The layer in between is checked and planned anew, and so are those after it, whose first leaves its call again."""
    mask = mask_of(kind)
    for layer, sizes in enumerate(({}, OTHER_TENSORS[other], {}, {})):
        qkv = tensors(**sizes)
        check(call(mask, qkv), mask, qkv)
        assert len(repeated) == max(0, layer - 2)


@TWO_KINDS
@torch.no_grad()
def test_layers_with_other_options(kind, repeated):
    mask = mask_of(kind)
    for given in ({}, *OTHER_OPTIONS, {}):
        qkv = tensors()
        check(call(mask, qkv, **given), mask, qkv, **given)


@KINDS
@torch.no_grad()
def test_layers_with_other_strides_and_places(kind, repeated):
    mask = mask_of(kind)
    call(mask, tensors())
    q, k, v = tensors()
    held = torch.randn(2 * KEYS * 16 + 1)
    for qkv in (
        (q.contiguous(), k, v),
        (q, k.contiguous(), v),
        (q, torch.cat([k, k], -1)[..., 16:], v),
        (q, k, held[1:].view(2, 1, KEYS, 16)),  # 4 bytes past a multiple of 16
    ):
        check(call(mask, qkv), mask, qkv)


@KINDS
def test_a_layer_with_gradients_in_between(kind, repeated):
    mask = mask_of(kind)
    with torch.no_grad():
        call(mask, tensors())
    q, k, v = tensors()
    q.requires_grad_()
    out = call(mask, (q, k, v))
    assert not repeated and out.requires_grad
    (got,) = torch.autograd.grad(out.sum(), q)
    assert got.isfinite().all() and got.abs().sum() > 0
    with torch.no_grad():
        qkv = tensors()
        check(call(mask, qkv), mask, qkv)
        assert len(repeated) == 1


@KINDS
@torch.no_grad()
def test_keys_that_are_values_in_one_layer(kind, repeated):
    """The call of a layer whose V is the first columns of K reads one of them; the next layer's V is its own."""
    mask = mask_of(kind)
    q, k, _ = tensors()
    check(call(mask, (q, k, k)), mask, (q, k, k))
    for qkv in (tensors(), (q, k, k), tensors()):
        check(call(mask, qkv), mask, qkv)


@KINDS
@torch.no_grad()
def test_whoever_watches_sees_every_call(kind, repeated):
    """A dispatch mode, as profilers and tracers push one, gets the operator's call."""

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Watch.seen += function.namespace == "tilefold"
            return function(*args, **(kwargs or {}))

    mask = mask_of(kind)
    call(mask, tensors())
    qkv = tensors()
    with Watch():
        out = call(mask, qkv)
    assert not repeated and Watch.seen
    check(out, mask, qkv)


@KINDS
@torch.no_grad()
def test_tangents_are_refused_in_every_layer(kind):
    mask = mask_of(kind)
    q, k, v = tensors()
    call(mask, (q, k, v))
    with forward_ad.dual_level(), pytest.raises(TilefoldError, match="forward-mode"):
        call(mask, (forward_ad.make_dual(q, torch.ones_like(q)), k, v))


@torch.no_grad()
def test_a_wrong_layer_is_refused_as_the_first_would_be():
    mask = mask_of("growing")
    q, k, v = tensors()
    call(mask, (q, k, v))
    with pytest.raises(TilefoldError, match="key"):
        call(mask, (q, k[:, :, :-1], v))
