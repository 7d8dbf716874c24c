"""The block-sparse Gluon kernel for sm_90: one launch over random lists, whose products find the blocks that they name."""

from simulated import Anything, Launch, Number, Panels, Tile, barriers, own_functions
from tilefold.kernels.hopper import parts, sparse_forward

FUNCTIONS = (
    (sparse_forward, ("_load_unit", "_load_branch", "_produce", "_consume")),
    (parts, ("load_panels", "load_rows")),
)


class Unit(Tile):
    """A unit of keys, or a warpgroup's queries."""

    def __init__(self, run, buffers, slot=0, panels=None):
        super().__init__(buffers, slot, panels)
        self.run = run

    def slice(self, begin, rows):
        block = self.run.block
        return Rows(self.run, self.buffers, panels=self.panels[begin // block :: 128 // block])

    def load(self, layout):
        """As on the device, the load may be under way until a product has needed it."""
        self.run.read(self)
        return self.held()


class Rows(Unit):
    """64 rows of a unit that are loaded into registers: read until they are used."""

    def load(self, layout):
        self.reading(1)
        return self

    def to(self, dtype):
        return self


class Units:
    def __init__(self, run, buffers, number):
        self.run, self.buffers, buffers.width = run, buffers, len(buffers.content) // number

    def index(self, i):
        return Unit(self.run, self.buffers, i)


class Run(Launch):
    """One launch: `programs` of `warpgroups` consumers."""

    def __init__(self, seed, warpgroups, block, slots, lists, heads, dim=128, mixed=0):
        super().__init__(seed)
        self.mixed, self.lists, self.heads = mixed, lists, heads
        self.warpgroups, self.block, self.slots, self.dim = warpgroups, block, slots, dim
        self.q_blocks, self.seq_k = len(lists) // heads, 64 * 128

    def namespace(self, program, programs):
        """The names that the kernel's functions see, with the language replaced."""
        run = self
        gl = self.language(
            ("zeros", "zeros_like", "full", "arange", "expand_dims"), program_id=lambda axis: Number(program),
            num_programs=lambda axis: programs, store=lambda pointer, value: setattr(run, "counter", value),
        )  # fmt: skip
        names = self.names(gl) | {
            "UNIT": 128, "PANEL": 64, "BRANCH": 1, "BRANCH_GATE": 2, "GATE": 4, "LOWEST": 0.0,
            "reinterpret": lambda ring, dtype, shape, layout: Units(run, ring, shape[0]),
            "count_of_item": lambda lists, item, q_blocks, heads: len(run.lists[item]),
            "list_of_item": lambda lists, i_q, i_b, i_h: run.lists[i_h * run.q_blocks + i_q],
            "place_of_item": lambda item, q_blocks, heads: (Number(item % q_blocks), Number(0), Number(item // q_blocks)),
            "units_of_list": lambda n, per: (max(-(-n // per), 1), max(-(-n // per), 1) * per - n),
            "entry": lambda index, i, count: index[i] if 0 <= i < count else -1,
            "draw_work": lambda counter: run.draw(), "read_work": lambda drawn: drawn,
            "live_of_entry": lambda *args: 0, "cut_columns": lambda s, *args: s, "quad_sums": Anything(),
            "softmax_step": lambda s, m, l, scale, layout, dtype: (s, m, l, Anything()),
            "rescale": lambda acc, alpha, row: acc, "_finish": lambda out, lse, acc, m, l, branch, *args: run.finish(branch),
            "_write_note": lambda note, item, count: note.update(item=item, count=count), "_read_note": run.read_note,
        }  # fmt: skip
        return own_functions(names, FUNCTIONS)

    def read_note(self, note):
        self.local.item, self.local.open, self.local.j = note["item"], [], {"k": 0, "v": 0}
        return note["item"], note["count"]

    def bytes_of(self, desc):
        return (64 if desc == "q" else self.block) * 64 * 2

    def boxes(self, side, rows):
        """In the order panel, block, of the current item's head."""
        head = self.local.item // self.q_blocks
        return [(side, 0, head, row, p * 64) for p in range(self.dim // 64) for row in rows]

    def expected(self, side, j):
        """What the slots of unit j of the current item hold."""
        per, entries = 128 // self.block, self.lists[self.local.item]
        missing = max(-(-len(entries) // per), 1) * per - len(entries)
        rows = [self.seq_k if i < missing else entries[i - missing] * self.block for i in range(j * per, (j + 1) * per)]
        return self.boxes(side, rows)

    def first_row(self):
        """Of the rows that this warpgroup makes."""
        return (self.local.item % self.q_blocks * self.warpgroups + self.local.consumer) * 64

    def product(self, a, tile, acc, **options):
        """Reads its buffer from now until it is waited for."""
        side = tile.buffers.name
        wanted = self.expected(side, self.local.j[side])
        self.local.j[side] += 1
        if tile.held() != wanted or (side == "k" and a != self.boxes("q", [self.first_row()])):  # a is Q there
            self.memory.fail(f"item {self.local.item}: {side} unit holds {tile.held()}, {wanted} was listed")
        self.read(tile)
        return Anything()

    def finish(self, branch):
        """The rows of the other branch are read until the result is made."""
        if self.mixed:
            boxes = self.boxes("branch", [self.first_row() // self.block * self.block])
            self.memory.nap()
            if branch.held() != boxes:
                self.memory.fail(f"item {self.local.item}: {branch.held()} is mixed in, not {boxes}")
            branch.reading(-1)
        self.made.append(self.local.item)

    def program(self, program, programs):
        """The threads of one program."""
        memory, groups, (k_slots, v_slots), note = self.memory, self.warpgroups, self.slots, {}
        panels, per = self.dim // 64, 128 // self.block
        sizes = {"q": groups * panels, "k": k_slots * panels * per, "v": v_slots * panels * per}
        rings = (
            *(Panels(memory, name, number) for name, number in sizes.items()),
            *barriers(memory, q_full=(groups, 1), q_empty=(groups, 1), k_full=(k_slots, 1), k_empty=(k_slots, groups),
                      v_full=(v_slots, 1), v_empty=(v_slots, groups)),
        )  # fmt: skip
        names, items = self.namespace(program, programs), len(self.lists)
        lengths = (1 << 20, self.seq_k, self.heads, self.q_blocks)

        def consumer(c):
            self.local.consumer, self.local.open = c, []
            zeros = (Number(0),) * 6
            names["_consume"](note, rings, zeros[:5], None, zeros, (), lengths, 1.0, c, self.dim, self.block, groups, k_slots,
                              v_slots, False, False, False, self.mixed)  # fmt: skip

        yield lambda: names["_produce"]("q", "k", "v", "branch", None, note, rings, None, lengths, 1, items, self.dim, self.block,
                                        groups, k_slots, v_slots, self.mixed)  # fmt: skip
        yield from (lambda c=c: consumer(c) for c in range(groups))

    def __call__(self, programs):
        self.launch(programs)
        assert sorted(self.made) == sorted(list(range(len(self.lists))) * self.warpgroups)
        assert self.counter == 0
