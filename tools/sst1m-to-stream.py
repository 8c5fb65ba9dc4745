#!/usr/bin/env python3
"""Convert a file of the SST-1M camera into stream files: one per crate, and one with trigger decisions.

The input is the example file of the PyPI package protozfits (pip install -r tools/requirements.txt), or any other file of
the camera (--input); --sha256 checks that it is a certain one. The output, by default in data/sst1m, is *.mfs.gz, pixels.csv and MANIFEST; patches.csv is read from there. docs/formats.md
specifies stream files, data/README.md lists the sources.
"""

import argparse
import csv
import gzip
import hashlib
import io
import math
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import protozfits

INPUT_NAME = "example_SST1M_20180822.fits.fz"

ALIGNMENT = 64

MAX_SPARSENESS = 16  # event numbers per event, without --renumber

CRATES = 3
BOARDS = 9  # per crate
CHANNELS = 48  # pixels per board
SAMPLES = 50  # per pixel and event
TRACE_BYTES = 192  # per crate and sample
DECISION_BYTES = 18  # per crate and sample

KIND_WAVEFORMS, KIND_TRACES, KIND_DECISIONS = 1, 2, 3

PIXEL_PITCH = 24.3  # mm, between neighbours in a row
ROW_PITCH = PIXEL_PITCH * math.sqrt(3) / 2


class Event(NamedTuple):
    number: int
    pixels: np.ndarray  # pixel at each stored position
    waveforms: np.ndarray  # int16 [crate][board][channel][sample]
    traces: np.ndarray  # uint8 [sample][crate][TRACE_BYTES]
    decisions: np.ndarray  # uint8 [sample][crate][DECISION_BYTES]


class Source(NamedTuple):
    id: int
    kind: int
    name: str
    fragments: list  # (event number, payload), ascending


def check_digest(path, expected):
    """End unless the file has this SHA-256."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != expected:
        sys.exit(f"{path}: SHA-256 is {digest}, expected {expected}")


def check_length(path, number, what, values, expected):
    """End unless an array of an event has the camera's length."""
    if len(values) != expected:
        sys.exit(f"{path}: event {number}: {what} has {len(values)} values, the camera's has {expected}")


def read_events(path):
    """Read all events, check their arrays and pixel order, and sort them by number."""
    events = []
    with protozfits.File(str(path)) as file:
        for event in file.Events:
            stored = event.hiGain.waveforms
            number = int(event.eventNumber)
            pixels = CRATES * BOARDS * CHANNELS
            check_length(path, number, "pixelsIndices", stored.pixelsIndices, pixels)
            check_length(path, number, "hiGain.waveforms.samples", stored.samples, pixels * SAMPLES)
            check_length(path, number, "trigger_input_traces", event.trigger_input_traces, SAMPLES * CRATES * TRACE_BYTES)
            decisions = SAMPLES * CRATES * DECISION_BYTES
            check_length(path, number, "trigger_output_patch7", event.trigger_output_patch7, decisions)
            # Copies: the reader reuses its buffers.
            events.append(
                Event(
                    number=number,
                    pixels=stored.pixelsIndices.copy(),
                    waveforms=stored.samples.astype("<i2").reshape(CRATES, BOARDS, CHANNELS, SAMPLES),
                    traces=event.trigger_input_traces.astype("u1").reshape(SAMPLES, CRATES, TRACE_BYTES),
                    decisions=event.trigger_output_patch7.astype("u1").reshape(SAMPLES, CRATES, DECISION_BYTES),
                )
            )
    if not events:
        sys.exit(f"{path}: no events")
    # Event servers write a file in parallel, so its events may be out of order; other files have the missing ones.
    events.sort(key=lambda event: event.number)
    first = events[0]
    for position, event in enumerate(events):
        if position and event.number == events[position - 1].number:
            sys.exit(f"{path}: event {event.number} is there twice")
        if not np.array_equal(event.pixels, first.pixels):
            sys.exit(f"{path}: event {event.number}: pixelsIndices differ from those of event {first.number}")
    return events


def crate_sources(events, crate):
    """The ten sources of a crate: its boards, then its trigger traces. Crates count from 1."""
    sources = [
        Source(
            id=crate << 8 | board,
            kind=KIND_WAVEFORMS,
            name=f"crate{crate} board{board}",
            fragments=[(event.number, event.waveforms[crate - 1, board].tobytes()) for event in events],
        )
        for board in range(BOARDS)
    ]
    traces = Source(
        id=crate << 8 | 0xF,
        kind=KIND_TRACES,
        name=f"crate{crate} traces",
        fragments=[(event.number, event.traces[:, crate - 1].tobytes()) for event in events],
    )
    return sources + [traces]


def decision_source(events):
    """Recorded decisions of the camera's trigger: the reference for trigger kernels, not an input."""
    fragments = [(event.number, event.decisions.tobytes()) for event in events]
    return Source(id=0xF00, kind=KIND_DECISIONS, name="patch7 decisions", fragments=fragments)


