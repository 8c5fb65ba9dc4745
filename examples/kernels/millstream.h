/* Imports of a kernel from its region (docs/kernels.md). Put this file beside your kernel. */
#ifndef MILLSTREAM_H
#define MILLSTREAM_H

#include <stdint.h>

#define MILLSTREAM(name) __attribute__((import_module("millstream_1"), import_name(#name)))

/* Argument word `index`, 0 to 15. */
MILLSTREAM(argument) uint64_t millstream_argument(uint32_t index);

/* Address of a range of card memory. Ends the run unless the whole range is in granted banks. */
MILLSTREAM(address) void *millstream_address(uint64_t offset, uint64_t bytes);

/* One source's part of an event: an entry of the table that `event` gets. */
struct millstream_fragment {
    uint32_t source; /* id of the source */
    uint32_t kind;   /* kind of its payload */
    uint32_t status; /* zero: there and intact; bits: 1 missing, 2 bad packet, 4 corrupt */
    uint32_t address, len;
    uint32_t crc; /* CRC-32 that the payload should have */
};

/* The payload of a fragment that is not missing. */
static inline const void *millstream_payload(const struct millstream_fragment *fragment) {
    return (const void *)(uintptr_t)fragment->address;
}

/* Sets result word `index`, 0 to 15. */
MILLSTREAM(result) void millstream_result(uint32_t index, uint64_t value);

/* Publishes the progress of the run, in units of the kernel. */
MILLSTREAM(progress) void millstream_progress(uint64_t done);

/* Counts bytes read and written, for the card's performance counters. */
MILLSTREAM(traffic) void millstream_traffic(uint64_t read, uint64_t written);

/* A safe point, at which the run may be stopped or paused. With the banks, `state` must suffice to resume from
 * here. Reach one at least every 100 ms. */
MILLSTREAM(safe_point) void millstream_safe_point(const uint64_t state[16]);

/* 1 and the state words if this run resumes another one, else 0. */
MILLSTREAM(resume) uint32_t millstream_resume(uint64_t state[16]);

/* Ends the run because of this argument. */
MILLSTREAM(refuse) _Noreturn void millstream_refuse(uint32_t argument);

#endif
