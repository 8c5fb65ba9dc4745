/* Remote memory and atomic operations on all nodes of a torus: remote RANK SIZE. Addresses are exchanged by files. */
#include "common.h"
#include <rdma/fi_atomic.h>
#include <rdma/fi_rma.h>

enum { SIZE = 100003, MOST = 64, KEY = 17 };

static unsigned rank, size;

/* Everybody sends a byte to everybody. Others make progress with this node's operations meanwhile. */
static void barrier(fi_addr_t *all, uint64_t tag)
{
    static char byte, bytes[MOST];
    for (unsigned i = 0; i < size; i++)
        CALL(fi_trecv(ep, &bytes[i], 1, NULL, all[i], tag, 0, NULL));
    for (unsigned i = 0; i < size; i++)
        CALL(fi_tsend(ep, &byte, 1, NULL, all[i], tag, NULL));
    for (unsigned i = 0; i < 2 * size; i++)
        done();
}

static unsigned char byte_of(unsigned node, size_t i) { return (unsigned char)(node * 31 + i * 7 + i / 4096); }

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    rank = atoi(argv[1]);
    size = atoi(argv[2]);
    open_domain(FI_TAGGED | FI_MSG | FI_RMA | FI_ATOMIC | FI_DIRECTED_RECV);
    CALL(fi_endpoint(domain, info, &ep, NULL));
    CHECK(fi_enable(ep) == -FI_ENOAV);
    enable_endpoint();

    static unsigned char memory[2 * SIZE], local[SIZE], back[SIZE];
    static uint64_t words[MOST];
    struct fid_mr *mr, *counters;
    CALL(fi_mr_reg(domain, memory, sizeof memory, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
    CALL(fi_mr_reg(domain, words, sizeof words, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY + 1, 0, &counters, NULL));
    CHECK(fi_mr_reg(domain, words, 8, FI_REMOTE_READ, 0, KEY, 0, &counters, NULL) == -FI_ENOKEY);

    char address[64];
    snprintf(address, sizeof address, "address.%u", rank);
    publish(address);
    fi_addr_t all[MOST];
    for (unsigned i = 0; i < size; i++) {
        snprintf(address, sizeof address, "address.%u", i);
        all[i] = find(address);
    }
    barrier(all, 1);

    /* A write, and the same bytes read back. */
    unsigned next = (rank + 1) % size, previous = (rank + size - 1) % size;
    for (size_t i = 0; i < SIZE; i++)
        local[i] = byte_of(rank, i);
    CALL(fi_write(ep, local, SIZE, NULL, all[next], 5, KEY, NULL));
    done();
    CALL(fi_read(ep, back, SIZE, NULL, all[next], 5, KEY, NULL));
    done();
    CHECK(memcmp(local, back, SIZE) == 0);
    barrier(all, 2);
    for (size_t i = 0; i < SIZE; i++)
        CHECK(memory[5 + i] == byte_of(previous, i));

    /* Atomic operations of all nodes on one word of node 0. */
    uint64_t one = 1, old;
    for (int i = 0; i < 100; i++) {
        CALL(fi_fetch_atomic(ep, &one, 1, NULL, &old, NULL, all[0], 8, KEY + 1, FI_UINT64, FI_SUM, NULL));
        done();
        CHECK(old < 100 * size);
    }
    double halves[2] = {0.5, 1.5};
    CALL(fi_atomic(ep, halves, 2, NULL, all[0], 16, KEY + 1, FI_DOUBLE, FI_SUM, NULL));
    done();
    barrier(all, 3);
    CALL(fi_read(ep, back, 24, NULL, all[0], 8, KEY + 1, NULL));
    done();
    double sums[2];
    memcpy(&old, back, 8);
    memcpy(sums, back + 8, 16);
    CHECK(old == 100 * size && sums[0] == 0.5 * size && sums[1] == 1.5 * size);
    barrier(all, 4);

    /* One of all nodes swaps. */
    uint64_t expected = 100 * size, mine = 1000 + rank;
    CALL(fi_compare_atomic(ep, &mine, 1, NULL, &expected, NULL, &old, NULL, all[0], 8, KEY + 1, FI_UINT64, FI_CSWAP,
                           NULL));
    done();
    CHECK(old == 100 * size || (old >= 1000 && old < 1000 + size));

    /* Errors belong to their operation. */
    struct fi_cq_tagged_entry entry;
    CALL(fi_read(ep, back, 8, NULL, all[next], 0, 999, &entry));
    CHECK(completed(&entry) == FI_EKEYREJECTED);
    CALL(fi_write(ep, local, 8, NULL, all[next], 2 * SIZE - 7, KEY, NULL));
    CHECK(completed(&entry) == FI_EINVAL);
    CHECK(fi_atomic(ep, halves, 1, NULL, all[0], 0, KEY + 1, FI_DOUBLE, FI_BXOR, NULL) == -FI_EOPNOTSUPP);
    CHECK(fi_send(ep, local, 8, NULL, 12345, NULL) == -FI_EADDRNOTAVAIL);
    CHECK(fi_inject(ep, local, 100000, all[next]) == -FI_EMSGSIZE);

    /* A short receive is truncated; a canceled one says so. */
    barrier(all, 5);
    CALL(fi_trecv(ep, back, 10, NULL, all[previous], 77, 0, NULL));
    CALL(fi_tsend(ep, local, 20, NULL, all[next], 77, NULL));
    int first = completed(&entry), second = completed(&entry);
    CHECK(first + second == FI_ETRUNC && (first == 0 || second == 0));
    int context;
    CALL(fi_trecv(ep, back, 10, NULL, all[previous], 78, 0, &context));
    CALL(fi_cancel(&ep->fid, &context));
    CHECK(completed(&entry) == FI_ECANCELED && entry.op_context == &context);
    barrier(all, 6);

    CALL(fi_close(&ep->fid));
    CALL(fi_close(&mr->fid));
    CALL(fi_close(&counters->fid));
    CALL(fi_close(&av->fid));
    CALL(fi_close(&cq->fid));
    CALL(fi_close(&domain->fid));
    CALL(fi_close(&fabric->fid));
    fi_freeinfo(info);
    fi_freeinfo(hints);
    return 0;
}
