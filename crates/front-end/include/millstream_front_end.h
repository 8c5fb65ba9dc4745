/* A front end's end of a shared-memory ring to a readout unit of the same host (docs/formats.md, Front-end ring).
 *
 * The header is complete: include it in one file of a program. It needs C11 and Linux.
 */
#ifndef MILLSTREAM_FRONT_END_H
#define MILLSTREAM_FRONT_END_H

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first #include"
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MSFE_ACCEPTED = 0, MSFE_BUSY = 1, MSFE_INVALID = 2 };

struct msfe {
    unsigned char *memory;
    size_t bytes, records;
    int connection, wake;
    uint64_t capacity, head;
    uint32_t max_len, first_source, sources;
    uint64_t *refused_since; /* ns, by source; 0: not refused */
    uint32_t crc_table[256];
};

static inline uint64_t msfe_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline _Atomic uint32_t *msfe_word(const struct msfe *ring, size_t offset) {
    return (_Atomic uint32_t *)(ring->memory + offset);
}

static inline _Atomic uint64_t *msfe_long(const struct msfe *ring, size_t offset) {
    return (_Atomic uint64_t *)(ring->memory + offset);
}

static inline uint32_t msfe_crc(const struct msfe *ring, const void *data, size_t len) {
    const unsigned char *bytes = data;
    uint32_t crc = 0xffffffffu;
    for (size_t at = 0; at < len; at++)
        crc = ring->crc_table[(crc ^ bytes[at]) & 0xff] ^ crc >> 8;
    return ~crc;
}

static inline void msfe_close(struct msfe *ring) {
    if (ring->memory)
        munmap(ring->memory, ring->bytes);
    if (ring->wake >= 0)
        close(ring->wake);
    if (ring->connection >= 0)
        close(ring->connection);
    free(ring->refused_since);
    memset(ring, 0, sizeof *ring);
    ring->wake = ring->connection = -1;
}

/* Limits the wait of connect() and recvmsg(), which end with EAGAIN then. */
static inline int msfe_limit(int socket, uint64_t deadline) {
    uint64_t now = msfe_now();
    /* Zero would be no limit. */
    uint64_t left = now + 1000000u < deadline ? deadline - now : 1000000u;
    struct timeval limit = {(time_t)(left / 1000000000u), (suseconds_t)(left % 1000000000u / 1000u)};
    return setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 &&
                   setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0
               ? 0
               : -1;
}

/* Receives the descriptors of the ring and of the wake-up. */
static inline int msfe_receive(int socket, uint64_t deadline, int fds[2]) {
    char text[4];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec data = {text, sizeof text};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t received;
    do {
        if (msfe_limit(socket, deadline) != 0)
            return -1;
        received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        /* A signal handler ends the wait, also with SA_RESTART. */
    } while (received < 0 && errno == EINTR && msfe_now() < deadline);
    if (received <= 0) {
        if (received < 0 && errno == EINTR)
            errno = EAGAIN;
        return -1;
    }
    struct cmsghdr *found = CMSG_FIRSTHDR(&message);
    if (!found || found->cmsg_type != SCM_RIGHTS || found->cmsg_len != CMSG_LEN(2 * sizeof(int))) {
        errno = EPROTO;
        return -1;
    }
    memcpy(fds, CMSG_DATA(found), 2 * sizeof(int));
    return 0;
}

/* The later one of a deadline and 100 ms from now: the answer of a readout unit takes some time, also if none is left. */
static inline uint64_t msfe_at_least(uint64_t deadline) {
    uint64_t least = msfe_now() + 100000000u;
    return least < deadline ? deadline : least;
}

/* Connects to the readout unit that waits for front ends of `name`; waits for it up to `timeout_ms`, and for its answer at least
 * 100 ms. Returns 0, or -1 with errno: ECONNREFUSED: no readout unit waits; ETIMEDOUT: it does not answer, because it is stopped
 * or has 64 front ends, the most; EPROTO: it has another version. */
