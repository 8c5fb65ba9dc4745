// One side of a reliable connection with failing requests, or with many successful ones.
//
//     faults SCENARIO -g GID_INDEX -p PORT [SERVER]
//
// The sides exchange their queue pair attributes over TCP. Both exit with 0 only if completion statuses
// (IBTA vol. 1, 9.9, 11.6.2) and every byte are as the scenario expects.

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

enum { REGION = 1 << 20, HALF = REGION / 2, DEPTH = 64 };

struct side {
	uint32_t qpn, psn, rkey;
	uint64_t address;
	union ibv_gid gid;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static uint8_t *memory;
static struct side mine, theirs;
static int peer = -1, server, gid_index, port = 18515;
static enum ibv_mtu mtu;

static void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fprintf(stderr, "faults, %s: ", server ? "server" : "client");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "\n");
	exit(1);
}

#define CHECK(what) do { if (!(what)) fail("%s (line %d): %s", #what, __LINE__, strerror(errno)); } while (0)

static void meet(const char *host)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE }, *found;
	char service[8];
	snprintf(service, sizeof service, "%d", port);
	CHECK(getaddrinfo(host, service, &hints, &found) == 0);
	int sock = socket(found->ai_family, found->ai_socktype, 0), one = 1;
	CHECK(sock >= 0);
	if (host) {
		CHECK(connect(sock, found->ai_addr, found->ai_addrlen) == 0);
		peer = sock;
	} else {
		setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		CHECK(bind(sock, found->ai_addr, found->ai_addrlen) == 0 && listen(sock, 1) == 0);
		CHECK((peer = accept(sock, NULL, NULL)) >= 0);
	}
	freeaddrinfo(found);
}

// Exchanges data; also a barrier between both sides.
static void swap(const void *out, void *in, size_t size)
{
	CHECK(write(peer, out, size) == (ssize_t) size);
	for (size_t got = 0; got < size;) {
		ssize_t more = read(peer, (char *) in + got, size - got);
		if (more <= 0)
			fail("the other side is gone");
		got += more;
	}
}

static void barrier(void)
{
	char c = 0;
	swap(&c, &c, 1);
}

static void set_up(int rnr_retry, int access)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	CHECK(devices && devices[0]);
	CHECK(context = ibv_open_device(devices[0]));
	ibv_free_device_list(devices);
	struct ibv_port_attr attr;
	CHECK(ibv_query_port(context, 1, &attr) == 0);
	mtu = attr.active_mtu;
	CHECK(pd = ibv_alloc_pd(context));
	CHECK(cq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0));
	CHECK(memory = aligned_alloc(4096, REGION));
	memset(memory, 0, REGION);
	CHECK(mr = ibv_reg_mr(pd, memory, REGION, access));
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	CHECK(qp = ibv_create_qp(pd, &init));
	struct ibv_qp_attr to = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};
	CHECK(ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	// Close to the wrap-around of packet sequence numbers.
	mine = (struct side) { qp->qp_num, 0xffffff - (getpid() & 63), mr->rkey, (uintptr_t) memory, {} };
	CHECK(ibv_query_gid(context, 1, gid_index, &mine.gid) == 0);
	swap(&mine, &theirs, sizeof mine);
	to = (struct ibv_qp_attr) {
		.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = theirs.qpn, .rq_psn = theirs.psn,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = theirs.gid, .sgid_index = gid_index, .hop_limit = 64 } },
	};
	CHECK(ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	// Not 7 retries: rxe treats that as infinite.
	to = (struct ibv_qp_attr) {
		.qp_state = IBV_QPS_RTS, .sq_psn = mine.psn, .timeout = 17, .retry_cnt = 6, .rnr_retry = rnr_retry, .max_rd_atomic = 4,
	};
	CHECK(ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC) == 0);
	barrier();
}

