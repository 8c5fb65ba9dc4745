/*
 * One-sided communication between the nodes of a Millstream torus, for programs in C.
 *
 * Link with -lmillstream_fabric. Start the program with `millstream torus run --dimensions 2x2x2 -- PROGRAM`, which runs it
 * once beside each node. Functions return MS_FABRIC_OK or another value of enum ms_fabric_error;
 * ms_fabric_error_message() describes the last error of the calling thread.
 *
 * A host outside of the torus calls ms_fabric_open_outside in place of ms_fabric_open. It puts, gets, notifies, changes
 * words and flushes as a node does, in regions that nodes published for it (ms_fabric_publish, ms_fabric_find). It has no
 * counters and events, and takes part in no operation of all nodes: MS_FABRIC_NOT_A_NODE.
 *
 * An exchange that fails with MS_FABRIC_TIMED_OUT, MS_FABRIC_NODE_LOST or another error of communication ends the exchanges
 * of its handle: later ones fail with the same error, as other nodes may have counted this node's part. The same holds for
 * barriers and reductions together. Operations between two nodes go on.
 *
 * A handle may be used by several threads, one call at a time: others wait. A handle does not survive fork().
 */
#ifndef MILLSTREAM_FABRIC_H
#define MILLSTREAM_FABRIC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A node's access to all nodes. */
typedef struct ms_fabric ms_fabric;

enum ms_fabric_error {
    MS_FABRIC_OK = 0,
    /* The region does not exist at that node, or was deregistered. */
    MS_FABRIC_NO_REGION = 1,
    /* The range exceeds the region. */
    MS_FABRIC_BOUNDS = 2,
    /* The offset of an atomic operation is not a multiple of 8. */
    MS_FABRIC_UNALIGNED = 3,
    /* The counter does not exist. */
    MS_FABRIC_NO_COUNTER = 4,
    /* The region's memory is gone: its application or its card's lease ended. */
    MS_FABRIC_GONE = 5,
    /* The region does not allow the access. */
    MS_FABRIC_ACCESS = 6,
    /* No live path leads to the node. */
    MS_FABRIC_NO_ROUTE = 7,
    /* The node or its application is lost. */
    MS_FABRIC_NODE_LOST = 8,
    /* The timeout passed. */
    MS_FABRIC_TIMED_OUT = 9,
    /* This node has no card, or the range is not in its memory. */
    MS_FABRIC_NO_CARD = 10,
    /* An argument is invalid: a null pointer, an unknown type or operation. */
    MS_FABRIC_INVALID = 11,
    /* The node process cannot be reached, or the system has no memory. */
    MS_FABRIC_SYSTEM = 12,
    /* Counters, events and operations of all nodes are for nodes: this is a host outside of the torus. */
    MS_FABRIC_NOT_A_NODE = 13
};

/* What the target's application learns of a put, after its data are visible. */
enum ms_fabric_notification_kind {
    MS_FABRIC_NOTIFY_NONE = 0,
    /* Adds `add` to the counter `counter`. */
    MS_FABRIC_NOTIFY_COUNTER = 1,
    /* Queues an event with the tag `tag`. */
    MS_FABRIC_NOTIFY_EVENT = 2
};

typedef struct ms_fabric_notification {
    /* enum ms_fabric_notification_kind */
    uint32_t kind;
    uint16_t counter;
    uint16_t add;
    uint32_t tag;
} ms_fabric_notification;

typedef struct ms_fabric_event {
    uint64_t region;
    uint64_t offset;
    uint64_t length;
    uint32_t tag;
    uint16_t source;
} ms_fabric_event;

/* Element types and operations of reductions. */
enum ms_fabric_type { MS_FABRIC_F64 = 0, MS_FABRIC_I64 = 1, MS_FABRIC_U64 = 2 };
enum ms_fabric_operation { MS_FABRIC_SUM = 0, MS_FABRIC_MIN = 1, MS_FABRIC_MAX = 2 };

enum {
    /* Counters of a node that applications may use: 0 to 252. The others belong to collective operations. */
    MS_FABRIC_COUNTERS = 253
};

/* Attaches to the node process at `socket`, or to the one that the environment names if `socket` is null. */
int ms_fabric_open(const char *socket, ms_fabric **fabric);

/*
 * Connects this host, which is no node, to the seventh port of a node, its gateway: "HOST:PORT" and the key of the port
 * (`millstream torus run --seventh HOST:PORT --seventh-key-file FILE`). If `gateway` is null, MILLSTREAM_TORUS_GATEWAY and
 * MILLSTREAM_TORUS_GATEWAY_KEY have both. MILLSTREAM_DEVICE selects the verbs device: `soft` for Millstream's, which is
 * found by MILLSTREAM_LIB or beside the program. `ms_fabric_rank` gives the number of the gateway.
 */
int ms_fabric_open_outside(const char *gateway, uint64_t key, ms_fabric **fabric);

/* Detaches. Regions of this handle are gone, and pointers to them are invalid. Null is ignored. */
void ms_fabric_close(ms_fabric *fabric);

