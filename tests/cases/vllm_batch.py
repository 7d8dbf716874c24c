"""Batches as vLLM hands them to a backend: requests with some tokens computed and some new, a paged cache, slots."""

import importlib
from types import SimpleNamespace

import torch

BLOCK, DIM, HEADS, KV_HEADS = 16, 32, 4, 2


class Batch:
    """requests: (tokens computed before, new ones).  padding: tokens behind the batch's.  physical: "NHD" or "HND", how the
    cache's memory goes.  rejected: numbers of new tokens whose slot is -1."""

    def __init__(self, requests, dtype=torch.float32, device="cpu", padding=0, physical="HND", kv_heads=KV_HEADS, dim=DIM,
                 rejected=()):  # fmt: skip
        generator = torch.Generator().manual_seed(len(requests) + sum(map(sum, requests)))

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.requests, self.dtype, self.device, self.dim, self.kv_heads = requests, dtype, device, dim, kv_heads
        self.pages = max(1, max(-(-(old + new) // BLOCK) for old, new in requests)) if requests else 1
        blocks = 3 + sum(-(-(old + new) // BLOCK) for old, new in requests)
        self.free = torch.randperm(blocks, generator=generator).tolist()
        shape = (blocks, kv_heads, BLOCK, 2 * dim) if physical == "HND" else (blocks, BLOCK, kv_heads, 2 * dim)
        self.cache = draw(*shape) if physical == "HND" else draw(*shape).transpose(1, 2)
        self.table = torch.full((len(requests), self.pages), -1, dtype=torch.int32)
        self.tokens = sum(new for _, new in requests)
        self.query = draw(self.tokens + padding, HEADS, dim)
        self.key, self.value = (draw(self.tokens + padding, kv_heads, dim) for _ in range(2))
        self.history, slots, first = [], [], 0
        for i, (old, new) in enumerate(requests):
            own = [self.free.pop() for _ in range(-(-(old + new) // BLOCK))]
            self.table[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
            places = [own[j // BLOCK] * BLOCK + j % BLOCK for j in range(old + new)]
            self.history.append((places, first, old))
            slots += places[old:]
            first += new
        self.slots = torch.tensor(slots + [-1] * padding, dtype=torch.int64)
        self.slots[list(rejected)] = -1
        self.starts = torch.tensor(
            [0, *torch.tensor([new for _, new in requests]).cumsum(0).tolist()], dtype=torch.int32
        )

    def common(self, causal=True, **more):
        lengths = torch.tensor([old + new for old, new in self.requests], dtype=torch.int32)
        to = self.device
        none = dict.fromkeys(("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"))
        return SimpleNamespace(
            num_actual_tokens=self.tokens, max_query_len=max((new for _, new in self.requests), default=0),
            query_start_loc=self.starts.to(to), seq_lens=lengths.to(to), block_table_tensor=self.table.to(to),
            slot_mapping=self.slots.to(to), causal=causal, **{**none, **more},
        )  # fmt: skip

    def builder(self):
        backend = importlib.import_module("tilefold.integrations.vllm_backend")
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=4096))
        return backend.TilefoldBuilder(SimpleNamespace(block_size=BLOCK), ["layer"], config, torch.device(self.device))

    def impl(self, scale=0.2, **options):
        backend = importlib.import_module("tilefold.integrations.vllm_backend")
        return backend.TilefoldImpl(HEADS, self.dim, scale, self.kv_heads, **options)

    def rows(self, dtype=None):
        """The cache as [slots, KV heads, 2 * dim], a copy."""
        cache = self.cache if dtype is None else self.cache.view(dtype)
        return cache.transpose(1, 2).float().reshape(-1, self.kv_heads, 2 * self.dim).clone()

    def run(self, impl, causal=True, scales=(1.0, 1.0), **more):
        layer = SimpleNamespace(
            **{f"_{x}_scale": torch.tensor(s, device=self.device) for x, s in zip("kv", scales, strict=True)}
        )
        output = torch.full((len(self.query), HEADS * self.dim), torch.nan, dtype=self.dtype, device=self.device)
        batch = self.builder().build(0, self.common(causal, **more))
        found = impl.forward(layer, self.query, self.key, self.value, self.cache, batch, output)
        assert found is output
        return output.view(-1, HEADS, self.dim)

    def expected(
        self, rows, causal=True, scale=0.2, window=None, softcap=0.0, slopes=None, sinks=None, scales=(1.0, 1.0)
    ):
        """Of every new token, in fp64, over rows [slots, KV heads, 2 * dim] of the cache."""
        out = []
        for places, first, old in self.history:
            kv = rows[places].double()
            k, v = kv[..., : self.dim] * scales[0], kv[..., self.dim :] * scales[1]
            for i in range(old, len(places)):
                q = self.query[first + i - old].double().cpu()
                k_h, v_h = (x.cpu().repeat_interleave(HEADS // self.kv_heads, 1) for x in (k, v))
                s = torch.einsum("hd,nhd->hn", q, k_h) * scale
                s = softcap * torch.tanh(s / softcap) if softcap else s
                place = torch.arange(len(places))
                if slopes is not None:
                    s = s - torch.tensor(slopes).double()[:, None] * (place - i).abs()
                hidden = (place > i) if causal else torch.zeros(len(places), dtype=torch.bool)
                if window is not None:
                    hidden = hidden | (place <= i - window) | (place >= i + window)
                s = s.masked_fill(hidden, -torch.inf)
                if sinks is not None:
                    s = torch.cat([s, sinks.double().cpu()[:, None]], 1)
                p = s.softmax(-1)[:, : len(places)]
                out.append(torch.einsum("hn,nhd->hd", p, v_h))
        return torch.stack(out) if out else torch.zeros(0, HEADS, self.dim).double()

    def untouched(self, before, new=None):
        """Rows but for those of `new` tokens' slots, or of all slots that are some, are as before."""
        kept = torch.ones(len(before), dtype=torch.bool)
        kept[self.slots[self.slots >= 0] if new is None else new] = False
        assert torch.equal(self.rows()[kept], before[kept])

    def held(self, **options):
        """A step by a backend with these options: new keys go to their slots, every other one stays; each token sees its request
        up to itself.  Returns what came out."""
        before = self.rows()
        out = self.run(self.impl(**options))
        rows, new = self.rows(), self.slots[: self.tokens]
        assert torch.equal(rows[new], torch.cat([self.key, self.value], -1)[: self.tokens].float())
        self.untouched(before, new)
        near(out[: self.tokens], self.expected(rows.cpu(), window=options.get("sliding_window")), self.dtype)
        return out


def near(found, wanted, dtype):
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert (found.double().cpu() - wanted).abs().max().item() <= limit * max(1.0, wanted.abs().max().item())