static inline int msfe_connect(struct msfe *ring, const char *name, int timeout_ms) {
    memset(ring, 0, sizeof *ring);
    ring->wake = ring->connection = -1;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int len = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "millstream-front-end/%u/%s",
                       (unsigned)geteuid(), name);
    if (len < 0 || (size_t)len >= sizeof address.sun_path - 1) {
        errno = ENAMETOOLONG;
        return -1;
    }
    socklen_t address_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len);
    uint64_t deadline = msfe_now() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        ring->connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (ring->connection < 0 || msfe_limit(ring->connection, msfe_at_least(deadline)) != 0) {
            int cause = errno;
            msfe_close(ring);
            errno = cause;
            return -1;
        }
        if (connect(ring->connection, (struct sockaddr *)&address, address_len) == 0)
            break;
        int cause = errno;
        close(ring->connection);
        ring->connection = -1;
        if ((cause != ECONNREFUSED && cause != EINTR) || msfe_now() >= deadline) {
            errno = cause == EAGAIN || cause == EINTR ? ETIMEDOUT : cause;
            return -1;
        }
        if (cause != EINTR)
            nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    struct ucred peer;
    socklen_t peer_len = sizeof peer;
    int fds[2];
    errno = 0;
    if (getsockopt(ring->connection, SOL_SOCKET, SO_PEERCRED, &peer, &peer_len) != 0 || peer.uid != geteuid() ||
        msfe_receive(ring->connection, msfe_at_least(deadline), fds) != 0) {
        int cause = errno == EAGAIN ? ETIMEDOUT : EPROTO;
        msfe_close(ring);
        errno = cause;
        return -1;
    }
    ring->wake = fds[1];
    struct stat file;
    int seals = fcntl(fds[0], F_GET_SEALS);
    if (fstat(fds[0], &file) == 0 && file.st_size >= 4096 && seals >= 0 && (seals & F_SEAL_SHRINK)) {
        ring->bytes = (size_t)file.st_size;
        ring->memory = mmap(NULL, ring->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
        if (ring->memory == MAP_FAILED)
            ring->memory = NULL;
    }
    close(fds[0]);
    if (ring->memory && memcmp(ring->memory, "MSRB", 4) == 0 && *msfe_word(ring, 4) == 1) {
        ring->capacity = *msfe_long(ring, 8);
        ring->max_len = *msfe_word(ring, 16);
        ring->first_source = *msfe_word(ring, 20);
        ring->sources = *msfe_word(ring, 24);
        ring->records = 4096 + ((size_t)ring->sources * 32 + 4095) / 4096 * 4096;
        ring->refused_since = calloc(ring->sources ? ring->sources : 1, sizeof *ring->refused_since);
    }
    int power = ring->capacity && !(ring->capacity & (ring->capacity - 1));
    uint64_t longest = (32 + (uint64_t)ring->max_len + 31) / 32 * 32;
    if (!ring->refused_since || !power || longest > ring->capacity || ring->records + ring->capacity > ring->bytes) {
        msfe_close(ring);
        errno = EPROTO;
        return -1;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? 0xedb88320u ^ crc >> 1 : crc >> 1;
        ring->crc_table[byte] = crc;
    }
    return 0;
}

/* Whether the readout unit asks to hold events back. */
static inline int msfe_is_busy(const struct msfe *ring) {
    return atomic_load_explicit(msfe_word(ring, 136), memory_order_acquire) != 0;
}

/* Whether the readout unit has ended. */
static inline int msfe_has_ended(const struct msfe *ring) {
    struct pollfd polled = {.fd = ring->connection, .events = POLLRDHUP};
    return poll(&polled, 1, 0) == 1;
}

static inline void msfe_put(struct msfe *ring, uint64_t at, const void *data, size_t len) {
    memcpy(ring->memory + ring->records + (at & (ring->capacity - 1)), data, len);
}

static inline void msfe_put_header(struct msfe *ring, uint64_t at, uint32_t source, uint32_t len, uint64_t event,
                                   uint32_t crc) {
    struct {
        uint32_t source, len;
        uint64_t event;
        uint32_t crc, reserved[3];
    } header = {source, len, event, crc, {0, 0, 0}};
    msfe_put(ring, at, &header, sizeof header);
}

/* Puts a fragment into the ring. Events of a source ascend. MSFE_BUSY: the readout unit is busy; the fragment is not in the
 * ring and is counted as refused. MSFE_INVALID: not a source, or not a length, of the readout unit. */
static inline int msfe_push(struct msfe *ring, uint32_t source, uint64_t event, const void *data, uint32_t len) {
    uint32_t index = source - ring->first_source;
    if (source < ring->first_source || index >= ring->sources || len > ring->max_len)
        return MSFE_INVALID;
    size_t entry = 4096 + (size_t)index * 32;
    uint64_t need = (32 + (uint64_t)len + 31) / 32 * 32;
    uint64_t rest = ring->capacity - (ring->head & (ring->capacity - 1));
    uint64_t start = rest < need ? ring->head + rest : ring->head;
    uint64_t tail = atomic_load_explicit(msfe_long(ring, 128), memory_order_acquire);
    if (msfe_is_busy(ring) || start + need - tail > ring->capacity) {
        if (!ring->refused_since[index])
            ring->refused_since[index] = msfe_now();
        atomic_fetch_add_explicit(msfe_long(ring, entry + 8), 1, memory_order_relaxed);
        return MSFE_BUSY;
    }
    if (start != ring->head)
        msfe_put_header(ring, ring->head, 0xffffffffu, (uint32_t)(rest - 32), 0, 0);
    msfe_put(ring, start + 32, data, len);
    msfe_put_header(ring, start, source, len, event, msfe_crc(ring, data, len));
    atomic_fetch_add_explicit(msfe_long(ring, entry), 1, memory_order_relaxed);
    if (ring->refused_since[index]) {
        uint64_t dead = msfe_now() - ring->refused_since[index];
        atomic_fetch_add_explicit(msfe_long(ring, entry + 16), dead, memory_order_relaxed);
        ring->refused_since[index] = 0;
    }
    ring->head = start + need;
    atomic_store_explicit(msfe_long(ring, 64), ring->head, memory_order_release);
    /* The consumer sets `waiting` first and reads `head` afterwards; here it is the reverse. One sees the other. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(msfe_word(ring, 192), memory_order_relaxed) &&
        atomic_exchange_explicit(msfe_word(ring, 192), 0, memory_order_acq_rel)) {
        uint64_t one = 1;
        ssize_t written = write(ring->wake, &one, sizeof one);
        (void)written;
    }
    return MSFE_ACCEPTED;
}

/* Puts a fragment into the ring and waits while the readout unit is busy; the wait counts as dead time. MSFE_BUSY: the
 * readout unit has ended. */
static inline int msfe_push_waiting(struct msfe *ring, uint32_t source, uint64_t event, const void *data,
                                    uint32_t len) {
    for (;;) {
        int pushed = msfe_push(ring, source, event, data, len);
        if (pushed != MSFE_BUSY || msfe_has_ended(ring))
            return pushed;
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
}

#endif
