"""The model, through the program."""

import pathlib

import pytest
from millstream import ProgramFailed, model

SITES = pathlib.Path(__file__).parents[2] / "sites"


def test_a_flow_is_explained():
    rows = model.explain(SITES / "recipe-baseline.toml", "write client server.u280")
    assert rows


def test_a_benchmark_is_simulated():
    rows = model.measure("ib_write_bw", SITES / "edr-pair.toml", "node0", "node1", sizes=[65536])
    assert rows


def test_a_site_is_checked_and_drawn():
    assert "2 hosts" in model.check_site(SITES / "edr-pair.toml")
    assert model.site_picture(SITES / "edr-pair.toml").startswith("<svg")


def test_a_wrong_flow_is_refused():
    with pytest.raises(ProgramFailed, match="nobody"):
        model.explain(SITES / "edr-pair.toml", "write nobody node1")
