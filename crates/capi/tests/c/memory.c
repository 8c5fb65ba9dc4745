/* Windows, re-registration, null regions, on-demand paging and device memory through the C interface. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

enum { LEN = 16384 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *near, *far;
static char *memory, *other;
static struct ibv_mr *local;

static struct ibv_qp *new_qp(void)
{
    struct ibv_qp_init_attr_ex init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
        .qp_type = IBV_QPT_RC,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = pd,
        .send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV |
                          IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE,
    };
    struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
    CHECK(qp);
    return qp;
}

static void connect_to(struct ibv_qp *qp, struct ibv_qp *peer)
{
    union ibv_gid gid;
    CHECK(!ibv_query_gid(context, 1, 1, &gid));
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
    };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp_num,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 1,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = 1 } },
    };
    CHECK(!ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
    };
    CHECK(!ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC));
}

static void connect_both(void)
{
    near = new_qp();
    far = new_qp();
    connect_to(near, far);
    connect_to(far, near);
}

static struct ibv_wc completion(void)
{
    struct ibv_wc wc;
    int n;
    while (!(n = ibv_poll_cq(cq, 1, &wc)))
        ;
    CHECK(n == 1);
    return wc;
}

/* Posts to `qp` and expects this status. */
static struct ibv_wc post(struct ibv_qp *qp, struct ibv_send_wr wr, enum ibv_wc_status status)
{
    struct ibv_send_wr *bad = NULL;
    wr.send_flags |= IBV_SEND_SIGNALED;
    CHECK(!ibv_post_send(qp, &wr, &bad));
    struct ibv_wc wc = completion();
    if (wc.status != status) {
        fprintf(stderr, "status %s, expected %s\n", ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
        exit(1);
    }
    return wc;
}

/* The peer writes 8 bytes of `local` with this key. */
static void far_writes(uint64_t addr, uint32_t rkey, enum ibv_wc_status status)
{
    struct ibv_sge sge = { (uint64_t)(uintptr_t)other, 8, local->lkey };
    struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 };
    wr.wr.rdma.remote_addr = addr;
    wr.wr.rdma.rkey = rkey;
    post(far, wr, status);
    if (status != IBV_WC_SUCCESS) {
        CHECK(!ibv_destroy_qp(near) && !ibv_destroy_qp(far));
        connect_both();
    }
}

static void windows_of_type_1(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    CHECK(mr && mw && mw->pd == pd && mw->context == context && mw->type == IBV_MW_TYPE_1);
    uint32_t first = mw->rkey;
    struct ibv_mw_bind bind = {
        .wr_id = 7,
        .send_flags = IBV_SEND_SIGNALED,
        .bind_info = { mr, (uintptr_t)memory + 100, 1000, IBV_ACCESS_REMOTE_WRITE },
    };
    CHECK(!ibv_bind_mw(near, mw, &bind));
    struct ibv_wc wc = completion();
    CHECK(wc.wr_id == 7 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
    CHECK(mw->rkey == ibv_inc_rkey(first));
    far_writes((uintptr_t)memory + 100, mw->rkey, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory + 100, other, 8));
    CHECK(ibv_dereg_mr(mr) == EBUSY);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(errno == EBUSY);
    far_writes((uintptr_t)memory + 100, first, IBV_WC_REM_ACCESS_ERR);
    far_writes((uintptr_t)memory + 100, mw->rkey, IBV_WC_SUCCESS);

    /* An unbind, and an invalid bind. */
    uint32_t bound = mw->rkey;
    bind.bind_info = (struct ibv_mw_bind_info){ 0 };
    CHECK(!ibv_bind_mw(near, mw, &bind));
    CHECK(completion().status == IBV_WC_SUCCESS && mw->rkey != bound);
    far_writes((uintptr_t)memory + 100, bound, IBV_WC_REM_ACCESS_ERR);
    bind.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)memory, 8, IBV_ACCESS_ZERO_BASED };
    CHECK(ibv_bind_mw(near, mw, &bind) == EINVAL);
    struct ibv_send_wr by_post = { .opcode = IBV_WR_BIND_MW }, *bad = NULL;
    by_post.bind_mw.mw = mw;
    by_post.bind_mw.rkey = mw->rkey;
    CHECK(ibv_post_send(near, &by_post, &bad) == EINVAL && bad == &by_post);
    CHECK(!ibv_dereg_mr(mr));
    CHECK(!ibv_dealloc_mw(mw));
    CHECK(!ibv_alloc_mw(pd, 3) && errno == EINVAL);
}

