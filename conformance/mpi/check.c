/*
 * MPI over the device; every result is compared with the expected one.
 *
 *   check point-to-point | one-sided | collectives
 *
 * Prints "TEST: N results right on P processes", or the first wrong result of each process, and then fails.
 * The sizes cover inline sends, eager messages and rendezvous.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size;
static long right, wrong;

static void expect(int holds, const char *what, long where)
{
    if (holds) {
        right++;
    } else if (wrong++ == 0) {
        fprintf(stderr, "rank %d: %s is wrong (%ld)\n", rank, what, where);
    }
}

static const int sizes[] = {0, 1, 7, 64, 220, 1000, 4096, 8191, 65536, 1 << 20, (4 << 20) + 3};
enum { SIZES = sizeof sizes / sizeof sizes[0], LARGEST = (4 << 20) + 3 };

/* A byte that depends on its position, message and sender. */
static unsigned char pattern(int from, int message, long position)
{
    return (unsigned char)(31 * from + 17 * message + position + (position >> 8) * 3 + (position >> 16) * 7);
}

static void fill(unsigned char *buffer, int bytes, int from, int message)
{
    for (long i = 0; i < bytes; i++)
        buffer[i] = pattern(from, message, i);
}

static void compare(const unsigned char *buffer, int bytes, int from, int message, const char *what)
{
    long i = 0;
    while (i < bytes && buffer[i] == pattern(from, message, i))
        i++;
    expect(i == bytes, what, i);
}

static unsigned char *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes);
    if (memory == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    return memory;
}

