/*
 * One-sided communication of MPI between two ranks, with windows and local buffers in host or card memory.
 *
 *   windows put|get|accumulate|atomics --window create|dynamic|allocate --buffers XY [--cards A,B]
 *
 * X is the memory of rank 0, Y of rank 1: H is host memory, D the memory of the rank's card (libmillstream_memory). A rank
 * has its window and its local buffer there. With `allocate` MPI allocates the windows in host memory, and only the local
 * buffers are in card memory.
 *
 *   put         each rank puts into the other's window
 *   get         each rank gets from the other's window
 *   accumulate  each rank adds 64-bit integers into both windows; MPI_Get_accumulate with MPI_REPLACE and MPI_NO_OP
 *   atomics     tickets by MPI_Fetch_and_op, one winner of MPI_Compare_and_swap, sums under exclusive locks
 *
 * put, get and accumulate run in each way of synchronisation: fences, a lock, a flush, post and start. Every byte of the
 * window and of the local buffer is compared, those around the transfer as well. The bytes of card memory are read from the
 * card's memory object, not through the mapping that MPI has.
 *
 * put and get count the bytes of card memory that MPI and UCX copy (copies.h). A transfer of ZERO_COPY bytes or more must
 * have none.
 *
 * Prints "TEST: N results right on 2 processes" and, for put and get, "TEST: N bytes in transfers of at least ZERO_COPY,
 * 0 copied".
 */
#define _GNU_SOURCE
#include "copies.h"
#include <mpi.h>
#include <millstream_memory.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPACE = (4 << 20) + (64 << 10), ZERO_COPY = 16384, GUARD = 4096 };

static const int sizes[] = {8, 1000, 4096, 8192, ZERO_COPY, 65536, 1 << 20, (4 << 20) + 3};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

enum synchronisation { FENCE, LOCK, FLUSH, POST_START, SYNCHRONISATIONS };
enum kind { CREATE, DYNAMIC, ALLOCATE };

static int rank, peer;
static long right, wrong, large_bytes;
static struct msm_memory *card;
static unsigned char *base, *local, *image;
static MPI_Win window;
static MPI_Group others;
static MPI_Aint origins[2]; /* displacement of byte 0 of each rank's window */

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

static void expect(int holds, const char *what, long where)
{
    if (holds)
        right++;
    else if (wrong++ == 0)
        fprintf(stderr, "rank %d: %s is wrong (%ld)\n", rank, what, where);
}

static unsigned char *allocate(void)
{
    unsigned char *memory = NULL;
    if (card != NULL) {
        memory = msm_alloc(card, SPACE, 4096);
        if (memory == NULL)
            fail("card memory", millstream_error());
    } else if (posix_memalign((void **)&memory, 4096, SPACE) != 0) {
        fail("host memory", "cannot be allocated");
    }
    return memory;
}

/* The bytes of `memory`: of the card's memory object if they are card memory. */
static const unsigned char *contents(const unsigned char *memory)
{
    uint64_t offset;
    int fd;
    if (card == NULL || msm_offset(card, memory) == UINT64_MAX)
        return memory;
    if (msm_dmabuf(card, memory, SPACE, &fd, &offset) != 0)
        fail("msm_dmabuf", millstream_error());
    for (size_t done = 0; done < SPACE;) {
        ssize_t count = pread(fd, image + done, SPACE - done, (off_t)(offset + done));
        if (count <= 0)
            fail("pread", "card memory cannot be read");
        done += (size_t)count;
    }
    return image;
}

static unsigned char pattern(int from, int message, size_t position)
{
    return (unsigned char)(101 * from + 37 * message + position * 7 + (position >> 8) * 3 + (position >> 16));
}

static unsigned char guard(size_t position)
{
    return (unsigned char)(0xa5 ^ position ^ position >> 8);
}

/* Local stores to a window are made under its lock. */
static void fill(unsigned char *memory, int from, int message, size_t start, size_t bytes)
{
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
    for (size_t i = 0; i < SPACE; i++)
        memory[i] = i >= start && i < start + bytes ? pattern(from, message, i - start) : guard(i);
    MPI_Win_unlock(rank, window);
}

static void compare(const unsigned char *memory, int from, int message, size_t start, size_t bytes, const char *what)
{
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
    const unsigned char *found = contents(memory);
    size_t i = 0;
    while (i < SPACE && found[i] == (i >= start && i < start + bytes ? pattern(from, message, i - start) : guard(i)))
        i++;
    MPI_Win_unlock(rank, window);
    expect(i == SPACE, what, (long)i);
}

