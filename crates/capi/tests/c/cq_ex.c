/* Extended completion queues: creation, reading completions in place, resizing, moderation. */
#include "verbs.h"
#include <poll.h>
#include <pthread.h>

enum { TIMES = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };

static struct ibv_cq_ex *cq;
static struct ibv_qp *qp[2];
static struct ibv_comp_channel *channel;

static void make(uint64_t fields)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 16, .wc_flags = fields, .cq_context = memory,
					    .channel = channel };
	CHECK((cq = ibv_create_cq_ex(context, &init)));
	CHECK(cq->cqe >= 16 && cq->cq_context == memory && cq->channel == channel);
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex init = description(IBV_QPT_RC, ibv_cq_ex_to_cq(cq), 0);
		CHECK((qp[i] = ibv_create_qp_ex(context, &init)));
	}
	bring_up(qp[0], qp[1]->qp_num);
	bring_up(qp[1], qp[0]->qp_num);
}

static void destroy(void)
{
	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == EBUSY);
	CHECK(ibv_destroy_qp(qp[0]) == 0 && ibv_destroy_qp(qp[1]) == 0);
	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
}

/* Sends from the first to the second, which causes two completions. */
static void send_one(uint64_t id, enum ibv_wr_opcode opcode, uint32_t length)
{
	struct ibv_sge sge = { .addr = at(0), .length = length, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(id),
				  .wr.rdma = { .remote_addr = at(2048), .rkey = mr->rkey } }, *bad;
	if (opcode != IBV_WR_RDMA_WRITE)
		receive(qp[1], id + 100, 1024, 512);
	CHECK(ibv_post_send(qp[0], &wr, &bad) == 0);
}

static void creation_refuses_what_is_not_there(void)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 10 }, changed;
	struct ibv_cq_ex *made;
	for (int bit = 0; bit < 64; bit++) {
		changed = init, changed.wc_flags = 1ull << bit;
		int there = changed.wc_flags & (IBV_WC_STANDARD_FLAGS | TIMES);
		int known = changed.wc_flags & IBV_CREATE_CQ_SUP_WC_FLAGS;
		if (there) {
			CHECK((made = ibv_create_cq_ex(context, &changed)));
			CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(made)) == 0);
		} else
			REFUSED(ibv_create_cq_ex(context, &changed), known ? EOPNOTSUPP : EINVAL);
	}
	changed = init, changed.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
	changed.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
	CHECK((made = ibv_create_cq_ex(context, &changed)));
	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(made)) == 0);
	changed.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	REFUSED(ibv_create_cq_ex(context, &changed), EOPNOTSUPP);
	changed.flags = 1 << 2;
	REFUSED(ibv_create_cq_ex(context, &changed), EINVAL);
	changed = init, changed.comp_mask = 1 << 2;
	REFUSED(ibv_create_cq_ex(context, &changed), EINVAL);
	changed = init, changed.cqe = 0;
	REFUSED(ibv_create_cq_ex(context, &changed), EINVAL);
	changed.cqe = 0x7fffffff;
	REFUSED(ibv_create_cq_ex(context, &changed), EINVAL);
	changed = init, changed.comp_vector = context->num_comp_vectors;
	REFUSED(ibv_create_cq_ex(context, &changed), EINVAL);
}

