/* Every function of millstream_memory.h on the card named by the argument. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <millstream_memory.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "line %d: %s; errno %d, %s\n", __LINE__, #condition, errno, millstream_error()); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define FAILS(call, error, words) CHECK((errno = 0, !(call)) && errno == (error) && strstr(millstream_error(), words))

/* Registers card memory as dma-buf and as it is, and writes from one registration to the other. */
static void rdma(struct msm_memory *card)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices != NULL && devices[0] != NULL);
    struct ibv_context *context = ibv_open_device(devices[0]);
    CHECK(context != NULL);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    unsigned char *from = msm_alloc(card, 100000, 0), *to = msm_alloc(card, 100000, 0);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *source = msm_reg_mr(pd, card, from, 100000, access), *target = ibv_reg_mr(pd, to, 100000, access);
    CHECK(source != NULL && target != NULL);
    struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp != NULL);
    union ibv_gid gid;
    CHECK(ibv_query_gid(context, 1, 0, &gid) == 0);
    /* The queue pair is connected to itself. */
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
                                .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
                                .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                       IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    for (int i = 0; i < 100000; i++)
        from[i] = (unsigned char)(i * 7 + (i >> 8));
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = 100000, .lkey = source->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {.remote_addr = (uintptr_t)to, .rkey = target->rkey}}, *bad;
    CHECK(ibv_post_send(qp, &wr, &bad) == 0);
    struct ibv_wc wc;
    int polled;
    while ((polled = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    CHECK(polled == 1 && wc.status == IBV_WC_SUCCESS);
    CHECK(memcmp(from, to, 100000) == 0);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dereg_mr(source) == 0 && ibv_dereg_mr(target) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    ibv_free_device_list(devices);
    CHECK(msm_free(card, from) == 0 && msm_free(card, to) == 0);
}

/* `reduce` adds words that the host has stored; its completion raises the interrupt. */
static void commands(struct msm_memory *card)
{
    FAILS(msm_submit(card, &(struct msc_descriptor){0}, NULL) == 0, EINVAL, "msm_rings");
    FAILS(msm_load(card, 0, "no-such-kernel") == 0, ENOENT, "no-such-kernel");
    FAILS(msm_load(card, 99, "verify") == 0, EINVAL, "no region 99");
    CHECK(msm_load(card, 0, "reduce") == 0);
    FAILS(msm_rings(card, 3) == 0, EINVAL, "3 slots: not a power of two");
    FAILS(msm_rings(card, 0) == 0, EINVAL, "0 slots: not a power of two");
    CHECK(msm_rings(card, 4) == 0);
    FAILS(msm_rings(card, 4) == 0, EINVAL, "open");
    uint64_t *words = msm_alloc(card, 4096, 0), index = 99, sum = 0;
    for (int i = 0; i < 512; i++)
        sum += words[i] = (uint64_t)i * i;
    int interrupt = msm_arm_interrupt(card);
    CHECK(interrupt >= 0);
    /* A command passes the offset and length of its arguments and of its result as argument words 0 to 3. */
    struct msc_descriptor command = {.args_offset = msm_offset(card, words), .args_len = 0, .result_offset = 4096, .cookie = 7};
    CHECK(msm_submit(card, &command, &index) == 0 && index == 0);
    struct pollfd polled = {.fd = interrupt, .events = POLLIN};
    CHECK(poll(&polled, 1, 10000) == 1);
    struct msc_completion done;
    CHECK(msm_wait(card, 10000, &done) == 0 && done.cookie == 7 && done.index == 0 && done.region == 0);
    /* The first results of `reduce`: bytes and sum. */
    CHECK(done.cause == 0 && done.events == 4096 && done.fragments == sum);
    command.reserved[0] = 1;
    FAILS(msm_submit(card, &command, NULL) == 0, EINVAL, "command");
    FAILS(msm_wait(card, 1, &done) == 0, ETIMEDOUT, "no completion");
    CHECK(msm_free(card, words) == 0);
}

/* The card has ended the lease: no call uses the card any more. */
static void revoked(struct msm_memory *card)
{
    uint64_t index;
    struct msc_descriptor command = {.result_offset = 4096, .cookie = 7};
    struct msc_completion done;
    CHECK(msm_load(card, 0, "reduce") == 0 && msm_rings(card, 4) == 0);
    printf("leased\n");
    fflush(stdout);
    /* The test revokes the lease. */
    while (msm_check(card) == 0)
        usleep(1000);
    FAILS(msm_submit(card, &command, &index) == 0, ENODEV, "lease");
    FAILS(msm_wait(card, 10000, &done) == 0, ENODEV, "lease");
    FAILS(msm_load(card, 0, "reduce") == 0, ENODEV, "lease");
    FAILS(msm_rings(card, 4) == 0, ENODEV, "lease");
    FAILS(msm_arm_interrupt(card) >= 0, ENODEV, "lease");
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    FAILS(msm_open(NULL, 0), EINVAL, "name");
    FAILS(msm_open("not a name!", 0), EINVAL, "not a name!");
    FAILS(msm_open("no-such-card-7", 0), ENODEV, "no-such-card-7");
    FAILS(msm_base(NULL), EINVAL, "null pointer");
    struct msm_memory *card = msm_open(argv[1], 10000);
    CHECK(card != NULL);
    /* The lease is taken. */
    FAILS(msm_open(argv[1], 50), EBUSY, "leased");

    unsigned char *base = msm_base(card);
    uint64_t size = msm_size(card), free_bytes = msm_free_bytes(card), offset;
    int fd;
    CHECK(size == 16 << 20 && free_bytes == size);
    unsigned char *block = msm_alloc(card, 1000, 4096), *fixed = msm_alloc_at(card, 1 << 20, 1 << 16);
    CHECK(block >= base && ((uintptr_t)block & 4095) == 0 && fixed == base + (1 << 20));
    CHECK(msm_offset(card, fixed + 5) == (1 << 20) + 5);
    FAILS(msm_alloc_at(card, (1 << 20) + 64, 64) != NULL, EINVAL, "not free");
    FAILS(msm_alloc(card, 8, 3) != NULL, EINVAL, "3");
    FAILS(msm_alloc(card, size, 0) != NULL, ENOMEM, "no free range");
    FAILS(msm_free(card, fixed + 64) == 0, EINVAL, "not the start");
    FAILS(msm_free(card, &fd) == 0, EINVAL, "outside");
    CHECK(msm_offset(card, &fd) == UINT64_MAX);
    CHECK(msm_dmabuf(card, fixed, 1 << 16, &fd, &offset) == 0 && fd >= 0 && offset == 1 << 20);
    FAILS(msm_dmabuf(card, fixed, size, &fd, &offset) == 0, EINVAL, "outside");
    CHECK(msm_free(card, block) == 0 && msm_free(card, fixed) == 0 && msm_free(card, NULL) == 0);
    CHECK(msm_free_bytes(card) == free_bytes);

    rdma(card);
    commands(card);

    CHECK(msm_check(card) == 0);
    struct pollfd alive = {.fd = msm_liveness_fd(card), .events = POLLIN};
    CHECK(poll(&alive, 1, 0) == 0);
    msm_close(card);
    msm_close(NULL);
    /* The next lease finds cleared memory. */
    card = msm_open(argv[1], 10000);
    CHECK(card != NULL && *((unsigned char *)msm_base(card) + 100) == 0);
    revoked(card);
    msm_close(card);
    printf("memory: all calls agree\n");
    return 0;
}
