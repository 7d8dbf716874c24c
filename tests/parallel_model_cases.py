"""Whole models on several ranks: FSDP2, tensor parallelism, checkpoints, torch.compile, Transformers; beside one process."""

import copy
import importlib.util
from functools import partial

import pytest
import torch
import torch.distributed as dist

import hf_models
import tilefold
import train_long
from cases.refusals import refuses
from parallel_plain import PLAIN, noting
from tilefold import parallel as tp
from tilefold import reference
from tilefold.reference.tolerance import compare


def on_two():
    yield "model-compiled", partial(compiled, "heads")
    yield "model-fsdp", fsdp
    if importlib.util.find_spec("diffusers"):
        yield from ((f"model-video-{family}", partial(sparse_video, family)) for family in ("wan", "hunyuan"))
    yield "model-train-long", long_example
    yield "model-mistral", partial(transformer, "mistral", "zigzag", [0, 9, 16])  # a window, packed
    yield "model-refusals", refusals
    yield "model-bench", bench


def on_four():
    yield "model-tensor-parallel", tensor_parallel


# ---------------------------------------------------------------- torch.compile


def compiled(scheme):
    """One graph, what eager gives, gradients too; a context that is opened again compiles nothing anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    rank, ranks = dist.get_rank(), dist.get_world_size()
    counter = CompileCounterWithBackend("aot_eager")
    told = []
    kernels = noting(told)

    def step(q, k, v):
        out, lse = tilefold.attention(q * 2, k, v, causal=True, scale=0.3, return_lse=True, deterministic=False)
        return out.square().sum() + lse.sum()

    program = torch.compile(step, fullgraph=True, backend=counter)
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 15, heads, 8, dtype=torch.float64, generator=random) for heads in (4, 1, 1))
    found = []
    for run in (step, program, program):
        sharding = tp.shard(15, ranks, "zigzag")
        leaves = [tp.shard_sequence(t, sharding, rank).clone().requires_grad_() for t in (q, k, v)]
        with tp.context_parallel(None, sharding, scheme=scheme, kernels=kernels):
            loss = run(*leaves)
        loss.backward()
        assert told
        assert not any(told)
        told.clear()
        found.append([loss.detach(), *(t.grad for t in leaves)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12, msg=scheme)
    assert counter.frame_count == 1


# ---------------------------------------------------------------- the decoder of the example


OPTIONS = ["--heads", "4", "--kv-heads", "2", "--dim", "8", "--layers", "2", "--tokens", "14", "--vocabulary", "11"]


def alone(model, tokens):
    """{name: gradient} and the loss of one process in fp64, attention written out."""
    model = copy.deepcopy(model).double()
    kept = tilefold.attention
    try:
        tilefold.attention = lambda q, k, v, causal: reference.attention(q, k, v, causal=causal)[0]
        logits = model(tokens, torch.arange(tokens.shape[1]))
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
        loss.backward()  # checkpoints attend again
    finally:
        tilefold.attention = kept
    return {name: p.grad for name, p in model.named_parameters()}, loss.detach()


def judge(got, loss, model, tokens):
    """Loss and gradients beside fp64."""
    exact, exact_loss = alone(model, tokens)
    plain, plain_loss = reference.deviating(lambda: alone(model, tokens), torch.float32)
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-6
    assert set(got) == set(exact)
    for name, gradient in got.items():
        verdict = compare(gradient, exact[name], plain[name])
        assert verdict.ok, f"{name}: {verdict}"


def shares(tokens, sharding, rank):
    """This rank's tokens, their positions, their labels."""
    return (
        tp.shard_sequence(tokens, sharding, rank),
        tp.positions(sharding, rank),
        tp.next_tokens(tokens, sharding, rank),
    )


def backward(model, tokens, sharding, group, scheme, factor):
    """The loss over the group's ranks; factor: of what is differentiated."""
    ranks = tp.ranks_of(group)
    mine, where, labels = shares(tokens, sharding, ranks.rank)
    with tp.context_parallel(ranks, sharding, scheme=scheme, kernels=PLAIN):
        logits = model(mine, where)
        losses = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
        loss = tp.loss_mean(losses, labels[0] != -100, ranks)
        (loss * factor).backward()
    return loss.detach()