static void completions_are_read_field_by_field(void)
{
	struct ibv_poll_cq_attr attr = { 0 }, wrong = { .comp_mask = 1 };
	make(IBV_WC_STANDARD_FLAGS);
	CHECK(ibv_start_poll(cq, &attr) == ENOENT);
	CHECK(ibv_start_poll(cq, &attr) == ENOENT);
	CHECK(ibv_start_poll(cq, &wrong) == EINVAL);

	send_one(1, IBV_WR_SEND_WITH_IMM, 33);
	CHECK(ibv_start_poll(cq, &attr) == 0);
	CHECK(cq->wr_id == 1 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_SEND);
	CHECK(ibv_wc_read_qp_num(cq) == qp[0]->qp_num);
	CHECK(ibv_wc_read_wc_flags(cq) == 0 && ibv_wc_read_vendor_err(cq) == 0);
	CHECK(ibv_next_poll(cq) == 0);
	CHECK(cq->wr_id == 101 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RECV);
	CHECK(ibv_wc_read_qp_num(cq) == qp[1]->qp_num);
	CHECK(ibv_wc_read_byte_len(cq) == 33);
	CHECK(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM && ibv_wc_read_imm_data(cq) == htobe32(1));
	CHECK(ibv_wc_read_slid(cq) == 0 && ibv_wc_read_sl(cq) == 0 && ibv_wc_read_dlid_path_bits(cq) == 0);
	/* More completions may arrive while one is read. */
	send_one(2, IBV_WR_RDMA_WRITE, 8);
	CHECK(ibv_next_poll(cq) == 0);
	CHECK(cq->wr_id == 2 && ibv_wc_read_opcode(cq) == IBV_WC_RDMA_WRITE);
	CHECK(ibv_next_poll(cq) == ENOENT);
	ibv_end_poll(cq);

	/* ibv_poll_cq works beside it. */
	send_one(3, IBV_WR_RDMA_WRITE, 8);
	send_one(4, IBV_WR_RDMA_WRITE, 8);
	CHECK(ibv_start_poll(cq, &attr) == 0 && cq->wr_id == 3);
	ibv_end_poll(cq);
	good(ibv_cq_ex_to_cq(cq), 4, IBV_WC_RDMA_WRITE);

	/* Errors, and the flushed requests behind them. */
	mr->rkey ^= 0x100;
	send_one(5, IBV_WR_RDMA_WRITE, 8);
	mr->rkey ^= 0x100;
	send_one(6, IBV_WR_RDMA_WRITE, 8);
	CHECK(ibv_start_poll(cq, &attr) == 0);
	CHECK(cq->wr_id == 5 && cq->status == IBV_WC_REM_ACCESS_ERR && ibv_wc_read_vendor_err(cq) != 0);
	CHECK(ibv_next_poll(cq) == 0);
	CHECK(cq->wr_id == 6 && cq->status == IBV_WC_WR_FLUSH_ERR);
	ibv_end_poll(cq);
	destroy();
}

static uint64_t clock_now(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	CHECK(ibv_query_rt_values_ex(context, &values) == 0);
	return values.raw_clock.tv_nsec;
}

static uint64_t wall_now(void)
{
	struct timespec now;
	CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void completions_know_their_time(void)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_device_attr_ex device;
	uint64_t before, between, after, stamp[4], wall[4], start = wall_now(), slack = 1000000;
	CHECK(ibv_query_device_ex(context, NULL, &device) == 0);
	CHECK(device.completion_timestamp_mask && device.hca_core_clock == 1000000);
	make(IBV_WC_STANDARD_FLAGS | TIMES);
	before = clock_now();
	send_one(1, IBV_WR_SEND, 8);
	between = clock_now();
	send_one(2, IBV_WR_SEND, 8);
	after = clock_now();
	CHECK(ibv_start_poll(cq, &attr) == 0);
	for (int i = 0; i < 4; i++) {
		stamp[i] = ibv_wc_read_completion_ts(cq);
		wall[i] = ibv_wc_read_completion_wallclock_ns(cq);
		/* Send completions first, then receive completions. */
		CHECK(cq->wr_id == (i < 2 ? i + 1u : i + 99u));
		CHECK(i % 2 ? stamp[i] >= between && stamp[i] <= after :
			      stamp[i] >= before && stamp[i] <= between);
		CHECK((stamp[i] & ~device.completion_timestamp_mask) == 0);
		CHECK(wall[i] - wall[0] == stamp[i] - stamp[0]);
		CHECK(wall[i] + slack >= start && wall[i] <= wall_now() + slack);
		CHECK(ibv_next_poll(cq) == (i == 3 ? ENOENT : 0));
	}
	ibv_end_poll(cq);
	destroy();
}

static void queues_change_their_size_with_completions_in_them(void)
{
	struct ibv_cq *plain;
	make(IBV_WC_STANDARD_FLAGS);
	plain = ibv_cq_ex_to_cq(cq);
	for (int i = 0; i < 6; i++)
		send_one(i, IBV_WR_SEND, 8);
	CHECK(ibv_resize_cq(plain, 4) == EINVAL && cq->cqe >= 16);
	CHECK(ibv_resize_cq(plain, 0) == EINVAL && ibv_resize_cq(plain, -1) == EINVAL);
	CHECK(ibv_resize_cq(plain, 0x7fffffff) == EINVAL);
	CHECK(ibv_resize_cq(plain, 1000) == 0 && plain->cqe >= 1000);
	send_one(6, IBV_WR_SEND, 8);
	CHECK(ibv_resize_cq(plain, 7) == 0 && plain->cqe >= 7 && plain->cqe < 16);
	for (int i = 0; i < 7; i++)
		good(plain, i, IBV_WC_SEND);
	for (int i = 0; i < 7; i++)
		good(plain, 100 + i, IBV_WC_RECV);
	empty(plain);
	destroy();
}

