"""`tilefold video calibrate`: a model measured, its policy file, the page and the picture."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tilefold.bench.page import Heading, Part, Picture, Rows, Words, new_figure
from tilefold.cli.runtime import folder, write_report
from tilefold.cli.video_demo import least_times
from tilefold.errors import ValueRangeError
from tilefold.video import Adapter, Pooled, scene
from tilefold.video.calibrate import CANDIDATES, Calibration, Fitted, calibrate, fit, model_error, policy_to_json
from tilefold.video.planted import Planted, PlantedAdapter

HEADS = ("candidate", "left out", "mass", "error, mean", "worst head")
FIT = ("policy", "left out", "model's error", "ms at least", "x dense")
PATCH = (1, 4, 4)
PLANTED = (("local", "scattered", "global", "local"), ("scattered", "local", "global", "scattered"))

Setup = tuple[nn.Module, Sequence[Mapping[str, Any]], Adapter | None]


def planted(device: str, quick: bool) -> Setup:
    """The model that is calibrated if none is named: heads of known kinds over a rendered video, two steps."""
    size = scene.Scene(8, 32, 48) if quick else scene.Scene(16, 48, 64)
    inputs = []
    for seed in range(2):
        tokens, grid = scene.patches(scene.render(size, seed=seed, device=device), PATCH)
        inputs.append({"hidden_states": (tokens - tokens.mean()) / tokens.std()})
    return Planted(grid, PLANTED, tokens.shape[-1]).to(device), inputs, PlantedAdapter()


def setup_of(name: str) -> Setup:
    """What the function of that name, module:function, returns: (model, inputs) or (model, inputs, adapter)."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        call = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueRangeError(f"model must be module:function that can be imported, got {name!r} ({error})") from None
    finally:
        sys.path.remove("")
    made = call()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ValueRangeError(
            f"{name} must return (model, inputs) or (model, inputs, adapter), got {type(made).__name__}"
        )
    return made[0], list(made[1]), made[2] if len(made) == 3 else None


class Report:
    """A calibration and what was fitted: tables, a picture, files."""

    def __init__(self, setup: Setup, error: float, cube: tuple[int, int, int] | None) -> None:
        self.model, self.inputs, adapter = setup
        self.kinds: Any = getattr(self.model, "kinds", None)
        options: dict[str, Any] = {"cube": cube, "adapter": adapter}
        self.limit = error
        self.found: Calibration = calibrate(self.model, self.inputs, CANDIDATES, **options)
        self.fitted: Fitted = fit(self.model, self.inputs, self.found, error, **options)
        self.same = Pooled(sparsity=round(1 - self.fitted.listed, 3))
        self.uniform = model_error(self.model, self.inputs, self.found.outputs, self.same, **options)

    def candidates(self) -> list[tuple[str, ...]]:
        """A row for each candidate, over all heads, layers and steps."""
        rows: list[tuple[str, ...]] = []
        for i, one in enumerate(self.found.candidates):
            error = self.found.error[:, :, i]
            listed, mass = (float(x[:, :, i].mean()) for x in (self.found.listed, self.found.mass))
            worst = float(error.amax())
            rows.append((plain(one), f"{1 - listed:.1%}", f"{mass:.1%}", f"{float(error.mean()):.3f}", f"{worst:.3f}"))
        return rows

    def fits(self) -> list[tuple[str, ...]]:
        """The fitted policy, and the uniform one of as many pairs."""
        times = least_times(self.fitted.listed)
        both = ("fitted", self.fitted.error), (f"all heads {plain(self.same)}", self.uniform)
        return [(name, f"{1 - self.fitted.listed:.1%}", f"{error:.4f}", *times) for name, error in both]

    def heads(self) -> list[tuple[str, ...]]:
        """A row for each head of each layer: how concentrated it is, and its candidate."""
        concentrated = self.found.gini.mean(0)
        rows: list[tuple[str, ...]] = []
        for layer, chosen in enumerate(self.fitted.choice.tolist()):
            for head, one in enumerate(chosen):
                error = float(self.found.error.mean(0)[layer, one, head])
                gini, name = float(concentrated[layer, head]), plain(self.found.candidates[one])
                planted_as = (self.kinds[layer][head],) if self.kinds else ()
                rows.append((f"{layer}.{head}", f"{gini:.2f}", name, f"{error:.3f}", *planted_as))
        return rows

    @property
    def words(self) -> str:
        met = "meets" if self.fitted.error <= self.limit else "does not meet"
        return (
            f"The fitted policy {met} a relative L2 error of {self.limit:g} of the model's output, over {len(self.inputs)} "
            "steps. ms at least: one layer's attention of Wan 14B at 720p with as large a share of blocks listed, by the rates "
            "of an H200."
        )

    def parts(self) -> list[Part]:
        """Of the page."""
        caption = (
            "Left: the error of each candidate over what it leaves out, the mean over heads, layers and steps. Middle: how "
            "concentrated each head is, the Gini coefficient of its rows of pooled scores. Right: the share of blocks that the "
            "fitted policy lists."
        )
        planted_as = ("planted",) if self.kinds else ()
        return [
            Words(self.words),
            Rows(FIT, tuple(self.fits())),
            Picture(self.figure(), caption),
            Heading("Candidates"),
            Rows(HEADS, tuple(self.candidates())),
            Heading("Heads"),
            Rows(("layer.head", "Gini", "candidate", "error", *planted_as), tuple(self.heads())),
        ]

    def write(self, out: Path) -> list[Path]:
        """The policy file, the page and the picture."""
        policy = folder(out) / "policy.json"
        policy.write_text(policy_to_json(self.fitted.policy) + "\n", encoding="utf-8")
        return [policy, *write_report(out, "calibration", "tilefold video calibrate", self.parts())]

    def figure(self) -> Any:
        """Error against sparsity, heads by concentration, what was chosen."""
        figure: Any = new_figure(15, 4.6)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
        families: dict[str, list[tuple[float, float]]] = {}
        for i, one in enumerate(self.found.candidates):
            point = 1 - float(self.found.listed[:, :, i].mean()), float(self.found.error[:, :, i].mean())
            families.setdefault(type(one).__name__, []).append(point)
        for name, points in families.items():
            left.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        left.set(xlabel="share of pairs left out", ylabel="relative L2 error of a head", title="Candidates")
        left.legend(frameon=False)
        listed = self.found.listed.mean(0).gather(1, self.fitted.choice[:, None])[:, 0]
        pairs = (
            (middle, self.found.gini.mean(0), "How concentrated heads are"),
            (right, listed, "Share listed by the fit"),
        )
        for axes, values, title in pairs:
            image = axes.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axes.set(xlabel="head", ylabel="layer", title=title)
            for axis, n in ((axes.xaxis, values.shape[1]), (axes.yaxis, values.shape[0])):
                axis.set_ticks(range(0, n, max(1, n // 8)))
            figure.colorbar(image, ax=axes, shrink=0.8)
        return figure


def plain(policy: object) -> str:
    """A policy as it is written, without what it leaves to its defaults."""
    return repr(policy).replace(", top_p=None, window=None", "").replace(", kind='block'", "")
