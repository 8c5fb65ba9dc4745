"""Predictions of the model for a site (docs/model.md).

    from millstream import model

    model.explain("sites/recipe-baseline.toml", "write client server.u280")
    model.measure("ib_write_bw", "sites/edr-pair.toml", "node0", "node1", sizes=[65536])
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from .program import call, call_json

__all__ = ["check_site", "event_builder", "explain", "measure", "predict", "site_picture"]


def _settings(settings: Mapping | None) -> list[str]:
    words: list[str] = []
    for name, value in (settings or {}).items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        words += ["--set", f"{name}={text}"]
    return words


def explain(site: str | os.PathLike, flow: str, settings: Mapping | None = None) -> list | dict:
    """Bandwidth of a flow, its bottleneck and the next limit."""
    return call_json("model", "explain", site, flow, "--samples", 0, *_settings(settings))


def measure(
    benchmark: str,
    site: str | os.PathLike,
    client: str,
    server: str,
    sizes: Iterable[int] = (),
    settings: Mapping | None = None,
) -> list | dict:
    """Simulates a benchmark program between two memories of a site."""
    sizes = ",".join(map(str, sizes))
    return call_json(
        "model", "measure", benchmark, site, client, server, *(["--sizes", sizes] if sizes else []), *_settings(settings)
    )


def predict(questions: str | os.PathLike, settings: Mapping | None = None) -> list[dict]:
    """Answers a table of questions, with intervals: one dictionary per row."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        out = Path(folder) / "predictions.csv"
        call("model", "predict", "--questions", questions, "--out", out, *_settings(settings))
        with out.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


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
