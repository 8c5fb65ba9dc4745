"""Runs of the event builder, described in Python (docs/event-builder.md).

    import numpy as np
    from millstream import EventBuilder

    run = EventBuilder(batch=8)
    run.readout("crate1", {1: waveforms})          # an array, fragments, a generator, or a stream file
    run.readout("crate2", "crate2.mfs")
    run.builder("bu0", memory="64MiB", kernel="verify")
    report = run.run()
    report.fragment_accounting.fragments_read, report.events
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from . import streams
from ._tables import table_html
from .program import ProgramFailed, call, program

__all__ = ["EventBuilder", "Outcome", "FragmentAccounting", "Report", "RunFailed", "Unit"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Fragments with one outcome and reason."""

    outcome: str
    reason: str
    events: int
    fragments: int


@dataclasses.dataclass(frozen=True)
class FragmentAccounting:
    """Where every fragment went: `fragments_read` is the sum over `outcomes`."""

    fragments_read: int
    outcomes: tuple[Outcome, ...]
    inconsistencies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of a run."""

    name: str
    events: int
    fragments: int
    payload_bytes: int
    exit_status: str
    peak_memory_bytes: int | None
    cpu_time_s: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a run. `fields` has all values as in docs/output.md."""

    name: str
    events: int
    fragments: int
    payload_bytes: int
    duration_s: float
    accepted_events: int
    stored_events: int
    event_files: tuple[Path, ...]
    fragment_accounting: FragmentAccounting
    units: tuple[Unit, ...]
    error: str | None
    success: bool
    problems: tuple[str, ...]
    fields: Mapping = dataclasses.field(repr=False)

    @classmethod
    def of(cls, fields: Mapping, folder: os.PathLike | str = ".") -> Report:
        """The report of the JSON that `millstream evb run --json` writes."""
        accounting = fields["fragment_accounting"]
        own = {unit.name for unit in dataclasses.fields(Unit)}
        return cls(
            **{name: fields[name] for name in _VALUES},
            event_files=tuple(Path(folder) / file for file in fields["event_files"]),
            fragment_accounting=FragmentAccounting(
                accounting["fragments_read"],
                tuple(
                    Outcome(row["outcome"], row["reason"], row["events"], row["fragments"])
                    for row in accounting["outcomes"]
                ),
                tuple(accounting["inconsistencies"]),
            ),
            units=tuple(
                Unit(**{name: value for name, value in unit.items() if name in own}) for unit in fields["units"]
            ),
            success=fields["derived"]["success"],
            problems=tuple(fields["derived"]["problems"]),
            fields=fields,
        )

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        rows = [
            ("events built", f"{self.events:,}"),
            ("payload", f"{self.payload_bytes / 1e6:,.1f} MB in {self.duration_s:.3f} s"),
            ("accepted, stored", f"{self.accepted_events:,}, {self.stored_events:,}"),
            ("fragments read", f"{self.fragment_accounting.fragments_read:,}"),
        ]
        rows += [(f"– {row.outcome}: {row.reason}", f"{row.fragments:,}") for row in self.fragment_accounting.outcomes]
        rows += [("problem", text) for text in self.problems]
        body = "".join(f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in rows)
        return f"<table><caption>{_escape(self.name)}</caption>{body}</table>" + self._units_html()

    def _units_html(self) -> str:
        columns = tuple(field.name for field in dataclasses.fields(Unit))
        return table_html("units", columns, (dataclasses.astuple(unit) for unit in self.units))


_VALUES = (
    "name", "events", "fragments", "payload_bytes", "duration_s", "accepted_events", "stored_events", "error",
)


def _escape(text: str) -> str:
    return html.escape(str(text))


class RunFailed(RuntimeError):
    """A run ended with an error. `report` is its report, if it left one."""

    def __init__(self, text: str, report: Report | None):
        super().__init__(text)
        self.report = report

    def __reduce__(self):
        return type(self), (*self.args, self.report)


