/* Shared code of the C test programs: checks that print their line, and two connected queue pairs. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

/* Checks that a call fails with NULL and this errno. */
#define REFUSED(pointer, number)                                                                     \
	do {                                                                                         \
		errno = 0;                                                                           \
		CHECK((pointer) == NULL);                                                            \
		CHECK(errno == (number));                                                            \
	} while (0)

enum { GID_INDEX = 1, QKEY = 0x11, SIZE = 8192 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char memory[SIZE];
static union ibv_gid gid;

/* Memory of both ends: requests copy within it. */
static uint64_t at(size_t offset)
{
	return (uint64_t)(uintptr_t)(memory + offset);
}

static void open_device(void)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		     IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	CHECK((context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, memory, SIZE, access)));
	CHECK(ibv_query_gid(context, 1, GID_INDEX, &gid) == 0);
}

static void close_device(void)
{
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_close_device(context) == 0);
}

/* The attributes of a queue pair with the `ibv_wr_*` functions for these operations. */
static inline struct ibv_qp_init_attr_ex description(enum ibv_qp_type type, struct ibv_cq *cq,
						     uint64_t operations)
{
	return (struct ibv_qp_init_attr_ex){
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 3, .max_recv_sge = 3,
			 .max_inline_data = 64 },
		.qp_type = type,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = operations,
	};
}

static struct ibv_ah_attr address(void)
{
	return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
				     .grh = { .dgid = gid, .sgid_index = GID_INDEX, .hop_limit = 1 } };
}

/* Takes a queue pair from RESET to RTS. */
static inline void bring_up(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC,
		.path_mtu = IBV_MTU_4096, .dest_qp_num = peer, .ah_attr = address(),
		.max_dest_rd_atomic = 1, .max_rd_atomic = 1, .min_rnr_timer = 12, .timeout = 14,
		.retry_cnt = 7, .rnr_retry = 7,
	};
	int ud = qp->qp_type == IBV_QPT_UD, rc = qp->qp_type == IBV_QPT_RC;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				       (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)) == 0);
	attr.qp_state = IBV_QPS_RTR;
	CHECK(ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE |
				    (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
				    (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)) == 0);
	attr.qp_state = IBV_QPS_RTS;
	CHECK(ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE | IBV_QP_SQ_PSN |
				    (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						    IBV_QP_MAX_QP_RD_ATOMIC :
					  0)) == 0);
}

static inline void receive(struct ibv_qp *qp, uint64_t id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = { .addr = at(offset), .length = length, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
}

/* Waits for the next completion. */
static inline struct ibv_wc next(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	time_t end = time(NULL) + 20;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		CHECK(time(NULL) < end);
	CHECK(n == 1);
	return wc;
}

/* Expects this request's successful completion as the next one. */
static inline struct ibv_wc good(struct ibv_cq *cq, uint64_t id, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = next(cq);
	CHECK(wc.status == IBV_WC_SUCCESS);
	CHECK(wc.wr_id == id);
	CHECK(wc.opcode == opcode);
	return wc;
}

static inline void empty(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
}
