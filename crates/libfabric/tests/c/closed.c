/* Sends to an endpoint that closes: closed RANK, on a torus of two nodes without supervisors. */
#include "common.h"

enum { SENDS = 40, SIZE = 64 };

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    open_domain(FI_TAGGED);
    CALL(fi_endpoint(domain, info, &ep, NULL));
    enable_endpoint();

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
