"""Stream files and multi-fragment packets as NumPy arrays (docs/formats.md).

    from millstream import streams

    streams.write("crate1.mfs", {7: np.arange(1000, dtype="<i2").reshape(10, 100)})
    stream = streams.open("crate1.mfs")
    stream[7].matrix("<i2")      # 10 events of 100 numbers each, without a copy
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from . import _millstream
from ._buffer import bytes_of
from ._millstream import FormatError

__all__ = ["FormatError", "Packet", "Source", "SourceData", "Stream", "build_packet", "open", "parse_packet", "write"]


@dataclasses.dataclass(frozen=True)
class SourceData:
    """Fragments of a source, to be written.

    `fragments` is an array with one row per event, or a sequence of arrays or bytes-like objects. `events` has the event
    number of each fragment; by default they are consecutive from the first event of the file.
    """

    fragments: object
    events: object = None
    kind: int = 0
    name: str = ""


class Source:
    """A source of an open stream file. Arrays are views of the mapped file and cannot be written."""

    def __init__(self, mapping, reader, fields, file_events: range):
        self._file_events = file_events
        self.id, self.kind, self.name, self._len, self.max_len, self._payload = fields
        self._mapping = mapping
        #: Event number (u64), offset in the file (u64), length (u32) and CRC-32 (u32) of each fragment.
        self.events, self.offsets, self.lengths, self.checksums = reader.index(self.id)

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:
        return f"<Source {self.id} {self.name!r}, kind {self.kind}, {self._len} fragments>"

    def __getitem__(self, position: int) -> np.ndarray:
        """The bytes of a fragment, by its position."""
        if not -self._len <= position < self._len:
            raise IndexError(f"source {self.id}: no fragment {position}, it has {self._len}")
        start = int(self.offsets[position])
        return self._mapping[start : start + int(self.lengths[position])]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[position] for position in range(self._len))

    def fragment(self, event: int) -> np.ndarray:
        """The bytes of the fragment of an event. Raises `KeyError` if it is missing."""
        if not 0 <= event < 1 << 64:
            raise KeyError(f"source {self.id} has no fragment of event {event}")
        position = int(np.searchsorted(self.events, np.uint64(event)))
        if position == self._len or int(self.events[position]) != event:
            raise KeyError(f"source {self.id} has no fragment of event {event}")
        return self[position]

    def matrix(self, dtype=np.uint8) -> np.ndarray:
        """All fragments as one array with a row per fragment, without a copy.

        Raises `ValueError` if the fragments differ in length.
        """
        dtype = np.dtype(dtype)
        lengths = np.unique(self.lengths)
        if len(lengths) == 0:
            return np.empty((0, 0), dtype)
        if len(lengths) > 1:
            raise ValueError(
                f"source {self.id}: fragments have {lengths[0]} to {lengths[-1]} bytes; use fragments one by one, or awkward()"
            )
        length = int(lengths[0])
        if length % dtype.itemsize:
            raise ValueError(f"source {self.id}: fragments of {length} bytes are not a multiple of {dtype}")
        columns = length // dtype.itemsize
        if length == 0:
            return np.empty((self._len, 0), dtype)
        stride = int(self.offsets[1] - self.offsets[0]) if self._len > 1 else length
        return np.ndarray((self._len, columns), dtype, self._mapping, int(self.offsets[0]), (stride, dtype.itemsize))

    def awkward(self, dtype=np.uint8):
        """All fragments as an Awkward array of lists. Needs the package `awkward`."""
        import awkward

        dtype = np.dtype(dtype)
        if np.any(self.lengths % dtype.itemsize):
            raise ValueError(f"source {self.id}: a fragment's length is not a multiple of {dtype}")
        content = np.concatenate([*self]) if self._len else np.empty(0, np.uint8)
        return awkward.unflatten(content.view(dtype), self.lengths // dtype.itemsize)


class Stream(Mapping):
    """An open stream file: a mapping of source ids to sources.

    Raises :class:`FormatError` if the file breaks the format; the text names offset, field and value. The file must not
    be truncated while it is open.
    """

    def __init__(self, path: str | os.PathLike):
        self._reader = _millstream.StreamReader(os.fspath(path))
        mapping = self._reader.mapping()
        #: The file's event numbers.
        self.events = range(*self._reader.events)
        self._sources = {
            fields[0]: Source(mapping, self._reader, fields, self.events) for fields in self._reader.sources()
        }
        #: Path of the file.
        self.path = self._reader.path
        #: Alignment of fragments (bytes).
        self.alignment = self._reader.alignment

    def __getitem__(self, source: int) -> Source:
        return self._sources[source]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"<Stream {self.path}: {len(self)} sources, {len(self.events)} events>"

    def verify(self) -> None:
        """Compares all payload with its checksums. Raises :class:`FormatError` at the first difference."""
        self._reader.verify()


def open(path: str | os.PathLike) -> Stream:
    """Opens a stream file."""
    return Stream(path)


def _flat(fragments) -> tuple[np.ndarray, np.ndarray]:
    """Lengths (u64) and concatenated bytes (u8) of fragments."""
    if isinstance(fragments, np.ndarray) and fragments.dtype != object:
        if fragments.ndim < 2:
            raise ValueError(f"fragments of {fragments.ndim} dimensions: give an array with one row per event")
        rows = np.ascontiguousarray(fragments)
        length = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        return np.full(len(rows), length, np.uint64), rows.reshape(-1).view(np.uint8)
    arrays = [bytes_of(fragment) for fragment in fragments]
    lengths = np.array([len(array) for array in arrays], np.uint64)
    return lengths, np.concatenate(arrays) if arrays else np.empty(0, np.uint8)


def _checksums(fragments) -> np.ndarray | None:
    """The recorded checksums of fragments, if they are those of a file: a copy of damaged fragments stays damaged."""
    return fragments.checksums if isinstance(fragments, Source) else None


def _event_numbers(events) -> np.ndarray:
    """Event numbers (u64). Raises `TypeError` if one is no integer, and `ValueError` if one is out of range."""
    if not isinstance(events, np.ndarray):
        numbers = [operator.index(event) for event in events]
        for number in numbers:
            if number < 0:
                raise ValueError(f"event number {number} is negative")
            if number >= 1 << 64:
                raise ValueError(f"event number {number} exceeds 64 bits")
        return np.array(numbers, np.uint64)
    if events.dtype.kind not in "iu":
        raise TypeError(f"event numbers are {events.dtype}, not integers")
    if events.dtype.kind == "i" and np.any(events < 0):
        raise ValueError(f"event number {events.min()} is negative")
    return np.ascontiguousarray(events, np.uint64)


def _consecutive(first_event: int, count: int) -> np.ndarray:
    """Event numbers (u64) from the first one on. Raises `ValueError` if one is out of range."""
    first_event = operator.index(first_event)
    if not 0 <= first_event <= (1 << 64) - max(count, 1):
        raise ValueError(f"{count} events from event {first_event}: not all are in 0 to 2**64 - 1")
    return np.uint64(first_event) + np.arange(count, dtype=np.uint64)


def _source_data(data) -> SourceData:
    """Fragments with their events."""
    if isinstance(data, Source):
        return SourceData(data, data.events, data.kind, data.name)
    if not isinstance(data, SourceData):
        return SourceData(data)
    if data.events is None and isinstance(data.fragments, Source):
        return dataclasses.replace(data, events=data.fragments.events)
    return data


def write(
    path: str | os.PathLike,
    sources: Mapping[int, object],
    *,
    first_event: int | None = None,
    n_events: int | None = None,
    alignment: int = 64,
) -> None:
    """Writes a stream file.

    `sources` maps ids to fragments, to :class:`SourceData`, or to a :class:`Source` of an open stream file, which keeps its
    events, kind, name and checksums; a :class:`Stream` is such a mapping. The file has `n_events` events from `first_event`. By default
    these are all events of the stream files of the sources, or from 0, up to the last event of a fragment. The file appears
    under its name when it is complete.
    """
    sources = {source: _source_data(data) for source, data in sorted(sources.items())}
    copied = [data.fragments._file_events for data in sources.values() if isinstance(data.fragments, Source)]
    if first_event is None:
        first_event = min((events.start for events in copied), default=0)
    prepared = []
    for source, data in sources.items():
        lengths, payload = _flat(data.fragments)
        if data.events is None:
            events = _consecutive(first_event, len(lengths))
        else:
            events = _event_numbers(data.events)
        prepared.append((source, data, events, lengths, payload))
    if n_events is None:
        ends = [events.stop for events in copied] + [int(events[-1]) + 1 for _, _, events, _, _ in prepared if len(events)]
        n_events = max(max(ends, default=first_event) - first_event, 0)
    writer = _millstream.StreamWriter(os.fspath(path), first_event, n_events, alignment)
    try:
        for source, data, events, lengths, payload in prepared:
            writer.append(source, data.kind, data.name, events, lengths, payload, _checksums(data.fragments))
        writer.finish()
    finally:
        writer.discard()


@dataclasses.dataclass(frozen=True)
class Packet(Sequence):
    """A multi-fragment packet: the fragments of one source for a batch of consecutive events."""

    source: int
    kind: int
    #: Events of the batch; a fragment may be missing.
    batch: range
    #: Event number of each fragment.
    events: np.ndarray
    #: Offset of each fragment in the packet (bytes).
    offsets: np.ndarray
    #: Length of each fragment (bytes).
    lengths: np.ndarray
    #: The packet.
    data: np.ndarray

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, position: int) -> np.ndarray:
        start = int(self.offsets[position])
        return self.data[start : start + int(self.lengths[position])]


def parse_packet(data) -> Packet:
    """Parses a packet, an array or a bytes-like object, and checks its header and payload."""
    data = bytes_of(data)
    fields = _millstream.parse_packet(data)
    return Packet(
        source=fields["source"],
        kind=fields["kind"],
        batch=range(fields["first_event"], fields["first_event"] + fields["n_events"]),
        events=fields["events"],
        offsets=fields["offsets"],
        lengths=fields["lengths"],
        data=data[: fields["total_len"]],
    )


def build_packet(
    source: int,
    fragments: Iterable | np.ndarray,
    *,
    first_event: int = 0,
    n_events: int | None = None,
    events=None,
    kind: int = 0,
    alignment: int = 64,
) -> np.ndarray:
    """Builds a packet. Without `events`, the fragments have consecutive events from `first_event`."""
    lengths, payload = _flat(fragments)
    if events is None:
        events = _consecutive(first_event, len(lengths))
    else:
        events = _event_numbers(events)
    if n_events is None:
        n_events = int(events[-1]) + 1 - first_event if len(events) else 1
    return _millstream.build_packet(
        source, kind, first_event, n_events, events, lengths, payload, alignment, _checksums(fragments)
    )
