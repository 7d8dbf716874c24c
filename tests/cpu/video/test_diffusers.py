"""Diffusers' attention dispatcher with tilefold as a backend."""

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.35", exc_type=ImportError, reason="diffusers is not installed")

import tilefold
from cases.refusals import refuses
from tilefold.errors import DtypeError, ShapeError, Unsupported


@pytest.fixture
def dispatch():
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    tilefold.register("diffusers")
    tilefold.register("diffusers")
    yield lambda *args, **options: dispatch_attention_fn(*args, backend=AttentionBackendName("tilefold"), **options)
    tilefold.unregister("diffusers")
    tilefold.unregister("diffusers")
    assert "tilefold" not in {member.value for member in AttentionBackendName}


def native(q, k, v, **options):
    """What diffusers' own backend gives, grouped heads included."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    return dispatch_attention_fn(q, k, v, backend=AttentionBackendName.NATIVE, **options)


def test_the_same_as_the_native_backend(dispatch, device):
    q = torch.randn(2, 9, 4, 16, device=device)
    k, v = (torch.randn(2, 7, 2, 16, device=device) for _ in range(2))
    live = torch.rand(2, 7, device=device) > 0.3
    live[:, 0] = True
    bias = torch.randn(1, 4, 9, 7, device=device)
    for options in ({}, {"attn_mask": live}, {"attn_mask": live[:, None, None]}, {"attn_mask": bias}, {"scale": 0.5}):
        found = dispatch(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(found, native(q, k, v, enable_gqa=True, **options), rtol=1e-5, atol=1e-5)
    q = q[:, :5]
    found = dispatch(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, native(q, k, v, is_causal=True, enable_gqa=True), rtol=1e-5, atol=1e-5)
    out, lse = dispatch(q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_refusals(dispatch, device):
    q = torch.randn(1, 5, 4, 16, device=device)
    k = torch.randn(1, 3, 2, 16, device=device)
    refuses(ShapeError, "enable_gqa=True", dispatch, q, k, k)
    refuses(Unsupported, "is_causal with 5 queries and 3 keys", dispatch, q, k, k, is_causal=True, enable_gqa=True)
    refuses(Unsupported, "_parallel_config", dispatch, q, k, k, enable_gqa=True, parallel_config=object())
    with pytest.raises(DtypeError, match=r"attn_mask has dtype torch\.int64"):
        dispatch(q, k, k, enable_gqa=True, attn_mask=torch.ones(1, 3, dtype=torch.long, device=device))


def test_a_model(dispatch, device):
    """A small video transformer with random weights changes to it by name."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=16, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    ).eval().to(device)  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4, device=device),
        "encoder_hidden_states": torch.randn(1, 3, 8, device=device),
        "timestep": torch.tensor([7], device=device),
    }
    with torch.no_grad():
        plain = model(**inputs).sample
        model.set_attention_backend("tilefold")
        found = model(**inputs).sample
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_other_models_go_on_after_it_is_taken_out(device):
    """A model that changed to it by name made it every model's."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn

    before = _AttentionBackendRegistry._active_backend
    tilefold.register("diffusers")
    _AttentionBackendRegistry.set_active_backend(type(before)("tilefold"))
    tilefold.unregister("diffusers")
    assert _AttentionBackendRegistry._active_backend is before
    q = torch.randn(1, 5, 2, 16, device=device)
    assert dispatch_attention_fn(q, q, q).shape == q.shape
