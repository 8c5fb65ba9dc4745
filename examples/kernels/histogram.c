/* Histogram of 16-bit samples.
 *
 * Arguments: 0: offset of the samples, 1: their number, 2: offset of 65536 counters of 32 bits, to which the
 * kernel adds. Results: 0: samples counted, 1: the most frequent value.
 *
 *     clang --target=wasm32 -mbulk-memory -O2 -nostdlib -Wl,--no-entry -Wl,--export=run \
 *         -o histogram.wasm histogram.c
 */
#include "millstream.h"

#define BINS 65536u
#define BLOCK (1u << 20)

void run(void) {
    uint64_t count = millstream_argument(1);
    if (count > UINT32_MAX)
        millstream_refuse(1);
    const uint16_t *samples = millstream_address(millstream_argument(0), 2 * count);
    uint32_t *counters = millstream_address(millstream_argument(2), 4 * BINS);

    /* State: samples counted. */
    uint64_t state[16] = {0};
    millstream_resume(state);
    while (state[0] < count) {
        uint64_t end = count - state[0] < BLOCK ? count : state[0] + BLOCK;
        for (uint64_t at = state[0]; at < end; at++)
            counters[samples[at]]++;
        millstream_traffic(2 * (end - state[0]), 0);
        state[0] = end;
        millstream_progress(end);
        millstream_safe_point(state);
    }

    uint32_t most = 0;
    for (uint32_t value = 1; value < BINS; value++)
        if (counters[value] > counters[most])
            most = value;
    millstream_result(0, count);
    millstream_result(1, most);
}
