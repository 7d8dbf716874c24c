"""Small video transformers of Diffusers with random weights, their inputs, and their fp64 twins over the oracle's attention."""

import copy

import torch

from cases import judge
from tilefold import reference
from tilefold.video import attend

GRID = (3, 3, 5)  # odd: cubes at every far edge are cut
FLAT = (3, 2, 5)  # half of the cubes, for what has twice the layers of attention
CUBE = (2, 2, 4)
TEXT = 9


def _pixels(batch, grid, channels=4):
    t, h, w = grid
    return torch.randn(batch, channels, t, 2 * h, 2 * w)


def wan(grid=GRID, batch=2, layers=1, image=False, times=False):
    """image: tokens of an image in cross-attention.  times: a time for each token, as in Wan 2.2 with 5 billion parameters."""
    from diffusers import WanTransformer3DModel

    beside = {"image_dim": 8, "added_kv_proj_dim": 24} if image else {}
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=16, num_layers=layers, cross_attn_norm=True, rope_max_seq_len=32, **beside,
    )  # fmt: skip
    tokens = grid[0] * grid[1] * grid[2]
    inputs = {
        "hidden_states": _pixels(batch, grid),
        "encoder_hidden_states": torch.randn(batch, 512 if image else TEXT, 8),
        "timestep": torch.randint(1000, (batch, tokens) if times else (batch,)),
    }
    if image:
        inputs["encoder_hidden_states_image"] = torch.randn(batch, 3, 8)
    return model, inputs


def hunyuan(grid=FLAT, batch=2, layers=1, condition=None):
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=layers,
        num_single_layers=layers, num_refiner_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(4, 4, 4), image_condition_type=condition,
    )  # fmt: skip
    lengths = torch.tensor([TEXT, 4, TEXT, 1])[:batch]
    inputs = {
        "hidden_states": _pixels(batch, grid),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16),
        "encoder_attention_mask": (torch.arange(TEXT) < lengths[:, None]).long(),
        "pooled_projections": torch.randn(batch, 8),
        "guidance": torch.ones(batch),
    }
    return model, inputs


def ltx(grid=GRID, batch=2, layers=1, times=False):
    """times: a time for each token, as where the first frames are given."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
        num_layers=layers, caption_channels=16,
    )  # fmt: skip
    t, h, w = grid
    inputs = {
        "hidden_states": torch.randn(batch, t * h * w, 8),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16),
        "timestep": torch.randint(1000, (batch, t * h * w) if times else (batch,)),
        "encoder_attention_mask": torch.ones(batch, TEXT),
        "num_frames": t,
        "height": h,
        "width": w,
    }
    return model, inputs


def cogvideox(grid=GRID, batch=2, layers=1, rotary=True):
    from diffusers import CogVideoXTransformer3DModel

    t, h, w = grid
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16,
        num_layers=layers, sample_width=2 * w, sample_height=2 * h, sample_frames=4 * t - 3, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=TEXT, use_rotary_positional_embeddings=rotary,
    )  # fmt: skip
    inputs = {
        "hidden_states": _pixels(batch, grid).transpose(1, 2),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16),
        "timestep": torch.randint(1000, (batch,)),
    }
    if rotary:
        angles = torch.randn(t * h * w, 8).repeat_interleave(2, 1)
        inputs["image_rotary_emb"] = angles.cos(), angles.sin()
    return model, inputs


FAMILIES = {"wan": wan, "hunyuan": hunyuan, "ltx": ltx, "cogvideox": cogvideox}


def sample(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def double_of(value):
    """Floating-point tensors of a structure in fp64, but for times: models compute those in fp32."""
    if isinstance(value, dict):
        return {name: one if name in ("timestep", "guidance") else double_of(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(double_of(one) for one in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def twin_of(model, monkeypatch):
    """A dense copy in fp64; from now on `.float()` leaves fp64 as it is, and sparse models in fp64 attend by the oracle."""
    narrow = torch.Tensor.float

    def float_of(x, *args, **kwargs):
        return x if x.dtype == torch.float64 else narrow(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", float_of)
    for name in ("attention", "sparse_attention"):
        mine, oracle = getattr(attend, name), getattr(reference, name)

        def chosen(q, *args, mine=mine, oracle=oracle, **options):
            return oracle(q, *args, **options)[0] if q.dtype == torch.float64 else mine(q, *args, **options)

        monkeypatch.setattr(attend, name, chosen)
    return copy.deepcopy(model).double()


class Recorded:
    """An observer: the lists of each call, in order, to be followed again."""

    def __init__(self):
        self.sites, self.lists = [], []

    def __call__(self, site, qkv, index):
        self.sites.append(site)
        self.lists.append(index)

    def policy(self):
        """One that returns the same lists again, call by call, and from the beginning."""
        return Replayed(self.lists)


class Replayed:
    def __init__(self, lists):
        self.lists, self.at = lists, 0

    def __call__(self, q, k, site):
        self.at += 1
        return self.lists[(self.at - 1) % len(self.lists)]


def gradients(model, inputs, weight):
    """The output, and gradients of the latents and of the projections to q, k and v of self-attention, by name."""
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].detach().requires_grad_()}
    out = model(**inputs).sample
    ends = ("to_q.weight", "to_k.weight", "to_v.weight")
    mine = {n: p for n, p in model.named_parameters() if n.endswith(ends) and "attn2" not in n and "refiner" not in n}
    found = torch.autograd.grad(out, [inputs["hidden_states"], *mine.values()], weight.to(out))
    return dict(zip(("out", "latents", *mine), (out, *found), strict=True))


def held(twin, given, weight, *found):
    """Hold what `gradients` made, once or more often, to those of the twin."""

    def wanted():
        return gradients(twin, given, weight)

    exact, plain = wanted(), reference.deviating(wanted, torch.float32)
    for got in found:
        assert got.keys() == exact.keys()
        for what in exact:
            judge(got[what], exact[what], plain[what], what)