class EventBuilder:
    """A run of the event builder on this host.

    Keyword arguments are the keys of `[run]` in docs/event-builder.md. Inputs in memory become stream files in `folder`,
    by default a temporary one.
    """

    def __init__(self, name: str = "python", *, folder: str | os.PathLike | None = None, **run):
        self._temporary = tempfile.TemporaryDirectory(prefix="millstream-") if folder is None else None
        self.folder = Path(folder if self._temporary is None else self._temporary.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, object] = {"run": {"name": name, "batch": 1, **run}, "readout": [], "builder": [], "card": []}

    def readout(self, name: str, sources) -> EventBuilder:
        """Adds a readout unit.

        `sources` is the path of a stream file, or a mapping of source ids to fragments as in
        :func:`millstream.streams.write`. Fragments may be an array, a sequence, or a generator of arrays.
        """
        if isinstance(sources, (str, os.PathLike)):
            path = Path(sources).resolve()
        else:
            path = self.folder / f"{name}.mfs"
            streams.write(path, {source: _drained(data) for source, data in sources.items()})
        self._tables["readout"].append({"name": name, "input": str(path)})
        return self

    def builder(
        self, name: str, *, slots: int = 8, memory: str | int | None = None, kernel: str | None = None, **card
    ) -> EventBuilder:
        """Adds a builder unit. With `memory` it lands in an emulated card that runs `kernel`, else in host memory.

        Further keyword arguments are the keys of `[[card]]` in docs/event-builder.md.
        """
        unit = {"name": name, "slots": slots}
        if memory is None:
            given = [*card] if kernel is None else ["kernel", *card]
            if given:
                raise TypeError(f"builder {name}: {', '.join(given)}: only of a card, which needs memory")
            unit["landing"] = "host"
        else:
            unit["card"] = f"{name}-card"
            for key in {"module", "patches"} & card.keys():
                card[key] = str(Path(card[key]).resolve())
            self._tables["card"].append({"name": unit["card"], "memory": memory, "kernel": kernel or "none", **card})
        self._tables["builder"].append(unit)
        return self

    def output(self, directory: str | os.PathLike, **settings) -> EventBuilder:
        """Stores accepted events in this directory."""
        self._tables["output"] = {"directory": str(Path(directory).resolve()), **settings}
        return self

    def reference_decisions(self, path: str | os.PathLike) -> EventBuilder:
        """Compares trigger decisions with recorded ones."""
        self._tables["check"] = {"reference_decisions": str(Path(path).resolve())}
        return self

    def config(self) -> str:
        """The configuration as TOML."""
        return _toml({name: table for name, table in self._tables.items() if table})

    def _write_config(self) -> Path:
        path = self.folder / "run.toml"
        path.write_text(self.config(), encoding="utf-8")
        return path

    def check(self) -> str:
        """Checks the configuration without a run. Returns its units and memory as text."""
        return call("evb", "check", self._write_config())

    def run(self, *, svg: str | os.PathLike | None = None, timeout: float | None = None) -> Report:
        """Runs and returns the report. Raises :class:`RunFailed` if the run fails."""
        config, file = self._write_config(), self.folder / "report.json"
        file.unlink(missing_ok=True)
        command = [str(program()), "evb", "run", str(config), "--json", str(file)]
        if svg is not None:
            command += ["--svg", os.fspath(svg)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        if not file.is_file():
            raise RunFailed(str(ProgramFailed(command, done.returncode, done.stderr)), None)
        report = Report.of(json.loads(file.read_text(encoding="utf-8")))
        if done.returncode != 0 or not report.success:
            problems = "; ".join(report.problems) or done.stderr.strip()
            raise RunFailed(f"run {report.name} failed: {problems}", report)
        return report


def _drained(data):
    """Fragments as an array or a sequence; a generator is read to its end."""
    if isinstance(data, streams.SourceData):
        return dataclasses.replace(data, fragments=_drained(data.fragments))
    return data if hasattr(data, "__len__") else list(data)


def _toml(tables: Mapping) -> str:
    """Tables of strings, numbers and booleans as TOML. JSON's strings are valid basic strings of TOML."""
    lines = []
    for name, content in tables.items():
        for table in content if isinstance(content, list) else [content]:
            lines.append(f"[[{name}]]" if isinstance(content, list) else f"[{name}]")
            lines += [f"{key} = {_toml_value(name, key, value)}" for key, value in table.items()]
            lines.append("")
    return "\n".join(lines)


def _toml_value(table, key, value) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (str, bool, int, float)):
        raise TypeError(f"[{table}] {key}: {value!r} is not a string, number or boolean")
    return json.dumps(value, ensure_ascii=False)
