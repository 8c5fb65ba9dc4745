// A function for events on a GPU: accepts an event if a sample of any of its fragments reaches a threshold.
//
// The payload is 16-bit samples, little-endian. Arguments of the configuration: the threshold. An event that lacks a fragment, or
// has a corrupt one, is rejected. docs/kernels.md explains the parameters. `make gpu-kernels` compiles it with clang; nvcc does so:
//
//     nvcc -ptx -I crates/card-server/src/kernel/gpu examples/kernels/decide_events.cu

#include "gpu.h"

struct EventRow {
    u64 offset;
    u32 length;
    u32 source;
    u32 kind;
    u32 status;
};

KERNEL void decide_events(const u8 *memory, const EventRow *rows, u64 sources, u64 events, u64 first_event,
                          const u64 *arguments, u32 *decisions) {
    (void)first_event;
    // A block takes events, its threads take samples.
    for (u64 event = BLOCK; event < events; event += BLOCKS) {
        const EventRow *row = rows + event * sources;
        bool is_whole = true;
        for (u64 source = 0; source < sources; source++) is_whole = is_whole && row[source].status == 0;
        for (u64 source = 0; is_whole && source < sources; source++) {
            const u16 *samples = (const u16 *)(memory + row[source].offset);
            for (u64 at = THREAD; at < row[source].length / 2; at += THREADS)
                if (samples[at] >= arguments[0]) atomic_or(&decisions[event], 1);
        }
    }
}