static void point_to_point(void)
{
    unsigned char *out = allocate(LARGEST), *in = allocate(LARGEST);
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    MPI_Status status;
    int count;

    /* Blocking messages around a ring, in every size. */
    for (int i = 0; i < SIZES; i++) {
        fill(out, sizes[i], rank, i);
        memset(in, 0xee, sizes[i]);
        if (rank % 2 == 0) {
            MPI_Send(out, sizes[i], MPI_BYTE, next, i, MPI_COMM_WORLD);
            MPI_Recv(in, LARGEST, MPI_BYTE, previous, i, MPI_COMM_WORLD, &status);
        } else {
            MPI_Recv(in, LARGEST, MPI_BYTE, previous, i, MPI_COMM_WORLD, &status);
            MPI_Send(out, sizes[i], MPI_BYTE, next, i, MPI_COMM_WORLD);
        }
        MPI_Get_count(&status, MPI_BYTE, &count);
        expect(count == sizes[i] && status.MPI_SOURCE == previous && status.MPI_TAG == i, "a status", i);
        compare(in, sizes[i], previous, i, "a received message");
    }
    /* Synchronous sends, and combined send and receive. */
    for (int i = 0; i < SIZES; i++) {
        MPI_Request request;
        fill(out, sizes[i], rank, i + 100);
        MPI_Irecv(in, sizes[i], MPI_BYTE, previous, 5, MPI_COMM_WORLD, &request);
        MPI_Ssend(out, sizes[i], MPI_BYTE, next, 5, MPI_COMM_WORLD);
        MPI_Wait(&request, &status);
        compare(in, sizes[i], previous, i + 100, "a synchronously sent message");
        fill(out, sizes[i], rank, i + 200);
        MPI_Sendrecv(out, sizes[i], MPI_BYTE, next, 6, in, sizes[i], MPI_BYTE, previous, 6, MPI_COMM_WORLD, &status);
        compare(in, sizes[i], previous, i + 200, "a message of a sendrecv");
    }
    /* Many outstanding messages, received in reverse order of their tags, some before they are sent. */
    enum { MANY = 200, SMALL = 512 };
    MPI_Request requests[2 * MANY];
    for (int early = 0; early < 2; early++) {
        if (!early)
            MPI_Barrier(MPI_COMM_WORLD);
        for (int i = 0; i < MANY; i++) {
            int message = MANY - 1 - i;
            MPI_Irecv(in + message * SMALL, SMALL, MPI_BYTE, previous, message, MPI_COMM_WORLD, &requests[i]);
        }
        for (int i = 0; i < MANY; i++) {
            fill(out + i * SMALL, SMALL, rank, i);
            MPI_Isend(out + i * SMALL, SMALL, MPI_BYTE, next, i, MPI_COMM_WORLD, &requests[MANY + i]);
        }
        MPI_Waitall(2 * MANY, requests, MPI_STATUSES_IGNORE);
        for (int i = 0; i < MANY; i++)
            compare(in + i * SMALL, SMALL, previous, i, "one of many messages");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    /* Unexpected messages of every size, probed with wildcards. */
    if (rank == 0) {
        long seen = 0;
        for (int i = 0; i < (size - 1) * SIZES; i++) {
            MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
            MPI_Get_count(&status, MPI_BYTE, &count);
            expect(status.MPI_TAG < SIZES && count == sizes[status.MPI_TAG], "a probed size", i);
            int from = status.MPI_SOURCE, tag = status.MPI_TAG;
            MPI_Recv(in, count, MPI_BYTE, from, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            compare(in, count, from, tag, "a message found by a wildcard");
            seen += from * 100 + tag;
        }
        long all = 0;
        for (int from = 1; from < size; from++)
            for (int tag = 0; tag < SIZES; tag++)
                all += from * 100 + tag;
        expect(seen == all, "the set of messages", seen);
    } else {
        for (int i = 0; i < SIZES; i++) {
            fill(out, sizes[i], rank, i);
            MPI_Send(out, sizes[i], MPI_BYTE, 0, i, MPI_COMM_WORLD);
        }
    }
    /* Separates these messages from later ones. */
    MPI_Barrier(MPI_COMM_WORLD);
    /* Messages with the same tag arrive in order. */
    enum { ORDERED = 1000 };
    if (rank == 1) {
        for (int i = 0; i < ORDERED; i++)
            MPI_Send(&i, 1, MPI_INT, 0, 7, MPI_COMM_WORLD);
    } else if (rank == 0) {
        for (int i = 0; i < ORDERED; i++) {
            int value = -1;
            MPI_Recv(&value, 1, MPI_INT, 1, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            expect(value == i, "the order of messages", i);
        }
    }
    /* A strided column. */
    enum { ROWS = 300, COLUMNS = 70 };
    static double matrix[ROWS][COLUMNS];
    MPI_Datatype column;
    MPI_Type_vector(ROWS, 1, COLUMNS, MPI_DOUBLE, &column);
    MPI_Type_commit(&column);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            matrix[i][j] = rank * 1e6 + i * 1e3 + j;
    MPI_Sendrecv(&matrix[0][3], 1, column, next, 8, &matrix[0][9], 1, column, previous, 8, MPI_COMM_WORLD, &status);
    for (int i = 0; i < ROWS; i++)
        expect(matrix[i][9] == previous * 1e6 + i * 1e3 + 3 && matrix[i][8] == rank * 1e6 + i * 1e3 + 8, "a column", i);
    MPI_Type_free(&column);
    free(out);
    free(in);
}

static void one_sided(void)
{
    enum { WORDS = 1 << 18 };
    int64_t *base, *local = malloc(WORDS * sizeof *local);
    MPI_Win window;
    if (local == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    MPI_Win_allocate(WORDS * sizeof *base, sizeof *base, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    const int counts[] = {1, 5, 100, 4096, 50000, WORDS};

    /* Fences: put to the next rank, get from it. */
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < WORDS; j++) {
            base[j] = -1;
            local[j] = rank * 1000000000L + i * 100000000L + j;
        }
        MPI_Win_fence(0, window);
        MPI_Put(local, counts[i], MPI_INT64_T, next, WORDS - counts[i], counts[i], MPI_INT64_T, window);
        MPI_Win_fence(0, window);
        int64_t first = WORDS - counts[i];
        for (int j = 0; j < counts[i]; j++)
            expect(base[first + j] == previous * 1000000000L + i * 100000000L + j, "a word that was put", j);
        expect(first == 0 || base[first - 1] == -1, "the word before what was put", i);
        MPI_Win_fence(0, window);
        MPI_Get(local, counts[i], MPI_INT64_T, next, WORDS - counts[i], counts[i], MPI_INT64_T, window);
        MPI_Win_fence(0, window);
        for (int j = 0; j < counts[i]; j++)
            expect(local[j] == rank * 1000000000L + i * 100000000L + j, "a word that was got", j);
    }
    /* Every rank accumulates at every rank. */
    for (int j = 0; j < WORDS; j++)
        base[j] = 0;
    for (int j = 0; j < 1000; j++)
        local[j] = (rank + 1) * (j + 1);
    MPI_Win_fence(0, window);
    for (int to = 0; to < size; to++)
        for (int i = 0; i < 10; i++)
            MPI_Accumulate(local, 1000, MPI_INT64_T, to, 0, 1000, MPI_INT64_T, MPI_SUM, window);
    MPI_Win_fence(0, window);
    for (int j = 0; j < 1000; j++)
        expect(base[j] == 10L * (j + 1) * size * (size + 1) / 2, "a sum of accumulates", j);

    /* Locks: a counter at rank 0 issues every ticket once. */
    base[0] = 0;
    base[1] = -1;
    base[2] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    enum { TICKETS = 500 };
    int64_t *tickets = malloc(TICKETS * sizeof *tickets), one = 1;
    MPI_Win_lock_all(0, window);
    MPI_Win_sync(window);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < TICKETS; i++) {
        MPI_Fetch_and_op(&one, &tickets[i], MPI_INT64_T, 0, 0, MPI_SUM, window);
        MPI_Win_flush(0, window);
        expect(tickets[i] >= 0 && tickets[i] < (int64_t)TICKETS * size, "a ticket", i);
    }
    /* Exactly one rank wins a compare-and-swap. */
    int64_t mine = rank, nobody = -1, before = -2;
    MPI_Compare_and_swap(&mine, &nobody, &before, MPI_INT64_T, 0, 1, window);
    MPI_Win_flush(0, window);
    MPI_Win_unlock_all(window);
    int won = before == -1, winners;
    MPI_Allreduce(&won, &winners, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(winners == 1, "the number of winners", winners);
    int64_t *all = malloc(sizeof *all * TICKETS * size);
    MPI_Allgather(tickets, TICKETS, MPI_INT64_T, all, TICKETS, MPI_INT64_T, MPI_COMM_WORLD);
    char *given = calloc(size, TICKETS);
    for (int i = 0; i < TICKETS * size; i++)
        if (all[i] >= 0 && all[i] < (int64_t)TICKETS * size)
            given[all[i]]++;
    for (int i = 0; i < TICKETS * size; i++)
        expect(given[i] == 1, "how often a ticket was given", i);

    /* Exclusive locks make read-modify-write atomic. */
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < 100; i++) {
        int64_t value;
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, window);
        MPI_Get(&value, 1, MPI_INT64_T, 0, 2, 1, MPI_INT64_T, window);
        MPI_Win_flush(0, window);
        value += rank + 1;
        MPI_Put(&value, 1, MPI_INT64_T, 0, 2, 1, MPI_INT64_T, window);
        MPI_Win_unlock(0, window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    int64_t total;
    MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
    MPI_Get(&total, 1, MPI_INT64_T, 0, 2, 1, MPI_INT64_T, window);
    MPI_Win_unlock(0, window);
    expect(total == 100L * size * (size + 1) / 2, "a sum under locks", total);
    MPI_Barrier(MPI_COMM_WORLD);

    /* Post, start, complete, wait with one neighbour. */
    MPI_Group world, to, from;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, 1, &next, &to);
    MPI_Group_incl(world, 1, &previous, &from);
    for (int i = 0; i < 20; i++) {
        local[0] = 100 * rank + i;
        MPI_Win_post(from, 0, window);
        MPI_Win_start(to, 0, window);
        MPI_Put(local, 1, MPI_INT64_T, next, 10, 1, MPI_INT64_T, window);
        MPI_Win_complete(window);
        MPI_Win_wait(window);
        expect(base[10] == 100 * previous + i, "a word put between start and complete", i);
    }
    MPI_Group_free(&world);
    MPI_Group_free(&to);
    MPI_Group_free(&from);
    MPI_Win_free(&window);

    /* A window on memory allocated by the program. */
    for (int j = 0; j < WORDS; j++)
        local[j] = rank;
    MPI_Win_create(local, WORDS * sizeof *local, sizeof *local, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    int64_t word = 7000 + rank;
    MPI_Win_fence(0, window);
    MPI_Put(&word, 1, MPI_INT64_T, next, 12345, 1, MPI_INT64_T, window);
    MPI_Win_fence(0, window);
    expect(local[12345] == 7000 + previous && local[12344] == rank, "a word in the program's own memory", local[12345]);
    MPI_Win_free(&window);
    free(local);
    free(tickets);
    free(all);
    free(given);
}

static void collectives(void)
{
    const int counts[] = {1, 3, 100, 5000, 200000};
    enum { LARGE = 200000 };
    int64_t *in = malloc(sizeof *in * LARGE * size), *out = malloc(sizeof *out * LARGE * size);
    if (in == NULL || out == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    for (int c = 0; c < 5; c++) {
        int n = counts[c];
        for (int root = 0; root < size; root++) {
            for (int j = 0; j < n; j++)
                out[j] = rank == root ? root * 7 + j : -1;
            MPI_Bcast(out, n, MPI_INT64_T, root, MPI_COMM_WORLD);
            for (int j = 0; j < n; j++)
                expect(out[j] == root * 7 + j, "a broadcast word", j);
        }
        for (int j = 0; j < n; j++)
            out[j] = (rank + 1) * (int64_t)(j + 1);
        int64_t ranks = (int64_t)size * (size + 1) / 2;
        MPI_Allreduce(out, in, n, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
        for (int j = 0; j < n; j++)
            expect(in[j] == ranks * (j + 1), "a sum of all", j);
        MPI_Reduce(out, in, n, MPI_INT64_T, MPI_MAX, size - 1, MPI_COMM_WORLD);
        for (int j = 0; rank == size - 1 && j < n; j++)
            expect(in[j] == (int64_t)size * (j + 1), "a greatest", j);
        MPI_Scan(out, in, n, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
        for (int j = 0; j < n; j++)
            expect(in[j] == (int64_t)(rank + 1) * (rank + 2) / 2 * (j + 1), "a running sum", j);
        MPI_Allgather(out, n, MPI_INT64_T, in, n, MPI_INT64_T, MPI_COMM_WORLD);
        for (int from = 0; from < size; from++)
            for (int j = 0; j < n; j++)
                expect(in[(long)from * n + j] == (from + 1) * (int64_t)(j + 1), "a gathered word", j);
        for (int to = 0; to < size; to++)
            for (int j = 0; j < n; j++)
                out[(long)to * n + j] = rank * 1000000000L + to * 10000000L + j;
        MPI_Alltoall(out, n, MPI_INT64_T, in, n, MPI_INT64_T, MPI_COMM_WORLD);
        for (int from = 0; from < size; from++)
            for (int j = 0; j < n; j++)
                expect(in[(long)from * n + j] == from * 1000000000L + rank * 10000000L + j, "a word from one to one", j);
        MPI_Scatter(out, n, MPI_INT64_T, in, n, MPI_INT64_T, 0, MPI_COMM_WORLD);
        for (int j = 0; j < n; j++)
            expect(in[j] == rank * 10000000L + j, "a scattered word", j);
        MPI_Request request;
        MPI_Ireduce_scatter_block(out, in, n, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        for (int j = 0; j < n; j++)
            expect(in[j] == ranks * 1000000000L - size * 1000000000L + size * (rank * 10000000L + j), "a scattered sum", j);
    }
    /* Parts of different lengths. */
    int parts[64], places[64], total = 0;
    for (int from = 0; from < size; from++) {
        parts[from] = 10 + 1000 * from;
        places[from] = total;
        total += parts[from];
    }
    for (int j = 0; j < parts[rank]; j++)
        out[j] = rank * 100000 + j;
    MPI_Gatherv(out, parts[rank], MPI_INT64_T, in, parts, places, MPI_INT64_T, 0, MPI_COMM_WORLD);
    for (int from = 0; rank == 0 && from < size; from++)
        for (int j = 0; j < parts[from]; j++)
            expect(in[places[from] + j] == from * 100000 + j, "a word of an unequal part", j);
    /* A communicator of every second rank. */
    MPI_Comm half;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    int members, sum;
    MPI_Comm_size(half, &members);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, half);
    int same = 0;
    for (int other = rank % 2; other < size; other += 2)
        same += other;
    expect(sum == same && members == (size + 1 - rank % 2) / 2, "the sum in a part of the processes", sum);
    MPI_Comm_free(&half);
    for (int i = 0; i < 200; i++)
        MPI_Barrier(MPI_COMM_WORLD);
    free(in);
    free(out);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"point-to-point", point_to_point}, {"one-sided", one_sided}, {"collectives", collectives}};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int found = 0;
    for (unsigned i = 0; i < 3; i++) {
        if (argc == 2 && strcmp(argv[1], tests[i].name) == 0) {
            found = 1;
            tests[i].run();
        }
    }
    long mine[2] = {right, wrong}, all[2] = {0, 0};
    MPI_Allreduce(mine, all, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && found && all[1] == 0)
        printf("%s: %ld results right on %d processes\n", argv[1], all[0], size);
    MPI_Finalize();
    return found && all[1] == 0 && all[0] > 0 ? 0 : 1;
}
