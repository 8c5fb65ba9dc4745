"""The model, through the program."""

import pathlib
import pickle

import pytest
from millstream import ProgramFailed, Site, model

SITES = pathlib.Path(__file__).parents[2] / "sites"


def test_a_flow_is_explained():
    table = model.explain(SITES / "recipe-baseline.toml", "write client server.u280", samples=100)
    (row,) = table
    assert row["low [GB/s]"] <= row["bandwidth [GB/s]"] <= row["high [GB/s]"]
    page = table._repr_html_()
    assert page.startswith("<table><caption>write client server.u280") and row["bottleneck"] in page
    assert table.column("bottleneck") == [row["bottleneck"]]
    with pytest.raises(KeyError, match="bandwith.*bandwidth"):
        table.column("bandwith")


def test_settings_with_several_values_make_a_row_each():
    lanes = "host.client.adapter.hca.pcie.lanes"
    table = model.explain(SITES / "recipe-baseline.toml", "write client server", {lanes: [8, 16]})
    assert table.column(lanes) == ["8", "16"]
    narrow, wide = table.column("bandwidth [GB/s]")
    assert narrow < wide


def test_a_benchmark_is_simulated():
    (row,) = Site(SITES / "edr-pair.toml").measure("ib_write_bw", "node0", "node1", sizes=[65536])
    assert row["bytes"] == 65536 and row["BW average [Gb/s]"] < 100


def test_flows_share_a_link():
    table = Site(SITES / "edr-pair.toml").flows("write node0 node1", "write node0 node1 65536", samples=100)
    total = sum(row["together [GB/s]"] for row in table)
    assert total < 1.01 * max(row["alone [GB/s]"] for row in table)
    assert all(row["together, low"] <= row["together [GB/s]"] <= row["together, high"] for row in table)


def test_questions_are_answered_with_numbers(tmp_path):
    questions = tmp_path / "questions.csv"
    questions.write_text("id,system,quantity,unit\nC01,Cilardo2021,bandwidth,GB/s\nZZ99,nobody,nothing,GB/s\n")
    known, unknown = model.predict(questions)
    assert known["low"] <= known["value"] <= known["high"]
    assert unknown["value"] is None and unknown["how"]


def test_a_site_is_checked_and_drawn():
    assert "2 hosts" in model.check_site(SITES / "edr-pair.toml")
    assert model.site_picture(SITES / "edr-pair.toml").startswith("<svg")
    assert "2 hosts" in repr(Site(SITES / "edr-pair.toml"))
    assert Site(SITES / "edr-pair.toml")._repr_svg_().startswith("<svg")
    with pytest.raises(ProgramFailed, match="nowhere.toml"):
        Site(SITES / "nowhere.toml")


def test_a_wrong_flow_is_refused():
    with pytest.raises(ProgramFailed, match="nobody"):
        model.explain(SITES / "edr-pair.toml", "write nobody node1")


def test_a_failure_goes_through_processes():
    failed = ProgramFailed(["millstream", "model"], 1, "no such flow\n")
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), copy.command, copy.code) == (str(failed), failed.command, 1)
