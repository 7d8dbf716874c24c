"""CPU tensors without Triton: who serves them, what plans and refusals say, and a process that has no Triton at all."""

import dataclasses
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

import tilefold
from cases.refusals import refuses
from tilefold import DeviceError, PlanError, Unsupported, masks, ops, sparse
from tilefold import plan as plans
from tilefold.cpu import calls
from tilefold.plan import DEVICES, AttentionProblem, TorchPlan, architecture, capabilities, device_named, plan_attention
from tilefold.plan import device as devices
from tilefold.plan.architecture import ARCHITECTURES, CPU, CUDA, HIP, INTERPRETER, SM_90, architecture_at
from tilefold.plan.capabilities import CAPABILITIES, architecture_refusal, function_of
from torch_cpu import device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")


def qkv(n: int = 40) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, n, 4, 16).unbind()


# ---------------------------------------------------------------- the registry


def test_every_device_has_its_architecture():
    found = {name: architecture.architecture_of(record).name for name, record in DEVICES.items()}
    assert found == {"h200": "sm_90", "h100": "sm_90", "b200": "cuda", "a100": "cuda", "l4": "cuda", "rtx4090": "cuda",
                     "mi300x": "hip", "interpreter": "interpreter"}  # fmt: skip
    assert device_named("cpu").architecture is CPU
    assert architecture_at("cpu", False) is CPU
    assert architecture_at("cuda", False) is CUDA
    assert architecture_at("cpu", True) is architecture_at("cuda", True) is INTERPRETER
    assert architecture_at("meta", False) is None
    assert set(ARCHITECTURES) == {SM_90, CUDA, HIP, INTERPRETER, CPU}


def test_a_kernel_of_one_architecture_says_so():
    name = "attention_forward_hopper"
    assert architecture_refusal(name, device_named("h100")) is None
    assert architecture_refusal(name, device_named("a100")) == "it is written for sm_90, this is sm_80"
    assert architecture_refusal(name, device_named("mi300x")) == "it is written for sm_90, this is gfx942"
    assert architecture_refusal("attention_forward", device_named("a100")) is None


def test_every_function_that_is_named_exists():
    named = [c for c in CAPABILITIES if c.function]
    assert {c.architecture for c in named} == {CPU}
    assert all(callable(function_of(c.operation, CPU)) for c in named)
    refuses(Unsupported, "conv2d is not served by torch (CPU)", function_of, "conv2d", CPU)


def test_another_architecture_is_a_line_and_its_records(monkeypatch):
    """With its functions in a module of its own, here this one.  No file of ops knows of it."""
    toy = dataclasses.replace(CPU, name="toy", title="a toy", backend="toy")
    record = dataclasses.replace(device_named("cpu"), name="toy", title="a toy", backend="toy")
    served = [dataclasses.replace(c, architecture=toy) for c in CAPABILITIES if c.architecture is CPU]
    own = dataclasses.replace(served[0], function=f"{__name__}:own_attention")
    monkeypatch.setattr(architecture, "ARCHITECTURES", (toy,))
    monkeypatch.setattr(capabilities, "CAPABILITIES", (own, *served[1:]))
    monkeypatch.setattr(devices, "device_named", {"toy": record}.get)
    q, k, v = (t.requires_grad_() for t in qkv())
    plan = tilefold.attention_plan(q, k, v)
    assert str(plan).startswith("Attention plan for a toy")
    assert plan.device is record
    seen.clear()
    tilefold.attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert seen == [plan]
    tilefold.matmul(q[0, :, 0], k[0, :, 0].t())
    refuses(Unsupported, "score_mod is not served by a toy", tilefold.attention, q, k, v, score_mod=plus_one)


seen: list[TorchPlan] = []


def own_attention(q, k, v, out, lse, call, plan):
    seen.append(plan)
    calls.attention(q, k, v, out, lse, call, plan)


# ---------------------------------------------------------------- plans and refusals


