/* Threads that are cancelled (pthread_cancel): verbs are no cancellation points, but for those that wait for an event. A
 * thread that ended inside would keep locks, and pages of its buffer that are being moved. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { ROUNDS = 20, LEN = 4 << 20, ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static volatile int inside;
static volatile long turns;

static char *pages(void)
{
	char *at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

/* Registers the buffer, or fresh pages if there is none, and makes queues, until it is cancelled. */
static void *use_verbs(void *buffer)
{
	for (;;) {
		int before;
		CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before) == 0);
		char *memory = buffer ? buffer : pages();
		CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &before) == 0);
		inside = 1;
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, ACCESS);
		struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
		CHECK(mr && cq);
		struct ibv_qp_init_attr init = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		};
		struct ibv_qp *qp = ibv_create_qp(pd, &init);
		CHECK(qp);
		CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dereg_mr(mr) == 0);
		inside = 0;
		turns++;
		CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before) == 0);
		if (!buffer)
			CHECK(munmap(memory, LEN) == 0);
		CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &before) == 0);
		pthread_testcancel();
	}
}

static void *use_them_once(void *finished)
{
	char *memory = pages();
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, ACCESS);
	CHECK(mr && ibv_dereg_mr(mr) == 0 && munmap(memory, LEN) == 0);
	*(volatile int *)finished = 1;
	return NULL;
}

static void *wait_for_completions(void *unused)
{
	struct ibv_cq *cq;
	void *user;
	(void)unused;
	CHECK(ibv_get_cq_event(channel, &cq, &user) == 0);
	return NULL;
}

static void *wait_for_events(void *unused)
{
	struct ibv_async_event event;
	(void)unused;
	CHECK(ibv_get_async_event(context, &event) == 0);
	return NULL;
}

static void cancel(pthread_t thread)
{
	void *result;
	CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0] && (context = ibv_open_device(list[0])) && (pd = ibv_alloc_pd(context)));
	CHECK((channel = ibv_create_comp_channel(context)));
	char *buffer = pages();
	memset(buffer, 'D', LEN);
	for (int round = 0; round < ROUNDS; round++) {
		pthread_t thread, other;
		long start = turns;
		CHECK(pthread_create(&thread, NULL, use_verbs, round % 2 ? buffer : NULL) == 0);
		for (int i = 0; i < 20000 && turns == start; i++)
			usleep(1000);
		CHECK(turns != start);
		/* Some time within a turn. */
		usleep(round * 97);
		cancel(thread);
		CHECK(!inside);
		for (size_t at = 0; at < LEN; at++)
			CHECK(buffer[at] == 'D');
		volatile int finished = 0;
		CHECK(pthread_create(&other, NULL, use_them_once, (void *)&finished) == 0);
		for (int i = 0; i < 20000 && !finished; i++)
			usleep(1000);
		CHECK(finished);
		CHECK(pthread_join(other, NULL) == 0);
	}
	void *(*waits[])(void *) = { wait_for_completions, wait_for_events };
	for (int i = 0; i < 2; i++) {
		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, waits[i], NULL) == 0);
		usleep(20000);
		cancel(thread);
	}
	CHECK(ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	puts("done");
	return 0;
}
