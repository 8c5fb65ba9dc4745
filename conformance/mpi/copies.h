/*
 * Counts the bytes of a range of memory that libraries of this process copy with memcpy or memmove, by library.
 *
 * copies.c defines these functions; the dynamic linker binds the calls of all libraries to them. Copies of the verbs
 * library are its transfers, so they are counted separately. Copies that a compiler expanded in place are not seen: run
 * UCX with UCX_BUILTIN_MEMCPY_MIN=inf and UCX_BUILTIN_MEMCPY_MAX=inf.
 */
#ifndef COPIES_H
#define COPIES_H

#include <stddef.h>
#include <stdint.h>

/* Sets the range; copies from it and into it count while counting is on. */
void copies_watch(const void *start, size_t bytes);
void copies_count(int on);

/* Bytes that libraries other than the verbs library have copied, and that the verbs library has. */
uint64_t copies_of_libraries(void);
uint64_t copies_of_device(void);

#endif
