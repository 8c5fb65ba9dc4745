/* What a kernel can ask of its region; docs/kernels.md says more. Put this file beside your kernel. */
#ifndef MILLSTREAM_H
#define MILLSTREAM_H

#include <stdint.h>

#define MILLSTREAM(name) __attribute__((import_module("millstream_1"), import_name(#name)))

/* Argument word `index`, 0 to 15. */
MILLSTREAM(argument) uint64_t millstream_argument(uint32_t index);

/* Where a range of card memory is. Ends the run if it is not all in banks that the run was given. */
MILLSTREAM(address) void *millstream_address(uint64_t offset, uint64_t bytes);

/* Sets result word `index`, 0 to 15. */
MILLSTREAM(result) void millstream_result(uint32_t index, uint64_t value);

/* Shows how far the run has come, in your own measure. */
MILLSTREAM(progress) void millstream_progress(uint64_t done);

/* Counts bytes read and written, for the card's performance counters. */
MILLSTREAM(traffic) void millstream_traffic(uint64_t read, uint64_t written);

/* A place where the run may be stopped or held; with the banks, these words must suffice to go on from here.
 * Reach one at least every 100 ms. */
MILLSTREAM(safe_point) void millstream_safe_point(const uint64_t state[16]);

/* Whether the run is to continue another one; if so, the words of its latest safe point. */
MILLSTREAM(resume) uint32_t millstream_resume(uint64_t state[16]);

/* Ends the run because of this argument. */
MILLSTREAM(refuse) _Noreturn void millstream_refuse(uint32_t argument);

#endif