def test_the_plan_is_printed_followed_and_refused():
    q, k, v = qkv()
    plan = tilefold.attention_plan(q, k, v, causal=True)
    assert isinstance(plan, TorchPlan)
    assert str(plan).startswith(
        "Attention plan for torch (CPU)\n  problem     1 x 40 queries, 40 keys, 4 heads on 4 KV heads, D=16 (V 16), float32\n"
        "  kernel      torch_attention\n  tiles       40 queries"
    )
    small = TorchPlan(plan.operation, plan.problem, plan.device, plan.cut)
    out = tilefold.attention(q, k, v, causal=True, plan=small)
    assert torch.equal(out, tilefold.attention(q, k, v, causal=True))
    refuses(
        PlanError, "plan was made for causal=True, the call has causal=False", tilefold.attention, q, k, v, plan=small
    )
    backward = tilefold.attention_backward_plan(q, k, v)
    refuses(
        PlanError, "plan is for attention_backward, the call is attention", tilefold.attention, q, k, v, plan=backward
    )
    refuses(DeviceError, "plans of them take device=", tilefold.attention_plan, *(t.to("meta") for t in (q, k, v)))
    problem = AttentionProblem(1, 40, 40, 4, 4, 16, 16, dtype="float32")
    with pytest.raises(PlanError, match=r"the call is on torch \(CPU\)"):
        tilefold.attention(q, k, v, plan=plan_attention(problem, device_named("a100")))


@triton.jit
def plus_one(score, batch, head, q_index, kv_index, args):
    return score + 1


def test_what_is_not_served_names_the_argument_and_the_interpreter():
    q, k, v = qkv()
    text = "is not served by torch .CPU.: .*TRITON_INTERPRET=1 before triton is imported"
    for name in ("score_mod", "mask_mod"):
        with pytest.raises(Unsupported, match=f"{name} {text}"):
            tilefold.attention(q, k, v, **{name: plus_one})
    x = torch.randn(1, 3, 8, 8)
    refuses(DeviceError, "start Python with TRITON_INTERPRET=1", ops.conv2d, x, torch.randn(4, 3, 3, 3))
    eight = q.to(torch.float8_e4m3fn)
    refuses(DeviceError, "start Python with TRITON_INTERPRET=1", tilefold.attention, eight, eight, eight)


def test_memory_stays_below_one_matrix_of_scores():
    """The largest tensor that a call makes has the scores of a tile, not those of all queries and keys."""
    n = 4096
    q, k, v = (torch.randn(1, n, 1, 16, requires_grad=True) for _ in range(3))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            nonlocal largest
            made = fn(*args, **(kwargs or {}))
            largest = max(
                [largest, *(t.numel() for t in (made if isinstance(made, tuple) else (made,)) if torch.is_tensor(t))]
            )
            return made

    from tilefold.cpu import dense
    from tilefold.cpu.terms import Terms
    from tilefold.plan.torch_cpu import cut_of

    heads = [t.detach().transpose(1, 2) for t in (q, k, v)]
    cut = cut_of(1, 1, 1, n, n)
    out, lse = torch.empty(1, 1, n, 16), torch.empty(1, 1, n)
    with Watch():
        dense.forward(*heads, Terms(0.25, right=0), cut, out, lse)
        grads = dense.Gradients(*(torch.empty(1, 1, n, 16) for _ in range(3)))
        dense.backward(*heads, Terms(0.25, right=0), cut, (lse, torch.zeros(1, 1, n)), out, grads)
    assert largest <= 512 * 4096 < n * n


# ---------------------------------------------------------------- without Triton

ALONE = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch, tilefold
from tilefold.sparse import sparse_video_attention
torch.set_num_threads(1)
q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 128, 4, 16))
tilefold.attention(q, k, v, causal=True, dropout_p=0.1).sum().backward()
sparse_video_attention(q, k, v).sum().backward()
cu = torch.tensor([0, 100, 256], dtype=torch.int32)
tilefold.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 156, 156).sum().backward()
with torch.no_grad():
    cache = torch.zeros(2, 32, 4, 16)
    lengths = torch.tensor([0, 7], dtype=torch.int32)
    tilefold.kvcache_append(k[:, :2], v[:, :2], cache, cache.clone(), cache_seqlens=lengths)
    tilefold.attention_kvcache(q[:, :1], cache, cache, cache_seqlens=lengths + 2)