/* Text of the last error of this thread. Valid until the next call of this thread. */
const char *ms_fabric_error_message(void);

/* Nodes on each axis. Node number = x + X * (y + Y * z). */
int ms_fabric_dimensions(const ms_fabric *fabric, uint16_t dimensions[3]);

/* Number of this node, and number of nodes. Either pointer may be null. */
int ms_fabric_rank(const ms_fabric *fabric, uint16_t *rank, uint32_t *nodes);

/*
 * Registers `size` zero bytes of this node. `memory` (may be null) gets their address. Other nodes write them at any time;
 * data that a notification or a flush announced are visible. A region of a host outside is a source and a target of its own
 * operations only.
 */
int ms_fabric_register(ms_fabric *fabric, size_t size, uint64_t *region, void **memory);

/* Registers `size` bytes at `offset` of the memory of this node's card (`millstream torus node --card`). */
int ms_fabric_register_card(ms_fabric *fabric, uint64_t offset, size_t size, uint64_t *region, void **memory);

/*
 * Lets hosts outside of the torus read a region of this node, or also write it (`writable` not 0). They find it by `name`:
 * 1 to 62 printable ASCII characters without spaces, which no other region of this node has (else MS_FABRIC_INVALID).
 */
int ms_fabric_publish(ms_fabric *fabric, uint64_t region, const char *name, int writable);

/*
 * The region that a node published by `name`, its size, and whether hosts outside may write it. The pointers may be null.
 * MS_FABRIC_NO_REGION if there is none, or not yet.
 */
int ms_fabric_find(ms_fabric *fabric, uint16_t node, const char *name, uint64_t *region, uint64_t *size, int *writable);

/* Ends a region of this node. Operations on it fail from here on. Its address is invalid. */
int ms_fabric_deregister(ms_fabric *fabric, uint64_t region);

/* Writes to a region of a node. The data may be reused when this returns. `notification` may be null. */
int ms_fabric_put(ms_fabric *fabric, uint16_t to, uint64_t region, uint64_t offset, const void *data, size_t length,
                  const ms_fabric_notification *notification);

/* Writes from a region of this node without a copy here. The source must not change before ms_fabric_flush. */
int ms_fabric_put_region(ms_fabric *fabric, uint16_t to, uint64_t region, uint64_t offset, uint64_t source,
                         uint64_t source_offset, size_t length, const ms_fabric_notification *notification);

/* Reads from a region of a node. */
int ms_fabric_get(ms_fabric *fabric, uint16_t from, uint64_t region, uint64_t offset, void *data, size_t length);

/* Reads into a region of this node without a further copy. */
int ms_fabric_get_region(ms_fabric *fabric, uint16_t from, uint64_t region, uint64_t offset, uint64_t target,
                         uint64_t target_offset, size_t length);

/* Adds to a little-endian word of 8 bytes. `previous` may be null. */
int ms_fabric_fetch_add(ms_fabric *fabric, uint16_t at, uint64_t region, uint64_t offset, uint64_t add,
                        uint64_t *previous);

/* Replaces a little-endian word of 8 bytes if it equals `expected`. `previous` may be null. */
int ms_fabric_compare_swap(ms_fabric *fabric, uint16_t at, uint64_t region, uint64_t offset, uint64_t expected,
                           uint64_t desired, uint64_t *previous);

/* Waits until all puts to a node are visible there. Returns the first failure of a put since the last flush. */
int ms_fabric_flush(ms_fabric *fabric, uint16_t to);

/* Value of a counter of this node. */
int ms_fabric_counter(const ms_fabric *fabric, uint16_t index, uint64_t *value);

/* Waits until a counter of this node is at least `value`. `from` is the node that raises it: its loss ends the wait. */
int ms_fabric_wait_counter(ms_fabric *fabric, uint16_t index, uint64_t value, uint16_t from, uint64_t timeout_ms);

/* The next event: 1 if there is one, 0 if there is none, a negated error otherwise. */
int ms_fabric_poll_event(ms_fabric *fabric, ms_fabric_event *event);

/* Events that found the queue full. */
int ms_fabric_lost_events(const ms_fabric *fabric, uint64_t *count);

/* A node that is known to be lost, or -1. */
int ms_fabric_lost_node(const ms_fabric *fabric);

/*
 * Gives every node `length` bytes of every node, in the order of node numbers: `all` has length * nodes bytes. All nodes
 * call it together with the same length. For setup, for example handles of regions.
 */
int ms_fabric_exchange(ms_fabric *fabric, const void *data, size_t length, void *all, uint64_t timeout_ms);

/* Waits until all nodes are here. All nodes call barriers and reductions in the same order. */
int ms_fabric_barrier(ms_fabric *fabric, uint64_t timeout_ms);

/*
 * Combines `count` values of all nodes in the order of node numbers, so that all nodes get the same bits. In place: after an
 * error, the values are undefined.
 */
int ms_fabric_allreduce(ms_fabric *fabric, void *values, size_t count, enum ms_fabric_type type,
                        enum ms_fabric_operation operation, uint64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
