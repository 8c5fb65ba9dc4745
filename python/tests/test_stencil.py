"""Sweeps over NumPy arrays on emulated cards."""

import numpy as np
import pytest
from millstream import ProgramFailed, stencil


def sweep(grid):
    """One sweep: each inner point becomes a quarter of the sum of its four neighbours."""
    after = grid.copy()
    after[1:-1, 1:-1] = 0.25 * (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:])
    return after


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_cards_compute_what_numpy_computes(dtype):
    grid = np.random.default_rng(1).random((96, 64)).astype(dtype)
    result = stencil.jacobi(grid, 5, local=2, verify=True, timeout=120)
    expected = grid
    for _ in range(5):
        expected = sweep(expected)
    assert result.grid.dtype == grid.dtype and result.grid.shape == grid.shape
    np.testing.assert_allclose(result.grid, expected, rtol=1e-5 if dtype == "f4" else 1e-13)
    assert result.report["losses"] == [] and sum(result.report["rows"]) == 96
    assert "96×64" in result._repr_html_()


def test_a_grid_of_integers_is_refused():
    with pytest.raises(ValueError, match="int64"):
        stencil.jacobi(np.zeros((8, 8), np.int64))


def test_unknown_cards_are_named():
    with pytest.raises(ProgramFailed, match="127.0.0.1:1"):
        stencil.jacobi(np.zeros((8, 8)), 1, cards=["127.0.0.1:1"], timeout=60)
    with pytest.raises(ProgramFailed, match="127.0.0.1:1"):
        stencil.jacobi(np.zeros((8, 8)), 1, cards="127.0.0.1:1", timeout=60)
