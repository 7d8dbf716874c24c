"""The page on tiles, warps and stages: each row is what the compiler makes of the flash rung, each formula what it counts."""

from dataclasses import astuple
from pathlib import Path

import pytest

from aot_cases import Results, compiled
from cases.ladder import TILE_HEAD, tile_cells
from tilefold.aot import CompileReport, Job, target_named
from tilefold.ladder import RUNGS, Tile
from tilefold.plan.problem import AttentionProblem
from tilefold.profiling.evidence import waves_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "ladder" / "tiles.md"
OWN = Tile(128, 64, 8, 3)
TILES = tuple(dict.fromkeys((
    *OWN.around(), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2),
)))  # fmt: skip
N, HEADS, DIM = 4096, 16, 128
PROBLEM = AttentionProblem(1, N, N, HEADS, HEADS, DIM, DIM)
JOBS = {
    (str(tile), "sm_90"): Job(
        "cases.ladder:example_launch",
        {"name": "flash", "kernel": "flash_kernel", "causal": False, "tile": astuple(tile)},
        "sm_90",
    )
    for tile in TILES
}
results = compiled(__name__, JOBS, whole=True, tritons=("installed",))


def rows() -> list[tuple[str, ...]]:
    """Rows of the page's tables under TILE_HEAD."""
    found: list[tuple[str, ...]] = []
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else ()
        inside = cells == TILE_HEAD or (inside and len(cells) == len(TILE_HEAD))
        if inside and cells != TILE_HEAD and not cells[0].startswith("---"):
            found.append(cells)
    return found


def intensity(tile: Tile) -> float:
    cost = RUNGS["flash"].cost(PROBLEM, tile)
    return cost.flops / cost.l2_bytes


def made_of(results: Results, tile: Tile) -> CompileReport:
    """What the installed Triton makes of it, if that is the page's."""
    found = results.of(str(tile), "sm_90")
    assert found.report is not None, found.error
    if found.report.triton != "3.6.0":
        pytest.skip(f"the page says what Triton 3.6.0 makes, this is {found.report.triton}")
    return found.report


def test_every_tile_of_the_rung_is_on_the_page() -> None:
    assert {astuple(tile) for tile in RUNGS["flash"].program.TILES} <= {astuple(tile) for tile in TILES}
    assert RUNGS["flash"].program.TILE == OWN
    named = {(row[0], row[1], row[2]) for row in rows()}
    assert named == {(f"{tile.block_m} x {tile.block_n}", str(tile.warps), str(tile.stages)) for tile in TILES}


def test_the_pages_tables_are_what_is_compiled(results: Results) -> None:
    made = {}
    for tile in TILES:
        cells = tile_cells(tile, made_of(results, tile), intensity(tile))
        made[cells[:3]] = cells
    wrong = [row for row in rows() if row != made[row[:3]]]
    listed = "\n".join(f"| {' | '.join(cells)} |" for cells in made.values())
    assert not wrong, f"{wrong}; the rows of now:\n{listed}"


def test_the_pages_formulas(results: Results) -> None:
    """Shared memory from two stages on, the least registers, programs an SM, FLOP a byte of L2."""
    target = target_named("sm_90")
    for tile in TILES:
        report = made_of(results, tile)
        m, n, warps, stages = astuple(tile)
        assert report.shared_bytes == 2 * DIM * (m + (2 * n * stages if stages > 1 else n)), tile
        held = m * (DIM + n) / (32 * warps)
        assert report.registers > min(held, target.registers_per_thread - 1), tile
        a_warp = 32 * -(-report.registers // target.register_granule) * target.register_granule
        limits = (
            target.registers_per_sm // 4 // a_warp * 4 // warps,
            target.shared_per_sm // (report.shared_bytes + target.shared_reserved),
            target.warps_per_sm // warps,
        )
        assert report.occupancy.programs == min(limits), tile
        assert intensity(tile) == pytest.approx(m * N / (m + N)), tile


def test_waves() -> None:
    """Of 132 SMs, as the page has them."""
    own, small = waves_of(HEADS * N // 128, 132, 1), waves_of(HEADS * N // 64, 132, 3)
    assert [(round(w.waves, 2), round(w.filled, 2)) for w in (own, small)] == [(3.88, 0.97), (2.59, 0.86)]


def test_what_the_page_says_of_spills(results: Results) -> None:
    """Too few threads for a tile spill in the loop; more threads than the rows need cost wgmma instructions."""
    few, own, many = (made_of(results, Tile(128, 64, warps, 3)) for warps in (4, 8, 16))
    assert few.registers == 255 and few.loop_spills and not own.spills and not many.spills
    assert "HGMMAx8 " in " ".join(own.loops[0].schedule) and "HGMMAx16" in " ".join(many.loops[0].schedule)
    loads = [made_of(results, Tile(128, 64, 8, stages)).loops[0].opcodes.get("LDGSTS", 0) for stages in (1, 2, 3, 4)]
    assert not loads[0] and all(loads[1:])  # cp.async from two stages on
