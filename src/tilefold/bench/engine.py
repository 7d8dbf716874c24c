"""What one command, one suite and one document need of any family of `tilefold bench`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilefold.bench import family_report
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import cases_of
from tilefold.bench.choice import select_cases
from tilefold.bench.family import Family
from tilefold.bench.loop import FAILED, WRONG, run_each
from tilefold.bench.record import Sheet
from tilefold.bench.run import Cell, Progress, Row, run_case
from tilefold.bench.setting import Options, Setting
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Request:
    """Which cases: quick ones, those whose name has a pattern; of attention also the dtype's full name and the direction;
    of sparse attention random lists at these sparsities (per cent) in place of the usual cases."""

    quick: bool = False
    pattern: str | None = None
    dtype: str = "bfloat16"
    direction: str = "forward"
    sparsities: tuple[float, ...] = ()

    def size(self, gpu: bool) -> str:
        """Of the cases: "tiny" without a GPU."""
        return "tiny" if not gpu else "quick" if self.quick else "full"


class Engine:
    """A family.  A *result* is what one case left: the row of a case, of video that of a point."""

    def __init__(self, family: Family) -> None:
        self.name, self.family = family.name, family

    @property
    def known(self) -> Mapping[str, Any]:
        """All implementations by name, "tilefold" among them."""
        return self.family.peers

    def usual(self, device: str) -> tuple[str, ...]:
        """The peers that are measured unasked."""
        return self.family.defaults[device]

    def beside(self, names: Sequence[str] | None, device: str) -> tuple[Any, ...]:
        """tilefold and the peers of these names; None: those usual on the device."""
        every = dict.fromkeys(("tilefold", *(self.usual(device) if names is None else names)))
        return tuple(self.known[name] for name in every)

    def cases(self, request: Request, gpu: bool) -> tuple[Any, ...]:
        """Raises ValueRangeError where there are none, or none that could run here."""
        return select_cases(self.family.cases(request.size(gpu)), request.pattern)

    def run(
        self,
        cases: Sequence[Any],
        peers: Sequence[Any],
        device: str,
        options: Options,
        progress: Progress,
        finished: Callable[[Any], None] = lambda result: None,
    ) -> list[Any]:
        """A result for each case that was reached (`loop.run_each`); finished(result) after each."""

        def one(case: Any) -> Any:
            return self.measured(case, peers, device, options, progress)

        return run_each(cases, one, lambda case, why: self.failed(case, peers, why), finished, options.budget_s)

    def measured(self, case: Any, peers: Sequence[Any], device: str, options: Options, progress: Progress) -> Any:
        """The result of a case, its peers checked and timed."""
        return run_case(self.family, case, peers, device, options, progress)

    def failed(self, case: Any, peers: Sequence[Any], why: str) -> Any:
        """What stands for the result of a case that raised."""
        return Row(self.family, case, tuple(Cell(case, one.name, FAILED, why) for one in peers))

    def records(self, result: Any, setting: Setting) -> list[dict[str, Any]]:
        return family_report.family_records([result], setting)

    def findings(self, results: Sequence[Any]) -> dict[str, Any]:
        """What a document says of all results together."""
        return {"lines": self.notes(results)}

    def sheets(self, results: Sequence[Any], setting: Setting) -> list[Sheet]:
        """The tables for a document, of the family one for each method."""
        tables = ((method, family_report.family_table(results, method)) for method in family_report.methods_of(results))
        title = family_report.family_title
        return [Sheet(title(results, method, setting), table.head, table.rows) for method, table in tables]

    def details(self, results: Sequence[Any], width: int, asked: bool) -> "list[RenderableType]":
        """Further tables for a terminal; asked: also those that say little of most runs."""
        return []

    def notes(self, results: Sequence[Any]) -> list[str]:
        return family_report.family_lines(results)

    def wrong(self, results: Sequence[Any]) -> bool:
        """Whether a result of tilefold failed its check, or failed."""
        own = {"tilefold", *(name for name, peer in self.family.peers.items() if peer.ours)}
        return any(
            cell.implementation in own and cell.status in (WRONG, FAILED) for row in results for cell in row.cells
        )


class AttentionEngine(Engine):
    """dense and sparse, whose tables have rates and shapes."""

    def cases(self, request: Request, gpu: bool) -> tuple[Any, ...]:
        if not request.quick and not gpu:
            raise ValueRangeError(
                f"the full cases of {self.name!r} need a GPU: on a CPU they would take days. Add --quick"
            )
        how = request.size(gpu), request.dtype, request.direction, request.sparsities
        return select_cases(cases_of(self.name, *how), request.pattern)

    def records(self, result: Any, setting: Setting) -> list[dict[str, Any]]:
        return report.records_of([result], setting)

    def findings(self, results: Sequence[Any]) -> dict[str, Any]:
        return report.findings(results)

    def sheets(self, results: Sequence[Any], setting: Setting) -> list[Sheet]:
        return report.sheets_of(results)

    def details(self, results: Sequence[Any], width: int, asked: bool) -> "list[RenderableType]":
        return report.detail_tables(results, width) if asked or any(row.case.pattern for row in results) else []

    def notes(self, results: Sequence[Any]) -> list[str]:
        return [*report.crossing_lines(results), *super().notes(results)]
