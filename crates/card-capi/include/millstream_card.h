/*
 * An accelerator card on the network, used by RDMA: libmillstream_memory.
 *
 *     struct msc_card *card = msc_connect("node3:7480", 10000);
 *     msc_acquire(card, 10000, 0, NULL);
 *     msc_put(card, 0, pixels, bytes);
 *     msc_load(card, 0, "verify");
 *     msc_start(card, 0, &run, &doorbell);
 *     msc_wait(card, doorbell, 1000, results);
 *
 * A function that fails returns -1 or NULL, sets errno, and leaves a sentence for millstream_error. ENOTCONN: the connection
 * has ended; close it and connect again. EPERM: this process holds no lease. The calls of one connection exclude each
 * other, but none waits for a thread in msc_wait or msc_next_message. millstream_memory.h has cards of this host;
 * docs/registers.md documents kernels, causes and messages.
 *
 * The verbs device is the one of MILLSTREAM_DEVICE, or the first. Link with -lmillstream_memory.
 */
#ifndef MILLSTREAM_CARD_H
#define MILLSTREAM_CARD_H

#include <stddef.h>
#include <stdint.h>

#include "millstream_card_registers.h"

#ifdef __cplusplus
extern "C" {
#endif

struct msc_card;

/* The latest error of this thread, a sentence, valid until its next error. Never NULL. */
const char *millstream_error(void);

/* Connects to the card that listens at `address`, "host:port". `timeout_ms` is the limit of every answer of the card. */
struct msc_card *msc_connect(const char *address, uint32_t timeout_ms);

/* Ends the connection, and with it the lease. NULL is allowed. */
void msc_close(struct msc_card *card);

/* Size of card memory in bytes. */
uint64_t msc_memory_bytes(const struct msc_card *card);

/*
 * Acquires the lease; waits up to `timeout_ms` while another client holds it (EBUSY). A thread of the library sends
 * heartbeats; the lease expires `duration_ms` after the latest, which is between 50 ms and 7 days. msc_release ends it, and
 * the card clears its memory.
 */
int msc_acquire(struct msc_card *card, uint32_t duration_ms, uint32_t timeout_ms, uint32_t *epoch);
int msc_release(struct msc_card *card);

/* Copies bytes to and from card memory. They are visible to kernels when the call returns. */
int msc_put(struct msc_card *card, uint64_t offset, const void *source, size_t bytes);
int msc_get(struct msc_card *card, uint64_t offset, void *target, size_t bytes);

/* Loads a kernel of the card's directory (ENOENT if it has none of this name). */
int msc_load(struct msc_card *card, uint32_t region, const char *kernel);

/* Writes a WebAssembly image to `offset` of card memory, where it has to stay, and loads it. */
int msc_load_image(struct msc_card *card, uint32_t region, const void *image, size_t bytes, uint64_t offset);

/* Parameters of a run. Zero: all banks, no limits. */
struct msc_run {
    uint64_t arguments[16];
    uint64_t banks; /* one bit each */
    uint64_t fuel;
    uint32_t timeout_ms;
    uint32_t reserved;
};

/* Starts the kernel of a region. `doorbell` identifies the run: it is the `sequence` of the message at its end. */
int msc_start(struct msc_card *card, uint32_t region, const struct msc_run *run, uint64_t *doorbell);

/* Waits for the end of a run; takes its message. EIO if the run failed, with region, cause and value in the sentence. */
int msc_wait(struct msc_card *card, uint64_t doorbell, uint32_t timeout_ms, uint64_t results[4]);

/* Stops a run at its next safe point. 1: a kernel was running, 0: none was. */
int msc_stop(struct msc_card *card, uint32_t region);

/*
 * Takes the next message, an interrupt of the card, for which no thread is in msc_wait. ETIMEDOUT if none came.
 * kind: MSC_MESSAGE_…; cause: 0 or MSC_CAUSE_….
 */
int msc_next_message(struct msc_card *card, uint32_t timeout_ms, struct msc_message *message);

#ifdef __cplusplus
}
#endif

#endif