tilefold.matmul(q[0, :, 0], k[0, :, 0].t(), activation="gelu").sum().backward()
print(tilefold.attention_plan(q, k, v))
"""


def test_without_triton_everything_works():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=env, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Attention plan for torch (CPU)")


@pytest.mark.usefixtures("torch_cpu")
def test_a_plan_without_tiles():
    plan = ops.rms_norm_plan(torch.zeros(3, 5), torch.zeros(5))
    assert str(plan).splitlines() == [
        "Rms norm plan for torch (CPU)", "  kernel      torch_rms_norm", "  why         Plain torch, in fp32."
    ]  # fmt: skip


@pytest.mark.usefixtures("torch_cpu")
def test_only_kernels_look_at_the_device():
    """check="device" is refused wherever it is taken, for right values too, and before anything is written."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    q, k, cos = torch.randn(1, 1, 4, 32), torch.randn(1, 64, 4, 32), torch.randn(80, 16)
    pages, table, before = k.view(4, 16, 4, 32), ints(0, 1, 2, 3)[None], k.clone()
    index = sparse.BlockIndex.from_map(torch.ones(1, 1, 1, 1, dtype=torch.bool), seq_q=1, seq_k=64)
    packed = {"cu_seqlens_q": ints(0, 1), "cu_seqlens_k": ints(0, 64), "max_seqlen_q": 1, "max_seqlen_k": 64}
    for call in (
        lambda **c: tilefold.attention_kvcache(q, k, k, cache_seqlens=ints(9), **c),
        lambda **c: tilefold.attention_kvcache(q, k, k, cache_seqlens=ints(69), **c),
        lambda **c: tilefold.attention_kvcache(q[0], pages, pages, cache_seqlens=ints(9), block_table=table,
                                               cu_seqlens_q=ints(0, 1), max_seqlen_q=1, **c),
        lambda **c: tilefold.kvcache_append(q, q, k, k, cache_seqlens=ints(6), **c),
        lambda **c: tilefold.attention_shared_prefix(q, pages, pages, cache_seqlens=ints(60), block_table=table,
                                                     prefix_length=16, **c),
        lambda **c: tilefold.apply_rotary(q[0], cos, cos, cu_seqlens=ints(0, 1), max_seqlen=1, **c),
        lambda **c: tilefold.attention_varlen(q[0], k[0], k[0], **packed, **c),
        lambda **c: tilefold.sparse_attention(q, k, k, index, **c),
    ):  # fmt: skip
        with pytest.raises(
            DeviceError, match="^check='device' has kernels look, .* but tensors are on cpu: check=True"
        ):
            call(check="device")
    assert torch.equal(k, before)


@pytest.mark.usefixtures("torch_cpu")
def test_a_notebook_shows_the_text_of_a_plan():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    x = torch.zeros(1, 70, 2, 16)
    h200 = plan_attention(AttentionProblem(1, 70, 70, 2, 2, 16, 16), device_named("h200"))
    for plan in (tilefold.attention_plan(x, x, x), h200):
        assert pretty(plan) == str(plan)


def test_each_plan_with_a_text_of_its_own_shows_it():
    found = set()
    for module in pkgutil.walk_packages(plans.__path__, "tilefold.plan."):
        for name, made in vars(importlib.import_module(module.name)).items():
            if isinstance(made, type) and name.endswith("Plan") and "__str__" in vars(made):
                assert "_repr_pretty_" in vars(made), name
                found.add(name)
    assert len(found) >= 14


@pytest.mark.usefixtures("torch_cpu")
def test_masks_with_block_lists():
    """Only causal: the refusal names the mask, not the function that it would become."""
    x = torch.randn(1, 64, 2, 16)
    index = sparse.BlockIndex.from_map(torch.ones(1, 1, 1, 1, dtype=torch.bool), seq_q=64, seq_k=64)
    whole = tilefold.attention(x, x, x, causal=True)
    torch.testing.assert_close(tilefold.sparse_attention(x, x, x, index, mask=masks.causal()), whole)
    for mask in (masks.window(3, 0), masks.keys(torch.tensor([40], dtype=torch.int32))):
        with pytest.raises(
            Unsupported, match=r"^mask is not served by torch \(CPU\) in sparse_attention, but for causal\(\);"
        ):
            tilefold.sparse_attention(x, x, x, index, mask=mask)


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    """As with kernels: results and gradients are those of the tensors' own dtype, to the bit."""
    q, k, v = (t.to(dtype).requires_grad_() for t in qkv())
    bias = torch.randn(1, 4, 40, 40, requires_grad=True)
    cu = torch.tensor([0, 15, 40], dtype=torch.int32)

    def made() -> list[torch.Tensor]:
        out = tilefold.attention(q, k, v, bias=bias)
        packed = tilefold.attention_varlen(q[0], k[0], v[0], cu, cu, 25, 25, causal=True)
        loss = out.float().square().sum() + packed.float().square().sum()
        return [out, packed, *torch.autograd.grad(loss, (q, k, v, bias))]

    want = made()
    with torch.autocast("cpu", torch.bfloat16):
        got = made()
    assert all(map(torch.equal, got, want))
