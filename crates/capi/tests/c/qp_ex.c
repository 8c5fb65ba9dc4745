/* Extended queue pairs: creation, and the ibv_wr_* functions, which are inline in verbs.h. */
#include "verbs.h"
#include <pthread.h>

enum { RC_OPERATIONS = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
		       IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
		       IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD };

struct pair {
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct ibv_qp_ex *ex;
};

static struct pair make(enum ibv_qp_type type, uint64_t operations)
{
	struct pair pair;
	for (int i = 0; i < 2; i++) {
		CHECK((pair.cq[i] = ibv_create_cq(context, 64, NULL, NULL, 0)));
		struct ibv_qp_init_attr_ex init = description(type, pair.cq[i], operations);
		CHECK((pair.qp[i] = ibv_create_qp_ex(context, &init)));
	}
	for (int i = 0; i < 2; i++)
		bring_up(pair.qp[i], pair.qp[!i]->qp_num);
	CHECK((pair.ex = ibv_qp_to_qp_ex(pair.qp[0])));
	return pair;
}

static void destroy(struct pair *pair)
{
	for (int i = 0; i < 2; i++) {
		CHECK(ibv_destroy_qp(pair->qp[i]) == 0);
		CHECK(ibv_destroy_cq(pair->cq[i]) == 0);
	}
}

static void creation_refuses_what_is_not_there(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = description(IBV_QPT_RC, cq, RC_OPERATIONS), changed;
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	CHECK(qp && ibv_qp_to_qp_ex(qp) == (struct ibv_qp_ex *)qp);
	CHECK(init.cap.max_send_wr >= 8 && init.cap.max_inline_data >= 64);
	CHECK(ibv_destroy_qp(qp) == 0);

	/* Without the flags it is an ordinary queue pair with either call. */
	changed = init, changed.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	CHECK((qp = ibv_create_qp_ex(context, &changed)));
	CHECK(ibv_qp_to_qp_ex(qp) == NULL);
	CHECK(ibv_destroy_qp(qp) == 0);
	changed = init, changed.comp_mask = IBV_QP_INIT_ATTR_PD;
	CHECK((qp = ibv_create_qp_ex(context, &changed)));
	CHECK(ibv_qp_to_qp_ex(qp) == NULL);
	CHECK(ibv_destroy_qp(qp) == 0);

	changed = init, changed.comp_mask |= 1 << 20;
	REFUSED(ibv_create_qp_ex(context, &changed), EINVAL);
	changed = init, changed.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	REFUSED(ibv_create_qp_ex(context, &changed), EINVAL);
	changed = init, changed.pd = NULL;
	REFUSED(ibv_create_qp_ex(context, &changed), EINVAL);
	changed = init, changed.cap.max_send_wr = 1 << 30;
	REFUSED(ibv_create_qp_ex(context, &changed), EINVAL);
	changed = init, changed.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	for (int bit = 1; bit < 12; bit++) {
		changed = init, changed.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
		changed.create_flags = 1 << bit;
		REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	}
	/* Operations that the transport, this device, or verbs.h does not have. */
	changed = init, changed.send_ops_flags |= IBV_QP_EX_WITH_TSO;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	changed = init, changed.send_ops_flags |= 1ull << 40;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	changed = init, changed.qp_type = IBV_QPT_UC;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	changed.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
	CHECK((qp = ibv_create_qp_ex(context, &changed)));
	CHECK(ibv_destroy_qp(qp) == 0);
	changed.qp_type = IBV_QPT_UD;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	changed.qp_type = IBV_QPT_RAW_PACKET;
	REFUSED(ibv_create_qp_ex(context, &changed), EOPNOTSUPP);
	CHECK(ibv_destroy_cq(cq) == 0);
}

static void begin(struct ibv_qp_ex *ex, uint64_t id, unsigned int flags)
{
	ex->wr_id = id;
	ex->wr_flags = flags;
}

