"""Five-point Jacobi sweeps in numpy and numba, baselines of the stencil kernel.

Reads lines `METHOD SWEEPS` and answers each with the seconds that the sweeps took. `check METHOD ROWS COLUMNS SWEEPS`
answers with a checksum over the bits of a small grid's result.
"""

import sys
import time

try:
    import numpy as np
except ImportError:
    # No method.
    print(flush=True)
    sys.exit()


def make(rows, columns):
    at = np.arange(rows * columns, dtype=np.uint64)
    # As in the C program: a 32-bit factor times a 64-bit index.
    cells = ((at * np.uint64(2654435761)) % np.uint64(1048573)).astype(np.float32) / np.float32(1024)
    cells = cells.reshape(rows, columns)
    return [cells, cells.copy()]


def by_numpy(grid, sweeps):
    quarter = np.float32(0.25)
    for _ in range(sweeps):
        a, b = grid
        b[1:-1, 1:-1] = quarter * ((a[:-2, 1:-1] + a[2:, 1:-1]) + (a[1:-1, :-2] + a[1:-1, 2:]))
        grid.reverse()


def numba_sweep():
    import numba

    @numba.njit(parallel=True, fastmath=False)
    def sweep(a, b):
        quarter = np.float32(0.25)
        for i in numba.prange(1, a.shape[0] - 1):
            for j in range(1, a.shape[1] - 1):
                b[i, j] = quarter * ((a[i - 1, j] + a[i + 1, j]) + (a[i, j - 1] + a[i, j + 1]))

    small = make(8, 8)
    sweep(small[0], small[1])

    def run(grid, sweeps):
        for _ in range(sweeps):
            sweep(grid[0], grid[1])
            grid.reverse()

    return run


def main():
    methods = {"numpy": by_numpy}
    try:
        methods["numba"] = numba_sweep()
    except ImportError:
        pass
    grid = make(int(sys.argv[1]), int(sys.argv[2]))
    print(" ".join(methods), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "check":
            small = make(int(words[2]), int(words[3]))
            methods[words[1]](small, int(words[4]))
            bits = small[0].view(np.uint32).ravel().astype(np.uint64)
            places = np.arange(bits.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
            print(int((bits * places).sum(dtype=np.uint64)), flush=True)
        else:
            start = time.perf_counter()
            methods[words[0]](grid, int(words[1]))
            print(time.perf_counter() - start, flush=True)


main()
