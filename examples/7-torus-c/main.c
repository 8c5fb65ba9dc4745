/* Every node of a torus writes to the next one, all count at node 0, and all add up. See README.md. */
#include <inttypes.h>
#include <millstream_fabric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARRIVED = 0, TIMEOUT_MS = 30000, MAX_NODES = 512 };

/* Ends the program with the reason if a call failed. */
static void check(int error, const char *what)
{
    if (error != MS_FABRIC_OK) {
        fprintf(stderr, "%s: %s\n", what, ms_fabric_error_message());
        exit(1);
    }
}

int main(void)
{
    ms_fabric *fabric;
    check(ms_fabric_open(NULL, &fabric), "open");
    uint16_t rank;
    uint32_t nodes;
    check(ms_fabric_rank(fabric, &rank, &nodes), "rank");
    if (nodes > MAX_NODES) {
        fprintf(stderr, "this example has places for %d nodes, not %" PRIu32 "\n", MAX_NODES, nodes);
        return 1;
    }

    /* A message of 32 bytes, then a word to count in. All nodes learn the regions of all others. */
    uint64_t inbox, regions[MAX_NODES];
    char *memory;
    check(ms_fabric_register(fabric, 40, &inbox, (void **)&memory), "register");
    check(ms_fabric_exchange(fabric, &inbox, sizeof inbox, regions, TIMEOUT_MS), "exchange");

    /* The next node's counter grows after the message is in its memory. */
    char message[32] = "";
    uint16_t next = (rank + 1) % nodes, previous = (rank + nodes - 1) % nodes;
    ms_fabric_notification arrived = {.kind = MS_FABRIC_NOTIFY_COUNTER, .counter = ARRIVED, .add = 1};
    snprintf(message, sizeof message, "greetings from node %d", rank);
    check(ms_fabric_put(fabric, next, regions[next], 0, message, sizeof message, &arrived), "put");
    check(ms_fabric_wait_counter(fabric, ARRIVED, 1, previous, TIMEOUT_MS), "wait for the message");
    snprintf(message, sizeof message, "greetings from node %d", previous);
    if (strcmp(memory, message) != 0) {
        fprintf(stderr, "node %d found \"%s\"\n", rank, memory);
        return 1;
    }

    check(ms_fabric_fetch_add(fabric, 0, regions[0], 32, 1, NULL), "fetch_add");
    check(ms_fabric_barrier(fabric, TIMEOUT_MS), "barrier");
    uint64_t counted;
    check(ms_fabric_get(fabric, 0, regions[0], 32, &counted, sizeof counted), "get");

    double numbers[2] = {rank, 0.5};
    check(ms_fabric_allreduce(fabric, numbers, 2, MS_FABRIC_F64, MS_FABRIC_SUM, TIMEOUT_MS), "allreduce");
    if (rank == 0)
        printf("%" PRIu64 " messages arrived, numbers of all nodes add up to %g, halves to %g\n", counted,
               numbers[0], numbers[1]);

    /* Others may still read the word of node 0. */
    check(ms_fabric_barrier(fabric, TIMEOUT_MS), "barrier");
    ms_fabric_close(fabric);
    return 0;
}
