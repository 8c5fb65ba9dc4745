"""Accepted events (docs/output.md) as NumPy, Awkward and Arrow arrays.

    from millstream import events

    with events.open("accepted/camera.bu0.h5", "accepted/camera.bu1.h5") as accepted:
        waveforms = accepted["camera/waveforms"]       # [event, pixel, sample]
        accepted.to_parquet("accepted.parquet")

Needs `h5py`; `awkward` and `pyarrow` for the methods that are called after them. Several files of a run are one table
in the order of event numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from ._millstream import FormatError
from ._tables import table_html

__all__ = ["Events", "open"]

FORMAT = "millstream events"
VERSION = 1


class Events(Mapping):
    """Event files of one run: a mapping of dataset paths to arrays with one row per event."""

    def __init__(self, *paths: str | os.PathLike):
        import h5py

        if not paths:
            raise ValueError("no event file given")
        self._files = []
        try:
            for path in paths:
                self._files.append(h5py.File(path, "r"))
                _check(self._files[-1], path)
        except BaseException:
            self.close()
            raise
        first = self._files[0]
        #: Attributes of the run, such as `name`, `software`, `trigger_kernel`.
        self.run = {name: _plain(value) for name, value in first["run"].attrs.items()}
        numbers = np.concatenate([file["events/number"][:] for file in self._files])
        self._order = np.argsort(numbers, kind="stable")
        #: Event numbers, ascending.
        self.numbers = numbers[self._order]
        #: Sources: id, kind, name and dataset of each.
        self.sources = [
            dict(zip(("id", "kind", "name", "dataset"), map(_plain, row)))
            for row in zip(*(first[f"sources/{column}"][:] for column in ("id", "kind", "name", "dataset")))
        ]
        self._columns = []
        first.visititems(self._collect)

    def _collect(self, path, item):
        dimensions = [_plain(name) for name in np.atleast_1d(item.attrs.get("dimensions", []))]
        if dimensions[:1] == ["event"] and not path.startswith("fragments/"):
            self._columns.append(path)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def __len__(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._columns:
            raise KeyError(f"no dataset {path!r} with one row per event; there are: {', '.join(self._columns)}")
        return np.concatenate([file[path][:] for file in self._files])[self._order]

    def _repr_html_(self) -> str:
        """A table of the datasets, for notebooks."""
        title = f"{self.run.get('name', '')}: {len(self.numbers):,} events"
        rows = ([path, "×".join(map(str, shape)) or "1", str(dtype), self.unit(path)] for path, shape, dtype in self._shapes())
        return table_html(title, ("dataset", "shape of an event", "type", "unit"), rows)

    def _shapes(self):
        for path in self:
            dataset = self._files[0][path]
            yield path, dataset.shape[1:], dataset.dtype

    def unit(self, path: str) -> str:
        """Unit of a dataset; empty without one."""
        return _plain(self._files[0][path].attrs["unit"])

    def fragments(self, source: str):
        """Variable-length fragments of a source as an Awkward array of bytes."""
        import awkward

        parts = []
        for pieces in self._pieces(source):
            flat = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
            parts.append(awkward.unflatten(flat, np.array([len(piece) for piece in pieces], np.int64)))
        return awkward.concatenate(parts)[self._order]

    def matrix(self, source: str, dtype="u1") -> np.ndarray:
        """Variable-length fragments of a source as rows of one array. All must have the same length."""
        pieces = [piece for file in self._pieces(source) for piece in file]
        lengths = sorted({len(piece) for piece in pieces})
        if len(lengths) > 1:
            raise ValueError(
                f"fragments of source {source!r} have {lengths[0]} to {lengths[-1]} bytes; fragments() returns them as they are"
            )
        if not pieces:
            return np.empty((0, 0), dtype)
        return np.stack(pieces).view(dtype)[self._order]

    def _pieces(self, source: str) -> Iterator[list[np.ndarray]]:
        """The fragments of a source, for each file."""
        for file in self._files:
            if f"fragments/{source}" not in file:
                raise KeyError(f"{file.filename}: no variable-length fragments of source {source!r}")
            group = file[f"fragments/{source}"]
            data, offset, length = group["data"][:], group["offset"][:], group["length"][:]
            yield [data[int(o) : int(o) + int(n)] for o, n in zip(offset, length)]

    def to_awkward(self):
        """All columns as an Awkward record array."""
        import awkward

        columns = {path.replace("/", "_"): self[path] for path in self}
        columns |= {f"fragments_{name}": self.fragments(name) for name in self._variable()}
        return awkward.zip(columns, depth_limit=1)

    def _variable(self):
        return list(self._files[0].get("fragments", ()))

    def to_arrow(self):
        """All columns as an Arrow table. Arrays of several dimensions become fixed-size lists."""
        import pyarrow

        columns = {path.replace("/", "_"): _arrow(pyarrow, self[path]) for path in self}
        for name in self._variable():
            fragments = self.fragments(name)
            columns[f"fragments_{name}"] = pyarrow.array(
                [np.asarray(fragment, np.uint8).tobytes() for fragment in fragments], pyarrow.binary()
            )
        return pyarrow.table(columns)

    def to_parquet(self, path: str | os.PathLike) -> None:
        """Writes all columns to a Parquet file, for Dask, DuckDB, Polars and others."""
        import pyarrow.parquet

        pyarrow.parquet.write_table(self.to_arrow(), os.fspath(path))


def _arrow(pyarrow, array):
    values = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        values = pyarrow.FixedSizeListArray.from_arrays(values, size)
    return values


def _plain(value):
    """A value of HDF5 as a value of Python."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


def _check(file, path) -> None:
    found = _plain(file.attrs.get("format", ""))
    if found != FORMAT:
        raise FormatError(f"{path}: attribute format: found {found!r}, expected {FORMAT!r}")
    version = _plain(file.attrs.get("version", 0))
    if version != VERSION:
        raise FormatError(f"{path}: attribute version: found {version}, expected {VERSION}")


def open(*paths: str | os.PathLike) -> Events:
    """Opens the event files of a run."""
    return Events(*paths)
