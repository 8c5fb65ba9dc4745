/* Sends to an endpoint that closes: closed RANK, on a torus of two nodes without supervisors. */
#include "common.h"

enum { SENDS = 40, SIZE = 64 };

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    struct fi_info *hints = fi_allocinfo(), *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_TAGGED;
    hints->fabric_attr->prov_name = strdup("millstream");
    CALL(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
    struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_TAGGED};
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
    CALL(fi_fabric(info->fabric_attr, &fabric, NULL));
    CALL(fi_domain(fabric, info, &domain, NULL));
    CALL(fi_cq_open(domain, &cq_attr, &cq, NULL));
    CALL(fi_av_open(domain, &av_attr, &av, NULL));
    CALL(fi_endpoint(domain, info, &ep, NULL));
    CALL(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    CALL(fi_ep_bind(ep, &av->fid, 0));
    CALL(fi_enable(ep));

    int closes = argv[1][0] == '1';
    publish(closes ? "closes" : "sends");
    fi_addr_t other = find(closes ? "sends" : "closes");
    static unsigned char bytes[SIZE];
    if (closes) {
        CALL(fi_trecv(ep, bytes, SIZE, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
        done();
        CALL(fi_close(&ep->fid));
        FILE *out = fopen("closed", "w");
        CHECK(out && fclose(out) == 0);
        return 0;
    }
    CALL(fi_tsend(ep, bytes, SIZE, NULL, other, 1, NULL));
    done();
    while (access("closed", F_OK) != 0)
        usleep(10000);
    /* The node of the closed endpoint notices it. */
    sleep(1);
    for (int i = 0; i < SENDS; i++)
        CALL(fi_tsend(ep, bytes, SIZE, NULL, other, 2, NULL));
    struct iovec part = {bytes, SIZE};
    struct fi_msg_tagged message = {.msg_iov = &part, .iov_count = 1, .addr = other, .tag = 3, .context = bytes};
    CALL(fi_tsendmsg(ep, &message, FI_DELIVERY_COMPLETE | FI_COMPLETION));
    /* Each of them completes. The one that waits for its delivery fails. */
    struct fi_cq_tagged_entry entry;
    int failed = 0;
    for (int i = 0; i <= SENDS; i++) {
        int error = completed(&entry);
        CHECK(error == 0 || error == FI_ECONNABORTED);
        failed += error != 0 && entry.op_context == bytes;
    }
    CHECK(failed == 1);
    /* Later ones fail at once. */
    CALL(fi_tsend(ep, bytes, SIZE, NULL, other, 4, NULL));
    CHECK(completed(&entry) == FI_ECONNABORTED);
    CALL(fi_close(&ep->fid));
    return 0;
}