static void every_operation_does_its_work(void)
{
	struct pair pair = make(IBV_QPT_RC, RC_OPERATIONS);
	struct ibv_qp_ex *ex = pair.ex;
	struct ibv_cq *here = pair.cq[0], *there = pair.cq[1];
	struct ibv_sge list[] = { { at(0), 3, mr->lkey }, { at(8), 0, mr->lkey }, { at(16), 5, mr->lkey } };
	struct ibv_data_buf pieces[] = { { memory, 3 }, { NULL, 0 }, { memory + 16, 5 } };
	struct ibv_wc wc;

	strcpy(memory, "one");
	strcpy(memory + 16, "-two.");
	receive(pair.qp[1], 100, 1024, 64);
	ibv_wr_start(ex);
	begin(ex, 1, IBV_SEND_SIGNALED);
	ibv_wr_send(ex);
	ibv_wr_set_sge_list(ex, 3, list);
	CHECK(ibv_wr_complete(ex) == 0);
	good(here, 1, IBV_WC_SEND);
	CHECK(good(there, 100, IBV_WC_RECV).byte_len == 8);
	CHECK(strcmp(memory + 1024, "one-two.") == 0);

	/* Not signalled: the second completion covers both. Inline data is copied when it is set. */
	receive(pair.qp[1], 101, 1024, 64);
	receive(pair.qp[1], 102, 1088, 64);
	ibv_wr_start(ex);
	begin(ex, 2, IBV_SEND_SOLICITED);
	ibv_wr_send_imm(ex, htobe32(77));
	ibv_wr_set_inline_data_list(ex, 3, pieces);
	memcpy(memory, "ONE", 3);
	begin(ex, 3, IBV_SEND_SIGNALED);
	ibv_wr_send_imm(ex, htobe32(78));
	ibv_wr_set_inline_data(ex, memory, 3);
	memset(memory, 0, 3);
	CHECK(ibv_wr_complete(ex) == 0);
	good(here, 3, IBV_WC_SEND);
	wc = good(there, 101, IBV_WC_RECV);
	CHECK(wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htobe32(77) && wc.byte_len == 8);
	CHECK(memcmp(memory + 1024, "one-two.", 8) == 0);
	wc = good(there, 102, IBV_WC_RECV);
	CHECK(wc.imm_data == htobe32(78) && memcmp(memory + 1088, "ONE", 4) == 0);

	strcpy(memory, "written");
	receive(pair.qp[1], 103, 0, 0);
	ibv_wr_start(ex);
	begin(ex, 4, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, mr->rkey, at(2048));
	ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
	begin(ex, 5, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write_imm(ex, mr->rkey, at(2056), 9);
	ibv_wr_set_inline_data(ex, memory, 8);
	begin(ex, 6, IBV_SEND_SIGNALED | IBV_SEND_FENCE);
	ibv_wr_rdma_read(ex, mr->rkey, at(2048));
	ibv_wr_set_sge(ex, mr->lkey, at(512), 16);
	begin(ex, 7, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, mr->rkey, at(0));
	CHECK(ibv_wr_complete(ex) == 0);
	good(here, 4, IBV_WC_RDMA_WRITE);
	good(here, 5, IBV_WC_RDMA_WRITE);
	CHECK(good(here, 6, IBV_WC_RDMA_READ).byte_len == 16);
	good(here, 7, IBV_WC_RDMA_WRITE);
	wc = good(there, 103, IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK(wc.imm_data == 9 && wc.byte_len == 8);
	CHECK(strcmp(memory + 512, "written") == 0 && strcmp(memory + 520, "written") == 0);

	uint64_t *word = (uint64_t *)(memory + 3072);
	*word = 40;
	ibv_wr_start(ex);
	begin(ex, 8, IBV_SEND_SIGNALED);
	ibv_wr_atomic_fetch_add(ex, mr->rkey, at(3072), 2);
	ibv_wr_set_sge(ex, mr->lkey, at(3080), 8);
	begin(ex, 9, IBV_SEND_SIGNALED);
	ibv_wr_atomic_cmp_swp(ex, mr->rkey, at(3072), 42, 7);
	ibv_wr_set_sge(ex, mr->lkey, at(3088), 8);
	CHECK(ibv_wr_complete(ex) == 0);
	good(here, 8, IBV_WC_FETCH_ADD);
	good(here, 9, IBV_WC_COMP_SWAP);
	CHECK(word[0] == 7 && word[1] == 40 && word[2] == 42);
	empty(here);
	empty(there);
	destroy(&pair);
}

static void a_batch_is_posted_whole_or_not_at_all(void)
{
	struct pair pair = make(IBV_QPT_RC, RC_OPERATIONS & ~IBV_QP_EX_WITH_RDMA_READ);
	struct ibv_qp_ex *ex = pair.ex;
	struct ibv_sge list[4] = { { 0 } };
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr granted;
	memset(memory, 0, SIZE);
	memory[0] = 1;
	CHECK(ibv_query_qp(pair.qp[0], &attr, IBV_QP_CAP, &granted) == 0);
	CHECK(granted.cap.max_inline_data < SIZE);

	ibv_wr_start(ex);
	begin(ex, 1, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, mr->rkey, at(64));
	ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
	ibv_wr_abort(ex);
	empty(pair.cq[0]);

	/* An invalid request behind a valid one, with every error that is detected at posting. */
	for (int wrong = 0; wrong < 8; wrong++) {
		ibv_wr_start(ex);
		begin(ex, 1, IBV_SEND_SIGNALED);
		if (wrong == 0)
			ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
		ibv_wr_rdma_write(ex, mr->rkey, at(64));
		ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
		begin(ex, 2, IBV_SEND_SIGNALED);
		ibv_wr_rdma_write(ex, mr->rkey, at(64));
		if (wrong == 1)
			ibv_wr_set_sge_list(ex, 4, list);
		if (wrong == 2)
			ibv_wr_set_inline_data(ex, memory, granted.cap.max_inline_data + 1);
		if (wrong == 3)
			ibv_wr_rdma_read(ex, mr->rkey, at(64));
		if (wrong == 4)
			ibv_wr_send_tso(ex, memory, 14, 1000);
		if (wrong == 5)
			for (int i = 0; i < 7; i++)
				ibv_wr_rdma_write(ex, mr->rkey, at(64));
		if (wrong == 6) {
			ibv_wr_atomic_fetch_add(ex, mr->rkey, at(64), 1);
			ibv_wr_set_inline_data(ex, memory, 8);
		}
		if (wrong == 7)
			ibv_wr_set_ud_addr(ex, NULL, 1, 1);
		int error = ibv_wr_complete(ex);
		CHECK(error == (wrong == 4 ? EOPNOTSUPP : wrong == 5 ? ENOMEM : EINVAL));
		empty(pair.cq[0]);
		CHECK(memory[64] == 0);
	}

	/* More requests than the queue has room for: posted requests remain, and the batch is refused. */
	ibv_wr_start(ex);
	for (int i = 0; i < 5; i++) {
		begin(ex, i, IBV_SEND_SIGNALED);
		ibv_wr_rdma_write(ex, mr->rkey, at(128));
		ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
	}
	CHECK(ibv_wr_complete(ex) == 0);
	ibv_wr_start(ex);
	for (int i = 0; i < 4; i++) {
		ibv_wr_rdma_write(ex, mr->rkey, at(64));
		ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
	}
	CHECK(ibv_wr_complete(ex) == ENOMEM);
	CHECK(memory[64] == 0);
	for (int i = 0; i < 5; i++)
		good(pair.cq[0], i, IBV_WC_RDMA_WRITE);

	/* An empty batch is valid, and ibv_post_send works beside it. */
	ibv_wr_start(ex);
	CHECK(ibv_wr_complete(ex) == 0);
	struct ibv_sge sge = { at(0), 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { .remote_addr = at(64), .rkey = mr->rkey } }, *bad;
	CHECK(ibv_post_send(pair.qp[0], &wr, &bad) == 0);
	good(pair.cq[0], 9, IBV_WC_RDMA_WRITE);
	CHECK(memory[64] == 1);

	/* A request that fails flushes the rest of its batch, in order. */
	ibv_wr_start(ex);
	for (int i = 0; i < 4; i++) {
		begin(ex, i, i == 1 ? IBV_SEND_SIGNALED : 0);
		ibv_wr_rdma_write(ex, i == 1 ? mr->rkey ^ 0x100 : mr->rkey, at(192 + 8 * i));
		ibv_wr_set_sge(ex, mr->lkey, at(0), 8);
	}
	CHECK(ibv_wr_complete(ex) == 0);
	struct ibv_wc wc = next(pair.cq[0]);
	CHECK(wc.wr_id == 1 && wc.status == IBV_WC_REM_ACCESS_ERR);
	for (unsigned i = 2; i < 4; i++) {
		wc = next(pair.cq[0]);
		CHECK(wc.wr_id == i && wc.status == IBV_WC_WR_FLUSH_ERR);
		CHECK(memory[192 + 8 * i] == 0);
	}
	CHECK(memory[192] == 1);
	/* Every later batch is flushed, too. */
	ibv_wr_start(ex);
	begin(ex, 10, 0);
	ibv_wr_send(ex);
	CHECK(ibv_wr_complete(ex) == 0);
	wc = next(pair.cq[0]);
	CHECK(wc.wr_id == 10 && wc.status == IBV_WC_WR_FLUSH_ERR);
	destroy(&pair);

	/* Refused in a state that takes no send requests. */
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = description(IBV_QPT_RC, cq, RC_OPERATIONS);
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	ibv_wr_start(ibv_qp_to_qp_ex(qp));
	ibv_wr_send(ibv_qp_to_qp_ex(qp));
	CHECK(ibv_wr_complete(ibv_qp_to_qp_ex(qp)) == EINVAL);
	CHECK(ibv_destroy_qp(qp) == 0);
	CHECK(ibv_destroy_cq(cq) == 0);
}

static void requests_wait_for_their_receives(void)
{
	struct pair pair = make(IBV_QPT_RC, RC_OPERATIONS);
	strcpy(memory, "later");
	ibv_wr_start(pair.ex);
	for (int i = 0; i < 3; i++) {
		begin(pair.ex, i, IBV_SEND_SIGNALED);
		ibv_wr_send(pair.ex);
		ibv_wr_set_inline_data(pair.ex, memory + i, 6 - i);
	}
	CHECK(ibv_wr_complete(pair.ex) == 0);
	empty(pair.cq[0]);
	memset(memory, 0, 6);
	for (int i = 0; i < 3; i++)
		receive(pair.qp[1], i, 1024 + 64 * i, 64);
	for (int i = 0; i < 3; i++) {
		good(pair.cq[0], i, IBV_WC_SEND);
		good(pair.cq[1], i, IBV_WC_RECV);
		CHECK(strcmp(memory + 1024 + 64 * i, &"later"[i]) == 0);
	}
	destroy(&pair);
}

static void datagrams_go_where_they_are_addressed(void)
{
	struct pair pair = make(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
	struct ibv_ah_attr attr = address();
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);
	CHECK(ah);
	strcpy(memory, "to you");
	for (int i = 0; i < 2; i++)
		receive(pair.qp[1], i, 1024 + 128 * i, 128);
	ibv_wr_start(pair.ex);
	begin(pair.ex, 1, IBV_SEND_SIGNALED);
	ibv_wr_send(pair.ex);
	ibv_wr_set_ud_addr(pair.ex, ah, pair.qp[1]->qp_num, QKEY);
	ibv_wr_set_sge(pair.ex, mr->lkey, at(0), 7);
	begin(pair.ex, 2, IBV_SEND_SIGNALED);
	ibv_wr_send_imm(pair.ex, 5);
	ibv_wr_set_inline_data(pair.ex, memory + 3, 4);
	ibv_wr_set_ud_addr(pair.ex, ah, pair.qp[1]->qp_num, QKEY);
	CHECK(ibv_wr_complete(pair.ex) == 0);
	for (int i = 0; i < 2; i++) {
		good(pair.cq[0], i + 1, IBV_WC_SEND);
		struct ibv_wc wc = good(pair.cq[1], i, IBV_WC_RECV);
		CHECK(wc.src_qp == pair.qp[0]->qp_num && wc.wc_flags & IBV_WC_GRH);
		CHECK(wc.byte_len == (i ? 44 : 47));
		CHECK(strcmp(memory + 1024 + 128 * i + 40, &"to you"[3 * i]) == 0);
	}
	/* A datagram without an address is refused. */
	ibv_wr_start(pair.ex);
	ibv_wr_send(pair.ex);
	ibv_wr_set_sge(pair.ex, mr->lkey, at(0), 7);
	CHECK(ibv_wr_complete(pair.ex) == EINVAL);
	empty(pair.cq[0]);
	CHECK(ibv_destroy_ah(ah) == 0);
	destroy(&pair);
}

static struct pair shared;

static void *writer(void *argument)
{
	uint64_t me = (uintptr_t)argument;
	for (int i = 0; i < 10000; i++) {
		ibv_wr_start(shared.ex);
		for (int word = 0; word < 2; word++) {
			begin(shared.ex, me, word ? IBV_SEND_SIGNALED : 0);
			ibv_wr_rdma_write(shared.ex, mr->rkey, at(64 + 8 * word));
			ibv_wr_set_inline_data(shared.ex, &me, 8);
		}
		int error = ibv_wr_complete(shared.ex);
		CHECK(error == 0 || error == ENOMEM);
		struct ibv_wc wc;
		while (ibv_poll_cq(shared.cq[0], 1, &wc) == 1)
			CHECK(wc.status == IBV_WC_SUCCESS);
	}
	return NULL;
}

/* A queue pair number has 24 bits (IBTA volume 1, 9.2.2); the attribute has 32. */
static void a_longer_queue_pair_number_is_refused(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = description(IBV_QPT_UC, cq, 0);
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	CHECK(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .ah_attr = address(),
				     .dest_qp_num = 1 << 24 | qp->qp_num };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	CHECK(ibv_modify_qp(qp, &attr, mask) == EINVAL);
	attr.dest_qp_num = qp->qp_num;
	CHECK(ibv_modify_qp(qp, &attr, mask) == 0);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
}

static void threads_take_turns(void)
{
	pthread_t threads[3];
	shared = make(IBV_QPT_RC, RC_OPERATIONS);
	for (uintptr_t i = 0; i < 3; i++)
		CHECK(pthread_create(&threads[i], NULL, writer, (void *)(i + 1)) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	/* Batches do not mix: both words are from the last batch. */
	CHECK(memory[64] != 0 && memory[64] == memory[72]);
	destroy(&shared);
}

int main(void)
{
	open_device();
	creation_refuses_what_is_not_there();
	every_operation_does_its_work();
	a_batch_is_posted_whole_or_not_at_all();
	requests_wait_for_their_receives();
	datagrams_go_where_they_are_addressed();
	a_longer_queue_pair_number_is_refused();
	threads_take_turns();
	close_device();
	puts("done");
	return 0;
}
