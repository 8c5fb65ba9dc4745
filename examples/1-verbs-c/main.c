/*
 * RDMA WRITE with immediate data between two processes, with plain libibverbs.
 *
 * The parent is the responder: it registers a buffer, posts a receive and tells the child its address and rkey.
 * The child is the requester: it writes a message into that buffer. The immediate data consumes the receive, so the
 * responder gets a completion and knows that the data has arrived.
 *
 * The two processes exchange their connection data over a socket pair; programs on two hosts use TCP or rdma_cm.
 *
 *     cc main.c -libverbs -o verbs && ./verbs
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	PORT = 1,
	GID_INDEX = 0, /* RoCE v2; `ibv_devinfo -v` lists the GIDs */
	BUFFER_SIZE = 4096,
};

#define CHECK(condition)                                                                          \
	do {                                                                                      \
		if (!(condition)) {                                                               \
			fprintf(stderr, "main.c:%d: %s failed: %s\n", __LINE__, #condition,       \
				strerror(errno));                                                 \
			exit(1);                                                                  \
		}                                                                                 \
	} while (0)

/* What one side must know about the other before it can connect and write. */
struct peer {
	uint32_t qp_num;
	uint32_t psn;
	union ibv_gid gid;
	uint64_t address; /* of the buffer */
	uint32_t rkey;
};

/* Verbs objects of one process. */
struct endpoint {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	char buffer[BUFFER_SIZE];
};

/* Opens the first device and creates a queue pair, a completion queue and a registered buffer. */
static struct peer create(struct endpoint *self, uint32_t psn)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	CHECK(devices && devices[0]); /* no device: is LD_LIBRARY_PATH set? */
	CHECK((self->context = ibv_open_device(devices[0])));
	ibv_free_device_list(devices);

	CHECK((self->pd = ibv_alloc_pd(self->context)));
	CHECK((self->mr = ibv_reg_mr(self->pd, self->buffer, BUFFER_SIZE,
				     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)));
	CHECK((self->cq = ibv_create_cq(self->context, 16, NULL, NULL, 0)));

	struct ibv_qp_init_attr init = {
		.send_cq = self->cq,
		.recv_cq = self->cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	CHECK((self->qp = ibv_create_qp(self->pd, &init)));

	struct peer info = {
		.qp_num = self->qp->qp_num,
		.psn = psn,
		.address = (uintptr_t)self->buffer,
		.rkey = self->mr->rkey,
	};
	CHECK(ibv_query_gid(self->context, PORT, GID_INDEX, &info.gid) == 0);
	return info;
}

/* Takes the queue pair through INIT and RTR to RTS. */
static void connect_qp(struct endpoint *self, const struct peer *local, const struct peer *remote)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = 0,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	CHECK(ibv_modify_qp(self->qp, &attr,
			    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);

	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = remote->qp_num,
		.rq_psn = remote->psn,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, /* 0.64 ms */
		.ah_attr = { .is_global = 1,
			     .port_num = PORT,
			     .grh = { .dgid = remote->gid, .sgid_index = GID_INDEX, .hop_limit = 64 } },
	};
	CHECK(ibv_modify_qp(self->qp, &attr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);

	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.sq_psn = local->psn,
		.timeout = 14, /* 67 ms */
		.retry_cnt = 7,
		.rnr_retry = 7, /* without limit */
		.max_rd_atomic = 1,
	};
	CHECK(ibv_modify_qp(self->qp, &attr,
			    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* Polls until a work request completes. */
static struct ibv_wc wait_completion(struct endpoint *self)
{
	struct ibv_wc wc;
	int n;
	while ((n = ibv_poll_cq(self->cq, 1, &wc)) == 0)
		;
	CHECK(n == 1);
	if (wc.status != IBV_WC_SUCCESS) {
		fprintf(stderr, "work request %lu: %s\n", (unsigned long)wc.wr_id,
			ibv_wc_status_str(wc.status));
		exit(1);
	}
	return wc;
}

static void destroy(struct endpoint *self)
{
	CHECK(ibv_destroy_qp(self->qp) == 0);
	CHECK(ibv_destroy_cq(self->cq) == 0);
	CHECK(ibv_dereg_mr(self->mr) == 0);
	CHECK(ibv_dealloc_pd(self->pd) == 0);
	CHECK(ibv_close_device(self->context) == 0);
}

static void exchange(int socket, const struct peer *local, struct peer *remote)
{
	CHECK(write(socket, local, sizeof *local) == sizeof *local);
	CHECK(read(socket, remote, sizeof *remote) == sizeof *remote);
}

/* Both sides are connected when both bytes have arrived. */
static void barrier(int socket)
{
	char byte = 0;
	CHECK(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1);
}

static void responder(int socket)
{
	static struct endpoint self;
	struct peer local = create(&self, 100), remote;
	exchange(socket, &local, &remote);
	connect_qp(&self, &local, &remote);

	/* WRITE with immediate data consumes a receive. It needs no buffer: the data goes to the address of the WRITE. */
	struct ibv_recv_wr recv = { .wr_id = 1 }, *bad;
	CHECK(ibv_post_recv(self.qp, &recv, &bad) == 0);
	barrier(socket);

	struct ibv_wc wc = wait_completion(&self);
	CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && (wc.wc_flags & IBV_WC_WITH_IMM));
	printf("responder: %u bytes arrived, immediate data %u: \"%s\"\n", wc.byte_len, ntohl(wc.imm_data),
	       self.buffer);
	barrier(socket);
	destroy(&self);
}

static void requester(int socket)
{
	static struct endpoint self;
	struct peer local = create(&self, 200), remote;
	exchange(socket, &local, &remote);
	connect_qp(&self, &local, &remote);
	barrier(socket); /* the responder has posted its receive */

	uint32_t length = snprintf(self.buffer, BUFFER_SIZE, "hello over RDMA") + 1;
	struct ibv_sge sge = { .addr = (uintptr_t)self.buffer, .length = length, .lkey = self.mr->lkey };
	struct ibv_send_wr write_imm = {
		.wr_id = 2,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = htonl(42), /* in network byte order */
		.wr.rdma = { .remote_addr = remote.address, .rkey = remote.rkey },
	}, *bad;
	CHECK(ibv_post_send(self.qp, &write_imm, &bad) == 0);

	struct ibv_wc wc = wait_completion(&self);
	CHECK(wc.wr_id == 2 && wc.opcode == IBV_WC_RDMA_WRITE);
	barrier(socket); /* the responder has read the data */
	destroy(&self);
}

int main(void)
{
	int sockets[2], status;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
	/* Each process opens the device itself: verbs objects do not survive fork(). */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(sockets[0]);
		requester(sockets[1]);
		return 0;
	}
	close(sockets[1]);
	responder(sockets[0]);
	CHECK(waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
