/* Over-relaxation of the Heisenberg spin glass in C, baselines of the spin kernel: an OpenMP loop, and wavefronts.
 * `spin METHOD X Y Z SWEEPS [FILE]` prints the seconds of the sweeps, and a checksum over the bits of all spins. FILE has
 * three components of the spin and three couplings of each site. METHOD is `loop` or `wavefrontN` (N sweeps together). */

#define _GNU_SOURCE
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int X, Y, Z, half;
/* Spins and couplings of even and odd sites: rows of half the sites, one beyond either end. */
static float *spin[2][3], *coupling[2][3];
static int pitch;

static size_t row_at(int y, int z) {
    return ((size_t)z * Y + y) * pitch + 16;
}

/* The update of a row of sites of a parity; x = 2 k + s. */
static void update(int parity, int y, int z) {
    int s = (parity + y + z) & 1, other = 1 - parity;
    size_t here = row_at(y, z), ym = row_at((y + Y - 1) % Y, z), yp = row_at((y + 1) % Y, z);
    size_t zm = row_at(y, (z + Z - 1) % Z), zp = row_at(y, (z + 1) % Z);
    float *restrict ox = spin[parity][0] + here, *restrict oy = spin[parity][1] + here,
                    *restrict oz = spin[parity][2] + here;
    const float *jxp = coupling[parity][0] + here, *jyp = coupling[parity][1] + here, *jzp = coupling[parity][2] + here;
    const float *jxm = coupling[other][0] + here - 1 + s, *jym = coupling[other][1] + ym, *jzm = coupling[other][2] + zm;
    const float *sx = spin[other][0], *sy = spin[other][1], *sz = spin[other][2];
    size_t xm = here - 1 + s, xp = here + s;
#define FIELD(c)                                                                                                       \
    (((jxm[k] * c[xm + k] + jxp[k] * c[xp + k]) + (jym[k] * c[ym + k] + jyp[k] * c[yp + k])) +                          \
     (jzm[k] * c[zm + k] + jzp[k] * c[zp + k]))
#pragma omp simd
    for (int k = 0; k < half; k++) {
        float hx = FIELD(sx), hy = FIELD(sy), hz = FIELD(sz);
        float dot = (ox[k] * hx + oy[k] * hy) + oz[k] * hz;
        float square = (hx * hx + hy * hy) + hz * hz;
        float factor = (dot + dot) / square;
        float nx = factor * hx - ox[k], ny = factor * hy - oy[k], nz = factor * hz - oz[k];
        ox[k] = square == 0 ? ox[k] : nx;
        oy[k] = square == 0 ? oy[k] : ny;
        oz[k] = square == 0 ? oz[k] : nz;
    }
    for (int c = 0; c < 3; c++) {
        float *row = spin[parity][c] + here;
        row[-1] = row[half - 1];
        row[half] = row[0];
    }
}

static void loop(int sweeps) {
    for (int h = 0; h < 2 * sweeps; h++) {
#pragma omp parallel for schedule(static)
        for (int z = 0; z < Z; z++)
            for (int y = 0; y < Y; y++)
                update(h & 1, y, z);
    }
}

/* Half-sweeps follow each other through the planes, two planes apart, so that a step's planes are independent. The planes
 * around z = 0, which need both ends, come after all others. Each thread has its rows. */
static void wavefront(int sweeps, int depth) {
    for (int done = 0; done < sweeps; done += depth) {
        int n = 2 * (sweeps - done < depth ? sweeps - done : depth);
#pragma omp parallel
        {
            int thread = omp_get_thread_num(), threads = omp_get_num_threads();
            int first = (int)((long)Y * thread / threads), last = (int)((long)Y * (thread + 1) / threads);
            for (int seam = 0; seam < 2; seam++) {
                for (int step = 0; step < 2 * Z + 2 * n; step++) {
                    int work = 0;
                    for (int h = 0; h < n; h++) {
                        int z = step - 2 * h;
                        if (seam ? z < Z - h || z >= Z + h : z < h || z >= Z - h)
                            continue;
                        work = 1;
                        for (int y = first; y < last; y++)
                            update(h & 1, y, z % Z);
                    }
                    if (work) {
#pragma omp barrier
                    }
                }
            }
        }
    }
}

static float *memory(size_t count) {
    size_t huge = (size_t)2 << 20, bytes = (count * sizeof(float) + huge - 1) / huge * huge;
    float *values = aligned_alloc(huge, bytes);
    if (!values) {
        perror("aligned_alloc");
        exit(1);
    }
    madvise(values, bytes, MADV_HUGEPAGE);
    memset(values, 0, bytes);
    return values;
}

static uint64_t mix(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return word ^ word >> 31;
}

static void site(int x, int y, int z, const float *values) {
    int parity = (x + y + z) & 1;
    size_t at = row_at(y, z) + x / 2;
    for (int c = 0; c < 3; c++) {
        spin[parity][c][at] = values[c];
        coupling[parity][c][at] = values[3 + c];
    }
}

static void fill(const char *name) {
    FILE *file = name ? fopen(name, "rb") : NULL;
    if (name && !file) {
        perror(name);
        exit(1);
    }
    uint64_t number = 0;
    for (int z = 0; z < Z; z++)
        for (int y = 0; y < Y; y++)
            for (int x = 0; x < X; x++) {
                float values[6];
                for (int c = 0; c < 6; c++)
                    values[c] = (float)(mix(++number) % 2001) / 1000.0f - 1.0f;
                if (file && fread(values, sizeof(float), 6, file) != 6) {
                    fprintf(stderr, "%s: too short\n", name);
                    exit(1);
                }
                site(x, y, z, values);
            }
    for (int parity = 0; parity < 2; parity++)
        for (int c = 0; c < 3; c++)
            for (int z = 0; z < Z; z++)
                for (int y = 0; y < Y; y++)
                    for (int kind = 0; kind < 2; kind++) {
                        float *row = (kind ? coupling : spin)[parity][c] + row_at(y, z);
                        row[-1] = row[half - 1];
                        row[half] = row[0];
                    }
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: spin METHOD X Y Z SWEEPS [FILE]\n");
        return 1;
    }
    X = atoi(argv[2]), Y = atoi(argv[3]), Z = atoi(argv[4]);
    int sweeps = atoi(argv[5]);
    half = X / 2;
    pitch = (16 + half + 1 + 15) / 16 * 16;
    for (int parity = 0; parity < 2; parity++)
        for (int c = 0; c < 3; c++) {
            spin[parity][c] = memory((size_t)pitch * Y * Z);
            coupling[parity][c] = memory((size_t)pitch * Y * Z);
        }
    fill(argc > 6 ? argv[6] : NULL);
    double start = omp_get_wtime();
    if (!strncmp(argv[1], "wavefront", 9))
        wavefront(sweeps, atoi(argv[1] + 9));
    else
        loop(sweeps);
    double seconds = omp_get_wtime() - start;
    uint64_t sum = 0, number = 0;
    for (int z = 0; z < Z; z++)
        for (int y = 0; y < Y; y++)
            for (int x = 0; x < X; x++) {
                uint64_t word = number++;
                for (int c = 0; c < 3; c++) {
                    uint32_t bits;
                    memcpy(&bits, spin[(x + y + z) & 1][c] + row_at(y, z) + x / 2, 4);
                    word = mix(word ^ bits);
                }
                sum += word;
            }
    printf("%.9f %llu\n", seconds, (unsigned long long)sum);
    return 0;
}
