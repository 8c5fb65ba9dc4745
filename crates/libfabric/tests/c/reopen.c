/* Endpoints that are opened anew, and one that is lost: reopen RANK, on a torus of two nodes. Addresses are exchanged by files. */
#include "common.h"

enum { ROUNDS = 5, SIZE = 300007 };

static unsigned char sent[SIZE], received[SIZE];

static void open_endpoint(void)
{
    CALL(fi_endpoint(domain, info, &ep, NULL));
    enable_endpoint();
}

static unsigned char byte_of(int round, size_t i) { return (unsigned char)(round * 31 + i * 7 + i / 4096); }

static void send_to(fi_addr_t to, int round)
{
    for (size_t i = 0; i < SIZE; i++)
        sent[i] = byte_of(round, i);
    struct iovec part = {sent, SIZE};
    struct fi_msg_tagged message = {.msg_iov = &part, .iov_count = 1, .addr = to, .tag = (uint64_t)round};
    CALL(fi_tsendmsg(ep, &message, FI_DELIVERY_COMPLETE | FI_COMPLETION));
    done();
}

static void receive(int round)
{
    memset(received, 0, SIZE);
    CALL(fi_trecv(ep, received, SIZE, NULL, FI_ADDR_UNSPEC, (uint64_t)round, 0, NULL));
    done();
    for (size_t i = 0; i < SIZE; i++)
        CHECK(received[i] == byte_of(round, i));
}

/* Its endpoint stays open. */
static void stay(void)
{
    open_endpoint();
    publish("stays");
    fi_addr_t other = 0;
    for (int round = 0; round < ROUNDS; round++) {
        char who[20];
        snprintf(who, sizeof who, "round.%d", round);
        other = find(who);
        receive(round);
        send_to(other, round);
    }
    struct fi_cq_tagged_entry entry;
    /* The other endpoint closes without a further message. */
    CALL(fi_trecv(ep, received, SIZE, NULL, other, 1000, 0, NULL));
    CHECK(completed(&entry) == FI_ECONNABORTED);
    CALL(fi_tsend(ep, sent, SIZE, NULL, other, 1000, NULL));
    CHECK(completed(&entry) == FI_ECONNABORTED);
    CALL(fi_close(&ep->fid));
}

/* Opens an endpoint for each round. */
static void come_and_go(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        char who[20];
        open_endpoint();
        snprintf(who, sizeof who, "round.%d", round);
        publish(who);
        send_to(find("stays"), round);
        receive(round);
        CALL(fi_close(&ep->fid));
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    open_domain(FI_TAGGED | FI_DIRECTED_RECV);
    if (atoi(argv[1]) == 0)
        stay();
    else
        come_and_go();
    CALL(fi_close(&av->fid));
    CALL(fi_close(&cq->fid));
    CALL(fi_close(&domain->fid));
    CALL(fi_close(&fabric->fid));
    fi_freeinfo(info);
    fi_freeinfo(hints);
    return 0;
}
