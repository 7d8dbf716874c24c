"""Keywords of other libraries: the error says what they are called here, and correct calls pay nothing that can be seen."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

import tilefold
from cases import qkv
from tilefold import keywords, parallel

FUNCTIONS = (
    tilefold.attention,
    tilefold.attention_varlen,
    tilefold.attention_kvcache,
    tilefold.attention_shared_prefix,
    tilefold.sparse_attention,
    tilefold.sparse_attention_varlen,
    tilefold.sparse_attention_paged,
    parallel.attention,
)
PLANS = (
    (tilefold.attention_plan, 3),
    (tilefold.attention_backward_plan, 3),
    (tilefold.attention_kvcache_plan, 3),
    (tilefold.sparse_plan, 4),
    (parallel.attention_plan, 4),
)


def refused(function, **given):
    """What a call with this keyword, and whatever is positional, is told."""
    positional = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 3]
    args = [torch.zeros(1, 16, 2, 16)] * len(positional)
    if function is tilefold.sparse_plan:
        args[3] = tilefold.BlockIndex.from_map(torch.ones(1, 1, 1, 1, dtype=torch.bool), seq_q=16, seq_k=16)
    needed = {"attention_kvcache": {}, "attention_shared_prefix": {"prefix_length": 0, "cache_seqlens": None}}
    with pytest.raises(TypeError) as caught:
        function(*args, **needed.get(function.__name__, {}), **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"is_causal": True}, "here it is causal (aligned to the bottom right, torch's is_causal to the top left"),
        ({"softmax_scale": 0.5}, "here it is scale"),
        (
            {"attn_mask": None},
            "here it is mask (bool, true where the query sees the key, or a Mask; a floating point one is bias)",
        ),
        ({"enable_gqa": True}, "leave it out: k and v may always have fewer heads than q"),
        ({"window_size": (-1, -1)}, "here it is window (a pair (left, right), both ends included"),
    ],
)
def test_the_five_of_torch_and_flash_attn(given, ours):
    name = next(iter(given))
    assert refused(tilefold.attention, **given).startswith(
        f"attention() got an unexpected keyword argument '{name}': {ours}"
    )


@pytest.mark.parametrize("function", [*FUNCTIONS, *(function for function, _ in PLANS)], ids=lambda f: f.__qualname__)
def test_what_an_error_names_is_there(function):
    """Of every function and every name in the table: ours is one of its arguments, or it says what to do instead."""
    accepted = dict.fromkeys(inspect.signature(function).parameters)
    for theirs, (ours, instead) in keywords.NAMES.items():
        if theirs in accepted:
            continue
        text = refused(function, **{theirs: None})
        assert f"got an unexpected keyword argument {theirs!r}" in text
        if "options" in accepted:
            continue
        found = [name for name, _ in ours if name in accepted]
        assert f"here it is {found[0]}" in text if found else instead in text, text


def test_sparse_attention_has_no_window_and_masks_of_its_own():
    assert "a mask_mod does what a window does" in refused(tilefold.sparse_attention, window_size=(5, 0))
    assert "or a Mask" in refused(tilefold.sparse_attention, attn_mask=None)
    assert "here it is scale" in refused(tilefold.sparse_plan, softmax_scale=1.0)
    assert "here it is window" in refused(tilefold.attention_kvcache_plan, window_size=(5, 0))


def test_other_names():
    """A slip of the pen is guessed; what is like nothing is said as Python says it."""
    assert refused(tilefold.attention, casual=True).endswith("'casual': did you mean causal?")
    assert refused(tilefold.attention, colour=1) == "attention() got an unexpected keyword argument 'colour'"
    assert refused(tilefold.attention_plan, casual=True).endswith("did you mean causal?")
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(Exception, match="unexpected keyword argument 'casual'"):  # Dynamo's own kind, and what was said
        torch.compile(lambda: tilefold.attention(q, q, q, casual=True), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_signatures_are_what_is_accepted(function):
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds and inspect.Parameter.KEYWORD_ONLY in kinds
    assert function.__code__.co_flags & inspect.CO_VARKEYWORDS


def test_every_public_function_of_this_kind_is_here():
    """Whoever has a causal argument is called with the names of others."""
    public = [getattr(tilefold, name) for name in tilefold.__all__]
    found = {f for f in public if inspect.isfunction(f) and "causal" in inspect.signature(f).parameters}
    assert found == set(FUNCTIONS) - {parallel.attention}


def test_type_checkers_refuse_them_too():
    """`**others: NoReturn`: no value is of that type, so that a keyword which does not exist is an error before it runs."""
    for part in ("api", "cache_api", "sparse_api", "parallel/calls"):
        tree = ast.parse((Path(tilefold.__file__).parent / f"{part}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "refusing" for d in node.decorator_list):
                assert ast.unparse(node.args.kwarg) == "others: NoReturn", node.name


@pytest.mark.no_poison
def test_compiled(device):
    q, k, v = qkv(1, 16, 16, 2, 2, 16, device=device)
    compiled = torch.compile(lambda *x: tilefold.attention(*x, causal=True), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), tilefold.attention(q, k, v, causal=True))
    wrong = torch.compile(lambda *x: tilefold.attention(*x, is_causal=True), backend="eager")
    with pytest.raises(Exception, match="here it is causal"):
        wrong(q, k, v)
