"""The decode table: CUDA-graph replays over rotating caches, checked first, peers in turns; and a sweep over plans."""
import dataclasses, itertools, math, statistics, sys, time
import torch
import tilefold
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

DEV, RATE = "cuda", 4.27e12
E4M3 = torch.float8_e4m3fn
# name: batch, keys, page, storage, mla
CASES = {
    "b1_8k": (1, 8192, 0, None, False), "b1_8k_p16": (1, 8192, 16, None, False), "b1_8k_p64": (1, 8192, 64, None, False),
    "b1_128k": (1, 131072, 0, None, False), "b1_128k_p64": (1, 131072, 64, None, False),
    "b32_8k": (32, 8192, 0, None, False), "b32_8k_p16": (32, 8192, 16, None, False), "b32_8k_p64": (32, 8192, 64, None, False),
    "b32_8k_p256": (32, 8192, 256, None, False), "b64_2k": (64, 2048, 0, None, False), "b64_2k_p64": (64, 2048, 64, None, False),
    "fp8": (32, 8192, 0, E4M3, False), "fp8_p64": (32, 8192, 64, E4M3, False), "int8": (32, 8192, 0, torch.int8, False),
    "mla_p64": (32, 8192, 64, None, True), "uneven": (32, "uneven", 64, None, False), "balanced": (32, "balanced", 64, None, False),
}


def uneven_lengths(batch):
    g = torch.Generator().manual_seed(1)
    n = torch.exp(torch.randn(batch, generator=g) * 1.5 + math.log(6000)).clamp(1, 131072).int()
    n[0], n[1] = 131072, 1
    return n


