"""What autograd and torch.func may ask of operators: lazy negations as gradients, tangents, transforms."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tilefold
from cases import rand
from cases.refusals import refuses
from tilefold import ops, quant, sparse
from tilefold.errors import Unsupported
from tilefold.ops.matrix.conv_layout import strides_of

F32 = torch.float32


def lowbit(x):
    weight = quant.quantize_weight(torch.linspace(-1, 1, 64 * 32, device=x.device).view(64, 32))
    return ops.lowbit_matmul(x, weight)


def attend(x):
    return tilefold.attention(x[None, :, None], x[None, :, None], x[None, :, None])


# Of a matrix [20, 32].
CALLS = {
    "matmul": lambda x: ops.matmul(x, x.detach().t(), activation="silu"),
    "bmm": lambda x: ops.bmm(x[None], x.detach().t()),
    "conv2d": lambda x: ops.conv2d(x[None, None], torch.ones(2, 1, 3, 3, device=x.device), activation="gelu"),
    "lowbit_matmul": lowbit,
    "add": lambda x: ops.add(x, x),
    "transpose": ops.transpose,
    "attention": attend,
}


def listed(x):
    keep = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=x.device)
    return sparse.BlockIndex.from_map(keep, block_q=16, block_k=16, seq_q=20, seq_k=20)


def packed(x):
    offsets = torch.tensor([0, 8, 20], dtype=torch.int32, device=x.device)
    return tilefold.attention_varlen(x[:, None], x[:, None], x[:, None], offsets, offsets, 12, 12)


TANGENTS = {
    name: CALLS[name] for name in ("matmul", "bmm", "conv2d", "lowbit_matmul", "add", "transpose", "attention")
} | {
    "attention of one query": lambda x: tilefold.attention(x[None, :1, None], *[x.repeat(20, 1)[None, :, None]] * 2),
    "attention_varlen": packed,
    "sparse_attention": lambda x: tilefold.sparse_attention(*[x[None, :, None]] * 3, listed(x)),
    "sparse_video_attention": lambda x: sparse.sparse_video_attention(*[x[None, :, None]] * 3, block=16),
    "coarse": lambda x: sparse.coarse(*[x[None, :, None]] * 3, block=16).out,
    "fuse": lambda x: sparse.fuse(x[None, :, None], x[None, :, None], x[None, :, 0, None]),
}


class Promises(TorchDispatchMode):
    """Compares the results of each of our operators with those of its fake, whose shapes and strides compiled code relies on."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        if op.namespace == "tilefold":
            with FakeTensorMode() as fakes:
                promised = op(*tree_map_only(torch.Tensor, fakes.from_tensor, args))
            for one, other in zip(tree_leaves(made), tree_leaves(promised), strict=True):
                told = [(t.shape, t.dtype, strides_of(t)) for t in (one, other)]
                assert told[0] == told[1], f"{op}: {told[0]} made, {told[1]} promised"
            self.seen.add(op.name().split("::")[1].split(".")[0])
        return made


def last(x):
    """[2, 4, 5, 16] of a matrix [20, 32], channels-last."""
    return x.reshape(2, 5, 16, 4).permute(0, 3, 1, 2)


def weights(x):
    return x[:4].reshape(8, 4, 4, 1)


OPERANDS = {
    "matmul of columns": lambda x: (ops.matmul, x.t(), x),
    "bmm of a transposed batch": lambda x: (ops.bmm, x.view(2, 10, 32).transpose(1, 2), x.view(2, 10, 32)),
    "conv2d channels-first": lambda x: (ops.conv2d, last(x).contiguous(), weights(x)),
    "conv2d channels-last": lambda x: (ops.conv2d, last(x), weights(x)),
    "conv2d of both": lambda x: (ops.conv2d, last(x).contiguous(), weights(x).to(memory_format=torch.channels_last)),
    "attention of heads outside": lambda x: (tilefold.attention, *[x.view(1, 2, 20, 16).transpose(1, 2)] * 3),
    "attention_varlen": lambda x: (packed, x),
    "sparse_attention": lambda x: (
        lambda a, b, c: tilefold.sparse_attention(a, b, c, listed(x)),
        *[x[None, :, None]] * 3,
    ),
    "coarse": lambda x: (lambda a: sparse.coarse(a, a, a, block=16).out, x[None, :, None]),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("name", OPERANDS)
def test_results_and_gradients_lie_as_their_fakes_promise(name, device):
    call, *operands = OPERANDS[name](rand(20, 32, dtype=F32, device=device))
    operands = [t.detach().requires_grad_() for t in operands]
    with Promises() as promises:
        torch.autograd.grad(call(*operands).sum(), operands)
    assert len(promises.seen) >= 2, promises.seen


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_that_is_lazily_negated(name, device):
    """Autograd hands it over as it is, with the negation in a flag that no kernel sees."""
    x = rand(20, 32, dtype=F32, device=device).requires_grad_()
    out = CALLS[name](x)
    given = torch.randn_like(out)
    lazy = torch._neg_view(given)
    assert lazy.is_neg() and lazy.is_contiguous()
    (got,) = torch.autograd.grad(out, x, lazy, retain_graph=True)
    (wanted,) = torch.autograd.grad(out, x, -given)
    assert torch.equal(got, wanted)


def test_a_gradient_that_is_lazily_conjugated(device):
    x = torch.randn(5, 7, dtype=torch.complex64, device=device, requires_grad=True)
    given = torch.randn(7, 5, dtype=torch.complex64, device=device)
    (got,) = torch.autograd.grad(ops.transpose(x), x, given.conj())
    assert torch.equal(got, given.t().conj())


@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_tangent_is_refused_and_not_lost(name, enabled, device):
    """torch.no_grad does not stop forward mode."""
    x = rand(20, 32, dtype=F32, device=device)
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(Unsupported, match=r"^\w+ carries a forward-mode tangent"):
            TANGENTS[name](dual)
    with pytest.raises(Unsupported, match="tangent"):
        torch.func.jvp(TANGENTS[name], (x,), (x,))


@pytest.mark.parametrize("name", ["matmul", "conv2d", "lowbit_matmul", "add", "transpose"])
def test_transforms_without_a_rule_are_named(name, device):
    x = rand(20, 32, dtype=F32, device=device)
    words = "tilefold::.* has no rule for vmap: of torch.func, it takes grad and vjp only"
    for call in (torch.func.vmap(CALLS[name]), torch.func.vmap(torch.func.grad(lambda x: CALLS[name](x).sum()))):
        with pytest.raises(Unsupported, match=words):
            call(x[None])
    with pytest.raises(Unsupported, match=f"^the gradient of {words}"):
        torch.func.jacrev(CALLS[name])(x)


@pytest.mark.parametrize("name", ["matmul", "bmm", "conv2d", "attention"])
def test_second_derivatives_are_refused(name, device):
    x = rand(20, 32, dtype=F32, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(CALLS[name](x).sum(), x, create_graph=True)
    refuses(Unsupported, "first derivatives only", dx.sum().backward)
