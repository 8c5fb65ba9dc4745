/*
 * A host outside of a torus and the nodes' programs: the host writes samples into the memory of every node, reads them back,
 * counts, and tells the nodes. See README.md.
 */
#define _DEFAULT_SOURCE /* usleep */
#include <inttypes.h>
#include <millstream_fabric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A region of a node: samples, and a word that the host counts in. */
enum { SAMPLES = 1000, COUNT_AT = SAMPLES * sizeof(uint32_t), BYTES = COUNT_AT + 8 };
/* The counter that the host raises when it is done. */
enum { DONE = 0, TIMEOUT_MS = 60000 };

/* Ends the program with the reason if a call failed. */
static void check(int error, const char *what)
{
    if (error != MS_FABRIC_OK) {
        fprintf(stderr, "%s: %s\n", what, ms_fabric_error_message());
        exit(1);
    }
}

static uint32_t sample(uint16_t node, uint32_t i)
{
    return 1000000u * node + i;
}

/* Publishes memory, waits for the host, and checks what it wrote. */
static void node(ms_fabric *fabric)
{
    uint16_t rank;
    uint64_t region, count;
    char *memory;
    check(ms_fabric_rank(fabric, &rank, NULL), "rank");
    check(ms_fabric_register(fabric, BYTES, &region, (void **)&memory), "register");
    check(ms_fabric_publish(fabric, region, "samples", 1), "publish");
    /* The notification's source is the host's gateway, node 0. */
    check(ms_fabric_wait_counter(fabric, DONE, 1, 0, TIMEOUT_MS), "wait for the host");
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint32_t found;
        memcpy(&found, memory + i * sizeof found, sizeof found);
        if (found != sample(rank, i)) {
            fprintf(stderr, "node %d found %" PRIu32 " at sample %" PRIu32 "\n", rank, found, i);
            exit(1);
        }
    }
    memcpy(&count, memory + COUNT_AT, sizeof count);
    if (count != SAMPLES) {
        fprintf(stderr, "node %d counted %" PRIu64 " samples\n", rank, count);
        exit(1);
    }
}

static void host(ms_fabric *fabric)
{
    uint16_t dimensions[3];
    check(ms_fabric_dimensions(fabric, dimensions), "dimensions");
    uint16_t nodes = dimensions[0] * dimensions[1] * dimensions[2];
    uint64_t regions[512], size;
    for (uint16_t to = 0; to < nodes; to++) {
        /* Its program may not have published the region yet. */
        int error, writable;
        while ((error = ms_fabric_find(fabric, to, "samples", &regions[to], &size, &writable)) == MS_FABRIC_NO_REGION)
            usleep(1000);
        check(error, "find");
        if (size != BYTES || !writable) {
            fprintf(stderr, "node %d published %" PRIu64 " bytes\n", to, size);
            exit(1);
        }
    }

    /* Puts to different nodes are under way at once. A flush waits for those to one node. */
    uint32_t samples[SAMPLES], found[SAMPLES];
    for (uint16_t to = 0; to < nodes; to++) {
        for (uint32_t i = 0; i < SAMPLES; i++)
            samples[i] = sample(to, i);
        check(ms_fabric_put(fabric, to, regions[to], 0, samples, sizeof samples, NULL), "put");
    }
    for (uint16_t to = 0; to < nodes; to++) {
        check(ms_fabric_flush(fabric, to), "flush");
        check(ms_fabric_get(fabric, to, regions[to], 0, found, sizeof found), "get");
        if (found[0] != sample(to, 0) || found[SAMPLES - 1] != sample(to, SAMPLES - 1)) {
            fprintf(stderr, "node %d has other samples\n", to);
            exit(1);
        }
    }

    uint64_t total = 0;
    for (uint16_t to = 0; to < nodes; to++) {
        uint64_t previous;
        check(ms_fabric_fetch_add(fabric, to, regions[to], COUNT_AT, SAMPLES - 1, &previous), "fetch_add");
        check(ms_fabric_compare_swap(fabric, to, regions[to], COUNT_AT, SAMPLES - 1, SAMPLES, &previous), "compare_swap");
        total += previous + 1;
        /* The counter grows after the data are visible. */
        ms_fabric_notification done = {.kind = MS_FABRIC_NOTIFY_COUNTER, .counter = DONE, .add = 1};
        check(ms_fabric_put(fabric, to, regions[to], 0, samples, 0, &done), "notify");
        check(ms_fabric_flush(fabric, to), "flush");
    }
    printf("%" PRIu64 " samples are in the memory of %d nodes\n", total, nodes);
}

int main(void)
{
    ms_fabric *fabric;
    if (getenv("MILLSTREAM_TORUS_SOCKET")) {
        check(ms_fabric_open(NULL, &fabric), "open");
        node(fabric);
    } else {
        check(ms_fabric_open_outside(NULL, 0, &fabric), "open outside");
        host(fabric);
    }
    ms_fabric_close(fabric);
    return 0;
}
