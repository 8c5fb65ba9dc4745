"""Five-point Jacobi sweeps on leased cards (docs/stencil.md).

    from millstream import stencil

    result = stencil.jacobi(grid, 100, cards=["node7:7480", "node8:7480"])
    result.grid
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ._tables import table_html
from .program import call

__all__ = ["Result", "jacobi"]

_STEPS = ("write", "compute", "halo", "read", "checkpoint", "wait")


@dataclasses.dataclass(frozen=True)
class Result:
    """The grid after the sweeps, and the report of the job."""

    grid: np.ndarray
    #: Fields as in docs/stencil.md, such as `wall_s`, `points_per_s`, `blocks`, `losses`.
    report: Mapping = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        rows, report = (len(self.report["cards"]), self.report)
        title = f"{self.grid.shape[0]}×{self.grid.shape[1]} {self.grid.dtype}, {report['iterations']} sweeps on {rows} cards"
        blocks = (
            [block["sweeps"], block["wall_s"] * 1e3, *(block["mean"][f"{step}_s"] * 1e3 for step in _STEPS)]
            for block in report["blocks"]
        )
        return table_html(title, ("sweeps", "wall [ms]", *(f"{step} [ms]" for step in _STEPS)), blocks)


def jacobi(
    grid: np.ndarray,
    iterations: int = 100,
    *,
    cards: str | Iterable[str] = (),
    spares: str | Iterable[str] = (),
    local: int = 2,
    site: str | os.PathLike | None = None,
    depth: int | None = None,
    checkpoint: int = 512,
    verify: bool = False,
    timeout: float | None = None,
) -> Result:
    """Computes sweeps over a two-dimensional grid of float32 or float64, whose boundary stays fixed.

    `cards` are names of the site file or `host:port`; without them, `local` emulated cards are started. `spares` replace lost
    cards. `depth` sweeps lie between two halo exchanges, `checkpoint` sweeps between two checkpoints. `verify` computes the
    same on the host and compares every bit. Raises :class:`millstream.ProgramFailed` if the job fails.
    """
    grid = np.asarray(grid)
    if grid.ndim != 2 or grid.dtype not in (np.dtype("f4"), np.dtype("f8")):
        raise ValueError(f"a grid of {grid.dtype} with shape {grid.shape}: it needs two dimensions of float32 or float64")
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        before, after, report = (Path(folder) / name for name in ("before.npy", "after.npy", "report.json"))
        np.save(before, np.ascontiguousarray(grid))
        words = ["--iterations", iterations, "--checkpoint", checkpoint]
        cards, spares = (names if isinstance(names, str) else ",".join(names) for names in (cards, spares))
        words += ["--cards", cards] if cards else ["--local", local]
        words += ["--spares", spares] if spares else []
        words += ["--site", site] if site is not None else []
        words += ["--depth", depth] if depth is not None else []
        words += ["--verify"] if verify else []
        call("stencil", "--input", before, "--output", after, "--json", report, *words, timeout=timeout)
        return Result(np.load(after), json.loads(report.read_text(encoding="utf-8")))
