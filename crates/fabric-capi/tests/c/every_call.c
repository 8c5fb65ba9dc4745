/* Each function and each error of millstream_fabric.h on a torus of two nodes or more. */
#include <millstream_fabric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONG_MS 60000
#define SIZE 300000

static void require(int holds, int line, const char *what)
{
    if (!holds) {
        fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, ms_fabric_error_message());
        exit(1);
    }
}
#define CHECK(condition) require(condition, __LINE__, #condition)

static unsigned char byte_of(unsigned node, size_t i) { return (unsigned char)(node * 37 + i * 7 + i / 4096); }

int main(void)
{
    ms_fabric *fabric = NULL;
    CHECK(ms_fabric_open("millstream-torus-nobody", &fabric) == MS_FABRIC_SYSTEM);
    CHECK(strstr(ms_fabric_error_message(), "millstream-torus-nobody") != NULL);
    CHECK(ms_fabric_open(NULL, NULL) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_rank(NULL, NULL, NULL) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_open(NULL, &fabric) == MS_FABRIC_OK);

    uint16_t rank, dimensions[3];
    uint32_t nodes;
    CHECK(ms_fabric_rank(fabric, &rank, &nodes) == MS_FABRIC_OK);
    CHECK(ms_fabric_dimensions(fabric, dimensions) == MS_FABRIC_OK);
    CHECK((uint32_t)dimensions[0] * dimensions[1] * dimensions[2] == nodes && rank < nodes && nodes >= 2);

    uint64_t target, source, regions[64];
    unsigned char *memory, *own;
    CHECK(nodes <= 64);
    CHECK(ms_fabric_register(fabric, SIZE, &target, (void **)&memory) == MS_FABRIC_OK);
    CHECK(ms_fabric_register(fabric, SIZE, &source, (void **)&own) == MS_FABRIC_OK);
    CHECK(ms_fabric_exchange(fabric, &target, 8, regions, LONG_MS) == MS_FABRIC_OK);
    CHECK(regions[rank] == target);
    uint16_t next = (uint16_t)((rank + 1) % nodes), previous = (uint16_t)((rank + nodes - 1) % nodes);

    /* From a region, with an event. */
    for (size_t i = 0; i < SIZE; i++)
        own[i] = byte_of(rank, i);
    ms_fabric_notification tag = {.kind = MS_FABRIC_NOTIFY_EVENT, .tag = 1000u + rank};
    CHECK(ms_fabric_put_region(fabric, next, regions[next], 8, source, 0, SIZE - 8, &tag) == MS_FABRIC_OK);
    CHECK(ms_fabric_flush(fabric, next) == MS_FABRIC_OK);
    CHECK(ms_fabric_barrier(fabric, LONG_MS) == MS_FABRIC_OK);
    ms_fabric_event event;
    CHECK(ms_fabric_poll_event(fabric, &event) == 1);
    CHECK(event.source == previous && event.tag == 1000u + previous && event.region == target);
    CHECK(event.offset == 8 && event.length == SIZE - 8);
    CHECK(ms_fabric_poll_event(fabric, &event) == 0);
    uint64_t lost = 9;
    CHECK(ms_fabric_lost_events(fabric, &lost) == MS_FABRIC_OK && lost == 0);
    for (size_t i = 0; i < SIZE - 8; i++)
        CHECK(memory[8 + i] == byte_of(previous, i));

    /* Back again, into a buffer and into a region. */
    static unsigned char data[SIZE];
    CHECK(ms_fabric_get(fabric, next, regions[next], 8, data, SIZE - 8) == MS_FABRIC_OK);
    for (size_t i = 0; i < SIZE - 8; i++)
        CHECK(data[i] == byte_of(rank, i));
    CHECK(ms_fabric_barrier(fabric, LONG_MS) == MS_FABRIC_OK);
    CHECK(ms_fabric_get_region(fabric, previous, regions[previous], 9, source, 1, SIZE - 9) == MS_FABRIC_OK);
    uint16_t before = (uint16_t)((rank + 2 * nodes - 2) % nodes);
    for (size_t i = 0; i < SIZE - 9; i++)
        CHECK(own[1 + i] == byte_of(before, i + 1));

    /* Atomic operations on the first word. */
    uint64_t value = 0;
    CHECK(ms_fabric_fetch_add(fabric, next, regions[next], 0, 5, &value) == MS_FABRIC_OK && value == 0);
    CHECK(ms_fabric_compare_swap(fabric, next, regions[next], 0, 5, 77, &value) == MS_FABRIC_OK && value == 5);
    CHECK(ms_fabric_compare_swap(fabric, next, regions[next], 0, 5, 78, NULL) == MS_FABRIC_OK);
    CHECK(ms_fabric_get(fabric, next, regions[next], 0, &value, 8) == MS_FABRIC_OK && value == 77);

    /* Counters. */
    ms_fabric_notification three = {.kind = MS_FABRIC_NOTIFY_COUNTER, .counter = 4, .add = 3};
    CHECK(ms_fabric_put(fabric, next, regions[next], 0, NULL, 0, &three) == MS_FABRIC_OK);
    CHECK(ms_fabric_wait_counter(fabric, 4, 3, previous, LONG_MS) == MS_FABRIC_OK);
    CHECK(ms_fabric_counter(fabric, 4, &value) == MS_FABRIC_OK && value == 3);
    CHECK(ms_fabric_wait_counter(fabric, 4, 4, previous, 20) == MS_FABRIC_TIMED_OUT);

    /* Errors. None harms what follows. */
    CHECK(ms_fabric_put(fabric, next, 12345, 0, &value, 8, NULL) == MS_FABRIC_OK);
    CHECK(ms_fabric_flush(fabric, next) == MS_FABRIC_NO_REGION);
    CHECK(ms_fabric_get(fabric, next, regions[next], SIZE - 1, data, 2) == MS_FABRIC_BOUNDS);
    CHECK(ms_fabric_fetch_add(fabric, next, regions[next], 4, 1, NULL) == MS_FABRIC_UNALIGNED);
    /* The counters of collective operations are not the application's. */
    ms_fabric_notification foreign = {.kind = MS_FABRIC_NOTIFY_COUNTER, .counter = MS_FABRIC_COUNTERS, .add = 1};
    CHECK(ms_fabric_put(fabric, next, regions[next], 0, NULL, 0, &foreign) == MS_FABRIC_NO_COUNTER);
    CHECK(ms_fabric_counter(fabric, MS_FABRIC_COUNTERS, &value) == MS_FABRIC_NO_COUNTER);
    CHECK(ms_fabric_wait_counter(fabric, MS_FABRIC_COUNTERS, 1, previous, 0) == MS_FABRIC_NO_COUNTER);
    CHECK(ms_fabric_flush(fabric, 60000) == MS_FABRIC_INVALID);
    CHECK(strncmp(ms_fabric_error_message(), "node 60000 is not in a torus of ", 32) == 0);
    CHECK(ms_fabric_wait_counter(fabric, 4, 4, 60000, 20) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_put(fabric, next, regions[next], 0, NULL, 8, NULL) == MS_FABRIC_INVALID);
    ms_fabric_notification unknown = {.kind = 9};
    CHECK(ms_fabric_put(fabric, next, regions[next], 0, &value, 8, &unknown) == MS_FABRIC_INVALID);
    CHECK(strcmp(ms_fabric_error_message(), "notification kind 9 is unknown") == 0);
    CHECK(ms_fabric_register_card(fabric, 0, 4096, &value, NULL) == MS_FABRIC_NO_CARD);
    CHECK(ms_fabric_publish(fabric, regions[rank], "words", 1) == MS_FABRIC_OK);
    CHECK(ms_fabric_publish(fabric, regions[rank], "two words", 1) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_publish(fabric, 1, "none", 0) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_publish(fabric, regions[rank], NULL, 0) == MS_FABRIC_INVALID);
    CHECK(ms_fabric_lost_node(fabric) == -1);

    /* More than one step of a reduction. */
    static uint64_t most[1000];
    for (uint64_t i = 0; i < 1000; i++)
        most[i] = i % nodes == rank ? i + 100 : i;
    CHECK(ms_fabric_allreduce(fabric, most, 1000, MS_FABRIC_U64, MS_FABRIC_MAX, LONG_MS) == MS_FABRIC_OK);
    for (uint64_t i = 0; i < 1000; i++)
        CHECK(most[i] == i + 100);
    CHECK(ms_fabric_allreduce(fabric, most, 1, MS_FABRIC_F64, 7, LONG_MS) == MS_FABRIC_INVALID);

    CHECK(ms_fabric_barrier(fabric, LONG_MS) == MS_FABRIC_OK);
    CHECK(ms_fabric_deregister(fabric, target) == MS_FABRIC_OK);
    CHECK(ms_fabric_deregister(fabric, target) == MS_FABRIC_NO_REGION);
    CHECK(ms_fabric_barrier(fabric, LONG_MS) == MS_FABRIC_OK);

    /* The others do not come to this barrier. Its failure ends barriers and reductions, and nothing else. */
    if (rank == 0) {
        CHECK(ms_fabric_barrier(fabric, 20) == MS_FABRIC_TIMED_OUT);
        CHECK(ms_fabric_barrier(fabric, LONG_MS) == MS_FABRIC_TIMED_OUT);
        CHECK(ms_fabric_allreduce(fabric, most, 1, MS_FABRIC_U64, MS_FABRIC_SUM, LONG_MS) == MS_FABRIC_TIMED_OUT);
    }
    CHECK(ms_fabric_fetch_add(fabric, next, regions[next], 0, 1, NULL) == MS_FABRIC_NO_REGION);
    uint16_t everybody[64];
    CHECK(ms_fabric_exchange(fabric, &rank, sizeof rank, everybody, LONG_MS) == MS_FABRIC_OK);
    ms_fabric_close(fabric);
    ms_fabric_close(NULL);
    return 0;
}