def padded(length):
    return -(-length // ALIGNMENT) * ALIGNMENT


def stream_file(sources, first_event, n_events):
    """The bytes of a stream file (docs/formats.md)."""
    header_struct = struct.Struct("<8sHHIIIQQQQQQI")
    header_len = header_struct.size + 4
    payload = bytearray(padded(header_len))
    source_table = bytearray()
    index = bytearray()
    n_fragments = 0
    for source in sources:
        payload_offset = len(payload)
        for event, data in source.fragments:
            index += struct.pack("<QQII", event, len(payload), len(data), zlib.crc32(data))
            payload += data.ljust(padded(len(data)), b"\0")
        source_table += struct.pack(
            "<IIQQQQII16s",
            source.id,
            source.kind,
            len(source.fragments),
            payload_offset,
            len(payload) - payload_offset,
            n_fragments,
            max((len(data) for _, data in source.fragments), default=0),
            0,
            source.name.encode(),
        )
        n_fragments += len(source.fragments)
    tables = bytes(source_table + index)
    header = header_struct.pack(
        b"MSTREAM\0",
        1,
        header_len,
        ALIGNMENT,
        len(sources),
        0,
        n_fragments,
        first_event,
        n_events,
        len(payload),
        len(payload) + len(source_table),
        len(payload) + len(tables),
        zlib.crc32(tables),
    )
    payload[:header_len] = header + struct.pack("<I", zlib.crc32(header))
    return bytes(payload) + tables


def read_patches(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pixel_table(pixels, patches):
    """pixels.csv: pixel and coordinates of each stored position.

    patches.csv gives three pixels per patch and the patch's centre. They touch: pixel_a is below the
    centre, pixel_b above and to the left, pixel_c above and to the right.
    """
    known = {}
    for patch in patches:
        x, y = float(patch["x_mm"]), float(patch["y_mm"])
        for name, dx, dy in (
            ("pixel_a", 0.0, -2 * ROW_PITCH / 3),
            ("pixel_b", -PIXEL_PITCH / 2, ROW_PITCH / 3),
            ("pixel_c", PIXEL_PITCH / 2, ROW_PITCH / 3),
        ):
            known[int(patch[name])] = (int(patch["crate"]), int(patch["patch"]), x + dx, y + dy)
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["crate", "board", "channel", "pixel", "patch", "x_mm", "y_mm"])
    for position, pixel in enumerate(pixels.tolist()):
        board_position, channel = divmod(position, CHANNELS)
        crate, board = board_position // BOARDS + 1, board_position % BOARDS
        patch_crate, patch, x, y = known.pop(pixel)
        if patch_crate != crate:
            sys.exit(f"pixel {pixel} is stored with crate {crate}; its patch {patch} is of crate {patch_crate}")
        rows.writerow([crate, board, channel, pixel, patch, f"{x:.2f}", f"{y:.2f}"])
    if known:
        sys.exit(f"pixels {sorted(known)} have a patch but no data")
    return table.getvalue().encode()


def write(path, data):
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def main():
    package_data = Path(protozfits.__file__).parent / "tests" / "resources" / INPUT_NAME
    data = Path(__file__).resolve().parent.parent / "data" / "sst1m"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--input", type=Path, default=package_data, help="the camera file")
    parser.add_argument("--sha256", help="expected SHA-256 of the camera file")
    parser.add_argument("--patches", type=Path, default=data / "patches.csv", help="table of trigger patches")
    parser.add_argument("--renumber", action="store_true", help="give the events consecutive numbers")
    parser.add_argument("--output", type=Path, default=data, help="folder for the results")
    arguments = parser.parse_args()

    if arguments.sha256:
        check_digest(arguments.input, arguments.sha256)
    events = read_events(arguments.input)
    if arguments.renumber:
        events = [event._replace(number=events[0].number + position) for position, event in enumerate(events)]
    n_events = events[-1].number - events[0].number + 1
    if n_events > MAX_SPARSENESS * len(events):
        sys.exit(f"{arguments.input}: {len(events)} events are spread over {n_events} numbers; use --renumber")
    if n_events != len(events):
        print(f"{n_events - len(events)} of {n_events} events are not in the file", file=sys.stderr)
    files = {f"crate{crate}.mfs": crate_sources(events, crate) for crate in range(1, CRATES + 1)}
    files["decisions.mfs"] = [decision_source(events)]

    arguments.output.mkdir(parents=True, exist_ok=True)
    manifest = ""
    for name, sources in files.items():
        content = stream_file(sources, events[0].number, n_events)
        write(arguments.output / f"{name}.gz", gzip.compress(content, compresslevel=9, mtime=0))
        manifest += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        fragments = sum(len(source.fragments) for source in sources)
        print(f"{name}: {len(sources)} sources, {fragments} fragments, {len(content)} B")
    write(arguments.output / "pixels.csv", pixel_table(events[0].pixels, read_patches(arguments.patches)))
    write(arguments.output / "MANIFEST", manifest.encode())


if __name__ == "__main__":
    main()