static void post(enum ibv_wr_opcode opcode, uint64_t id, uint32_t at, uint32_t len, uint32_t rkey, uint64_t remote)
{
	struct ibv_sge parts[2] = {
		{ (uintptr_t) memory + at, len / 3, mr->lkey }, { (uintptr_t) memory + at + len / 3, len - len / 3, mr->lkey },
	};
	int atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	struct ibv_send_wr wr = { .wr_id = id, .opcode = opcode, .sg_list = parts, .num_sge = 2 }, *bad;
	if (atomic) {
		parts[0].length = 8;
		wr.num_sge = 1;
		wr.wr.atomic.remote_addr = remote;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 3 : id;
		wr.wr.atomic.swap = id + 1;
	} else if (opcode != IBV_WR_SEND && opcode != IBV_WR_SEND_WITH_IMM) {
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
	}
	if (opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
		wr.imm_data = htonl(id);
	CHECK(ibv_post_send(qp, &wr, &bad) == 0);
}

static void post_receive(uint64_t id, uint32_t at, uint32_t len)
{
	struct ibv_sge part = { (uintptr_t) memory + at, len, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &part, .num_sge = 1 }, *bad;
	CHECK(ibv_post_recv(qp, &wr, &bad) == 0);
}

static struct ibv_wc wait_for_completion(void)
{
	struct ibv_wc wc;
	time_t began = time(NULL);
	int got;
	while ((got = ibv_poll_cq(cq, 1, &wc)) == 0)
		if (time(NULL) - began > 30)
			fail("no completion comes");
	CHECK(got == 1);
	return wc;
}

static void expect(uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = wait_for_completion();
	if (wc.wr_id != id || wc.status != status)
		fail("request %lu ends with \"%s\", not request %lu with \"%s\"", (unsigned long) wc.wr_id,
			ibv_wc_status_str(wc.status), (unsigned long) id, ibv_wc_status_str(status));
}

// The request fails with this status; later requests are flushed.
static void refused(enum ibv_wr_opcode opcode, uint32_t len, uint32_t rkey, uint64_t remote, enum ibv_wc_status status)
{
	post(opcode, 1, 0, len, rkey, remote);
	post(IBV_WR_RDMA_WRITE, 2, 0, 16, theirs.rkey, theirs.address);
	expect(1, status);
	expect(2, IBV_WC_WR_FLUSH_ERR);
}

static uint32_t random_number(uint32_t *state)
{
	*state = *state * 1664525 + 1013904223;
	return *state >> 8;
}

static void fill(uint32_t at, uint32_t len, uint32_t seed)
{
	for (uint32_t i = 0; i < len; i++)
		memory[at + i] = random_number(&seed);
}

static void compare(uint32_t at, uint32_t len, uint32_t seed, const char *what)
{
	for (uint32_t i = 0; i < len; i++) {
		uint8_t wanted = random_number(&seed);
		if (memory[at + i] != wanted)
			fail("%s: byte %u of %u is %02x, not %02x", what, i, len, memory[at + i], wanted);
	}
}

// All operations in many lengths, every byte compared. The client is the requester. The server's memory has two
// halves: the target of writes and sends, and the source of reads.
static void all_operations(void)
{
	static const enum ibv_wr_opcode KINDS[] = {
		IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM,
		IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
	};
	uint32_t lengths = 7;
	uint64_t sum = 0;
	for (uint32_t round = 1; round <= 140; round++) {
		enum ibv_wr_opcode kind = KINDS[round % 7];
		uint32_t len = round % 5 == 0 ? random_number(&lengths) % 200 : random_number(&lengths) % 60000;
		int receives = kind == IBV_WR_SEND || kind == IBV_WR_SEND_WITH_IMM || kind == IBV_WR_RDMA_WRITE_WITH_IMM;
		int atomic = kind == IBV_WR_ATOMIC_FETCH_AND_ADD || kind == IBV_WR_ATOMIC_CMP_AND_SWP;
		if (server) {
			if (receives)
				post_receive(round, 0, kind == IBV_WR_RDMA_WRITE_WITH_IMM ? 0 : HALF);
			if (kind == IBV_WR_RDMA_READ)
				fill(HALF, len, round);
			if (atomic)
				*(uint64_t *) (memory + HALF) = sum = round;
			barrier();
			if (receives) {
				struct ibv_wc wc = wait_for_completion();
				if (wc.status || wc.wr_id != round || wc.byte_len != len)
					fail("receive %u: \"%s\", %u bytes of %u", round, ibv_wc_status_str(wc.status), wc.byte_len, len);
				if ((wc.wc_flags & IBV_WC_WITH_IMM) && ntohl(wc.imm_data) != round)
					fail("receive %u: immediate data %u", round, ntohl(wc.imm_data));
			}
			barrier();
			if (atomic && *(uint64_t *) (memory + HALF) != sum + (kind == IBV_WR_ATOMIC_FETCH_AND_ADD ? 3 : 1))
				fail("atomic %u leaves %lu", round, *(unsigned long *) (memory + HALF));
			if (!atomic && kind != IBV_WR_RDMA_READ)
				compare(0, len, round, "arrived");
		} else {
			fill(0, len, round);
			barrier();
			if (atomic)
				post(kind, round, HALF, 8, theirs.rkey, theirs.address + HALF);
			else if (kind == IBV_WR_RDMA_READ)
				post(kind, round, HALF, len, theirs.rkey, theirs.address + HALF);
			else
				post(kind, round, 0, len, theirs.rkey, theirs.address);
			expect(round, IBV_WC_SUCCESS);
			if (kind == IBV_WR_RDMA_READ)
				compare(HALF, len, round, "read");
			if (atomic && *(uint64_t *) (memory + HALF) != round)
				fail("atomic %u returns %lu", round, *(unsigned long *) (memory + HALF));
			barrier();
		}
	}
	printf("140 operations, every byte as sent\n");
}

int main(int argc, char **argv)
{
	int option;
	while ((option = getopt(argc, argv, "g:p:")) != -1) {
		if (option == 'g')
			gid_index = atoi(optarg);
		else if (option == 'p')
			port = atoi(optarg);
		else
			return 2;
	}
	if (optind >= argc)
		return 2;
	const char *scenario = argv[optind], *host = optind + 1 < argc ? argv[optind + 1] : NULL;
	server = !host;
	meet(host);
	int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	int is_late = !strcmp(scenario, "receive-late"), is_read_only = !strcmp(scenario, "no-right");
	set_up(is_late ? 7 : 2, is_read_only ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ : all);

	if (!strcmp(scenario, "all-operations")) {
		all_operations();
	} else if (!strcmp(scenario, "wrong-key")) {
		if (!server)
			refused(IBV_WR_RDMA_WRITE, 5000, theirs.rkey ^ 0x55, theirs.address, IBV_WC_REM_ACCESS_ERR);
	} else if (!strcmp(scenario, "out-of-range")) {
		if (!server)
			refused(IBV_WR_RDMA_READ, 5000, theirs.rkey, theirs.address + REGION - 4999, IBV_WC_REM_ACCESS_ERR);
	} else if (is_read_only) {
		if (!server)
			refused(IBV_WR_RDMA_WRITE, 100, theirs.rkey, theirs.address, IBV_WC_REM_ACCESS_ERR);
	} else if (!strcmp(scenario, "no-receive")) {
		if (!server)
			refused(IBV_WR_SEND, 100, 0, 0, IBV_WC_RNR_RETRY_EXC_ERR);
	} else if (!strcmp(scenario, "receive-too-short")) {
		if (server)
			post_receive(1, 0, 4000);
		barrier();
		if (server)
			expect(1, IBV_WC_LOC_LEN_ERR);
		else
			refused(IBV_WR_SEND, 9000, 0, 0, IBV_WC_REM_INV_REQ_ERR);
	} else if (is_late) {
		if (server) {
			usleep(300000);
			post_receive(1, 0, HALF);
			expect(1, IBV_WC_SUCCESS);
			compare(0, 20000, 9, "arrived");
		} else {
			fill(0, 20000, 9);
			post(IBV_WR_SEND, 1, 0, 20000, 0, 0);
			expect(1, IBV_WC_SUCCESS);
		}
	} else if (!strcmp(scenario, "nobody-there")) {
		if (server)
			CHECK(ibv_destroy_qp(qp) == 0);
		barrier();
		if (!server)
			refused(IBV_WR_RDMA_WRITE, 100, theirs.rkey, theirs.address, IBV_WC_RETRY_EXC_ERR);
	} else {
		fail("no scenario %s", scenario);
	}
	barrier();
	printf("%s: as it should be\n", scenario);
	return 0;
}
