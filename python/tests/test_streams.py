"""Stream files and packets."""

import shutil

import numpy as np
import pytest
from millstream import FormatError, streams


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crate.mfs"


def test_an_array_is_read_back_without_a_copy(path):
    data = np.arange(10 * 100, dtype="<i2").reshape(10, 100)
    streams.write(path, {7: streams.SourceData(data, kind=2, name="crate 7")}, first_event=1000)

    stream = streams.open(path)
    assert list(stream) == [7]
    assert stream.events == range(1000, 1010)
    source = stream[7]
    assert (source.kind, source.name, len(source), source.max_len) == (2, "crate 7", 10, 200)
    matrix = source.matrix("<i2")
    np.testing.assert_array_equal(matrix, data)
    assert np.shares_memory(matrix, source[3])
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 1
    with pytest.raises(ValueError):
        matrix.setflags(write=True)
    stream.verify()


def test_an_array_outlives_its_stream(path):
    streams.write(path, {1: np.full((3, 8), 5, np.uint8)})
    matrix = streams.open(path)[1].matrix()
    path.unlink()
    assert matrix.sum() == 3 * 8 * 5


def test_fragments_of_any_length_and_missing_events(path):
    fragments = [b"a", b"", np.arange(3, dtype="<u4"), memoryview(b"four")]
    streams.write(path, {1: streams.SourceData(fragments, events=[0, 2, 3, 9]), 2: []}, n_events=12)
    stream = streams.open(path)
    assert stream.events == range(12)
    assert [bytes(fragment) for fragment in stream[1]] == [b"a", b"", np.arange(3, dtype="<u4").tobytes(), b"four"]
    assert bytes(stream[1].fragment(9)) == b"four"
    with pytest.raises(KeyError, match="event 5"):
        stream[1].fragment(5)
    with pytest.raises(ValueError, match="0 to 12 bytes"):
        stream[1].matrix()
    assert len(stream[2]) == 0 and stream[2].matrix().shape == (0, 0)


def test_sources_of_a_stream_keep_their_events(path, tmp_path):
    first = streams.SourceData([b"a", b"bc"], events=[1001, 1004], kind=3, name="first")
    streams.write(path, {1: first, 2: np.zeros((2, 4), np.uint8)}, first_event=1000, n_events=8)
    stream, copy = streams.open(path), tmp_path / "copy.mfs"
    streams.write(copy, stream)
    assert copy.read_bytes() == path.read_bytes()

    streams.write(copy, {5: stream[1], 6: streams.SourceData(stream[2], name="second"), 7: [b"new"]})
    copied = streams.open(copy)
    assert copied.events == range(1000, 1008)
    assert (copied[5].kind, copied[5].name, copied[6].name) == (3, "first", "second")
    assert [list(copied[source].events) for source in copied] == [[1001, 1004], [1000, 1001], [1000]]
    assert [bytes(fragment) for fragment in copied[5]] == [b"a", b"bc"]


def test_event_numbers_are_integers(path):
    for events, error in [([0.0, 1.0], TypeError), (np.array([0.5, 1.5]), TypeError), (np.array([-1, 2]), ValueError)]:
        with pytest.raises(error):
            streams.write(path, {1: streams.SourceData([b"a", b"b"], events=events)}, n_events=10)
        with pytest.raises(error):
            streams.build_packet(1, [b"a", b"b"], events=events)
    assert not path.exists()
    last = 2**64 - 2
    streams.write(path, {1: streams.SourceData([b"a"], events=[last])}, first_event=last, n_events=1)
    assert list(streams.open(path)[1].events) == [last]


def test_numbers_out_of_range_are_value_errors(path):
    one = np.zeros((1, 4), np.uint8)
    for options in [
        {"sources": {1: streams.SourceData(one, events=[-1])}},
        {"sources": {1: streams.SourceData(one, events=[2**64])}},
        {"sources": {1: streams.SourceData(one, kind=-1)}},
        {"sources": {2**32: one}},
        {"sources": {-1: one}},
        {"sources": {1: one}, "first_event": -1},
        {"sources": {1: one}, "first_event": 2**64},
        {"sources": {1: one}, "n_events": -1},
        {"sources": {1: one}, "alignment": -64},
        {"sources": {1: one}, "alignment": 2**32},
    ]:
        with pytest.raises(ValueError):
            streams.write(path, **options)
        assert not path.exists()
    streams.write(path, {1: one}, first_event=2**64 - 2)
    with pytest.raises(KeyError):
        streams.open(path)[1].fragment(-1)
    for options in [
        {"source": 2**32},
        {"source": -1},
        {"kind": 2**32},
        {"first_event": -1},
        {"n_events": -1},
        {"n_events": 2**32},
        {"events": [-1]},
        {"alignment": -1},
    ]:
        with pytest.raises(ValueError):
            streams.build_packet(**{"source": 1, "fragments": one, **options})


def test_refused_input_leaves_no_file(path):
    with pytest.raises(ValueError, match="events must ascend"):
        streams.write(path, {1: streams.SourceData([b"a", b"b"], events=[3, 3])}, n_events=10)
    with pytest.raises(ValueError, match="at least one event"):
        streams.write(path, {1: []})
    with pytest.raises(ValueError, match="power of two"):
        streams.write(path, {1: [b"a"]}, alignment=3)
    with pytest.raises(ValueError, match="one row per event"):
        streams.write(path, {1: np.zeros(4)})
    assert list(path.parent.iterdir()) == []


def test_a_damaged_file_is_refused_by_offset_and_field(path, tmp_path):
    streams.write(path, {1: np.ones((4, 100), np.uint8)})
    damaged = tmp_path / "damaged.mfs"
    shutil.copy(path, damaged)
    with open(damaged, "r+b") as file:
        file.seek(200)
        file.write(b"\xff")
    with pytest.raises(FormatError, match="damaged.mfs: byte 128: payload of fragment 0 .*CRC-32"):
        streams.open(damaged).verify()
    # Copies show the damage.
    copy = tmp_path / "copy.mfs"
    streams.write(copy, streams.open(damaged))
    with pytest.raises(FormatError, match="copy.mfs: byte 128: payload of fragment 0 .*CRC-32"):
        streams.open(copy).verify()
    with pytest.raises(FormatError, match="event 0: payload does not match"):
        streams.parse_packet(streams.build_packet(1, streams.open(damaged)[1]))
    with open(damaged, "r+b") as file:
        file.write(b"?")
    with pytest.raises(FormatError, match="byte 0: magic"):
        streams.open(damaged)
    with pytest.raises(FileNotFoundError, match="missing.mfs"):
        streams.open(tmp_path / "missing.mfs")


def test_a_packet_is_parsed_back():
    packet = streams.build_packet(3, [b"one", b"", b"three"], first_event=100, n_events=8, events=[100, 104, 107])
    parsed = streams.parse_packet(packet)
    assert (parsed.source, parsed.batch) == (3, range(100, 108))
    assert list(parsed.events) == [100, 104, 107]
    assert [bytes(fragment) for fragment in parsed] == [b"one", b"", b"three"]
    assert np.shares_memory(parsed[2], packet)

    packet[int(parsed.offsets[2])] ^= 1
    with pytest.raises(FormatError, match="event 107"):
        streams.parse_packet(packet)
    with pytest.raises(FormatError, match="needs"):
        streams.parse_packet(packet[:20])
    with pytest.raises(ValueError, match="n_events"):
        streams.build_packet(3, [b"x"], n_events=0)