static void begin(enum synchronisation way, int target)
{
    MPI_Barrier(MPI_COMM_WORLD);
    switch (way) {
    case FENCE:
        MPI_Win_fence(0, window);
        break;
    case LOCK:
        MPI_Win_lock(MPI_LOCK_SHARED, target, 0, window);
        break;
    case FLUSH:
        MPI_Win_lock_all(0, window);
        break;
    default:
        MPI_Win_post(others, 0, window);
        MPI_Win_start(others, 0, window);
    }
}

static void end(enum synchronisation way, int target)
{
    switch (way) {
    case FENCE:
        MPI_Win_fence(0, window);
        break;
    case LOCK:
        MPI_Win_unlock(target, window);
        break;
    case FLUSH:
        MPI_Win_flush(target, window);
        MPI_Win_unlock_all(window);
        break;
    default:
        MPI_Win_complete(window);
        MPI_Win_wait(window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/* One put or get of `bytes` at `start` of the other's window and of the local buffer. */
static void transfer(int puts, enum synchronisation way, int bytes, size_t start)
{
    uint64_t before = copies_of_libraries();
    copies_count(1);
    begin(way, peer);
    if (puts)
        MPI_Put(local + start, bytes, MPI_BYTE, peer, origins[peer] + (MPI_Aint)start, bytes, MPI_BYTE, window);
    else
        MPI_Get(local + start, bytes, MPI_BYTE, peer, origins[peer] + (MPI_Aint)start, bytes, MPI_BYTE, window);
    end(way, peer);
    copies_count(0);
    if (bytes >= ZERO_COPY) {
        large_bytes += bytes;
        expect(copies_of_libraries() == before, "a transfer with copies of card memory by MPI or UCX", bytes);
    }
}

static void transfers(int puts)
{
    for (int way = FENCE; way < SYNCHRONISATIONS; way++)
        for (int i = 0; i < SIZES; i++) {
            int bytes = sizes[i], message = way * SIZES + i;
            size_t start = GUARD + 24 * (size_t)message;
            if (puts) {
                fill(base, 0, 0, 0, 0);
                fill(local, rank, message, start, bytes);
                transfer(1, way, bytes, start);
                compare(base, peer, message, start, bytes, "a window after a put");
                compare(local, rank, message, start, bytes, "the source of a put");
            } else {
                fill(base, rank, message, start, bytes);
                fill(local, 0, 0, 0, 0);
                transfer(0, way, bytes, start);
                compare(local, peer, message, start, bytes, "a buffer after a get");
                compare(base, rank, message, start, bytes, "the source of a get");
            }
        }
}

static void put(void)
{
    transfers(1);
}

static void get(void)
{
    transfers(0);
}

/* Words of the window: `words[i] = first + i * step`. */
static void fill_words(unsigned char *memory, int64_t first, int64_t step)
{
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
    for (size_t i = 0; i < SPACE / 8; i++)
        ((int64_t *)memory)[i] = first + (int64_t)i * step;
    MPI_Win_unlock(rank, window);
}

/* Compares words `from` to `end` with `inside`, all others with `outside`; each is a first value and a step. */
static void compare_words(const unsigned char *memory, size_t from, size_t end, const int64_t inside[2],
                          const int64_t outside[2], const char *what)
{
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
    const int64_t *words = (const int64_t *)contents(memory);
    size_t i = 0;
    for (; i < SPACE / 8; i++) {
        const int64_t *line = i >= from && i < end ? inside : outside;
        if (words[i] != line[0] + (int64_t)i * line[1])
            break;
    }
    MPI_Win_unlock(rank, window);
    expect(i == SPACE / 8, what, (long)i);
}

static void accumulate_at(int target, size_t from, int count)
{
    MPI_Aint place = origins[target] + (MPI_Aint)from * 8;
    for (int i = 0; i < 3; i++)
        MPI_Accumulate(local + from * 8, count, MPI_INT64_T, target, place, count, MPI_INT64_T, MPI_SUM, window);
}

static void accumulate(void)
{
    static const int counts[] = {1, 125, 4096, 65536};
    const int64_t start[2] = {1000, 3};
    for (int way = FENCE; way < SYNCHRONISATIONS; way++)
        for (int i = 0; i < 4; i++) {
            size_t from = 512 + 8 * (size_t)i;
            fill_words(base, start[0], start[1]);
            fill_words(local, rank + 1, 5);
            /* Both ranks add to the window of each rank in turn; the group of post and start has the other rank only. */
            for (int target = 0; target < 2; target++) {
                int adds = way != POST_START || rank != target;
                begin(way, way == POST_START ? peer : target);
                if (adds)
                    accumulate_at(target, from, counts[i]);
                end(way, way == POST_START ? peer : target);
            }
            /* Three times the local words of each rank that added. */
            int64_t sum[2] = {start[0] + 3 * (way == POST_START ? peer + 1 : 1 + 2), start[1] + 3 * 5 * (way == POST_START ? 1 : 2)};
            compare_words(base, from, from + (size_t)counts[i], sum, start, "a window after accumulates");
        }
    /* Exchange: the window gets the local words, a buffer the previous ones. Then read without a change. */
    const int64_t old[2] = {7000 + peer, 2}, new[2] = {90 + peer, 11}, none[2] = {-1, 0};
    unsigned char *result = allocate();
    enum { FROM = 640, COUNT = 30000 };
    for (int round = 0; round < 2; round++) {
        if (round == 0) {
            fill_words(base, 7000 + rank, 2);
            fill_words(local, 90 + rank, 11);
        }
        fill_words(result, -1, 0);
        begin(FLUSH, peer);
        MPI_Get_accumulate(local + FROM * 8, COUNT, MPI_INT64_T, result + FROM * 8, COUNT, MPI_INT64_T, peer,
                           origins[peer] + FROM * 8, COUNT, MPI_INT64_T, round == 0 ? MPI_REPLACE : MPI_NO_OP, window);
        end(FLUSH, peer);
        const int64_t mine[2] = {7000 + rank, 2}, fetched[2] = {90 + rank, 11};
        compare_words(result, FROM, FROM + COUNT, round == 0 ? old : fetched, none, "what was fetched");
        compare_words(base, FROM, FROM + COUNT, new, mine, "a window after an exchange");
    }
}

/* At the window of `owner`: word 0 a ticket counter, word 1 for the winner, word 2 a sum under exclusive locks. */
static void atomics_at(int owner)
{
    enum { TICKETS = 500, SUMS = 100 };
    int64_t *tickets = (int64_t *)local, *all = malloc(sizeof *all * TICKETS * 2), one = 1;
    fill_words(base, 0, 0);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
    ((int64_t *)base)[1] = -1;
    MPI_Win_unlock(rank, window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, window);
    for (int i = 0; i < TICKETS; i++) {
        MPI_Fetch_and_op(&one, &tickets[i], MPI_INT64_T, owner, origins[owner], MPI_SUM, window);
        MPI_Win_flush(owner, window);
    }
    int64_t mine = rank, nobody = -1, before = -2;
    MPI_Compare_and_swap(&mine, &nobody, &before, MPI_INT64_T, owner, origins[owner] + 8, window);
    MPI_Win_flush(owner, window);
    MPI_Win_unlock_all(window);
    int won = before == -1, winners;
    MPI_Allreduce(&won, &winners, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(winners == 1, "the number of winners", winners);
    MPI_Allgather(tickets, TICKETS, MPI_INT64_T, all, TICKETS, MPI_INT64_T, MPI_COMM_WORLD);
    char given[2 * TICKETS] = {0};
    for (int i = 0; i < 2 * TICKETS; i++)
        if (all[i] >= 0 && all[i] < 2 * TICKETS)
            given[all[i]]++;
    for (int i = 0; i < 2 * TICKETS; i++)
        expect(given[i] == 1, "how often a ticket was given", i);
    free(all);
    for (int i = 0; i < SUMS; i++) {
        int64_t *value = (int64_t *)local;
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, owner, 0, window);
        MPI_Get(value, 1, MPI_INT64_T, owner, origins[owner] + 16, 1, MPI_INT64_T, window);
        MPI_Win_flush(owner, window);
        *value += rank + 1;
        MPI_Put(value, 1, MPI_INT64_T, owner, origins[owner] + 16, 1, MPI_INT64_T, window);
        MPI_Win_unlock(owner, window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == owner) {
        MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
        const int64_t *words = (const int64_t *)contents(base);
        expect(words[0] == 2 * TICKETS, "the ticket counter", words[0]);
        expect(words[1] == 0 || words[1] == 1, "the winner", words[1]);
        expect(words[2] == SUMS * 3, "the sum under exclusive locks", words[2]);
        MPI_Win_unlock(rank, window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static void atomics(void)
{
    atomics_at(0);
    atomics_at(1);
}

struct options {
    void (*run)(void);
    const char *name, *buffers, *cards;
    enum kind kind;
};

static void parse(int argc, char **argv, struct options *options)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"put", put}, {"get", get}, {"accumulate", accumulate}, {"atomics", atomics}};
    static const char *const kinds[] = {"create", "dynamic", "allocate"};
    for (int i = 0; argc > 1 && i < 4; i++)
        if (strcmp(argv[1], tests[i].name) == 0) {
            options->name = tests[i].name;
            options->run = tests[i].run;
        }
    int known = options->run != NULL && argc % 2 == 0;
    for (int i = 2; known && i < argc; i += 2) {
        int kind = -1;
        if (strcmp(argv[i], "--buffers") == 0)
            options->buffers = argv[i + 1];
        else if (strcmp(argv[i], "--cards") == 0)
            options->cards = argv[i + 1];
        else if (strcmp(argv[i], "--window") == 0)
            for (kind = 2; kind >= 0 && strcmp(argv[i + 1], kinds[kind]) != 0; kind--)
                ;
        else
            known = 0;
        if (strcmp(argv[i], "--window") == 0) {
            known = known && kind >= 0;
            options->kind = (enum kind)kind;
        }
    }
    if (!known || strlen(options->buffers) != 2 || strspn(options->buffers, "HD") != 2)
        fail("usage", "windows put|get|accumulate|atomics --window create|dynamic|allocate --buffers HH|HD|DH|DD [--cards A,B]");
}

/* Opens this rank's card: the rank-th name of the list. */
static void open_card(const char *cards)
{
    char name[256];
    const char *second = strchr(cards, ',');
    if (second == NULL)
        fail("--cards", "two names, separated by a comma");
    const char *mine = rank == 0 ? cards : second + 1;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(mine, ","), mine);
    card = msm_open(name, 10000);
    if (card == NULL)
        fail("msm_open", millstream_error());
    copies_watch(msm_base(card), msm_size(card));
}

/* The counter must see a library's copy of card memory; MPI_Pack makes one. */
static void check_counter(void)
{
    char packed[64];
    int position = 0;
    uint64_t before = copies_of_libraries();
    if (card == NULL)
        return;
    copies_count(1);
    MPI_Pack(local, 64, MPI_BYTE, packed, 64, &position, MPI_COMM_WORLD);
    copies_count(0);
    if (copies_of_libraries() - before < 64)
        fail("copies.c", "the copy of MPI_Pack was not counted");
}

static void create_window(enum kind kind)
{
    MPI_Aint origin = 0;
    if (kind == ALLOCATE) {
        MPI_Win_allocate(SPACE, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
    } else {
        base = allocate();
        if (kind == CREATE) {
            MPI_Win_create(base, SPACE, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        } else {
            MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &window);
            MPI_Win_attach(window, base, SPACE);
            MPI_Get_address(base, &origin);
        }
    }
    MPI_Allgather(&origin, 1, MPI_AINT, origins, 1, MPI_AINT, MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    struct options options = {.buffers = "", .cards = ""};
    int size;
    MPI_Group all;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    peer = 1 - rank;
    if (size != 2)
        fail("mpirun", "start two ranks");
    parse(argc, argv, &options);
    if (options.buffers[rank] == 'D')
        open_card(options.cards);
    local = allocate();
    image = malloc(SPACE);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, 1, &peer, &others);
    create_window(options.kind);
    check_counter();

    options.run();

    long mine[3] = {right, wrong, large_bytes}, sums[3] = {0, 0, 0};
    MPI_Allreduce(mine, sums, 3, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && sums[1] == 0) {
        printf("%s: %ld results right on %d processes\n", options.name, sums[0], size);
        if (sums[2] > 0)
            printf("%s: %ld bytes in transfers of at least %d, 0 copied\n", options.name, sums[2], ZERO_COPY);
    }
    if (card != NULL && msm_check(card) != 0)
        fail("msm_check", millstream_error());
    if (options.kind == DYNAMIC)
        MPI_Win_detach(window, base);
    MPI_Win_free(&window);
    MPI_Group_free(&others);
    MPI_Group_free(&all);
    MPI_Finalize();
    msm_close(card);
    return sums[1] == 0 && sums[0] > 0 ? 0 : 1;
}