static void windows_of_type_2(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    CHECK(mr && mw);
    struct ibv_send_wr wr = { .wr_id = 9, .opcode = IBV_WR_BIND_MW };
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info =
        (struct ibv_mw_bind_info){ mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED };
    uint32_t key = wr.bind_mw.rkey;
    CHECK(post(near, wr, IBV_WC_SUCCESS).opcode == IBV_WC_BIND_MW && mw->rkey == key);
    far_writes(56, key, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory + 56, other, 8));
    CHECK(ibv_dereg_mr(mr) == EBUSY);

    /* The peer invalidates the key. */
    struct ibv_recv_wr recv = { .wr_id = 3 }, *bad_recv = NULL;
    CHECK(!ibv_post_recv(near, &recv, &bad_recv));
    struct ibv_send_wr inv = { .wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED };
    inv.invalidate_rkey = key;
    struct ibv_send_wr *bad = NULL;
    CHECK(!ibv_post_send(far, &inv, &bad));
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = completion();
        CHECK(wc.status == IBV_WC_SUCCESS);
        if (wc.opcode == IBV_WC_RECV) {
            CHECK(wc.wr_id == 3 && (wc.wc_flags & IBV_WC_WITH_INV) && !(wc.wc_flags & IBV_WC_WITH_IMM));
            CHECK(wc.invalidated_rkey == key);
        }
    }

    /* The owner binds the window again and invalidates it. */
    wr.bind_mw.rkey = ibv_inc_rkey(key);
    post(near, wr, IBV_WC_SUCCESS);
    inv = (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV };
    inv.invalidate_rkey = mw->rkey;
    CHECK(post(near, inv, IBV_WC_SUCCESS).opcode == IBV_WC_LOCAL_INV);
    far_writes(0, mw->rkey, IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_pd(pd) == EBUSY);
    CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_mw(mw));
}

