/*
 * Latency and bandwidth of MPI messages, puts and gets between two ranks, with buffers in host or card memory; time of
 * MPI_Alltoall.
 *
 *   messages TEST --buffers XY [--cards A,B] [--stage] [--separate] [--allocate] [--sizes BYTES,…] [--seconds S] [--verify]
 *
 * X is the buffer of rank 0, Y of rank 1: H is host memory (malloc), D the memory of the rank's card (libmillstream_memory).
 * The definitions are those of the OSU micro-benchmarks:
 *
 *   latency  rank 0 sends, rank 1 receives and sends a message of the same size back; half of the round trip, MPI_Send and
 *            MPI_Recv. Unit: µs.
 *   bw       rank 0 posts 64 MPI_Isend, rank 1 64 MPI_Irecv, both wait for all; rank 1 then sends 4 bytes. Payload of
 *            rank 0 divided by time. Unit: 10^6 bytes per second.
 *   bibw     both ranks do both at once; payload of both ranks divided by time.
 *   put-latency, get-latency   rank 0 puts into (gets from) the window of rank 1, one transfer and MPI_Win_flush at a time
 *   put-bw, get-bw             64 transfers and MPI_Win_flush
 *   alltoall MPI_Alltoall with blocks of the size, between barriers that do not count; mean time of a call over all calls and
 *            ranks. Two or more ranks, host memory only. Unit: µs.
 *
 * The windows of the one-sided tests are the buffers (MPI_Win_create), under one shared lock. With --allocate MPI allocates the
 * windows (MPI_Win_allocate), which UCX's shared memory needs to transfer without the target.
 *
 * Sizes larger than 8 KiB have a tenth of the warm-up of smaller ones, as in OSU. Each measurement repeats windows until
 * --seconds have passed at rank 0.
 *
 * With --separate, each of the 64 messages of a window has a buffer of its own at both ranks. Otherwise they share one, as in
 * OSU.
 *
 * With --stage, which the one-sided tests and alltoall do not have, card memory is not given to MPI: the sender copies each
 * message to a host buffer first, the receiver copies it to card memory afterwards. The copies count. It implies --separate,
 * because a buffer must not change while MPI sends from it: compare it with the same test with --separate.
 *
 * --verify measures nothing. It sends the same messages from separate buffers, each with bytes that depend on rank, message
 * and position, and compares every byte at its final place.
 *
 * Prints "TEST SIZE VALUE" a size, or "TEST: N messages verified".
 */
#include <mpi.h>
#include <millstream_memory.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 64, MAX_SIZES = 32, SMALL = 8192 };

enum test { LATENCY, BANDWIDTH, BIDIRECTIONAL, ALLTOALL, PUT_LATENCY, PUT_BANDWIDTH, GET_LATENCY, GET_BANDWIDTH, TESTS };

static const char *const names[TESTS] = {"latency", "bw", "bibw", "alltoall", "put-latency", "put-bw", "get-latency", "get-bw"};

static int one_by_one(enum test test)
{
    return test == LATENCY || test == ALLTOALL || test == PUT_LATENCY || test == GET_LATENCY;
}

static int one_sided(enum test test)
{
    return test >= PUT_LATENCY;
}

static int rank, ranks;
static MPI_Win window;
static struct msm_memory *card;
static int staging, separate;
static unsigned char *outbox, *inbox;         /* WINDOW messages each, or a block a rank; on the card if this rank has one */
static unsigned char *outbox_host, *inbox_host; /* with --stage */
static MPI_Request requests[2 * WINDOW];

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

static unsigned char *buffer(size_t bytes)
{
    unsigned char *memory = NULL;
    if (card != NULL) {
        memory = msm_alloc(card, bytes, 4096);
        if (memory == NULL)
            fail("card memory", millstream_error());
    } else if (posix_memalign((void **)&memory, 4096, bytes) != 0) {
        fail("host memory", "cannot be allocated");
    }
    memset(memory, 0, bytes);
    return memory;
}

static unsigned char *host_buffer(size_t bytes)
{
    unsigned char *memory = NULL;
    if (posix_memalign((void **)&memory, 4096, bytes) != 0)
        fail("host memory", "cannot be allocated");
    memset(memory, 0, bytes);
    return memory;
}

