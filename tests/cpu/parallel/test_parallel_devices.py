"""Which devices a process group carries, as torch writes it down for each backend; without a group."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from tilefold.errors import DeviceError
from tilefold.parallel import agree
from tilefold.parallel.group import carried_by, check_device

CPU, META, GPU = torch.empty(1), torch.empty(1, device="meta"), torch.device("cuda", 1)


def group_of(monkeypatch, backend, name=None):
    """As if the group had been made with that backend."""
    written = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: written)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: name or backend)


@pytest.mark.parametrize(
    ("backend", "carried"),
    [("nccl", ("cuda",)), ("gloo", ("cpu", "cuda")), ("cpu:gloo,cuda:nccl", ("cpu", "cuda"))],
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
    with pytest.raises(DeviceError, match="q is on meta"):
        check_device("q", META, None)
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