static void windows_in_batches(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2), *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    CHECK(mr && mw && one);
    struct ibv_qp_ex *owner = ibv_qp_to_qp_ex(near), *peer = ibv_qp_to_qp_ex(far);
    struct ibv_mw_bind_info info = { mr, (uintptr_t)memory, 4096, IBV_ACCESS_REMOTE_WRITE };
    uint32_t first = ibv_inc_rkey(mw->rkey), second = ibv_inc_rkey(first);
    ibv_wr_start(owner);
    owner->wr_id = 1, owner->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_bind_mw(owner, mw, first, &info);
    owner->wr_id = 2;
    ibv_wr_local_inv(owner, first);
    owner->wr_id = 3;
    ibv_wr_bind_mw(owner, mw, second, &info);
    CHECK(!ibv_wr_complete(owner) && mw->rkey == second);
    for (unsigned i = 1; i <= 3; i++) {
        struct ibv_wc wc = completion();
        CHECK(wc.wr_id == i && wc.status == IBV_WC_SUCCESS);
        CHECK(wc.opcode == (i == 2 ? IBV_WC_LOCAL_INV : IBV_WC_BIND_MW));
    }
    ibv_wr_start(owner);
    ibv_wr_bind_mw(owner, one, one->rkey, &info);
    CHECK(ibv_wr_complete(owner) == EINVAL);
    /* A destination has no effect here, and overwrites no other field. */
    struct ibv_ah_attr where = { .is_global = 1, .port_num = 1 };
    CHECK(!ibv_query_gid(near->context, 1, 0, &where.grh.dgid));
    struct ibv_ah *ah = ibv_create_ah(pd, &where);
    CHECK(ah);
    uint32_t third = ibv_inc_rkey(second);
    ibv_wr_start(owner);
    owner->wr_id = 6, owner->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_local_inv(owner, second);
    ibv_wr_set_ud_addr(owner, ah, 1, 2);
    owner->wr_id = 7;
    ibv_wr_bind_mw(owner, mw, third, &info);
    ibv_wr_set_ud_addr(owner, ah, 1, 2);
    CHECK(!ibv_wr_complete(owner) && mw->rkey == third);
    for (unsigned i = 6; i <= 7; i++) {
        struct ibv_wc bound = completion();
        CHECK(bound.wr_id == i && bound.status == IBV_WC_SUCCESS);
    }
    CHECK(!ibv_destroy_ah(ah));
    second = third;

    struct ibv_recv_wr recv = { .wr_id = 5 }, *bad = NULL;
    CHECK(!ibv_post_recv(near, &recv, &bad));
    memset(memory, 0, LEN);
    ibv_wr_start(peer);
    peer->wr_id = 4, peer->wr_flags = 0;
    ibv_wr_rdma_write(peer, second, (uintptr_t)memory + 16);
    ibv_wr_set_sge(peer, local->lkey, (uintptr_t)other, 8);
    ibv_wr_send_inv(peer, second);
    CHECK(!ibv_wr_complete(peer));
    struct ibv_wc wc = completion();
    CHECK(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS && wc.invalidated_rkey == second);
    CHECK(!memcmp(memory + 16, other, 8));
    far_writes((uintptr_t)memory, second, IBV_WC_REM_ACCESS_ERR);
    CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_mw(mw) && !ibv_dealloc_mw(one));
}

static void atomic_writes(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(mr);
    struct ibv_qp_ex *peer = ibv_qp_to_qp_ex(far);
    memset(memory, 0, LEN);
    char value[8] = "eight by";
    ibv_wr_start(peer);
    peer->wr_id = 1, peer->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_write(peer, mr->rkey, (uintptr_t)memory + 8, value);
    memset(value, 'x', sizeof(value));
    CHECK(!ibv_wr_complete(peer));
    struct ibv_wc wc = completion();
    CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_ATOMIC_WRITE);
    CHECK(!memcmp(memory + 8, "eight by", 8) && !memory[7] && !memory[16]);
    CHECK(!ibv_dereg_mr(mr));
}

static void changed_regions(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_pd *second = ibv_alloc_pd(context);
    CHECK(mr && second);
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD, second, memory + 4096, 64, 0));
    CHECK(mr->addr == memory + 4096 && mr->length == 64 && mr->pd == second);
    CHECK(ibv_dealloc_pd(second) == EBUSY);
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, pd, NULL, 0, all));
    far_writes((uintptr_t)memory + 4096, mr->rkey, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory + 4096, other, 8));
    struct {
        int flags;
        struct ibv_pd *pd;
        void *addr;
        size_t length;
        int access;
    } wrong[] = {
        { 0, NULL, NULL, 0, 0 },
        { 8, NULL, NULL, 0, 0 },
        { IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 64, 0 },
        { IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 0, 0 },
        { IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0 },
        { IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, all },
        { IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE },
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        errno = 0;
        CHECK(ibv_rereg_mr(mr, wrong[i].flags, wrong[i].pd, wrong[i].addr, wrong[i].length, wrong[i].access) ==
              IBV_REREG_MR_ERR_INPUT);
        CHECK(errno == EINVAL);
    }
    far_writes((uintptr_t)memory + 4096 + 56, mr->rkey, IBV_WC_SUCCESS);
    far_writes((uintptr_t)memory, mr->rkey, IBV_WC_REM_ACCESS_ERR);
    CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(second));
}

