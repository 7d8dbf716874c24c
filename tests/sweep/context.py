"""What a problem runs in: tensors with guard bands, poisoned fresh memory, the kernels launched, comparisons read at once."""

import random
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .bounds import Wrong

FORMS = ("plain", "gap", "turned", "offset", "fused")
"""Strides: contiguous; rows with a gap; another order of dimensions in memory; off every alignment; part of a wider tensor."""

_REACHED: dict[str, int] = {}


class Context:
    """Makes a problem's tensors from its seed, and collects what is to be compared."""

    def __init__(self, seed: int, device: torch.device, guard: bool = True, small: bool = False) -> None:
        self.device, self.guard, self.small = device, guard, small
        self.generator = torch.Generator(device).manual_seed(seed)
        self.rng = random.Random(seed)
        self.kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.found: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.plant: Any = None  # a test's change of the results

    # ------------------------------------------------------------ inputs

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, rounded to dtype."""
        made = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return made.to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def whole(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers on the device, with what lies beside them in memory far out of range."""
        return self.place(torch.tensor(values, device=self.device).to(dtype), "plain")

    def place(self, values: torch.Tensor, form: str = "plain", name: str = "", writable: bool = False) -> torch.Tensor:
        """`values` as a view of a larger buffer, by a form of strides (see FORMS), the last dimension contiguous.

        All around it, and in the gaps, lies NaN (the largest number of integers).  The buffer has to be the same afterwards,
        but for the view itself if it is writable."""
        n = values.dim()
        order, grow, lead = list(range(n)), [0] * n, 0
        if form == "gap" and n > 1:
            grow[-1] = 3 if values.shape[-1] % 2 else 8
        elif form == "turned" and n > 2:
            order[-2], order[-3] = order[-3], order[-2]
        elif form == "offset":
            lead = 1
        elif form == "fused" and n > 1:
            grow[-2] = 2
        room = [values.shape[i] + grow[i] for i in order]
        band = 67 if self.guard and lead else 64 if self.guard else lead
        count = 1
        for size in room:
            count *= max(1, size)
        behind = 64 if self.guard else 0
        flat = torch.full((band + count + behind,), _far(values.dtype), device=self.device, dtype=torch.float32
                          if values.dtype == torch.float8_e4m3fn else values.dtype).to(values.dtype)  # fmt: skip
        strides, step = [0] * n, 1
        for i in reversed(order):
            strides[i] = step
            step *= max(1, values.shape[i] + grow[i])
        view = flat.as_strided(values.shape, strides, band)
        view.copy_(values)
        if self.guard and flat.numel():
            self.kept.append((name or "an input", flat, self._image(flat, view if writable else None)))
        return view

    def _image(self, flat: torch.Tensor, hole: torch.Tensor | None) -> torch.Tensor:
        """The buffer's bytes; those of the hole count as changed for ever (see `_touched`)."""
        image = flat.view(torch.uint8).clone()
        if hole is not None:
            size = flat.element_size()
            at = torch.zeros(flat.numel(), dtype=torch.bool, device=self.device)
            at.as_strided(hole.shape, hole.stride(), hole.storage_offset()).fill_(True)
            return torch.cat([image, at.repeat_interleave(size).to(torch.uint8)])
        return image

    # ------------------------------------------------------------ results

    def compare(self, name: str, got: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor | float) -> None:
        """`got` may be `limit` off from `exact` (fp64), element by element; infinities have to be where `exact` has them."""
        if tuple(got.shape) != tuple(exact.shape):
            raise Wrong(f"{name} has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
        got = got.detach()
        if self.plant is not None:
            got = self.plant(name, got)
        wide = got.double()
        off = (wide - exact).abs()
        bad = torch.where(exact.isfinite(), ~(off <= limit), wide != exact)
        if exact.numel():
            self.found.append((name, bad, wide, exact))

    def expect(self, name: str, holds: bool, detail: str = "") -> None:
        if not holds:
            raise Wrong(f"{name}: {detail}" if detail else name)

    def finish(self) -> None:
        """Raise what was wrong."""
        checks = [bad.sum() for _, bad, _, _ in self.found] + [_touched(flat, image) for _, flat, image in self.kept]
        counts = torch.stack([c.double() for c in checks]).tolist() if checks else []
        for (name, bad, got, exact), count in zip(self.found, counts, strict=False):
            if count:
                raise Wrong(_tell(name, bad, got, exact))
        for (name, _, _), count in zip(self.kept, counts[len(self.found) :], strict=True):
            if count:
                raise Wrong(f"{name}: memory around or in it was written: {int(count)} bytes")


def _far(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _touched(flat: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    now = flat.view(torch.uint8)
    if image.numel() == now.numel():
        return (now != image).sum()
    before, hole = image.chunk(2)
    return ((now != before) & (hole == 0)).sum()


def _tell(name: str, bad: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> str:
    places = bad.nonzero()
    first = tuple(places[0].tolist())
    off = (got - exact).abs()
    worst = float(off[bad].nan_to_num(nan=float("inf")).max())
    return (
        f"{name}{list(got.shape)}: {len(places)} of {bad.numel()} wrong, first {list(first)}: {float(got[first]):.6g} for "
        f"{float(exact[first]):.6g}, worst off by {worst:.3g}"
    )


# ---------------------------------------------------------------- around all problems


@contextmanager
def poisoned() -> Any:
    """Fresh floating-point memory is NaN."""
    before = [(torch, n, getattr(torch, n)) for n in ("empty", "empty_like", "empty_strided")]
    before += [(torch.Tensor, n, getattr(torch.Tensor, n)) for n in ("new_empty", "new_empty_strided")]
    for owner, name, allocate in before:
        setattr(owner, name, _nan(allocate))
    try:
        yield
    finally:
        for owner, name, allocate in before:
            setattr(owner, name, allocate)


def _nan(allocate: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        fresh = allocate(*args, **kwargs)
        if fresh.is_floating_point():
            with torch.no_grad():
                fresh.fill_(float("nan"))
        return fresh

    return made


def kernels_reached() -> dict[str, int]:
    """Launches by kernel since the first call, which begins to count them."""
    from tilefold.ops.launch import Launch

    def counting(call: Any) -> Any:
        def counted(self: Any, args: Any) -> None:
            name = self.fn.__name__
            _REACHED[name] = _REACHED.get(name, 0) + 1
            call(self, args)

        counted.counts = True  # type: ignore[attr-defined]
        return counted

    if not hasattr(Launch.__call__, "counts"):
        for way in ("__call__", "flat"):
            setattr(Launch, way, counting(getattr(Launch, way)))
    return _REACHED
