/* See copies.h. Compile with -fno-builtin and without loop idioms, so that the copy loop does not call itself. */
#define _GNU_SOURCE
#include "copies.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

typedef void *copy_function(void *, const void *, size_t);

static _Atomic(uintptr_t) watched_start, watched_end;
static atomic_int counting;
static atomic_uint_least64_t libraries, device;
static _Atomic(copy_function *) real;

void copies_watch(const void *start, size_t bytes)
{
    watched_start = (uintptr_t)start;
    watched_end = (uintptr_t)start + bytes;
}

void copies_count(int on)
{
    counting = on;
}

uint64_t copies_of_libraries(void)
{
    return libraries;
}

uint64_t copies_of_device(void)
{
    return device;
}

static int watched(const void *address, size_t bytes)
{
    return (uintptr_t)address < watched_end && (uintptr_t)address + bytes > watched_start;
}

static void count(const void *to, const void *from, size_t bytes, const void *caller)
{
    Dl_info info;
    if (!counting || bytes == 0 || (!watched(to, bytes) && !watched(from, bytes)))
        return;
    if (dladdr(caller, &info) != 0 && info.dli_fname != NULL &&
        (strstr(info.dli_fname, "libibverbs") != NULL || strstr(info.dli_fname, "libmillstream_preload") != NULL))
        device += bytes;
    else
        libraries += bytes;
}

/* memmove of the C library. Until it is found, which may copy itself, bytes are copied one by one. */
static void *copy(unsigned char *to, const unsigned char *from, size_t bytes)
{
    static atomic_flag searching = ATOMIC_FLAG_INIT;
    copy_function *function = real;
    if (function == NULL && !atomic_flag_test_and_set(&searching)) {
        function = (copy_function *)dlsym(RTLD_NEXT, "memmove");
        real = function;
    }
    if (function != NULL)
        return function(to, from, bytes);
    if ((uintptr_t)to <= (uintptr_t)from)
        for (size_t i = 0; i < bytes; i++)
            to[i] = from[i];
    else
        for (size_t i = bytes; i-- > 0;)
            to[i] = from[i];
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t bytes)
{
    count(to, from, bytes, __builtin_return_address(0));
    return copy(to, from, bytes);
}

void *memmove(void *to, const void *from, size_t bytes)
{
    count(to, from, bytes, __builtin_return_address(0));
    return copy(to, from, bytes);
}

void *__memcpy_chk(void *restrict to, const void *restrict from, size_t bytes, size_t room)
{
    (void)room;
    count(to, from, bytes, __builtin_return_address(0));
    return copy(to, from, bytes);
}

void *__memmove_chk(void *to, const void *from, size_t bytes, size_t room)
{
    (void)room;
    count(to, from, bytes, __builtin_return_address(0));
    return copy(to, from, bytes);
}
