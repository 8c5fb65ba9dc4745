/* Every function of millstream_card.h on the card at the address of the first argument; the second one is a WebAssembly text. */
#include <errno.h>
#include <millstream_card.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "line %d: %s; errno %d, %s\n", __LINE__, #condition, errno, millstream_error()); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define FAILS(call, error, words) CHECK((errno = 0, !(call)) && errno == (error) && strstr(millstream_error(), words))

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    FAILS(msc_connect("no-port", 1000), EIO, "no-port");
    FAILS(msc_connect("127.0.0.1:1", 50), ETIMEDOUT, "timed out");
    FAILS(msc_put(NULL, 0, "", 1) == 0, EINVAL, "null pointer");
    struct msc_card *card = msc_connect(argv[1], 10000), *other = msc_connect(argv[1], 10000);
    CHECK(card != NULL && other != NULL && msc_memory_bytes(card) == 16 << 20);
    FAILS(msc_put(card, 0, "a", 1) == 0, EPERM, "lease");
    uint32_t epoch = 0;
    CHECK(msc_acquire(card, 10000, 0, &epoch) == 0 && epoch > 0);
    FAILS(msc_acquire(other, 10000, 0, NULL) == 0, EBUSY, "leased");

    uint64_t words[512], back[512] = {0}, sum = 0, results[4], doorbell;
    for (int i = 0; i < 512; i++)
        sum += words[i] = (uint64_t)i * i;
    CHECK(msc_put(card, 4096, words, sizeof words) == 0 && msc_get(card, 4096, back, sizeof back) == 0);
    CHECK(memcmp(words, back, sizeof words) == 0);
    FAILS(msc_put(card, 16 << 20, words, 8) == 0, EINVAL, "outside");
    FAILS(msc_get(card, 0, NULL, 8) == 0, EINVAL, "null pointer");

    FAILS(msc_load(card, 0, "no-such-kernel") == 0, ENOENT, "no-such-kernel");
    CHECK(msc_load(card, 0, "reduce") == 0);
    struct msc_run run = {.arguments = {4096, 0, sizeof words}};
    CHECK(msc_start(card, 0, &run, &doorbell) == 0 && msc_wait(card, doorbell, 10000, results) == 0);
    CHECK(results[0] == sizeof words && results[1] == sum);
    /* The end of a run is an interrupt. */
    struct msc_message message;
    CHECK(msc_start(card, 0, &run, &doorbell) == 0 && msc_next_message(card, 10000, &message) == 0);
    CHECK(message.kind == MSC_MESSAGE_REGION_DONE && message.sequence == doorbell && message.values[1] == sum);
    FAILS(msc_next_message(card, 1, &message) == 0, ETIMEDOUT, "no message");
    /* A failed run names its cause. */
    run.arguments[2] = 12;
    CHECK(msc_start(card, 0, &run, &doorbell) == 0);
    FAILS(msc_wait(card, doorbell, 10000, results) == 0, EIO, "region 0");
    CHECK(msc_stop(card, 0) == 0);
    FAILS(msc_start(card, 99, &run, &doorbell) == 0, EINVAL, "no region 99");

    CHECK(msc_load_image(card, 1, argv[2], strlen(argv[2]), 1 << 20) == 0);
    CHECK(msc_start(card, 1, &run, &doorbell) == 0 && msc_wait(card, doorbell, 10000, results) == 0 && results[0] == 42);

    CHECK(msc_release(card) == 0);
    FAILS(msc_get(card, 0, back, 8) == 0, EPERM, "lease");
    CHECK(msc_acquire(other, 10000, 10000, NULL) == 0);
    msc_close(card);
    msc_close(other);
    msc_close(NULL);
    printf("card: all calls agree\n");
    return 0;
}
