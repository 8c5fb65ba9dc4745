/* What a host outside of the torus is refused, and operations between its own regions and those of nodes. */
#define _DEFAULT_SOURCE /* usleep */
#include <millstream_fabric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPECT(error, call)                                                                                        \
    do {                                                                                                           \
        int got = (call);                                                                                          \
        if (got != (error)) {                                                                                      \
            fprintf(stderr, "line %d: %s is %d, not %d: %s\n", __LINE__, #call, got, (error), ms_fabric_error_message()); \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

int main(void)
{
    ms_fabric *fabric;
    uint64_t region, size, value = 7;
    uint16_t rank;
    int writable, error;
    EXPECT(MS_FABRIC_INVALID, ms_fabric_open_outside("127.0.0.1:1", 5, NULL));
    EXPECT(MS_FABRIC_OK, ms_fabric_open_outside(NULL, 0, &fabric));
    EXPECT(MS_FABRIC_OK, ms_fabric_rank(fabric, &rank, NULL));
    EXPECT(0, rank);
    EXPECT(MS_FABRIC_INVALID, ms_fabric_find(fabric, 0, NULL, &region, &size, &writable));
    EXPECT(MS_FABRIC_NO_REGION, ms_fabric_find(fabric, 0, "absent", &region, &size, &writable));
    EXPECT(MS_FABRIC_INVALID, ms_fabric_find(fabric, 99, "samples", &region, &size, &writable));
    while ((error = ms_fabric_find(fabric, 1, "samples", &region, &size, NULL)) == MS_FABRIC_NO_REGION)
        usleep(1000);
    EXPECT(MS_FABRIC_OK, error);

    /* From a region of this host to the node and back. */
    uint64_t own;
    char *memory;
    EXPECT(MS_FABRIC_OK, ms_fabric_register(fabric, 256, &own, (void **)&memory));
    memset(memory, 5, 100);
    EXPECT(MS_FABRIC_OK, ms_fabric_put_region(fabric, 1, region, 0, own, 0, 100, NULL));
    EXPECT(MS_FABRIC_OK, ms_fabric_flush(fabric, 1));
    EXPECT(MS_FABRIC_OK, ms_fabric_get_region(fabric, 1, region, 0, own, 128, 100));
    EXPECT(0, memcmp(memory, memory + 128, 100));
    EXPECT(MS_FABRIC_OK, ms_fabric_deregister(fabric, own));
    EXPECT(MS_FABRIC_NO_REGION, ms_fabric_put_region(fabric, 1, region, 0, own, 0, 8, NULL));

    EXPECT(MS_FABRIC_NO_REGION, ms_fabric_get(fabric, 1, 12345, 0, &value, sizeof value));
    EXPECT(MS_FABRIC_BOUNDS, ms_fabric_get(fabric, 1, region, size, &value, sizeof value));
    EXPECT(MS_FABRIC_UNALIGNED, ms_fabric_fetch_add(fabric, 1, region, 4, 1, NULL));
    EXPECT(MS_FABRIC_NO_CARD, ms_fabric_register_card(fabric, 0, 4096, &own, NULL));

    /* What nodes alone have. */
    double sum = 1;
    ms_fabric_event event;
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_counter(fabric, 0, &value));
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_wait_counter(fabric, 0, 1, 0, 10));
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_exchange(fabric, &value, sizeof value, &value, 10));
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_barrier(fabric, 10));
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_allreduce(fabric, &sum, 1, MS_FABRIC_F64, MS_FABRIC_SUM, 10));
    EXPECT(MS_FABRIC_NOT_A_NODE, ms_fabric_publish(fabric, region, "mine", 0));
    EXPECT(0, ms_fabric_poll_event(fabric, &event));
    EXPECT(-1, ms_fabric_lost_node(fabric));
    ms_fabric_close(fabric);
    return 0;
}
