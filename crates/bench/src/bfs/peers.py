"""Breadth-first searches of networkit, igraph and SuiteSparse:GraphBLAS, beside `millstream bench bfs`.

`peers.py EDGES SCALE ROOTS PEER` reads pairs of 32-bit vertex numbers from the file EDGES, builds the graph without self-loops
and duplicates, and prints a line `build SECONDS`, and for each of the comma-separated ROOTS a line `ROOT SECONDS REACHED`.
PEER is `networkit`, `igraph` or `GraphBLAS`. A library that is missing ends the program with status 3.
"""

import sys
import time

import numpy as np


def rows(edges, vertices):
    """Both directions of each distinct edge."""
    low, high = edges.min(axis=1).astype(np.int64), edges.max(axis=1).astype(np.int64)
    keys = np.unique((low << 32 | high)[low != high])
    return keys >> 32, keys & 0xFFFFFFFF


def networkit(edges, vertices):
    import networkit as nk

    nk.setNumberOfThreads(2)
    a, b = rows(edges, vertices)
    start = time.perf_counter()
    graph = nk.GraphFromCoo((a, b), n=vertices, weighted=False, directed=False)
    print("build", time.perf_counter() - start)

    def search(root):
        bfs = nk.distance.BFS(graph, root, True)
        start = time.perf_counter()
        bfs.run()
        seconds = time.perf_counter() - start
        # The distance of a vertex that is not reached is larger than any path.
        return seconds, int((np.asarray(bfs.getDistances()) < vertices).sum())

    return search


def igraph(edges, vertices):
    import igraph as ig

    a, b = rows(edges, vertices)
    pairs = np.column_stack([a, b])
    start = time.perf_counter()
    graph = ig.Graph(n=vertices, edges=pairs)
    print("build", time.perf_counter() - start)

    def search(root):
        start = time.perf_counter()
        order, _, _ = graph.bfs(root)
        return time.perf_counter() - start, len(order)

    return search


def graphblas(edges, vertices):
    import graphblas as gb
    from graphblas import Matrix, Vector, semiring

    gb.ss.config["nthreads"] = 2
    a, b = rows(edges, vertices)
    start = time.perf_counter()
    ends = np.concatenate([a, b]), np.concatenate([b, a])
    graph = Matrix.from_coo(*ends, True, nrows=vertices, ncols=vertices)
    graph.ss.config["format"] = "by_row"
    graph.wait()
    print("build", time.perf_counter() - start)
    # The number of the vertex in the frontier: the parent.
    parent_of = semiring.ss.any_secondi[np.int64]

    def search(root):
        parent = Vector(np.int64, vertices)
        frontier = Vector(np.int64, vertices)
        start = time.perf_counter()
        parent[root] = root
        frontier[root] = root
        while frontier.nvals:
            frontier(~parent.S, replace=True) << frontier.vxm(graph, parent_of)
            parent(frontier.S) << frontier
        return time.perf_counter() - start, parent.nvals

    return search


def main():
    edges, scale = np.fromfile(sys.argv[1], dtype="<u4").reshape(-1, 2), int(sys.argv[2])
    roots = [int(root) for root in sys.argv[3].split(",")]
    peer = {"networkit": networkit, "igraph": igraph, "GraphBLAS": graphblas}[sys.argv[4]]
    try:
        search = peer(edges, 1 << scale)
    except ImportError as error:
        print("missing", error)
        sys.exit(3)
    search(roots[0])
    for root in roots:
        seconds, reached = search(root)
        print(root, seconds, reached, flush=True)


main()