class Problem:
    def __init__(self, name, fill=True):
        self.name = name
        batch, keys, page, stored, mla = CASES[name]
        heads, kv, dim, dim_v = (16, 1, 576, 512) if mla else (32, 8, 128, 128)
        lens = uneven_lengths(batch)
        if keys == "balanced":
            lens = torch.full((batch,), -(-int(lens.sum()) // batch), dtype=torch.int32)
        elif keys != "uneven":
            lens = torch.full((batch,), keys, dtype=torch.int32)
        self.lens, self.batch, self.mla, self.stored, self.page = lens.to(DEV), batch, mla, stored, page
        size = 1 if stored else 2
        self.bytes = int(lens.sum()) * kv * (dim if mla else dim + dim_v) * size + 2 * batch * heads * (dim + dim_v)
        self.floor = self.bytes / RATE * 1e6
        self.sets = max(2, min(12, math.ceil(2.2e8 / self.bytes)))
        self.q = torch.randn(batch, 1, heads, dim, device=DEV, dtype=torch.bfloat16)
        self.calls = []
        self.keep = []
        for _ in range(self.sets):
            self.add(kv, dim, dim_v, fill)

    def tensor(self, shape, fill):
        if self.stored == torch.int8:
            return torch.randint(-127, 128, shape, device=DEV, dtype=torch.int8)
        dt = torch.bfloat16
        x = torch.empty(shape, device=DEV, dtype=dt)
        if fill:
            x.normal_()
        return x.to(self.stored) if self.stored else x

    def add(self, kv, dim, dim_v, fill):
        most = int(self.lens.max())
        options = {"cache_seqlens": self.lens, "causal": True}
        if self.page:
            need = [-(-n // self.page) for n in self.lens.tolist()]
            pages, width = sum(need), max(need)
            order = torch.randperm(pages, device=DEV).int()
            table = torch.full((self.batch, width), 1 << 30, dtype=torch.int32, device=DEV)
            at = 0
            for b, n in enumerate(need):
                table[b, :n] = order[at : at + n]
                at += n
            shape = (pages, self.page, kv)
            options["block_table"] = table
        else:
            shape = (self.batch, most, kv)
        k = self.tensor((*shape, dim), fill)
        v = k[..., :dim_v] if self.mla else self.tensor((*shape, dim_v), fill)
        if self.stored:
            s = 1 / 74.0 if self.stored == torch.int8 else 1.0
            options["k_scale"] = options["v_scale"] = torch.full((kv,), s, device=DEV)
        self.keep.append((k, v, options))

    def run(self, i, plan=None):
        k, v, options = self.keep[i]
        return tilefold.attention_kvcache(self.q, k, v, plan=plan, **options)

    def plan(self):
        k, v, options = self.keep[0]
        return tilefold.attention_kvcache_plan(self.q, k, v, **options)

    def check(self, plan=None):
        """Largest error over some sequences, relative to fp32's largest; fp32 products in fp64 sums."""
        out, worst = self.run(0, plan), 0.0
        k, v, options = self.keep[0]
        for b in sorted({0, 1, self.batch // 2, self.batch - 1} & set(range(self.batch))):
            n = int(self.lens[b])
            if self.page:
                rows = options["block_table"][b, : -(-n // self.page)].long()
                kk, vv = k[rows].flatten(0, 1)[:n], v[rows].flatten(0, 1)[:n]
            else:
                kk, vv = k[b, :n], v[b, :n]
            ks = options["k_scale"][0].item() if self.stored else 1.0
            kk, vv = kk.float() * ks, vv.float() * ks
            group = self.q.shape[2] // kk.shape[1]
            q = self.q[b, 0].float().view(kk.shape[1], group, -1)
            p = torch.softmax(torch.einsum("hgd,nhd->hgn", q.double(), kk.double()) / math.sqrt(q.shape[-1]), -1)
            want = torch.einsum("hgn,nhd->hgd", p, vv.double()).flatten(0, 1)
            worst = max(worst, ((out[b, 0].double() - want).abs().max() / want.abs().max()).item())
        return worst


def graph_of(call, number):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(number):
            call(i)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(i) for i in range(number)]
    return graph, outs


def measure(graphs, number, rounds=7, span=0.02):
    """us a call: medians of rounds, in turns."""
    reps, found = {}, {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(graph, n):
        torch.cuda.synchronize()
        start.record()
        for _ in range(n):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / n / number

    for name, (graph, _) in graphs.items():
        once(graph, 2)
        reps[name] = max(2, min(200, int(span * 1e6 / (once(graph, 2) * number))))
    for _ in range(rounds):
        for name, (graph, _) in graphs.items():
            found[name].append(once(graph, reps[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def peers(p):
    if p.page or p.stored or p.mla:
        return {}
    q = p.q.transpose(1, 2)
    found = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        def call(i, backend=backend):
            with sdpa_kernel(backend):
                return sdpa(q, p.keep[i][0].transpose(1, 2), p.keep[i][1].transpose(1, 2), enable_gqa=True)
        found[name] = call
    return found


def time_all(names):
    table = []
    for name in names or CASES:
        begin = time.time()
        try:
            p = Problem(name)
            base = p.plan()
            ways = {"last": None, "kernel": dataclasses.replace(base, merge="kernel")}
            errors = {way: p.check(plan) for way, plan in ways.items()}
            bad = {way: e for way, e in errors.items() if not e < 0.02}
            graphs = {way: graph_of(lambda i, plan=plan: p.run(i, plan), p.sets) for way, plan in ways.items()}
            for peer, call in peers(p).items():
                try:
                    graphs[peer] = graph_of(call, p.sets)
                except Exception as error:
                    print(name, peer, "failed:", str(error)[:100])
            us = measure(graphs, p.sets)
            # a replay gives what the eager call gave
            graphs["last"][0].replay()
            torch.cuda.synchronize()
            same = all(torch.equal(o, p.run(i)) for i, o in enumerate(graphs["last"][1]))
            table.append((name, p.floor, us, p.bytes, max(errors.values()), bad, same,
                          f"{base.block_m}x{base.block_n} w{base.num_warps} s{base.num_stages} p{base.programs}"))
            del graphs, p
        except Exception as error:
            import traceback
            traceback.print_exc()
            table.append((name, 0, {}, 0, 0, {"failed": str(error)[:80]}, False, ""))
        torch.cuda.empty_cache()
        print(f"# {name} {time.time() - begin:.1f} s", flush=True)
    print(f"{'case':13}{'floor':>8}{'last':>9}{'/floor':>7}{'kernel':>9}{'/floor':>7}{'cudnn':>9}{'flash':>9}{'GB/s':>7}  err    same  plan")
    for name, floor, us, nbytes, err, bad, same, plan in table:
        def cell(way, width=9):
            return f"{us[way]:{width}.1f}" if way in us else " " * (width - 1) + "-"
        def ratio(way):
            return f"{us[way] / floor:7.3f}" if way in us else "      -"
        rate = f"{nbytes / us['last'] / 1e3:7.0f}" if "last" in us else "      -"
        print(f"{name:13}{floor:8.1f}{cell('last')}{ratio('last')}{cell('kernel')}{ratio('kernel')}{cell('cudnn')}{cell('flash')}{rate}"
              f"  {err:.4f} {'yes' if same else 'NO '}  {plan} {'WRONG ' + str(bad) if bad else ''}")


SWEEP = ["b1_8k", "b1_8k_p16", "b32_8k", "b64_2k", "fp8", "int8", "mla_p64"]


def variants(base):
    p, found = base.problem, []
    size = p.row_bytes
    for n, w, stages, per, reg in itertools.product((32, 64, 128, 256), (4, 8), (2, 3, 4, 5, 6, 8), (1, 2, 3), (None, 128)):
        used = max(1, stages - 1) * n * size + base.block_m * (n + p.block_k) * 2 + 2048
        if used * per > base.device.smem_per_sm or used > base.device.smem_per_block or (stages - 1) * n * size * per < 48000:
            continue
        if (reg is not None) != (w * per > 8) or w * per > 16 or n > 128 and size > 256 or n < 64 and size <= 512:
            continue
        found.append(dataclasses.replace(base, block_n=n, num_warps=w, num_stages=stages, programs=per * base.device.sms, maxnreg=reg))
    return found


def sweep(names, budget=100.0):
    begin, lines = time.time(), []
    names = names or SWEEP
    for number, name in enumerate(names):
        p = Problem(name)
        base, graphs = p.plan(), {}
        mine = begin + budget * (number + 1) / len(names)
        for plan in variants(base):
            if time.time() > mine - 2:
                print("#", name, "out of time after", len(graphs))
                break
            label = f"n{plan.block_n} w{plan.num_warps} s{plan.num_stages} p{plan.programs // plan.device.sms} r{plan.maxnreg}"
            try:
                if p.check(plan) > 0.02:
                    print("#", name, label, "WRONG")
                    continue
                graphs[label] = graph_of(lambda i, plan=plan: p.run(i, plan), p.sets)
            except Exception as error:
                print("#", name, label, "failed:", str(error)[:80].replace("\n", " "))
        us = measure(graphs, p.sets, rounds=3, span=0.004)
        best = sorted(us, key=us.get)[:6]
        more, byname = {}, {f"n{v.block_n} w{v.num_warps} s{v.num_stages} p{v.programs // v.device.sms} r{v.maxnreg}": v for v in variants(base)}
        for label in best[:2]:
            v = byname[label]
            items = v.items
            for extra in ({"merge": "kernel"}, {"least": 2}, {"least": 4}, *([{"splits": max(1, v.programs // items)}] if items <= v.programs else [])):
                plan = dataclasses.replace(v, **extra)
                try:
                    if p.check(plan) < 0.02:
                        more[f"{label} {extra}"] = graph_of(lambda i, plan=plan: p.run(i, plan), p.sets)
                except Exception as error:
                    print("#", label, extra, "failed:", str(error)[:80])
        us |= measure({**more, **{label: graphs[label] for label in best}}, p.sets, rounds=5, span=0.01)
        lines.append(f"{name}: floor {p.floor:.1f}")
        lines += [f"    {us[label]:8.1f} us {us[label] / p.floor:6.3f}  {label}" for label in sorted(us, key=us.get)[:8]]
        del graphs, more, p
        torch.cuda.empty_cache()
    print("\n".join(lines))


def warm(i, n, names):
    """Compile a share of the sweep into Triton's cache."""
    todo = []
    for name in names or SWEEP:
        p = None
        for j, plan in enumerate(variants(Problem_small(name).plan())):
            if j % n == i:
                todo.append((name, plan))
    held = {}
    for name, plan in todo:
        p = held.setdefault(name, Problem_small(name))
        try:
            p.run(0, plan)
        except Exception as error:
            print(name, str(error)[:100])
    torch.cuda.synchronize()
    print("warmed", len(todo))


_SMALL = {}


def Problem_small(name):
    if name not in _SMALL:
        _SMALL[name] = p = Problem(name, fill=False)
        p.keep = p.keep[:1]
    return _SMALL[name]


if __name__ == "__main__":
    torch.manual_seed(0)
    mode, *rest = sys.argv[1:]
    if mode == "time":
        time_all(rest)
    elif mode == "warm":
        warm(int(rest[0]), int(rest[1]), rest[2:])
    else:
        sweep(rest)
