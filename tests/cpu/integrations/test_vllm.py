"""The backend of vLLM, driven as its runner drives one, by a stub of the classes that it derives from."""

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib
import torch

import vllm_contract
import vllm_stub
from cases.refusals import refuses
from cases.vllm_batch import BLOCK, HEADS, Batch, near
from tilefold.errors import ShapeError, Unsupported

ROOT = Path(__file__).parents[3]
BATCHES = {
    "prompts": [(0, 5), (0, 33), (0, 1)],
    "decoding": [(40, 1), (16, 1), (1, 1), (15, 1)],
    "chunks": [(16, 7), (48, 16)],
    "mixed": [(31, 1), (0, 20), (5, 12), (64, 1)],
    "one": [(0, 1)],
}


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    vllm_stub.install(monkeypatch)
    yield importlib.import_module("tilefold.integrations.vllm_backend")
    sys.modules.pop("tilefold.integrations.vllm_backend", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("physical", ["NHD", "HND"])
def test_batches(name, physical, dtype):
    """Padding is not written."""
    batch = Batch(BATCHES[name], dtype, padding=3, physical=physical)
    assert batch.held()[batch.tokens :].isnan().all()


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"sliding_window": 9}, {"window": 9}),
        ({"logits_soft_cap": 3.0}, {"softcap": 3.0}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"slopes": [0.5, 0.25, 0.1, 0.0]}),
        ({"sinks": torch.tensor([1.0, -1.0, 0.0, 4.0])}, {"sinks": torch.tensor([1.0, -1.0, 0.0, 4.0])}),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_options(given, same, causal):
    batch = Batch(BATCHES["mixed"])
    out = batch.run(batch.impl(**given), causal)
    near(out, batch.expected(batch.rows(), causal, **same), torch.float32)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn])
def test_cache_of_8_bits(name, stored):
    """Elements times the layer's factors, which stay on the device."""
    batch, scales = Batch(BATCHES["mixed"], torch.bfloat16), (0.05, 0.11)
    batch.cache = (batch.cache.float() * 5).to(torch.float8_e4m3fn).view(stored)
    out = batch.run(batch.impl(kv_cache_dtype=name), scales=scales)
    rows = batch.rows(torch.float8_e4m3fn)
    for side, scale, x in ((0, scales[0], batch.key), (1, scales[1], batch.value)):
        made = rows[batch.slots][..., side * batch.dim : (side + 1) * batch.dim]
        assert torch.equal(made, (x.float() / scale).to(torch.float8_e4m3fn).float())
    near(out, batch.expected(rows, scales=scales), torch.bfloat16)


def test_slots_of_nothing():
    """A slot of -1 is written nowhere."""
    batch = Batch(BATCHES["mixed"], rejected=(3, 8))
    before = batch.rows()
    batch.run(batch.impl())
    batch.untouched(before)
    assert len(set(batch.slots.tolist())) == batch.tokens - 1  # two of -1


def test_who_shares_a_cache_does_not_write_it():
    batch = Batch(BATCHES["decoding"])
    before = batch.rows()
    out = batch.run(batch.impl(kv_sharing_target_layer_name="layer 3"))
    assert torch.equal(batch.rows(), before)
    near(out, batch.expected(before), torch.float32)


def test_no_requests_and_the_profiling_run():
    batch = Batch([])
    assert batch.run(batch.impl()).shape == (0, HEADS, batch.dim)
    output = torch.full((4, HEADS * 32), torch.nan)
    assert (batch.impl().forward(None, None, None, None, None, None, output) == 0).all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attn_type": "encoder_only"}, "serves decoder attention"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "expected one of 'auto', 'fp8', 'fp8_e4m3'"),
        ({"use_alibi_sqrt": True}, "does not take use_alibi_sqrt=True"),
        ({"chunk_lookback": 3}, "does not take chunk_lookback=3"),
    ],
    ids=str,
)
def test_refused_layers(options, why):
    with pytest.raises(Unsupported, match=why):
        Batch([(0, 1)]).impl(**options)
    assert Batch([(0, 1)]).impl(use_alibi_sqrt=False, chunk_lookback=-1, block_n=None)


