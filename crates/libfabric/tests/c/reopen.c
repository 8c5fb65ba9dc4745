/* Endpoints that are opened anew, and one that is lost: reopen RANK, on a torus of two nodes. Addresses are exchanged by files. */
#include "common.h"

enum { ROUNDS = 5, SIZE = 300007 };

static struct fi_info *info;
static struct fid_domain *domain;
static unsigned char sent[SIZE], received[SIZE];

static void open_endpoint(void)
{
    CALL(fi_endpoint(domain, info, &ep, NULL));
    CALL(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    CALL(fi_ep_bind(ep, &av->fid, 0));
    CALL(fi_enable(ep));
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
    struct fi_info *hints = fi_allocinfo();
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_TAGGED | FI_DIRECTED_RECV;
    hints->fabric_attr->prov_name = strdup("millstream");
    CALL(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
    struct fid_fabric *fabric;
    struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_TAGGED};
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
    CALL(fi_fabric(info->fabric_attr, &fabric, NULL));
    CALL(fi_domain(fabric, info, &domain, NULL));
    CALL(fi_cq_open(domain, &cq_attr, &cq, NULL));
    CALL(fi_av_open(domain, &av_attr, &av, NULL));
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