def fsdp():
    """FSDP2 over the ranks that share the sequence, with checkpoints, and a compiled layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    options = train_long.arguments(OPTIONS, False)
    tokens = torch.randint(11, (1, 14), generator=torch.Generator().manual_seed(4))
    model = train_long.build(options, torch.device("cpu"))
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (ranks,))
    model.layers[0].compile(backend="aot_eager")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = backward(model, tokens, tp.shard(14, ranks, "zigzag"), mesh, "ring", ranks)  # FSDP averages
    judge({name: p.grad.full_tensor() for name, p in model.named_parameters()}, loss, whole, tokens)


def sparse_video(family):
    """A video model of Diffusers with sparse attention that learns, under FSDP2: blocks are shards, gates with them.
    Ranks have the same video, so that the average of gradients is that of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import video_models as small
    from tilefold import video

    torch.manual_seed(3)
    model, inputs = small.FAMILIES[family](small.FLAT, batch=1)
    video.sparsify(model, video.Pooled(sparsity=0.5), cube=small.CUBE, trainable=True)
    with torch.no_grad():
        for one in video.trainable_parameters(model).values():
            one.normal_(0, 0.5)
    whole, mesh = copy.deepcopy(model), init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("blocks", "transformer_blocks", "single_transformer_blocks"):
        for block in getattr(model, name, ()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wanted = whole(**inputs).sample
    wanted.square().mean().backward()
    got = model(**inputs).sample
    got.square().mean().backward()
    torch.testing.assert_close(got, wanted)
    pairs = list(zip(model.named_parameters(), whole.parameters(), strict=True))
    assert all(hasattr(one, "full_tensor") for (_, one), _ in pairs)
    mine, theirs = (video.trainable_parameters(each).values() for each in (model, whole))
    assert {*map(id, mine)} <= {id(one) for (_, one), _ in pairs} and all(one.grad.abs().max() > 0 for one in theirs)
    for (name, one), other in pairs:
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(
                one.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def tensor_parallel():
    """A mesh of two dimensions: heads over one, tokens over the other; FSDP2 over that one, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tokens = torch.randint(11, (1, 14), generator=torch.Generator().manual_seed(4))
    model = train_long.build(train_long.arguments(OPTIONS, False), torch.device("cpu"))
    whole = copy.deepcopy(model)
    cut = {name: ColwiseParallel() for name in ("q", "k", "v", "up", "gate")}
    cut |= {name: RowwiseParallel() for name in ("out", "down")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], cut)
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    loss = backward(model, tokens, tp.shard(14, 2, "zigzag"), mesh["cp"], "ring", 2)  # FSDP averages
    judge({name: p.grad.full_tensor() for name, p in model.named_parameters()}, loss, whole, tokens)


def long_example():
    """The example as it is run, in small: its losses are those of one process."""
    small = "--layers 1 --heads 2 --kv-heads 1 --tokens 8 --steps 2 --check --vocabulary 5"
    assert train_long.main(small.split()) == 0


# ---------------------------------------------------------------- Transformers


def transformer(family, kind, tokens, device="cpu", kernels=PLAIN):
    """Loss and gradients of a model of Transformers, its tokens cut over the ranks, beside the same model in fp64."""
    ranks = dist.get_world_size()
    hf_models.register_exact()
    model = hf_models.make(family, use_cache=False, num_hidden_layers=1)
    sharding = tp.shard(tokens, ranks, kind)
    ids = torch.randint(2, 64, (1, sharding.total), generator=torch.Generator().manual_seed(5))
    whole = {
        "position_ids": torch.cat(
            [torch.arange(b - a) for a, b in zip(sharding.starts, sharding.starts[1:], strict=False)]
        )[None]
    }
    labels = tp.next_tokens(ids, sharding, None)
    other = hf_models.made_by(model, "exact", double=True)

    def gradients():
        other.zero_grad()
        loss = other(input_ids=ids, labels=labels, shift_labels=labels, **whole).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in other.parameters())]

    found = [gradients(), reference.deviating(gradients, torch.float32)]
    mine = hf_models.made_by(model, "tilefold").to(device).train()
    mine.gradient_checkpointing_enable({"use_reentrant": False})
    with tp.context_parallel(None, sharding, scheme="ring", kernels=kernels):
        loss = mine(**tp.causal_batch(ids.to(device), sharding)).loss
        loss.backward()
    got = [loss.detach().clone(), *(p.grad for p in mine.parameters())]
    for t in got:
        dist.all_reduce(t)
    got = [t.cpu() for t in got]
    names = ["loss", *(name for name, _ in model.named_parameters())]
    assert abs(got[0] - found[0][0]) <= 2 * abs(found[1][0] - found[0][0]) + 1e-6, (got[0], found[0][0])
    for name, one, exact, plain in list(zip(names, got, *found, strict=True))[1:]:
        verdict = compare(one, exact, plain)
        assert verdict.ok, f"{name}: {verdict}"


def refusals():
    """What a model might ask for and would not get right is refused."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sharding = tp.shard(8, ranks)
    tilefold.register()
    model = hf_models.make("llama", num_hidden_layers=1)
    model.set_attn_implementation("tilefold")
    ids = torch.arange(8)[None]
    given = tp.causal_batch(ids, sharding)
    length = sharding.length(rank)
    with tp.context_parallel(None, sharding, kernels=PLAIN):
        padded = torch.ones(1, length, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)
        refuses(tilefold.Unsupported, "padding", model, **given, attention_mask=padded, use_cache=False)
        model(**given, attention_mask=torch.ones_like(padded), use_cache=False)
    x = torch.zeros(1, length, 2, 8)

    def direct(x):
        return tp.attention(x, x, x, sharding)

    with pytest.raises(Exception, match="under context_parallel"):
        torch.compile(direct, backend="eager", fullgraph=True)(x)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    spread = DTensor.from_local(x, init_device_mesh("cpu", (ranks,)), [Shard(1)])
    refuses(tilefold.Unsupported, "to_local", tp.attention, spread, spread, spread, sharding)


# ---------------------------------------------------------------- the benchmark


def bench():
    """The command on ranks that are there: outputs are checked, PyTorch's refusal is a line, a wrong result is found."""
    from typer.testing import CliRunner

    from tilefold.bench.parallel.loads import Work
    from tilefold.bench.parallel.run import measure
    from tilefold.cli.app import app

    options = ("--tokens", "12", "--ways", "heads,torch", "--heads", "2,1", "--dim", "16", "--direction", "backward")
    result = CliRunner().invoke(app, ["bench", "parallel", *options], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == 0, (result.output, result.exception)
    if dist.get_rank() == 0:
        assert "does not have a sharding strategy" in result.output
        assert "not usable" in result.output
        assert "2 heads on 1, D=16, float32, causal" in result.output
    work = Work((12,), (2, 1), 16, "float32", backward=(False,), ways=("ring", "two_level"), rounds=1)
    kept = tp.attention
    tp.attention = lambda *tensors, **options: kept(*tensors, **(options | {"causal": False}))
    try:
        wrong, impossible = measure(work)
    finally:
        tp.attention = kept
    assert wrong.status == "WRONG"
    assert "out" in wrong.note
    assert impossible.status == "not usable"
    assert "ranks of a node" in impossible.note
    assert measure(Work((12,), (1, 1), 16, "float32", budget=0.0, backward=(False,))) == []
    lists = measure(Work((100,), (2, 1), 16, "float32", ways=("sparse",), rounds=1, density=0.4, block=16))
    assert [line.status for line in lists] == ["ok", "ok"], lists
    assert "of the blocks; a rank receives at most" in lists[0].note