def test_refused_batches():
    batch = Batch([(0, 2)])
    for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"):
        with pytest.raises(Unsupported, match=name):
            batch.builder().build(0, batch.common(**{name: torch.ones(1)}))
    refuses(Unsupported, "one causal flag", batch.builder().build, 0, batch.common(causal=torch.tensor([True])))
    builder = batch.builder()
    builder.page = builder.page[:1]
    refuses(ShapeError, "slot_mapping has 2 tokens, max_num_batched_tokens is 1", builder.build, 0, batch.common())
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(Unsupported, match="no quantized output"):
            batch.impl().forward(None, None, None, None, None, None, None, **{name: torch.ones(1)})


def test_slots_lie_where_they_lay():
    """A captured step reads the buffers of the step before."""
    batch = Batch([(3, 1), (20, 1)])
    builder = batch.builder()
    first = builder.build(0, batch.common())
    again = builder.build(0, Batch([(40, 1), (15, 1)]).common())
    assert first.page.data_ptr() == again.page.data_ptr()
    assert first.row.data_ptr() == again.row.data_ptr()
    assert first.row.tolist() == [40 % BLOCK, 15]


def test_what_vllm_asks(backend):
    own = backend.TilefoldBackend
    assert [own.supports_head_size(n) for n in (0, 1, 64, 256, 512, 513)] == [False, True, True, True, True, False]
    assert own.supports_sink() and own.supports_sliding_window() and own.supports_batch_invariance()
    assert [own.supports_compute_capability(SimpleNamespace(major=n)) for n in (7, 8, 9)] == [False, True, True]
    assert own.get_supported_kernel_block_sizes() == [vllm_stub.MultipleOf(16)]
    assert (own.get_impl_cls(), own.get_builder_cls()) == (backend.TilefoldImpl, backend.TilefoldBuilder)


def test_the_plugin():
    """The entry point registers the class by its name, and imports no kernel."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = metadata["tilefold"].partition(":")
    getattr(importlib.import_module(module), function)()
    path = vllm_stub.REGISTERED[vllm_stub.AttentionBackendEnum.CUSTOM]
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "CUSTOM"


REST = """
class CommonAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: int
    seq_lens: int
    block_table_tensor: int
    slot_mapping: int
    causal: int
    mm_req_doc_ranges: int
    rswa_prefix_lens: int
    dcp_local_seq_lens: int
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", []),
        ("attn_metadata, output,", "metadata, output,", ["AttentionImpl.forward takes"]),
        ("def supports_sink(cls)", "def has_sink(cls)", ["AttentionBackend has no supports_sink"]),
        ("    seq_lens: int\n", "", ["CommonAttentionMetadata has no seq_lens"]),
        ("    CUSTOM = None", "    OTHER = None", ["AttentionBackendEnum has no CUSTOM"]),
        ("    NEVER = 0", "", ["AttentionCGSupport has no NEVER"]),
    ],
)
def test_the_contract_is_compared(tmp_path, old, new, said):
    """A vLLM made of the stub's source is as the backend takes it, and each change is named."""
    source = (inspect.getsource(vllm_stub) + REST).replace(old, new) if old else inspect.getsource(vllm_stub) + REST
    folder = tmp_path / "vllm"
    (folder / "v1" / "attention" / "backends").mkdir(parents=True)
    (folder / "plugins").mkdir()
    for place in ("backend.py", "backends/registry.py"):
        (folder / "v1" / "attention" / place).write_text(source)
    (folder / "plugins" / "__init__.py").write_text('GROUP = "vllm.general_plugins"')
    (folder / "envs.py").write_text("if True:\n    VLLM_BATCH_INVARIANT: bool = False")
    found = vllm_contract.differences(tmp_path)
    assert len(found) >= len(said) and all(any(one.startswith(start) for one in found) for start in said)
    assert said or not found