static void regions_without_memory_of_their_own(void)
{
    struct ibv_mr *null = ibv_alloc_null_mr(pd);
    CHECK(null && !null->addr && null->length == SIZE_MAX && null->lkey && !null->rkey);
    struct ibv_mr *target = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(target);
    memset(memory, 1, LEN);
    struct ibv_sge sge = { 12345, LEN, null->lkey };
    struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 };
    wr.wr.rdma.remote_addr = (uintptr_t)memory;
    wr.wr.rdma.rkey = target->rkey;
    post(near, wr, IBV_WC_SUCCESS);
    CHECK(memory[0] == 0 && !memcmp(memory, memory + 1, LEN - 1));
    CHECK(!ibv_dereg_mr(null) && !ibv_dereg_mr(target));

    struct ibv_mr *process =
        ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(process);
    far_writes((uintptr_t)memory + 3, process->rkey, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory + 3, other, 8));
    struct ibv_sge range = { (uintptr_t)memory, LEN, process->lkey };
    CHECK(!ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &range, 1));
    CHECK(!ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &range, 1));
    CHECK(!ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0, &range, 1));
    CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 2, &range, 1) == EINVAL);
    CHECK(ibv_advise_mr(pd, 77, 0, &range, 1) == EOPNOTSUPP);
    range.addr = 0;
    CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &range, 1) == EFAULT);
    CHECK(!ibv_dereg_mr(process));

    struct ibv_mr *based = ibv_reg_mr(
        pd, memory, LEN, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING);
    CHECK(based);
    memset(memory, 0, LEN);
    far_writes(64, based->rkey, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory + 64, other, 8));
    CHECK(!ibv_dereg_mr(based));
}

