"""Compares an event file with the stream files that its fragments came from, byte by byte.

usage: compare.py [--some BATCH] EVENTS.h5 REPLAY STREAM.mfs...

The file must hold all events of all passes in order; with --some, any subset, built in batches of BATCH.

Shares no code with the writer: it reads stream files as in docs/formats.md, and the event file with h5py as in
docs/output.md. Fragments of kind 1 and 2 are a camera's, of kind 3 its trigger decisions. All others are stored
as bytes.
"""

import struct
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np


def read_stream(path):
    """Sources of a stream file: {id: (kind, name, {event: payload})}, and its events."""
    data = Path(path).read_bytes()
    assert data[:8] == b"MSTREAM\0", path
    n_sources, = struct.unpack_from("<I", data, 16)
    first, count, sources_at, index_at = struct.unpack_from("<4Q", data, 32)
    sources = {}
    for k in range(n_sources):
        source, kind, n, _, _, first_fragment = struct.unpack_from("<2I4Q", data, sources_at + 64 * k)
        name = data[sources_at + 64 * k + 48 : sources_at + 64 * k + 64].rstrip(b"\0").decode()
        fragments = {}
        for i in range(first_fragment, first_fragment + n):
            event, offset, length, crc = struct.unpack_from("<2Q2I", data, index_at + 24 * i)
            fragments[event] = data[offset : offset + length]
            assert zlib.crc32(fragments[event]) == crc, (path, source, event)
        sources[source] = (kind, name, fragments)
    return sources, range(first, first + count)


def equal(what, found, expected):
    assert np.array_equal(found, expected), f"{what}: {found!r}, expected {expected!r}"


def compare_camera(file, boards, crates, decisions, originals):
    """Waveforms and traces in stored order; the decisions and the values derived from them."""
    compared = 0
    waveforms = file["camera/waveforms"]
    equal("shape", waveforms.shape, (len(originals), 48 * len(boards), 50))
    assert waveforms.dtype == np.int16
    traces = file["camera/trigger_traces"]
    equal("shape", traces.shape, (len(originals), len(crates), 50, 192))
    assert traces.dtype == np.uint8
    for row, event in enumerate(originals):
        expected = b"".join(boards[source][event] for source in sorted(boards))
        assert waveforms[row].astype("<i2").tobytes() == expected, f"waveforms of row {row}"
        compared += len(expected)
        expected = b"".join(crates[source][event] for source in sorted(crates))
        assert traces[row].tobytes() == expected, f"traces of row {row}"
        compared += len(expected)

    maps = file["trigger/decisions"][:]
    equal("shape", maps.shape, (len(originals), 50, 3, 18))
    patch_of_bit = file["trigger/patch_of_bit"][:]
    assert sorted(patch_of_bit) == list(range(432))
    for row, event in enumerate(originals):
        assert maps[row].tobytes() == decisions[event], f"decisions of row {row}"
        bits = np.unpackbits(np.frombuffer(decisions[event], np.uint8), bitorder="little").reshape(50, 432)
        equal("bits_set", file["trigger/bits_set"][row], bits.sum())
        samples, places = np.nonzero(bits)
        first = (samples[0], places[0], patch_of_bit[places[0]]) if len(samples) else (-1, -1, -1)
        equal("first_sample", file["trigger/first_sample"][row], first[0])
        equal("first_bit", file["trigger/first_bit"][row], first[1])
        equal("first_patch", file["trigger/first_patch"][row], first[2])

    assert sorted(file["camera/pixel_id"][:]) == list(range(48 * len(boards)))
    assert file["camera/pixel_x"].attrs["unit"] == file["camera/pixel_y"].attrs["unit"] == "mm"
    return compared


def compare_bytes(file, name, fragments, originals):
    group = file[f"fragments/{name}"]
    data = group["data"][:].tobytes()
    end = 0
    for row, event in enumerate(originals):
        payload = fragments.get(event, b"")
        equal("offset", group["offset"][row], end)
        equal("length", group["length"][row], len(payload))
        assert data[end : end + len(payload)] == payload, f"{name}: row {row}"
        end += len(payload)
    equal(f"bytes of {name}", len(data), end)
    return end


def compare(file, replay, streams, batch=None):
    sources, events = {}, None
    for path in streams:
        more, events = read_stream(path)
        sources |= more
    decided = [fragments for kind, _, fragments in sources.values() if kind == 3]
    sources = {source: found for source, found in sources.items() if found[0] != 3}
    ids = sorted(sources)
    originals = list(events) * replay
    numbers = events.start + np.arange(len(originals), dtype=np.uint64)
    batches = numbers // 8
    if batch:
        some = file["events/number"][:]
        assert len(set(some)) == len(some) and set(some) <= set(numbers), some
        originals = [originals[int(number) - events.start] for number in some]
        numbers, batches = some, (some - np.uint64(events.start)) // np.uint64(batch)

    assert file.attrs["format"] == "millstream events" and file.attrs["version"] == 1
    run = file["run"].attrs
    assert run["name"] and run["software"].startswith("millstream ") and run["replay"] == replay
    equal("inputs", len(file["run/inputs/name"]), len(file["run/inputs/bytes"]))
    for name, length, checksum in zip(*(file[f"run/inputs/{k}"] for k in ("name", "bytes", "checksum"))):
        path, = (path for path in streams if Path(path).name == name.decode())
        data = Path(path).read_bytes()
        assert (length, checksum.decode()) == (len(data), f"crc32:{zlib.crc32(data):08x}"), path

    equal("numbers", file["events/number"], numbers)
    equal("batches", file["events/batch"], batches)
    equal("ids", file["sources/id"], ids)
    equal("kinds", file["sources/kind"], [sources[source][0] for source in ids])
    equal("names", file["sources/name"].asstr()[:], [sources[source][1] for source in ids])

    lacking = 0
    for column, source in enumerate(ids):
        payloads = [sources[source][2].get(event) for event in originals]
        present = np.array([payload is not None for payload in payloads], dtype=bool)
        lacking |= ~present
        equal("state", file["events/fragment_state"][:, column], present.astype(np.uint8))
        equal("length", file["events/fragment_length"][:, column], [len(payload or b"") for payload in payloads])
        equal("crc", file["events/fragment_crc32"][:, column], [zlib.crc32(payload or b"") for payload in payloads])
    equal("status", file["events/status"], np.asarray(lacking, np.uint8))

    of_kind = lambda kind: {source: sources[source][2] for source in ids if sources[source][0] == kind}
    compared = 0
    if decided:
        compared += compare_camera(file, of_kind(1), of_kind(2), decided[0], originals)
    for kind, name, fragments in sources.values():
        if kind not in (1, 2):
            compared += compare_bytes(file, name, fragments, originals)
    equal("payload compared", compared, file["events/fragment_length"][:].sum())

    def described(name, item):
        if isinstance(item, h5py.Dataset):
            equal(f"dimensions of {name}", len(item.attrs["dimensions"]), item.ndim)
            assert item.attrs["description"] and "unit" in item.attrs, name

    file.visititems(described)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    some = int(arguments[1]) if arguments[0] == "--some" else None
    path, replay, *streams = arguments[2:] if some else arguments
    with h5py.File(path, "r") as file:
        compare(file, int(replay), streams, some)
