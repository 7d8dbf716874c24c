"""Gradients of matrix products against the oracle's, and the operator under torch.compile, functorch and opcheck."""

import pytest
import torch

from cases import graph_gives, rand
from cases.matmul import ACTIVATIONS, check_gradients, matrix
from tilefold import ops
from tilefold.errors import Unsupported
from tilefold.ops.matrix.matmul import MATMUL
from tilefold.ops.matrix.product import Epilogue


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul(activation, dtype, device):
    a = matrix(21, 18, dtype=dtype, device=device, leaf=True)
    b = matrix(18, 35, dtype=dtype, device=device, turned=True, leaf=True)
    check_gradients(a, b, rand(35, dtype=dtype, device=device).requires_grad_(), activation=activation)


SHARED = [((3, 20, 18), (3, 18, 35)), ((3, 20, 18), (18, 35)), ((20, 18), (3, 18, 35))]


@pytest.mark.parametrize("shapes", SHARED)
@pytest.mark.parametrize("bias", [(35,), (3, 1, 1), (3, 20, 35), (20, 1)])
def test_batches(shapes, bias, device):
    """A shared operand's gradient is summed over the batch."""
    a, b = (rand(*shape, device=device).requires_grad_() for shape in shapes)
    check_gradients(a, b, rand(*bias, device=device).requires_grad_(), activation="gelu")


@pytest.mark.parametrize("turned", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shapes", SHARED)
def test_batches_that_are_no_longer_k(turned, shapes, device):
    """Layouts whose batches do not join: the kernel goes through them."""
    a, b = (matrix(*shape, device=device, turned=t, leaf=True) for shape, t in zip(shapes, turned, strict=True))
    check_gradients(a, b, None)
    lead = rand(20, 3, 18, device=device).transpose(0, 1).requires_grad_()
    check_gradients(lead, rand(18, 35, device=device).requires_grad_(), None, activation="relu")


def test_gradients_of_any_strides(device):
    """After sum() and transposes."""
    a, b = matrix(21, 18, device=device, leaf=True), matrix(18, 35, device=device, leaf=True)
    for activation in (None, "silu"):
        check_gradients(a, b, None, dout=torch.ones(1, device=device).expand(21, 35), activation=activation)
        check_gradients(a, b, None, dout=rand(35, 21, device=device).t(), activation=activation)


@pytest.mark.parametrize("which", ["a", "b", "bias"])
def test_only_what_is_asked_for(which, device):
    tensors = {"a": rand(20, 18, device=device), "b": rand(18, 35, device=device), "bias": rand(35, device=device)}
    tensors[which].requires_grad_()
    check_gradients(*tensors.values(), activation="gelu_tanh")


@pytest.mark.parametrize("sizes", [(0, 5, 4), (5, 0, 4), (5, 6, 0)])
@pytest.mark.parametrize("batch", [None, 2])
def test_empty(sizes, batch, device):
    m, n, k = sizes
    lead = () if batch is None else (batch,)
    a, b = rand(*lead, m, k, device=device).requires_grad_(), rand(k, n, device=device).requires_grad_()
    check_gradients(a, b, rand(n, device=device).requires_grad_(), activation="silu")


def test_the_same_bits_every_run(device):
    a, b = (rand(*shape, device=device).requires_grad_() for shape in ((3, 20, 40), (40, 35)))
    runs = [torch.autograd.grad(ops.bmm(a, b, activation="gelu").square().sum(), (a, b)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_eight_bits_have_no_gradient(device):
    a, b = (rand(16, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    with pytest.raises(Unsupported, match="bias requires a gradient, but products in float8_e4m3fn have none"):
        ops.matmul(a, b, bias=rand(16, device=device).requires_grad_())


def layer(a, b, bias, activation):
    return ops.bmm(a * 2, b, bias=bias, activation=activation) + 1


@pytest.mark.no_poison
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_compile_fullgraph(activation, device):
    leaves = [rand(*shape, device=device).requires_grad_() for shape in ((2, 20, 18), (18, 35), (35,))]
    compiled = graph_gives(layer, *leaves, activation, times=2)
    plain = [t.detach() for t in leaves]
    assert torch.equal(compiled(*plain, activation), layer(*plain, activation))


@pytest.mark.no_poison
def test_func_grad(device):
    """torch.func takes the autograd function, not the dispatcher's operator."""
    a, b = rand(5, 4, device=device), rand(4, 6, device=device)
    made = torch.func.grad(lambda x: ops.matmul(x, b, activation="gelu").square().sum())(a)
    leaf = a.clone().requires_grad_()
    (want,) = torch.autograd.grad(ops.matmul(leaf, b, activation="gelu").square().sum(), leaf)
    assert torch.equal(made, want)


@pytest.mark.no_poison
def test_opcheck(device):
    a, b, bias = (rand(*shape, device=device).requires_grad_() for shape in ((2, 20, 18), (18, 35), (35,)))
    epilogue = Epilogue("silu", out_dtype=a.dtype, saved=True)
    torch.library.opcheck(MATMUL.op, MATMUL.flat(a, b, bias, None, None, epilogue))
