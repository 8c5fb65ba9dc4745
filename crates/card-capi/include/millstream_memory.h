/*
 * Memory of an accelerator card of this host as communication buffer: libmillstream_memory.
 *
 * msm_open leases the card and maps its memory (BAR4). Every byte of the mapping is ordinary host memory for loads, stores,
 * MPI_Send, MPI_Win_create and ibv_reg_mr. Messages go from it and into it without a copy through host buffers.
 *
 *     struct msm_memory *card = msm_open("u280-0", 1000);
 *     double *halo = msm_alloc(card, bytes, 0);
 *     MPI_Send(halo, n, MPI_DOUBLE, next, 0, MPI_COMM_WORLD);
 *
 * A function that fails returns -1 or NULL, sets errno, and leaves a sentence for millstream_error. Functions are safe
 * to call from several threads. msm_rings, msm_submit and msm_wait of one card exclude each other. msm_load, msm_rings,
 * msm_submit, msm_wait and msm_arm_interrupt fail with ENODEV when the card or the lease has ended.
 *
 * Link with -lmillstream_memory.
 */
#ifndef MILLSTREAM_MEMORY_H
#define MILLSTREAM_MEMORY_H

#include <stdint.h>

#include "millstream_card_registers.h"

#ifdef __cplusplus
extern "C" {
#endif

struct msm_memory;

/* The latest error of this thread, a sentence, valid until its next error. Never NULL. */
const char *millstream_error(void);

/*
 * Opens the card `name` of this user, acquires its lease, and maps its memory. Waits up to `timeout_ms` for a card that is
 * starting or leased. The lease ends with msm_close or with the process; the card then clears its memory.
 * errno: ENODEV no such card, EBUSY leased, ETIMEDOUT no answer, EACCES another user's card.
 */
struct msm_memory *msm_open(const char *name, uint32_t timeout_ms);

/* Ends the lease and unmaps the memory. Deregister memory regions and free MPI windows first. NULL is allowed. */
void msm_close(struct msm_memory *memory);

/* Address of byte 0 of card memory, and its size in bytes. */
void *msm_base(const struct msm_memory *memory);
uint64_t msm_size(const struct msm_memory *memory);

/*
 * Allocates card memory. Alignment: a power of two, at least 64 bytes (0: 64). The lists of the allocator are in host
 * memory. errno: ENOMEM, EINVAL.
 */
void *msm_alloc(struct msm_memory *memory, uint64_t bytes, uint64_t alignment);

/* Allocates the bytes at `offset` of card memory, for example a buffer of a kernel. EINVAL if one is not free. */
void *msm_alloc_at(struct msm_memory *memory, uint64_t offset, uint64_t bytes);

/* Frees an allocation; the address stays mapped. NULL is allowed. */
int msm_free(struct msm_memory *memory, void *address);
uint64_t msm_free_bytes(const struct msm_memory *memory);

/* Offset in card memory of an address of the mapping, as kernels and DMA use it; UINT64_MAX if it is outside. */
uint64_t msm_offset(const struct msm_memory *memory, const void *address);

/*
 * Descriptor and offset of `bytes` bytes at `address`, for ibv_reg_dmabuf_mr. The descriptor belongs to `memory`. It is a
 * memfd in place of a dma-buf: the soft device registers it, an adapter does not.
 */
int msm_dmabuf(const struct msm_memory *memory, const void *address, uint64_t bytes, int *fd, uint64_t *offset);

#ifdef INFINIBAND_VERBS_H
/* Registers card memory with a device; include infiniband/verbs.h first. The region's addresses are those of the mapping. */
static inline struct ibv_mr *msm_reg_mr(struct ibv_pd *pd, const struct msm_memory *memory, void *address, size_t bytes,
                                        int access)
{
    uint64_t offset;
    int fd;
    if (msm_dmabuf(memory, address, bytes, &fd, &offset) != 0)
        return NULL;
    return ibv_reg_dmabuf_mr(pd, offset, bytes, (uintptr_t)address, fd, access);
}
#endif

/*
 * 0 while the card runs and the lease is this handle's. Otherwise ENODEV. If the card has ended, the memory keeps its bytes,
 * and nobody reads them. If the lease has ended (revoked by another client), the card clears its memory and leases it again:
 * the mapping is then the next holder's memory. Do not access it any more, and call msm_close.
 */
int msm_check(const struct msm_memory *memory);

/* Descriptor that hangs up (POLLHUP) when the card ends. Poll it; do not read it. */
int msm_liveness_fd(const struct msm_memory *memory);

/* Loads a kernel of the card's directory into a region. errno: ENOENT no such kernel, EINVAL no such region. */
int msm_load(struct msm_memory *memory, uint32_t region, const char *kernel);

/*
 * The command queue. The rings end with the lease. msm_rings allocates both rings (64 bytes a slot and ring; slots: a power of two). msm_submit writes a
 * command for a loaded kernel and returns its index 0, 1, 2, …; EAGAIN if all slots are in use. msm_wait takes the next
 * completion, in the order of the commands; ETIMEDOUT. completion->cause is 0 or an MSC_CAUSE code.
 */
int msm_rings(struct msm_memory *memory, uint32_t slots);
int msm_submit(struct msm_memory *memory, const struct msc_descriptor *command, uint64_t *index);
int msm_wait(struct msm_memory *memory, uint32_t timeout_ms, struct msc_completion *completion);

/*
 * Arms the interrupt of the next completion. Returns a descriptor that then becomes readable (POLLIN). Call msm_wait with a
 * timeout of 0 before waiting for it, because a completion may have come earlier.
 */
int msm_arm_interrupt(struct msm_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
