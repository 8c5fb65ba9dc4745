/* Five-point Jacobi sweeps in C, baselines of the stencil kernel: an OpenMP loop, non-temporal stores, wavefronts.
 * Reads lines `METHOD SWEEPS` and answers each with the seconds that the sweeps took. `check METHOD ROWS COLUMNS SWEEPS`
 * answers with a checksum over the bits of a small grid's result. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct {
    int rows, columns;
    float *now, *next;
} grid;

static inline void row(const float *restrict from, float *restrict to, int columns, int first, int last) {
    for (int j = first; j < last; j++)
        to[j] = ((from[j - columns] + from[j + columns]) + (from[j - 1] + from[j + 1])) * 0.25f;
}

static void swap(grid *g) {
    float *now = g->now;
    g->now = g->next;
    g->next = now;
}

static void loop(grid *g, int sweeps) {
    for (int s = 0; s < sweeps; s++) {
#pragma omp parallel for schedule(static)
        for (int i = 1; i < g->rows - 1; i++) {
            size_t at = (size_t)i * g->columns;
            row(g->now + at, g->next + at, g->columns, 1, g->columns - 1);
        }
        swap(g);
    }
}

/* Non-temporal stores: the result leaves the caches before it is read again, so fetching its lines is wasted. */
static void nontemporal(grid *g, int sweeps) {
    for (int s = 0; s < sweeps; s++) {
#pragma omp parallel for schedule(static)
        for (int i = 1; i < g->rows - 1; i++) {
            const float *from = g->now + (size_t)i * g->columns;
            float *to = g->next + (size_t)i * g->columns;
            int columns = g->columns, j = 1;
            for (; j < columns - 1 && (uintptr_t)(to + j) % 32; j++)
                row(from, to, columns, j, j + 1);
            for (; j + 8 <= columns - 1; j += 8) {
                __m256 vertical =
                    _mm256_add_ps(_mm256_loadu_ps(from + j - columns), _mm256_loadu_ps(from + j + columns));
                __m256 horizontal = _mm256_add_ps(_mm256_loadu_ps(from + j - 1), _mm256_loadu_ps(from + j + 1));
                __m256 sum = _mm256_add_ps(vertical, horizontal);
                _mm256_stream_ps(to + j, _mm256_mul_ps(sum, _mm256_set1_ps(0.25f)));
            }
            row(from, to, columns, j, columns - 1);
        }
        _mm_sfence();
        swap(g);
    }
}

/* `depth` sweeps follow each other down the grid, two rows apart, so that a sweep's input is still in the cache.
 * Each thread has its columns; the sweeps of a step are independent. */
static void wavefront(grid *g, int sweeps, int depth) {
    for (int done = 0; done < sweeps; done += depth) {
        int together = sweeps - done < depth ? sweeps - done : depth;
#pragma omp parallel
        {
            int thread = omp_get_thread_num(), threads = omp_get_num_threads();
            int first = 1 + (int)((long)(g->columns - 2) * thread / threads);
            int last = 1 + (int)((long)(g->columns - 2) * (thread + 1) / threads);
            for (int step = 1; step < g->rows - 1 + 2 * (together - 1); step++) {
                for (int t = 0; t < together; t++) {
                    int i = step - 2 * t;
                    if (i < 1 || i >= g->rows - 1)
                        continue;
                    size_t at = (size_t)i * g->columns;
                    const float *from = (t % 2 ? g->next : g->now) + at;
                    float *to = (t % 2 ? g->now : g->next) + at;
                    row(from, to, g->columns, first, last);
                }
#pragma omp barrier
            }
        }
        if (together % 2)
            swap(g);
    }
}

static float *memory(size_t bytes) {
    size_t huge = (size_t)2 << 20;
    float *cells = aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
    if (!cells) {
        perror("aligned_alloc");
        exit(1);
    }
    madvise(cells, bytes, MADV_HUGEPAGE);
    return cells;
}

static grid make(int rows, int columns) {
    size_t cells = (size_t)rows * columns;
    grid g = {rows, columns, memory(cells * sizeof(float)), memory(cells * sizeof(float))};
    for (size_t at = 0; at < cells; at++)
        g.now[at] = g.next[at] = (float)(at * 2654435761u % 1048573) / 1024.0f;
    return g;
}

static void run(const char *method, grid *g, int sweeps) {
    if (!strcmp(method, "loop"))
        loop(g, sweeps);
    else if (!strcmp(method, "nontemporal"))
        nontemporal(g, sweeps);
    else if (!strncmp(method, "wavefront", 9))
        wavefront(g, sweeps, atoi(method + 9));
    else {
        fprintf(stderr, "no method %s\n", method);
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: stencil ROWS COLUMNS\n");
        return 1;
    }
    grid g = make(atoi(argv[1]), atoi(argv[2]));
    char method[32];
    while (scanf("%31s", method) == 1) {
        int rows, columns, sweeps;
        if (!strcmp(method, "check")) {
            if (scanf("%31s %d %d %d", method, &rows, &columns, &sweeps) != 4)
                return 1;
            grid small = make(rows, columns);
            run(method, &small, sweeps);
            uint64_t sum = 0;
            for (size_t at = 0; at < (size_t)rows * columns; at++) {
                uint32_t bits;
                memcpy(&bits, small.now + at, sizeof bits);
                sum += bits * (uint64_t)(2 * at + 1);
            }
            printf("%llu\n", (unsigned long long)sum);
            free(small.now);
            free(small.next);
        } else if (scanf("%d", &sweeps) == 1) {
            double start = omp_get_wtime();
            run(method, &g, sweeps);
            printf("%.9f\n", omp_get_wtime() - start);
        }
        fflush(stdout);
    }
    return 0;
}
