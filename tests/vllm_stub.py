"""What tilefold's vLLM backend imports of vLLM 0.33, for tests without vLLM: names and signatures, no behaviour.

`tests/vllm_contract.py` compares them with an installed vLLM's sources."""

# ruff: noqa: B027

import enum
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionMetadata:
    pass


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None): ...

    @classmethod
    def supports_head_size(cls, head_size): ...

    @classmethod
    def supports_sink(cls): ...

    @classmethod
    def supports_sliding_window(cls): ...

    @classmethod
    def supports_non_causal(cls): ...

    @classmethod
    def supports_batch_invariance(cls): ...

    @classmethod
    def supports_compute_capability(cls, capability): ...


class AttentionMetadataBuilder(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None


REGISTERED: dict = {}
BACKEND = (AttentionType, AttentionCGSupport, MultipleOf, AttentionMetadata, AttentionBackend, AttentionMetadataBuilder,
           AttentionImpl)  # fmt: skip


def register_backend(backend, class_path=None, is_mamba=False):
    REGISTERED[backend] = class_path


def install(monkeypatch, invariant=False):
    """Put the names where the backend looks for them, as long as the test runs."""
    names = ("vllm", "vllm.envs", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends",
             "vllm.v1.attention.backends.registry")  # fmt: skip
    made = {name: types.ModuleType(name) for name in names}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
        monkeypatch.setitem(sys.modules, name, module)
    made["vllm.envs"].VLLM_BATCH_INVARIANT = invariant
    for one in BACKEND:
        setattr(made["vllm.v1.attention.backend"], one.__name__, one)
    registry = made["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum, registry.register_backend = AttentionBackendEnum, register_backend
    monkeypatch.delitem(sys.modules, "tilefold.integrations.vllm_backend", raising=False)