enum { MESSAGES = 10000 };

static int found[2];

/* Polls until all completions were seen, in long and in short batches. */
static void *poller(void *argument)
{
	int *mine = argument;
	struct ibv_poll_cq_attr attr = { 0 };
	while (__atomic_load_n(&found[0], __ATOMIC_ACQUIRE) + __atomic_load_n(&found[1], __ATOMIC_ACQUIRE) <
	       MESSAGES) {
		if (ibv_start_poll(cq, &attr) != 0) {
			sched_yield();
			continue;
		}
		do {
			CHECK(cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_RDMA_WRITE);
			CHECK(ibv_wc_read_qp_num(cq) == qp[0]->qp_num);
			__atomic_add_fetch(mine, 1, __ATOMIC_ACQ_REL);
		} while (cq->wr_id % 3 && ibv_next_poll(cq) == 0);
		ibv_end_poll(cq);
	}
	return NULL;
}

static void threads_share_a_queue_whose_size_changes(void)
{
	pthread_t threads[2];
	make(IBV_WC_STANDARD_FLAGS | TIMES);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, poller, &found[i]) == 0);
	for (int i = 0; i < MESSAGES; i++) {
		struct ibv_send_wr wr = { .wr_id = i, .opcode = IBV_WR_RDMA_WRITE,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.rdma = { .remote_addr = at(0), .rkey = mr->rkey } }, *bad;
		int error;
		while ((error = ibv_post_send(qp[0], &wr, &bad)) == ENOMEM)
			sched_yield();
		CHECK(error == 0);
		if (i % 16 == 0)
			CHECK(ibv_resize_cq(ibv_cq_ex_to_cq(cq), i % 32 ? 16 : 512) == 0);
	}
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(found[0] + found[1] == MESSAGES);
	empty(ibv_cq_ex_to_cq(cq));
	destroy();
}

static int event(int timeout)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct ibv_cq *from;
	void *cq_context;
	if (poll(&fd, 1, timeout) != 1)
		return 0;
	CHECK(ibv_get_cq_event(channel, &from, &cq_context) == 0);
	CHECK(from == ibv_cq_ex_to_cq(cq) && cq_context == memory);
	ibv_ack_cq_events(from, 1);
	return 1;
}

static void events_are_moderated(void)
{
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE,
					   .moderate = { .cq_count = 3, .cq_period = 0xffff } };
	struct ibv_device_attr_ex device;
	int delayed = 0;
	CHECK(ibv_query_device_ex(context, NULL, &device) == 0);
	CHECK(device.cq_mod_caps.max_cq_count == 0xffff && device.cq_mod_caps.max_cq_period == 0xffff);
	CHECK((channel = ibv_create_comp_channel(context)));
	make(IBV_WC_STANDARD_FLAGS);
	CHECK(ibv_modify_cq(ibv_cq_ex_to_cq(cq), &attr) == 0);
	for (int round = 0; round < 10; round++) {
		CHECK(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0) == 0);
		send_one(1, IBV_WR_RDMA_WRITE, 8);
		send_one(2, IBV_WR_RDMA_WRITE, 8);
		int early = event(0);
		delayed += !early;
		/* The third completion raises the event, or the period does. */
		if (round % 2)
			send_one(3, IBV_WR_RDMA_WRITE, 8);
		CHECK(early || event(20000));
		for (int i = 1; i <= 2 + round % 2; i++)
			good(ibv_cq_ex_to_cq(cq), i, IBV_WC_RDMA_WRITE);
	}
	/* On a busy processor the period may have ended already, but not always. */
	CHECK(delayed > 0);
	attr.attr_mask = 1 << 1;
	CHECK(ibv_modify_cq(ibv_cq_ex_to_cq(cq), &attr) == EINVAL);
	attr.attr_mask = 0;
	CHECK(ibv_modify_cq(ibv_cq_ex_to_cq(cq), &attr) == 0);
	destroy();
	CHECK(ibv_destroy_comp_channel(channel) == 0);
}

int main(void)
{
	open_device();
	creation_refuses_what_is_not_there();
	completions_are_read_field_by_field();
	completions_know_their_time();
	queues_change_their_size_with_completions_in_them();
	threads_share_a_queue_whose_size_changes();
	events_are_moderated();
	close_device();
	puts("done");
	return 0;
}
