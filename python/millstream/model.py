"""Sites and predictions of the model for them (docs/model.md, docs/site.md).

    from millstream import Site

    site = Site("sites/recipe-baseline.toml")       # a notebook draws it
    site.explain("write client server.u280")
    site.measure("ib_write_bw", "client", "server", sizes=[65536])

Results are tables; a notebook shows them as such.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ._tables import Table
from .program import call, call_json

__all__ = ["Site", "Table", "check_site", "event_builder", "explain", "flows", "measure", "predict", "site_picture"]


def _settings(settings: Mapping | None) -> list[str]:
    words: list[str] = []
    for name, value in (settings or {}).items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        words += ["--set", f"{name}={text}"]
    return words


def explain(
    site: str | os.PathLike, flow: str, settings: Mapping | None = None, *, samples: int = 1000
) -> Table:
    """Bandwidth of a flow with its 90 % interval, its bottleneck and the next limit.

    `samples` parameter sets make the interval; with 0 there is none. Several values of a setting make one row each.
    """
    return Table.of(call_json("model", "explain", site, flow, "--samples", samples, *_settings(settings)))


def measure(
    benchmark: str,
    site: str | os.PathLike,
    client: str,
    server: str,
    sizes: Iterable[int] = (),
    settings: Mapping | None = None,
) -> Table:
    """Simulates a benchmark program between two memories of a site."""
    sizes = ",".join(map(str, sizes))
    return Table.of(
        call_json(
            "model", "measure", benchmark, site, client, server, *(["--sizes", sizes] if sizes else []), *_settings(settings)
        )
    )


def flows(
    site: str | os.PathLike,
    *flows: str,
    pattern: str | None = None,
    settings: Mapping | None = None,
    samples: int = 1000,
) -> Table:
    """Bandwidths of flows that run at the same time, alone and together, with 90 % intervals.

    `pattern` adds WRITEs between all hosts: `all-to-all`, `shift:N` or `incast:HOST`.
    """
    words = ["--pattern", pattern] if pattern else []
    return Table.of(call_json("model", "flows", site, *flows, *words, "--samples", samples, *_settings(settings)))


def predict(questions: str | os.PathLike, settings: Mapping | None = None) -> Table:
    """Answers a table of questions, with intervals: one row each. Values and bounds are numbers, or none if silent."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        out = Path(folder) / "predictions.csv"
        call("model", "predict", "--questions", questions, "--out", out, *_settings(settings))
        with out.open(newline="", encoding="utf-8") as file:
            answers = csv.DictReader(file)
            rows = [{name: _number(text) if name in _NUMBERS else text for name, text in row.items()} for row in answers]
            return Table(f"predictions for {Path(questions).name}", answers.fieldnames or (), rows)


_NUMBERS = ("value", "low", "high")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def event_builder(site: str | os.PathLike | None = None, *arguments) -> dict:
    """Simulates the event builder. `arguments` are options of `millstream model event-builder`."""
    return json.loads(call("model", "event-builder", *([site] if site else []), *arguments, "--json"))


def check_site(*files: str | os.PathLike) -> str:
    """Validates site files. Returns what they contain as text."""
    return call("site", "check", *files)


def site_picture(file: str | os.PathLike) -> str:
    """A picture of a site as SVG."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        out = Path(folder) / "site.svg"
        call("site", "show", file, "--out", out)
        return out.read_text(encoding="utf-8")


class Site:
    """A site file. Raises :class:`millstream.ProgramFailed` if it is invalid; the text has line, field and value."""

    def __init__(self, file: str | os.PathLike):
        self.file = Path(file)
        self._contents = check_site(self.file).strip()

    def __repr__(self) -> str:
        return f"<Site {self._contents}>"

    def picture(self) -> str:
        """A picture as SVG."""
        return site_picture(self.file)

    def _repr_svg_(self) -> str:
        return self.picture()

    def explain(self, flow: str, settings: Mapping | None = None, *, samples: int = 1000) -> Table:
        """As :func:`explain`."""
        return explain(self.file, flow, settings, samples=samples)

    def measure(
        self, benchmark: str, client: str, server: str, sizes: Iterable[int] = (), settings: Mapping | None = None
    ) -> Table:
        """As :func:`measure`."""
        return measure(benchmark, self.file, client, server, sizes, settings)

    def flows(
        self, *words: str, pattern: str | None = None, settings: Mapping | None = None, samples: int = 1000
    ) -> Table:
        """As :func:`flows`."""
        return flows(self.file, *words, pattern=pattern, settings=settings, samples=samples)
