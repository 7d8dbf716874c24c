"""What implementations make of one problem, by name: the tensors that `tilefold compare` sets beside each other."""

from typing import Any

import torch
from torch import Tensor

from tilefold import reference, sparse
from tilefold.bench.accuracy import LARGEST, exact_result
from tilefold.bench.attention.block_peers import portable_plans
from tilefold.bench.attention.peers import IMPLEMENTATIONS, tilefold_call
from tilefold.bench.implementation import Inputs
from tilefold.bench.video.stages import video_inputs
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan.sparse.video import VideoShape
from tilefold.reference.rounding import plain
from tilefold.sparse.stages import SelectOptions

GRADIENTS = ("dq", "dk", "dv")
VIDEO_NAMES = ("tilefold", "fused", "fp64", "plain")
ORACLES = ("fp64", "plain")
LSE = ("tilefold", "portable")  # of attention, those that tell it
# Of the video pipeline, in the order in which they are made; `kept` is 1 where a query block's list has a KV block.
STAGES = ("coarse", "scores", "gini", "tau", "mass", "kept", "fine", "lse", "out")

Results = dict[str, Tensor]


# --- attention by itself ------------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """ValueRangeError unless it is an implementation of attention."""
    if name != "fp64" and name not in IMPLEMENTATIONS:
        raise ValueRangeError(
            f"an implementation must be a file or one of fp64, {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )


def attention_results(name: str, inputs: Inputs, device: str) -> Results:
    """ "out", and "lse" [B, H, Sq] (natural log) of those that tell it; or "dq", "dk", "dv". Unsupported, naming the
    implementation, if it cannot take the case."""
    if name == "fp64":
        return exact_result(inputs)
    implementation = IMPLEMENTATIONS[name]
    if why := implementation.refuses(inputs.case, device):
        raise Unsupported(f"{name} cannot take {inputs.case.name}: {why}")
    run = implementation.prepare(inputs)
    with run.context():
        found = run.call()
    if inputs.case.backward:
        return dict(zip(GRADIENTS, found, strict=True))
    results = {"out": found}
    if name in LSE:
        plans = portable_plans(inputs) if name == "portable" else None
        chosen = {"plan": plans[0]} if plans else {}
        results["lse"] = tilefold_call(inputs, return_lse=True, **chosen)(inputs.q, inputs.k, inputs.v)[1]
    return results


def without_lse(names: tuple[str, str]) -> list[str]:
    """Those whose forward results have no lse."""
    return [name for name in dict.fromkeys(names) if name not in LSE and name != "fp64"]


# --- the video pipeline -------------------------------------------------------------------------------------------------------


def check_video_names(names: tuple[str, str], backward: bool, same_lists: bool) -> None:
    """ValueRangeError unless the pipeline runs by these names, in this direction and over the first one's lists."""
    for name in names:
        if name not in VIDEO_NAMES:
            raise ValueRangeError(
                f"an implementation of the video pipeline must be one of {', '.join(VIDEO_NAMES)}, got {name!r}"
            )
        if name == "fused" and backward:
            raise ValueRangeError(
                "direction must be forward for 'fused', whose gradients are those of 'tilefold', got 'backward'"
            )
    if same_lists and (names[1] not in ORACLES or names[0] == "fused"):
        raise ValueRangeError(
            f"--same-lists has fp64 or plain attend the lists that tilefold, fp64 or plain selected: name them second and "
            f"first, got {names[1]!r} and {names[0]!r}"
        )


def video_results(
    names: tuple[str, str],
    shape: VideoShape,
    select: SelectOptions,
    device: str,
    seed: int,
    backward: bool,
    same_lists: bool,
) -> tuple[Results, Results]:
    """Of each name every stage's results and the output, or the gradients of q, k, v and both gates.

    tilefold: the stages one by one; fused: the fine stage's epilogue mixes the branches, so that only "out" is there; fp64: the
    oracles in float64 on inputs widened to it; plain: the same in the inputs' dtype. same_lists: the second attends the lists
    that the first selected, so that a tie broken the other way does not show in all that follows.
    Unsupported if an oracle's scores would be too many."""
    scores = shape.batch * shape.heads * shape.seq**2
    for name in names:
        if name in ORACLES and scores > LARGEST:
            raise Unsupported(
                f"{name} cannot take {shape.batch} x {shape.heads} x {shape.seq} x {shape.seq} scores, more than {LARGEST}. "
                f"Choose a smaller --shape, or --quick"
            )
    inputs = video_inputs(shape, device, seed)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.gates}
    grad = None
    if backward:
        grad = torch.randn(inputs.q.shape, generator=inputs.generator, device=device, dtype=inputs.q.dtype)
    options = {"select": select, "block": shape.block}
    first, index = _pipeline(names[0], tensors, options, grad, None)
    second, _ = _pipeline(names[1], tensors, options, grad, index if same_lists else None)
    return first, second


def _pipeline(
    name: str, tensors: dict[str, Tensor], options: dict[str, Any], grad: Tensor | None, lists: Any
) -> tuple[Results, Any]:
    """(the results of one implementation, the lists it attended); lists: those that an oracle is to attend, or None."""
    run: Any = sparse.sparse_video_attention
    if name in ORACLES:
        work = torch.float64 if name == "fp64" else tensors["q"].dtype
        tensors = {key: t.to(work) for key, t in tensors.items()}
        run, options = plain()(reference.sparse_video_attention), {**options, "index": lists, "dtype": work}
    if grad is not None:
        leaves = {key: t.detach().requires_grad_() for key, t in tensors.items()}
        out, stages = run(**leaves, **options, return_stages=True)
        made = torch.autograd.grad(out, [*leaves.values()], grad.to(out.dtype))
        return {f"d{key}": one for key, one in zip(leaves, made, strict=True)}, stages.index
    if name == "fused":
        return {"out": run(**tensors, **options)}, None
    out, stages = run(**tensors, **options, return_stages=True)
    kept = stages.index.to_map().to(torch.uint8)
    chosen = stages.scores, stages.gini, stages.tau, stages.mass, kept
    each = stages.coarse_out, *chosen, stages.fine_out, stages.fine_lse, out
    return {key: t for key, t in zip(STAGES, each, strict=True) if t is not None}, stages.index
