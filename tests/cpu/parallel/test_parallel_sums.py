"""Without other ranks: what pieces give for a rank's rows, put together; which devices a process group carries."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from cases.refusals import refuses
from tilefold.errors import DeviceError
from tilefold.ops.cache.merge import _merge_plainly, merge_into
from tilefold.parallel import agree
from tilefold.parallel.group import carried_by, check_device
from tilefold.parallel.sums import State, Sum
from tilefold.reference.tolerance import compare

AREAS = {
    "one": [(0, 12)],
    "halves": [(0, 6), (6, 12)],
    "own and halves": [(0, 12), (0, 5), (5, 12)],
    "ring": [(0, 12), (0, 12), (6, 12), (6, 12)],
    "early": [(0, 12), (0, 12), (0, 7), (6, 12), (6, 12)],
    "gaps": [(2, 5), (4, 9)],
    "inside": [(0, 12), (3, 5), (8, 9), (3, 9)],
    "nothing": [],
    "empty": [(3, 3), (0, 12)],
}


def piece(rows, dtype, random):
    out = torch.randn(2, rows, 3, 8, generator=random).to(dtype)
    lse = torch.randn(2, 3, rows, generator=random) * 3
    return out, lse.masked_fill(torch.rand(2, 3, rows, generator=random) < 0.2, float("-inf"))


@pytest.mark.parametrize("name", AREAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_merged(name, dtype):
    """out and lse beside weights over all pieces in fp64; rows of no piece are dead."""
    random = torch.Generator().manual_seed(3)
    q = torch.zeros(2, 12, 3, 8, dtype=dtype)
    pieces = [(low, high, *piece(high - low, dtype, random)) for low, high in AREAS[name]]
    lses = torch.full((len(pieces) + 1, 2, 3, 12), float("-inf"), dtype=torch.float64)
    outs = torch.zeros(len(pieces) + 1, 2, 12, 3, 8, dtype=torch.float64)
    state = State(q, 8, [one[:2] for one in pieces])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for i, (low, high, out, lse) in enumerate(pieces):
        outs[i, :, low:high], lses[i, :, :, low:high] = out, lse
        dead = (lse == float("-inf")).transpose(1, 2)[..., None]
        outs[i, :, low:high].masked_fill_(dead, 0)
        state.take((out.masked_fill(dead, 0.0), lse.to(exact)), low, high)
    got, lse = state.result()
    total = lses.logsumexp(0)
    weights = torch.exp(lses - total.masked_fill(total == float("-inf"), 0)).transpose(2, 3)[..., None]
    want = (outs * weights).sum(0)
    assert got.dtype == dtype
    assert torch.equal(lse.isinf(), total.isinf())
    verdict = compare(got, want, want.to(dtype))
    assert verdict.ok, verdict
    torch.testing.assert_close(lse.double(), total, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", AREAS)
@pytest.mark.parametrize("into", [None, False, True])
def test_added(name, into):
    """In the dtype of the tensor, or in a given fp32 tensor that is empty or has a summand."""
    random = torch.Generator().manual_seed(4)
    like = torch.zeros(1, 12, 2, 8, dtype=torch.bfloat16)
    work = None if into is None else torch.randn(1, 12, 2, 8, generator=random) if into else torch.empty(1, 12, 2, 8)
    want = work.double() if into else torch.zeros(1, 12, 2, 8, dtype=torch.float64)
    one = Sum(like if work is None else work, AREAS[name], work, bool(into))
    for low, high in AREAS[name]:
        part = torch.randn(1, high - low, 2, 8, generator=random).to(torch.bfloat16)
        want[:, low:high] += part
        one.take((part,), low, high)
    got = one.result()
    assert got.dtype == (torch.bfloat16 if into is None else torch.float32)
    verdict = compare(got, want, want.to(got.dtype))
    assert verdict.ok, verdict


@pytest.mark.interpreter
def test_kernel_and_plain_form_agree():
    """In place, of three dtypes, over rows of larger tensors."""
    random = torch.Generator().manual_seed(5)
    (a, lse_a), (b, lse_b) = piece(9, torch.float32, random), piece(9, torch.bfloat16, random)
    found = []
    for merge in (merge_into, _merge_plainly):
        for to in (torch.float32, torch.bfloat16):
            work, sums = torch.zeros(2, 12, 3, 8), torch.zeros(2, 3, 12)
            work[:, 2:11], sums[:, :, 2:11] = a.masked_fill((lse_a == float("-inf")).mT[..., None], 0), lse_a
            mine, lse = work[:, 2:11], sums[:, :, 2:11]
            out = mine if to == torch.float32 else torch.zeros(2, 9, 3, 8, dtype=to)
            merge(mine, lse, b.masked_fill((lse_b == float("-inf")).mT[..., None], 0), lse_b, out, lse)
            assert (work[:, :2] == 0).all()
            assert (work[:, 11:] == 0).all()
            found.append((out.float().clone(), lse.clone()))
    for one, other, atol in zip(found[:2], found[2:], (1e-6, 1e-2), strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=atol)
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-6)


# ---------------------------------------------------------------- devices


CPU, META, GPU = torch.empty(1), torch.empty(1, device="meta"), torch.device("cuda", 1)


def group_of(monkeypatch, backend, name=None):
    """As if the group had been made with that backend."""
    written = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: written)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: name or backend)


@pytest.mark.parametrize(
    ("backend", "carried"), [("nccl", ("cuda",)), ("gloo", ("cpu", "cuda")), ("cpu:gloo,cuda:nccl", ("cpu", "cuda"))]
)
def test_what_torch_writes_is_read(monkeypatch, backend, carried):
    group_of(monkeypatch, backend)
    assert carried_by(None) == carried


def test_tensors_that_a_group_does_not_carry(monkeypatch):
    group_of(monkeypatch, "nccl")
    with pytest.raises(DeviceError, match=r"q is on cpu, but the process group \(nccl\) exchanges tensors on cuda"):
        check_device("q", CPU, None)
    assert agree._carrier(None, CPU.device) == torch.device("cuda"), "where NCCL can compare"
    assert agree._carrier(None, GPU) == GPU
    group_of(monkeypatch, "gloo")
    check_device("q", CPU, None)
    refuses(DeviceError, "q is on meta", check_device, "q", META, None)
    assert agree._carrier(None, GPU) == torch.device("cpu"), "what is compared is read by the host"
    group_of(monkeypatch, "cpu:gloo,cuda:nccl", "nccl")
    check_device("q", CPU, None)
    assert agree._carrier(None, GPU) == GPU


@pytest.mark.parametrize("fault", [TypeError, ValueError, KeyError, RuntimeError])
def test_where_torch_does_not_say_nothing_is_refused(monkeypatch, fault):
    def refuse(group=None):
        raise fault

    monkeypatch.setattr(dist, "get_backend_config", refuse)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    assert carried_by(None) is None
    check_device("q", META, None)
    assert agree._carrier(None, GPU) == GPU
