"""One launch of the dense backward kernels for sm_90, the narrow one and the wide one, what it has to make, and in what.

Every sum is over the pairs of tiles that see each other, in order, also where it waits in memory between two KV splits;
every piece of work is done once; no tile's P, q or dout is taken for another's."""

from simulated.backward import CAUSAL, FULL, WIDE_CLASSES, WIDE_FUNCTIONS, WINDOW, ZEROS, Backward, Value
from tilefold.plan import AttentionProblem
from tilefold.plan.backward import attention_backward_hopper as rules


class Sum:
    """The sum of a tile of queries between two KV splits: in memory, by one program at a time."""

    def __init__(self, run, place):
        self.run, self.place = run, place

    def store(self, value):
        self.run.sums[self.place] = value

    def load(self):
        if self.place not in self.run.sums:
            self.run.memory.fail(f"the sum of {self.place} is read before it is written")
        found = self.run.sums.pop(self.place)
        return Value(found.tags, found.log)


class Run(Backward):
    """One launch; KV splits of split_tiles tiles, heads_at_once KV heads.  span: None, or tiles of a head of the call some of
    whose queries it makes.  hold: K and V in registers."""

    def __init__(self, seed, kind, seq_q, seq_k, heads, group, split_tiles, heads_at_once, slots, query_tiles=2, hold=False,
                 span=None):  # fmt: skip
        super().__init__(seed)
        self.span, self.hold, self.band, self.query_tiles = span, hold, (90, 30), query_tiles
        self.kind, self.heads, self.group, self.heads_at_once, self.slots = kind, heads, group, heads_at_once, slots
        self.seq_q, self.seq_k = seq_q, seq_k
        self.q_units, self.kv_units = -(-seq_q // 64), -(-seq_k // 64)
        self.split_tiles, self.splits = split_tiles, -(-self.kv_units // split_tiles)
        self.segments = heads // group // heads_at_once * self.splits
        window = self.band if kind == WINDOW else (-1, -1)
        problem = AttentionProblem(1, seq_q, seq_k, heads, heads // group, 64, 64, causal=kind == CAUSAL, window=window)
        self.width = rules.line_width(problem, split_tiles * 64)
        self.slot_rows = heads_at_once * group * rules.lines(problem, split_tiles * 64) * self.width * 64
        self.key_items = heads_at_once * split_tiles
        self.delay = min(self.key_items + 5, max(1, slots - 1) * self.key_items)
        self.query_items = heads_at_once * group * -(-self.q_units // query_tiles)
        self.items = self.segments * (self.key_items + self.query_items)
        self.sums = {}

    def namespace(self):
        names = super().namespace()
        names["SplitSums"].of = lambda sums, work, tile, acc, column: Sum(
            self, (int(work.batch * self.heads + work.head), int(tile), int(column))
        )
        return names

    def units_of_statistics(self):
        return self.span or self.q_units

    # ------------------------------------------------------------ what is wanted

    def paired(self, q, k):
        """Whether some query of tile q sees some key of tile k: by looking at each."""
        left, right = self.band
        for i in range(q * 64, min(q * 64 + 64, self.seq_q)):
            own, end = i + self.seq_k - self.seq_q, min(k * 64 + 64, self.seq_k)
            for j in (k * 64, end - 1, min(max(own, k * 64), end - 1)):
                if self.kind == FULL or (j <= own if self.kind == CAUSAL else own - left <= j <= own + right):
                    return True
        return False

    def expected(self):
        """{(output, head, tile): its products}"""
        wanted = {}
        for h in range(self.heads):
            for q in range(self.q_units):
                seen = [k for k in range(self.kv_units) if self.paired(q, k)]
                wanted["dq", h, q] = tuple(
                    (self.made_of(h, q, k)[1], self.boxes("k", h // self.group, k)) for k in seen
                )
        for hk in range(self.heads // self.group):
            for k in range(self.kv_units):
                dv, dk = [], []
                units = [q for q in range(self.q_units) if self.paired(q, k)]
                for h in range(hk * self.group, (hk + 1) * self.group):
                    for q in units or [self.q_units]:  # the tile past the end, with the last row of the statistics
                        p, ds = self.made_of(h, q, k, None if units else self.heads * self.units_of_statistics())
                        dv.append((p, self.boxes("do", h, q)))
                        dk.append((ds, self.boxes("q", h, q)))
                wanted["dv", hk, k], wanted["dk", hk, k] = tuple(dv), tuple(dk)
        return self.in_parts(wanted)

    def in_parts(self, wanted):
        """Of three panels the first two, and the third, have accumulators of their own."""
        made = {}
        for (name, *place), pairs in wanted.items():
            if (self.panels_v if name == "dv" else self.panels_qk) != 3:
                made[(name, *place)] = pairs
                continue
            for part, mine in (name, lambda box: box[4] < 128), (f"{name} rest", lambda box: box[4] == 128):
                made[(part, *place)] = tuple((left, frozenset(filter(mine, right))) for left, right in pairs)
        return made

    def store(self, out, acc, rows, stride, dtype, columns=None):
        if int(rows) <= 0:
            return  # tiles past the end: of keys in the last split, of queries in the last pair
        work = self.local.work
        if out.first == 0:  # the rest of the columns comes behind
            self.local.later = self.local.stored if out.name == "dq" else 0
            self.local.stored += 1
        log = tuple(pair for pair in acc.log if pair[0] != ZEROS)
        name = f"{out.name} rest" if out.first else out.name
        self.record((name, int(work.head), int(work.tile) + self.local.later), log)

    # ------------------------------------------------------------ threads

    def nouns(self, names, consumers=1):
        """What both partitions share: scheduler, pipeline, mask and ring of dS."""
        config = names["BackwardConfig"](
            None, 64 * self.panels, self.ring, self.query_tiles, self.hold, False, self.panels_qk, self.panels_v
        )
        pipe, tiles = self.pipeline(names, config, consumers)
        lengths = names["Lengths"](self.seq_q, self.seq_k, self.q_units, self.kv_units)
        scheduler = names["SplitScheduler"](
            names["Counters"](0, self.segments), lengths, self.heads, self.group, self.split_tiles, self.splits,
            self.heads_at_once, self.delay, self.slots, self.heads * self.units_of_statistics(), self.span,
            self.query_tiles)  # fmt: skip
        ds = names["make_ds_ring"](
            tiles, self.slots, self.heads_at_once, self.group, self.split_tiles, self.width, self.kind
        )
        assert ds.slot_rows == self.slot_rows
        return scheduler, pipe, names["BackwardMask"](*self.band, self.kind), ds

    def begin_at(self, item, scheduler, first=0):
        self.begin(item)
        drawn = scheduler.locate(item)
        self.local.work = scheduler.kv_tile(drawn) if drawn.keys else scheduler.query_tile(drawn)
        self.local.stored = first

    def ends(self, names, config):
        """Where results go: sums between splits, gradients."""
        sums = names["SplitSums"](None, self.heads, config, self.splits > 1)
        return sums, *self.gradients(names, None if self.span is None else 0)

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        nouns = self.nouns(names)

        def consume():
            self.begin_at(item, nouns[0])
            names["consume"](item, *nouns, *self.ends(names, nouns[1].config), 1.0)

        return lambda: names["produce"](item, *nouns), consume

    def __call__(self, places):
        self.run(places)
        assert self.made == self.expected()
        assert not self.sums
        assert self.progress[1:] == [self.key_items] * self.segments + [self.query_items] * self.segments


class Wide(Run):
    """Two consumers a work tile, P handed from one to the other; V has half of the columns."""

    panels_v = 1
    functions, classes = WIDE_FUNCTIONS, WIDE_CLASSES

    def program(self, item):
        """The three partitions of the program that has drawn an item."""
        names = self.namespace()
        scheduler, pipe, mask, ds = nouns = self.nouns(names, 2)
        exchange = self.exchange(names)

        def consume(number):
            own = self.query_tiles // 2  # of a work tile for dq
            self.begin_at(item, scheduler, number * own)
            names["consume"](
                number, item, scheduler, pipe, mask, self.softcap(), exchange, ds, *self.ends(names, pipe.config)
            )

        return lambda: names["produce"](item, *nouns), lambda: consume(0), lambda: consume(1)


class ThreePanels(Wide):
    """As at D=192 and V of 128: products of two panels and of one, and sums of as many columns."""

    panels, panels_qk, panels_v, ring = 3, 3, 2, 3


class ThreePanelsEach(ThreePanels):
    """As at D=192."""

    panels_v = 3
