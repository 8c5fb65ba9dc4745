"""Runs of the event builder, and their accepted events."""

import pathlib
import pickle

import numpy as np
import pytest
from millstream import EventBuilder, RunFailed, events, streams
from millstream.program import call

CAMERA = pathlib.Path(__file__).parents[2] / "data" / "sst1m"


def waveforms(seed, samples, n_events=64):
    return np.random.default_rng(seed).integers(0, 4096, (n_events, samples), dtype="<u2")


def test_events_are_built_from_arrays_and_generators():
    run = EventBuilder(batch=8)
    run.readout("crate1", {1: waveforms(1, 500)})
    run.readout("crate2", {2: (row[: 10 + index] for index, row in enumerate(waveforms(2, 300)))})
    run.builder("bu0", memory="64MiB", kernel="verify")
    assert "2 readout units" in run.check()

    report = run.run(timeout=60)
    assert report.success and report.problems == ()
    assert (report.events, report.fragments) == (64, 128)
    assert report.fragment_accounting.fragments_read == 128
    assert sum(outcome.fragments for outcome in report.fragment_accounting.outcomes) == 128
    assert {unit.exit_status for unit in report.units} == {"done"}
    assert "<table>" in report._repr_html_() and "crate2" in report._repr_html_()


def test_built_events_are_stored_without_a_deciding_kernel(tmp_path):
    rows = waveforms(3, 200)
    run = EventBuilder(batch=8).readout("crate1", {1: rows})
    run.builder("bu0", memory="64MiB", kernel="verify").output(tmp_path / "stored", events="built")
    report = run.run(timeout=60)
    assert report.stored_events == 64
    with events.open(*report.event_files) as table:
        assert list(table.numbers) == list(range(64))
        assert "64 events" in table._repr_html_() and "events/fragment_length" in table._repr_html_()
        assert (table["events/fragment_length"] == rows[0].nbytes).all()
        np.testing.assert_array_equal(table.matrix("source_0x1", "<u2"), rows)
        with pytest.raises(KeyError, match="source_0x2"):
            table.matrix("source_0x2")


def test_fragments_of_different_lengths_are_no_matrix(tmp_path):
    rows = [row[: 10 + index] for index, row in enumerate(waveforms(4, 100, n_events=8))]
    run = EventBuilder(batch=4).readout("crate1", {1: rows})
    run.builder("bu0", memory="64MiB", kernel="verify").output(tmp_path / "stored", events="built")
    with events.open(*run.run(timeout=60).event_files) as table:
        with pytest.raises(ValueError, match=r"source 'source_0x1' have 20 to 34 bytes; fragments\(\)"):
            table.matrix("source_0x1")


def test_events_of_an_earlier_run_are_replaced_on_request_only(tmp_path):
    run = EventBuilder(batch=8).readout("crate1", {1: waveforms(3, 200)})
    run.builder("bu0", memory="64MiB").output(tmp_path / "stored", events="built")
    (file,) = run.run(timeout=60).event_files
    before = file.read_bytes()
    with pytest.raises(RunFailed, match="64 events of an earlier run"):
        run.run(timeout=60)
    assert file.read_bytes() == before
    assert run.output(tmp_path / "stored", events="built", replace=True).run(timeout=60).stored_events == 64


def test_settings_of_a_card_need_its_memory():
    with pytest.raises(TypeError, match="bu0: kernel, patches: only of a card"):
        EventBuilder().builder("bu0", kernel="verify", patches="patches.csv")
    with pytest.raises(TypeError, match="bu0: slot: only of a card"):
        EventBuilder().builder("bu0", slot=4)


def test_a_wrong_configuration_is_refused():
    run = EventBuilder(batch=8).readout("crate1", {1: waveforms(1, 10)})
    run.builder("bu0", memory="64MiB", kernel="no-such-kernel")
    with pytest.raises(RunFailed, match="no-such-kernel") as failure:
        run.run()
    assert failure.value.report is None
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    with pytest.raises(TypeError, match=r"\[run\] batch"):
        EventBuilder(batch=[8]).config()


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """Event files of the recorded camera events of the repository, from two builder units."""
    folder = tmp_path_factory.mktemp("camera")
    call("stream", "unpack", CAMERA, folder)
    run = EventBuilder("camera", folder=folder / "run", batch=4)
    for crate in (1, 2, 3):
        run.readout(f"crate{crate}", folder / f"crate{crate}.mfs")
    for builder in ("bu0", "bu1"):
        run.builder(builder, memory="64MiB", kernel="cluster7", patches=CAMERA / "patches.csv")
    report = run.output(folder / "accepted").run(timeout=120)
    return folder, report


def test_accepted_events_are_arrays(accepted):
    folder, report = accepted
    assert len(report.event_files) == 2
    with events.open(*report.event_files) as table:
        assert len(table.numbers) == report.stored_events > 0
        assert list(table.numbers) == sorted(table.numbers)
        assert table.run["name"] == "camera"
        assert table.unit("camera/waveforms") == "ADC count"
        waveforms = table["camera/waveforms"]
        assert waveforms.shape == (report.stored_events, 1296, 50)
        with pytest.raises(KeyError, match="camera/waveforms"):
            table["no/such"]

        # The stored bytes are those of the stream files.
        stream = streams.open(folder / "crate1.mfs")
        boards = [source for source in stream.values() if source.kind == 1]
        for row, number in enumerate(table.numbers):
            recorded = np.concatenate([board.fragment(int(number)) for board in boards]).view("<i2")
            np.testing.assert_array_equal(waveforms[row].reshape(3, -1)[0], recorded)


def test_accepted_events_as_arrow_and_awkward(accepted, tmp_path):
    _, report = accepted
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: Arrow tables are not tested")
    with events.open(*report.event_files) as table:
        arrow = table.to_arrow()
        assert arrow.num_rows == len(table.numbers)
        table.to_parquet(tmp_path / "accepted.parquet")
        import pyarrow.parquet

        back = pyarrow.parquet.read_table(tmp_path / "accepted.parquet")
        assert back["events_number"].to_pylist() == list(table.numbers)
        assert back["camera_waveforms"][0].as_py() == table["camera/waveforms"][0].tolist()
    pytest.importorskip("awkward", reason="awkward is not installed: Awkward arrays are not tested")
    with events.open(*report.event_files) as table:
        assert len(table.to_awkward()) == len(table.numbers)


def test_another_file_is_refused(tmp_path):
    import h5py

    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs["format"] = "something else"
    with pytest.raises(events.FormatError, match="other.h5: attribute format"):
        events.open(tmp_path / "other.h5")
    with pytest.raises(FileNotFoundError):
        events.open(tmp_path / "missing.h5")


def test_files_of_a_card_are_those_of_this_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = EventBuilder(batch=np.int64(8)).builder("bu0", memory="64MiB", kernel="wasm", module="decide.wasm")
    assert f'module = "{tmp_path}/decide.wasm"' in run.config()
    assert "batch = 8" in run.config()