static void device_memory(void)
{
    struct ibv_alloc_dm_attr attr = { .length = 4096, .log_align_req = 3 };
    struct ibv_dm *dm = ibv_alloc_dm(context, &attr);
    CHECK(dm && dm->context == context);
    struct ibv_mr *mr =
        ibv_reg_dm_mr(pd, dm, 8, 4088, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(mr && mr->length == 4088);
    far_writes(0, mr->rkey, IBV_WC_SUCCESS);
    char back[8];
    CHECK(!ibv_memcpy_from_dm(back, dm, 8, 8) && !memcmp(back, other, 8));
    CHECK(!ibv_memcpy_to_dm(dm, 4088, other, 8));
    CHECK(ibv_memcpy_to_dm(dm, 4089, other, 8) == EINVAL && ibv_memcpy_from_dm(back, dm, UINT64_MAX, 8) == EINVAL);
    CHECK(ibv_free_dm(dm) == EBUSY);
    CHECK(!ibv_reg_dm_mr(pd, dm, 0, 8, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
    CHECK(!ibv_dereg_mr(mr) && !ibv_free_dm(dm));
    attr.comp_mask = 1;
    CHECK(!ibv_alloc_dm(context, &attr) && errno == EINVAL);
}

static void *never_called(struct ibv_pd *of, void *with, size_t size, size_t alignment, uint64_t type)
{
    (void)of, (void)with, (void)size, (void)alignment, (void)type;
    return NULL;
}

static void never_called_either(struct ibv_pd *of, void *with, void *what, uint64_t type)
{
    (void)of, (void)with, (void)what, (void)type;
}

static void parent_domains(void)
{
    struct ibv_td_init_attr td_attr = { 0 };
    struct ibv_td *td = ibv_alloc_td(context, &td_attr);
    CHECK(td && td->context == context);
    td_attr.comp_mask = 1;
    CHECK(!ibv_alloc_td(context, &td_attr) && errno == EINVAL);

    struct ibv_pd *base = ibv_alloc_pd(context);
    struct ibv_parent_domain_init_attr attr = {
        .pd = base,
        .td = td,
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = never_called,
        .free = never_called_either,
        .pd_context = memory,
    };
    struct ibv_pd *parent = ibv_alloc_parent_domain(context, &attr);
    CHECK(base && parent && parent != base && parent->context == context);
    CHECK(ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(base) == EBUSY);
    attr.free = NULL;
    CHECK(!ibv_alloc_parent_domain(context, &attr) && errno == EINVAL);
    attr.comp_mask = 4;
    CHECK(!ibv_alloc_parent_domain(context, &attr) && errno == EINVAL);
    attr.comp_mask = 0, attr.pd = NULL;
    CHECK(!ibv_alloc_parent_domain(context, &attr) && errno == EINVAL);

    /* A queue pair of the parent domain uses a region of the protection domain. */
    struct ibv_pd *saved = pd;
    struct ibv_cq_init_attr_ex cq_attr = {
        .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent,
    };
    struct ibv_cq_ex *of_parent = ibv_create_cq_ex(context, &cq_attr);
    CHECK(of_parent);
    cq_attr.parent_domain = base;
    CHECK(!ibv_create_cq_ex(context, &cq_attr) && errno == EINVAL);
    pd = parent;
    struct ibv_qp *first = near, *second = far;
    connect_both();
    struct ibv_mr *mr = ibv_reg_mr(base, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    struct ibv_mr *source = ibv_reg_mr(parent, other, LEN, 0), *old = local;
    CHECK(mr && source);
    local = source;
    memset(memory, 0, LEN);
    far_writes((uintptr_t)memory, mr->rkey, IBV_WC_SUCCESS);
    CHECK(!memcmp(memory, other, 8));
    CHECK(ibv_dealloc_pd(parent) == EBUSY);
    CHECK(!ibv_destroy_qp(near) && !ibv_destroy_qp(far) && !ibv_dereg_mr(source));
    CHECK(ibv_dealloc_pd(parent) == EBUSY);
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(of_parent)));
    CHECK(!ibv_dealloc_pd(parent) && ibv_dealloc_pd(base) == EBUSY && !ibv_dealloc_td(td));
    CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(base));
    near = first, far = second, local = old, pd = saved;
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    context = ibv_open_device(list[0]);
    CHECK(context);
    struct ibv_device_attr_ex ex;
    CHECK(!ibv_query_device_ex(context, NULL, &ex) && ex.orig_attr.max_mw > 0 && ex.max_dm_size >= 4096);
    CHECK(ex.device_cap_flags_ex & (1ULL << 40)); /* atomic write */
    CHECK(ex.odp_caps.general_caps == (IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT));
    CHECK(ex.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_ATOMIC);
    CHECK(ex.xrc_odp_caps == ex.odp_caps.per_transport_caps.rc_odp_caps);
    CHECK(!(ex.odp_caps.per_transport_caps.ud_odp_caps & IBV_ODP_SUPPORT_WRITE));
    const unsigned caps =
        IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    CHECK((ex.orig_attr.device_cap_flags & caps) == caps);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    memory = aligned_alloc(4096, LEN);
    other = aligned_alloc(4096, LEN);
    CHECK(pd && cq && memory && other);
    memset(memory, 0, LEN);
    for (int i = 0; i < LEN; i++)
        other[i] = (char)(i * 7 + 1);
    local = ibv_reg_mr(pd, other, LEN, IBV_ACCESS_LOCAL_WRITE);
    CHECK(local);
    connect_both();

    windows_of_type_1();
    windows_of_type_2();
    windows_in_batches();
    atomic_writes();
    changed_regions();
    regions_without_memory_of_their_own();
    device_memory();
    parent_domains();

    CHECK(!ibv_destroy_qp(near) && !ibv_destroy_qp(far) && !ibv_dereg_mr(local));
    CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
    ibv_free_device_list(list);
    puts("done");
    return 0;
}