/* Where MPI sends message `slot` from, after the copy of the staging variant. */
static unsigned char *sent_from(int slot, size_t size)
{
    if (!staging)
        return outbox + slot * size;
    return memcpy(outbox_host + slot * size, outbox + slot * size, size);
}

static unsigned char *received_at(int slot, size_t size)
{
    return (staging ? inbox_host : inbox) + slot * size;
}

static void deliver(int slot, size_t size)
{
    if (staging)
        memcpy(inbox + slot * size, inbox_host + slot * size, size);
}

static void send_one(int slot, size_t size)
{
    MPI_Send(sent_from(slot, size), (int)size, MPI_BYTE, 1 - rank, 1, MPI_COMM_WORLD);
}

static void receive_one(int slot, size_t size)
{
    MPI_Recv(received_at(slot, size), (int)size, MPI_BYTE, 1 - rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    deliver(slot, size);
}

/* Whether messages of a test arrive at this rank. */
static int arrive_here(enum test test)
{
    if (test == LATENCY || test == BIDIRECTIONAL || test == ALLTOALL)
        return 1;
    return test == GET_LATENCY || test == GET_BANDWIDTH ? rank == 0 : rank == 1;
}

/* The transfers of rank 0 in one round of a one-sided test. */
static void play_one_sided(enum test test, size_t size, int stride)
{
    int gets = test == GET_LATENCY || test == GET_BANDWIDTH;
    for (int i = 0; rank == 0 && i < (one_by_one(test) ? 1 : WINDOW); i++) {
        size_t at = i * stride * size;
        if (gets)
            MPI_Get(inbox + at, (int)size, MPI_BYTE, 1, (MPI_Aint)at, (int)size, MPI_BYTE, window);
        else
            MPI_Put(outbox + at, (int)size, MPI_BYTE, 1, (MPI_Aint)at, (int)size, MPI_BYTE, window);
    }
    if (rank == 0)
        MPI_Win_flush(1, window);
}

/* One round of a test. `stride` is 0 when all messages of a window share a buffer, as in OSU, and 1 for separate ones. */
static void play(enum test test, size_t size, int stride)
{
    int sends = test == BIDIRECTIONAL || rank == 0, receives = test == BIDIRECTIONAL || rank == 1, count = 0;
    char acknowledgement[4] = {0};
    if (one_sided(test)) {
        play_one_sided(test, size, stride);
        return;
    }
    if (test == ALLTOALL) {
        MPI_Alltoall(outbox, (int)size, MPI_BYTE, inbox, (int)size, MPI_BYTE, MPI_COMM_WORLD);
        return;
    }
    if (test == LATENCY) {
        if (rank == 0)
            send_one(0, size);
        receive_one(0, size);
        if (rank == 1)
            send_one(0, size);
        return;
    }
    for (int i = 0; receives && i < WINDOW; i++)
        MPI_Irecv(received_at(i * stride, size), (int)size, MPI_BYTE, 1 - rank, 10, MPI_COMM_WORLD, &requests[count++]);
    for (int i = 0; sends && i < WINDOW; i++)
        MPI_Isend(sent_from(i * stride, size), (int)size, MPI_BYTE, 1 - rank, 10, MPI_COMM_WORLD,
                  &requests[count++]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    for (int i = 0; receives && i < WINDOW; i++)
        deliver(i * stride, size);
    if (rank == 1)
        MPI_Send(acknowledgement, 4, MPI_BYTE, 0, 11, MPI_COMM_WORLD);
    else
        MPI_Recv(acknowledgement, 4, MPI_BYTE, 1, 11, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/*
 * Time of one round in seconds. Rank 0 decides when it is enough, between batches of rounds. Rank 1 takes no part in one-sided
 * rounds; it waits for their end.
 */
static double measure(enum test test, size_t size, double seconds)
{
    int warm_up = one_by_one(test) ? 1000 : 20, batch = one_by_one(test) ? 200 : 4, more = 1;
    long rounds = 0;
    double taken = 0;
    if (size > SMALL) {
        warm_up /= 10;
        batch = one_by_one(test) ? 20 : 1;
    }
    if (one_sided(test) && rank == 1) {
        MPI_Barrier(MPI_COMM_WORLD);
        return 1;
    }
    for (int i = 0; i < warm_up; i++)
        play(test, size, separate);
    while (more) {
        if (!one_sided(test))
            MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int i = 0; i < batch; i++)
            play(test, size, separate);
        taken += MPI_Wtime() - start;
        rounds += batch;
        more = taken < seconds;
        if (!one_sided(test))
            MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (one_sided(test))
        MPI_Barrier(MPI_COMM_WORLD);
    return taken / (double)rounds;
}

/* Mean time of MPI_Alltoall over all calls and ranks, in seconds. Rank 0 decides when it is enough. */
static double measure_alltoall(size_t size, double seconds)
{
    int batch = size > SMALL ? 20 : 200, more = 1;
    long calls = 0;
    double taken = 0, all = 0;
    for (int i = 0; i < batch; i++)
        play(ALLTOALL, size, 0);
    while (more) {
        for (int i = 0; i < batch; i++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            play(ALLTOALL, size, 0);
            taken += MPI_Wtime() - start;
        }
        calls += batch;
        more = taken < seconds;
        MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    MPI_Reduce(&taken, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    return all / (double)calls / ranks;
}

static unsigned char pattern(int from, int round, int slot, size_t position)
{
    return (unsigned char)(101 * from + 37 * round + 11 * slot + position * 7 + (position >> 8) * 3 + (position >> 16));
}

/* The byte that arrives here. In alltoall, this rank sends block `slot` to rank `slot` and receives a block from it. */
static unsigned char expected(enum test test, int round, int slot, size_t position)
{
    return test == ALLTOALL ? pattern(slot, round, rank, position) : pattern(1 - rank, round, slot, position);
}

/* Sends rounds of messages with known bytes. Returns the number of messages that arrived here. */
static long verify(enum test test, size_t size)
{
    int slots = test == ALLTOALL ? ranks : one_by_one(test) ? 1 : WINDOW, receives = arrive_here(test);
    long messages = 0;
    for (int round = 0; round < 3; round++) {
        for (int slot = 0; slot < slots; slot++)
            for (size_t i = 0; i < size; i++) {
                outbox[slot * size + i] = pattern(rank, round, slot, i);
                inbox[slot * size + i] = (unsigned char)~expected(test, round, slot, i);
            }
        MPI_Barrier(MPI_COMM_WORLD);
        play(test, size, 1);
        if (one_sided(test))
            MPI_Barrier(MPI_COMM_WORLD);
        for (int slot = 0; receives && slot < slots; slot++, messages++)
            for (size_t i = 0; i < size; i++)
                if (inbox[slot * size + i] != expected(test, round, slot, i)) {
                    fprintf(stderr, "rank %d: byte %zu of message %d with %zu bytes is wrong\n", rank, i, slot, size);
                    MPI_Abort(MPI_COMM_WORLD, 1);
                }
    }
    return messages;
}

struct options {
    enum test test;
    const char *name, *buffers, *cards;
    int verify, allocate;
    double seconds;
    size_t sizes[MAX_SIZES];
    int size_count;
};

static void parse_sizes(struct options *options, const char *list)
{
    options->size_count = 0;
    for (char *end; *list != '\0'; list = *end == ',' ? end + 1 : end) {
        unsigned long long size = strtoull(list, &end, 10);
        if (end == list || (*end != ',' && *end != '\0') || size == 0 || size > 1 << 26)
            fail("--sizes", "each size is a number of bytes, 1 to 67108864");
        if (options->size_count == MAX_SIZES)
            fail("--sizes", "at most 32 sizes");
        options->sizes[options->size_count++] = (size_t)size;
    }
    if (options->size_count == 0)
        fail("--sizes", "no size");
}

static void parse(int argc, char **argv, struct options *options)
{
    int known = 0;
    for (int i = 0; argc > 1 && i < TESTS; i++)
        if (strcmp(argv[1], names[i]) == 0) {
            options->test = (enum test)i;
            options->name = names[i];
            known = 1;
        }
    if (!known)
        fail("usage", "messages latency|bw|bibw|alltoall|put-latency|put-bw|get-latency|get-bw --buffers HH [--cards A,B] [--stage] [--separate] [--allocate] [--sizes N,…] [--seconds S] [--verify]");
    parse_sizes(options, "8,1024,8192,65536,1048576");
    for (int i = 2; i < argc; i++) {
        const char *argument = argv[i], *next = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argument, "--stage") == 0)
            staging = separate = 1;
        else if (strcmp(argument, "--separate") == 0)
            separate = 1;
        else if (strcmp(argument, "--verify") == 0)
            options->verify = 1;
        else if (strcmp(argument, "--allocate") == 0)
            options->allocate = 1;
        else if (next == NULL)
            fail(argument, "unknown option, or its value is missing");
        else if (strcmp(argument, "--buffers") == 0)
            options->buffers = argv[++i];
        else if (strcmp(argument, "--cards") == 0)
            options->cards = argv[++i];
        else if (strcmp(argument, "--sizes") == 0)
            parse_sizes(options, argv[++i]);
        else if (strcmp(argument, "--seconds") == 0)
            options->seconds = strtod(argv[++i], NULL);
        else
            fail(argument, "unknown option");
    }
    if (staging && (one_sided(options->test) || options->test == ALLTOALL))
        fail("--stage", "the one-sided tests and alltoall have no staging");
    if (strlen(options->buffers) != 2 || strspn(options->buffers, "HD") != 2)
        fail("--buffers", "HH, HD, DH or DD");
    if (options->test == ALLTOALL && strcmp(options->buffers, "HH") != 0)
        fail("--buffers", "alltoall has host memory only");
    if (ranks < 2 || (ranks > 2 && options->test != ALLTOALL))
        fail("mpirun", "start two ranks; for alltoall two or more");
}

/* Opens this rank's card: the rank-th name of the list. */
static void open_card(const char *cards)
{
    char name[256];
    const char *second = strchr(cards, ',');
    if (rank == 1 && second == NULL)
        fail("--cards", "two names, separated by a comma");
    const char *mine = rank == 0 ? cards : second + 1;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(mine, ","), mine);
    card = msm_open(name, 10000);
    if (card == NULL)
        fail("msm_open", millstream_error());
}

int main(int argc, char **argv)
{
    struct options options = {.buffers = "HH", .cards = "", .seconds = 0.2};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    parse(argc, argv, &options);
    if (rank < 2 && options.buffers[rank] == 'D')
        open_card(options.cards);
    /* Only a rank with card memory stages. */
    staging = staging && card != NULL;
    size_t largest = 0;
    for (int i = 0; i < options.size_count; i++)
        largest = options.sizes[i] > largest ? options.sizes[i] : largest;
    size_t slots = options.test == ALLTOALL ? (size_t)ranks : options.verify || separate ? WINDOW : 1;
    outbox = buffer(slots * largest);
    inbox = buffer(slots * largest);
    if (staging) {
        outbox_host = host_buffer(slots * largest);
        inbox_host = host_buffer(slots * largest);
    }
    if (one_sided(options.test)) {
        unsigned char **shared = options.test == GET_LATENCY || options.test == GET_BANDWIDTH ? &outbox : &inbox;
        MPI_Aint bytes = (MPI_Aint)(slots * largest);
        if (options.allocate)
            MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, shared, &window);
        else
            MPI_Win_create(*shared, bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        MPI_Win_lock_all(0, window);
    }

    long messages = 0;
    for (int i = 0; i < options.size_count; i++) {
        size_t bytes = options.sizes[i];
        if (options.verify) {
            messages += verify(options.test, bytes);
            continue;
        }
        double round = options.test == ALLTOALL ? measure_alltoall(bytes, options.seconds)
                                                : measure(options.test, bytes, options.seconds);
        double payload = (double)bytes * WINDOW * (options.test == BIDIRECTIONAL ? 2 : 1);
        if (rank == 0)
            printf("%s %zu %.4f\n", options.name, bytes,
                   one_by_one(options.test) ? round / (options.test == LATENCY ? 2 : 1) * 1e6 : payload / round / 1e6);
    }
    long all;
    MPI_Reduce(&messages, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0 && options.verify)
        printf("%s: %ld messages verified\n", options.name, all);
    if (card != NULL && msm_check(card) != 0)
        fail("msm_check", millstream_error());
    if (one_sided(options.test)) {
        MPI_Win_unlock_all(window);
        MPI_Win_free(&window);
    }
    MPI_Finalize();
    msm_close(card);
    return 0;
}
