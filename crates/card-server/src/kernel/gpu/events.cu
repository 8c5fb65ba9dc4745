// Kernels of a GPU for the packets of a batch of events: checksums of fragments, and the camera's trigger.
//
// `make gpu-kernels` compiles this file to events.ptx (clang; no CUDA toolkit). The driver of the GPU compiles the PTX when a
// card loads it.
//
// The card has checked all offsets. A network may still write to the packets, so every byte is used as found.

#include "gpu.h"

// A fragment in card memory.
struct Fragment {
    u64 offset;
    u32 length;
    u32 unused;
};

// The traces of an event: offsets in card memory, by crate, and the numbers of their fragments, ~0 without a checksum.
struct Event {
    u64 traces[3];
    u32 fragments[3];
    u32 is_decided;
};

// The decisions of an event.
struct Result {
    u32 bits_set;
    // Sample * 432 + position of the first bit set; ~0 without one.
    u32 first;
};

enum { CHUNK = 256, SAMPLES = 50, PATCHES = 432, PATCHES_PER_CRATE = 144, TRACE_STRIDE = 192, ROW = 8, INPUTS = 7 };
enum { SAMPLE_BYTES = PATCHES / 8, EVENT_BYTES = SAMPLES * SAMPLE_BYTES };

// CRC-32 (IEEE 802.3), bits reversed.
static const u32 POLYNOMIAL = 0xedb88320u;

// Product of two polynomials modulo that of the checksum, bits reversed.
DEVICE u32 product(u32 a, u32 b) {
    u32 sum = 0;
    for (u32 bit = 0; bit < 32; bit++) {
        sum ^= b & (0u - (a >> 31));
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return sum;
}

// The checksum's register after `bytes` further zero bytes.
DEVICE u32 shifted(u32 value, u64 bytes) {
    u32 power = 1u << 23; // x to the 8th
    for (; bytes != 0; bytes >>= 1) {
        if (bytes & 1) value = product(power, value);
        power = product(power, power);
    }
    return value;
}

DEVICE u32 checksum_step(u32 value, u32 bits) {
    for (u32 bit = 0; bit < bits; bit++) value = (value >> 1) ^ (POLYNOMIAL & (0u - (value & 1)));
    return value;
}

// The checksum's register after `length` bytes.
DEVICE u32 checksum(u32 value, const u8 *bytes, u64 length) {
    while (length != 0 && (reinterpret_cast<u64>(bytes) & 3)) {
        value = checksum_step(value ^ *bytes++, 8);
        length--;
    }
    for (; length >= 4; length -= 4, bytes += 4) value = checksum_step(value ^ *reinterpret_cast<const u32 *>(bytes), 32);
    while (length-- != 0) value = checksum_step(value ^ *bytes++, 8);
    return value;
}

// Adds the checksum of each fragment to a word that is zero before. A block takes fragments, its threads take chunks of them;
// the checksum of a chunk, shifted by the bytes behind it, is a term of the sum.
KERNEL void fragment_checksums(const u8 *memory, const Fragment *fragments, u64 count, u32 *checksums) {
    for (u64 number = BLOCK; number < count; number += BLOCKS) {
        const u8 *payload = memory + fragments[number].offset;
        u64 length = fragments[number].length;
        u64 chunks = (length + CHUNK - 1) / CHUNK;
        // The first register and the result are complemented. An empty fragment has the checksum zero.
        for (u64 chunk = THREAD; chunk < chunks; chunk += THREADS) {
            u64 start = chunk * CHUNK;
            u64 size = length - start < u64(CHUNK) ? length - start : u64(CHUNK);
            u32 value = checksum(chunk == 0 ? ~0u : 0, payload + start, size);
            value = shifted(value, length - start - size);
            atomic_xor(&checksums[number], chunk == 0 ? ~value : value);
        }
    }
}

// Decision maps of events: a bit for each sample and position whose cluster exceeds the threshold. A thread makes a byte of a
// map. `expected` and `found` are the checksums of fragments.
KERNEL void cluster7(const u8 *memory, const short *geometry, const Event *events, u64 count, u64 threshold,
                     const u32 *expected, const u32 *found, u8 *maps, Result *results) {
    u64 step = static_cast<u64>(BLOCKS) * THREADS;
    for (u64 at = static_cast<u64>(BLOCK) * THREADS + THREAD; at < count * EVENT_BYTES; at += step) {
        u64 number = at / EVENT_BYTES;
        u32 sample = static_cast<u32>(at % EVENT_BYTES) / SAMPLE_BYTES;
        u32 byte = static_cast<u32>(at % SAMPLE_BYTES);
        const Event *event = &events[number];
        u32 is_decided = event->is_decided;
        for (u32 crate = 0; crate < 3; crate++) {
            u32 fragment = event->fragments[crate];
            if (fragment != ~0u && expected[fragment] != found[fragment]) is_decided = 0;
        }
        u32 bits = 0;
        for (u32 bit = 0; is_decided && bit < 8; bit++) {
            const short *row = geometry + (byte * 8 + bit) * ROW;
            u32 sum = 0;
            for (u32 input = 0; input < INPUTS; input++) {
                int trace = row[input];
                if (trace < 0) continue;
                u64 crate = event->traces[trace / PATCHES_PER_CRATE];
                sum += memory[crate + sample * TRACE_STRIDE + trace % PATCHES_PER_CRATE];
            }
            if (sum > threshold) bits |= 1u << bit;
        }
        maps[at] = static_cast<u8>(bits);
        if (bits != 0) {
            u32 set = 0;
            for (u32 left = bits; left != 0; left &= left - 1) set++;
            u32 first = 0;
            while (!(bits >> first & 1)) first++;
            atomic_add(&results[number].bits_set, set);
            atomic_min(&results[number].first, sample * PATCHES + byte * 8 + first);
        }
    }
}
