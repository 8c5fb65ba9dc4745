// A program that uses the connection manager's device directly, as librdmacm does. It writes commands, and
// answers arrive at an address in the command. Each test is one function, named on the command line. It
// prints the error and exits with 1, or prints nothing.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

// Suppresses the kernel's second definition of IPv6 addresses.
#define _UAPI_LINUX_IN6_H
#include <rdma/rdma_user_cm.h>

#include "cases.h"

struct command { struct rdma_ucm_cmd_hdr header; char body[400]; };

// Writes one command; zero, or errno.
static int command(int fd, int number, const void *body, size_t len, size_t room)
{
	struct command command = { { number, len, room }, { 0 } };
	memcpy(command.body, body, len);
	ssize_t written = write(fd, &command, sizeof command.header + len);
	if (written < 0)
		return errno;
	return written == (ssize_t)(sizeof command.header + len) ? 0 : EIO;
}

static int open_channel(int flags)
{
	int fd = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC | flags);
	CHECK(fd >= 0);
	return fd;
}

static uint32_t create(int fd, uint64_t uid)
{
	struct rdma_ucm_create_id_resp answer = { ~0u };
	struct rdma_ucm_create_id body = { .uid = uid, .response = (uintptr_t)&answer, .ps = RDMA_PS_TCP };
	CHECK(command(fd, RDMA_USER_CM_CMD_CREATE_ID, &body, sizeof body, sizeof answer) == 0);
	CHECK(answer.id != ~0u);
	return answer.id;
}

static int destroy(int fd, uint32_t id)
{
	struct rdma_ucm_destroy_id_resp answer;
	struct rdma_ucm_destroy_id body = { .response = (uintptr_t)&answer, .id = id };
	return command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &body, sizeof body, sizeof answer);
}

static struct sockaddr_in6 loopback(int port)
{
	struct sockaddr_in6 address = { 0 };
	struct sockaddr_in *in = (struct sockaddr_in *)&address;
	in->sin_family = AF_INET;
	in->sin_port = htons(port);
	in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

static int bind_to(int fd, uint32_t id, int port)
{
	struct rdma_ucm_bind_ip body = { .addr = loopback(port), .id = id };
	return command(fd, RDMA_USER_CM_CMD_BIND_IP, &body, sizeof body, 0);
}

static void resolve(int fd, uint32_t id, int port)
{
	struct rdma_ucm_resolve_ip body = { .dst_addr = loopback(port), .id = id, .timeout_ms = 2000 };
	CHECK(command(fd, RDMA_USER_CM_CMD_RESOLVE_IP, &body, sizeof body, 0) == 0);
}

// The next event's number, or minus errno.
static int next_event(int fd, struct rdma_ucm_event_resp *event)
{
	struct rdma_ucm_get_event body = { (uintptr_t)event };
	int failed = command(fd, RDMA_USER_CM_CMD_GET_EVENT, &body, sizeof body, sizeof *event);
	return failed ? -failed : (int)event->event;
}

static int is_readable(int fd)
{
	struct pollfd polled = { fd, POLLIN, 0 };
	CHECK(poll(&polled, 1, 0) >= 0);
	return polled.revents & POLLIN;
}

// A free port: one that the manager chose before.
static int free_port(int fd)
{
	uint32_t id = create(fd, 1);
	struct rdma_ucm_query_route_resp route;
	struct rdma_ucm_query query = { .response = (uintptr_t)&route, .id = id };
	CHECK(bind_to(fd, id, 0) == 0);
	CHECK(command(fd, RDMA_USER_CM_CMD_QUERY_ROUTE, &query, sizeof query, sizeof route) == 0);
	CHECK(destroy(fd, id) == 0);
	int port = ntohs(((struct sockaddr_in *)&route.src_addr)->sin_port);
	CHECK(port != 0 && route.node_guid != 0);
	return port;
}

static void is_a_device(void)
{
	struct stat stat;
	int fd = open_channel(0);
	CHECK(fstat(fd, &stat) == 0 && S_ISCHR(stat.st_mode));
	dev_t device = stat.st_rdev;
	CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
	CHECK(lstat("/dev/infiniband/rdma_cm", &stat) == 0 && S_ISCHR(stat.st_mode) && stat.st_rdev == device);
	CHECK(access("/dev/infiniband/rdma_cm", R_OK | W_OK) == 0);
	CHECK(open("/dev/infiniband/uverbs0", O_RDWR) == -1 && errno == ENXIO);
	CHECK(open("/dev/infiniband/other", O_RDWR) == -1);
	// Other files are unchanged.
	CHECK(fstat(0, &stat) == 0 && stat.st_rdev != device);
	int pipes[2];
	CHECK(pipe(pipes) == 0 && write(pipes[1], "\0\0\0\0\1\0\0\0x", 9) == 9);
}

static void wrong_commands_are_refused(void)
{
	int fd = open_channel(0);
	struct rdma_ucm_disconnect nobody = { 4711 };
	CHECK(command(fd, RDMA_USER_CM_CMD_DISCONNECT, &nobody, sizeof nobody, 0) == ENOENT);
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_OPTION, &nobody, sizeof nobody, 0) == ENOSYS);
	struct rdma_ucm_event_resp event;
	struct rdma_ucm_get_event body = { (uintptr_t)&event };
	CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &body, sizeof body, 100) == ENOSPC);
	// The whole header must be there, and bytes behind a command are ignored.
	struct { struct rdma_ucm_cmd_hdr header; struct rdma_ucm_disconnect body; char more[600]; } written = {
		{ RDMA_USER_CM_CMD_DISCONNECT, sizeof nobody, 0 }, nobody, { 0 } };
	for (size_t len = 0; len < sizeof written.header + sizeof nobody; len++)
		CHECK(write(fd, &written, len) == -1 && errno == EINVAL);
	CHECK(write(fd, &written, sizeof written) == -1 && errno == ENOENT);
	struct pollfd polled = { fd, POLLIN, 0 };
	CHECK(poll(&polled, 1, 0) == 0);
	// An identifier belongs to its channel.
	uint32_t id = create(fd, 1);
	int other = open_channel(0);
	CHECK(destroy(other, id) == EINVAL);
	CHECK(destroy(fd, id) == 0 && destroy(fd, id) == ENOENT);
}

static void can_be_polled_however_it_was_copied(void)
{
	struct rdma_ucm_event_resp event;
	int fd = open_channel(O_NONBLOCK);
	int copy = dup(fd), set = epoll_create1(0);
	struct epoll_event wanted = { EPOLLIN, { 0 } }, got;
	CHECK(copy >= 0 && set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, copy, &wanted) == 0);
	CHECK(next_event(fd, &event) == -EAGAIN && !is_readable(fd) && epoll_wait(set, &got, 1, 0) == 0);
	uint32_t id = create(fd, 77);
	resolve(fd, id, 7);
	CHECK(is_readable(fd) && is_readable(copy) && epoll_wait(set, &got, 1, 0) == 1);
	CHECK(close(fd) == 0);
	CHECK(next_event(copy, &event) == 0 && event.uid == 77 && event.id == id && event.status == 0);
	CHECK(!is_readable(copy) && next_event(copy, &event) == -EAGAIN);
	// Events of a destroyed identifier are dropped.
	uint32_t second = create(copy, 78);
	resolve(copy, second, 7);
	CHECK(is_readable(copy) && destroy(copy, second) == 0 && !is_readable(copy));
}

static void *get_event(void *fd)
{
	struct rdma_ucm_event_resp event;
	return (void *)(intptr_t)next_event((int)(intptr_t)fd, &event);
}

static void waiting_ends_with_an_event_or_the_thread(void)
{
	pthread_t waiter;
	void *got;
	int fd = open_channel(0);
	uint32_t id = create(fd, 1);
	CHECK(pthread_create(&waiter, NULL, get_event, (void *)(intptr_t)fd) == 0);
	usleep(50000);
	resolve(fd, id, 7);
	CHECK(pthread_join(waiter, &got) == 0 && got == NULL);
	for (int i = 0; i < 100; i++) {
		CHECK(pthread_create(&waiter, NULL, get_event, (void *)(intptr_t)fd) == 0);
		if (i % 2)
			usleep(2000);
		CHECK(pthread_cancel(waiter) == 0 && pthread_join(waiter, &got) == 0 && got == PTHREAD_CANCELED);
	}
	// Destroyed identifiers hold no resources.
	CHECK(destroy(fd, id) == 0);
}

static void interrupt(int signal) { (void)signal; }

static void a_signal_ends_waiting(void)
{
	struct sigaction action = { .sa_handler = interrupt };
	struct rdma_ucm_event_resp event;
	int fd = open_channel(0);
	sigaction(SIGALRM, &action, NULL);
	// Again and again: the first signal may come before the call.
	setitimer(ITIMER_REAL, &(struct itimerval) { .it_interval = { 1, 0 }, .it_value = { 1, 0 } }, NULL);
	CHECK(next_event(fd, &event) == -EINTR);
}

// A child does not keep its parent's ports and cannot use its channels, but can open others.
static void children_start_afresh(void)
{
	int fd = open_channel(0), port = free_port(fd), to_parent[2], to_us[2], status;
	CHECK(pipe(to_parent) == 0 && pipe(to_us) == 0);
	pid_t owner = fork(), grandchild;
	CHECK(owner >= 0);
	if (owner == 0) {
		int mine = open_channel(0);
		uint32_t id = create(mine, 1);
		CHECK(bind_to(mine, id, port) == 0);
		grandchild = fork();
		CHECK(grandchild >= 0);
		if (grandchild == 0) {
			struct rdma_ucm_disconnect body = { id };
			CHECK(command(mine, RDMA_USER_CM_CMD_DISCONNECT, &body, sizeof body, 0) == EIO);
			create(open_channel(0), 2);
			pid_t self = getpid();
			CHECK(write(to_us[1], &self, sizeof self) == sizeof self);
			CHECK(write(to_parent[1], "x", 1) == 1);
			// The child outlives its parent.
			pause();
		}
		char ready;
		CHECK(read(to_parent[0], &ready, 1) == 1);
		_exit(0);
	}
	CHECK(waitpid(owner, &status, 0) == owner && status == 0);
	CHECK(read(to_us[0], &grandchild, sizeof grandchild) == sizeof grandchild);
	uint32_t id = create(fd, 3);
	int bound = bind_to(fd, id, port);
	kill(grandchild, SIGKILL);
	CHECK(bound == 0);
}

static void ports_are_given_back(void)
{
	int fd = open_channel(0), port = free_port(fd);
	uint32_t first = create(fd, 1), second = create(fd, 2);
	CHECK(bind_to(fd, first, port) == 0);
	CHECK(bind_to(fd, second, port) == EADDRINUSE);
	CHECK(destroy(fd, first) == 0);
	CHECK(bind_to(fd, second, port) == 0);
	// Closing a channel releases the ports of its identifiers after a moment.
	int other = open_channel(0);
	CHECK(close(fd) == 0);
	uint32_t third = create(other, 3);
	for (int i = 0; i < 500 && bind_to(other, third, port) != 0; i++)
		usleep(10000);
	CHECK(bind_to(other, third, port) == EINVAL);
}

// Daemons close all descriptors. The manager cannot continue; the rest of the program must work.
static void everything_can_be_closed(void)
{
	open_channel(0);
	for (int fd = 3; fd < 256; fd++)
		close(fd);
	int pipes[2];
	char got = 0;
	CHECK(pipe(pipes) == 0);
	CHECK(write(pipes[1], "x", 1) == 1 && read(pipes[0], &got, 1) == 1 && got == 'x');
	usleep(100000);
	CHECK(write(pipes[1], "y", 1) == 1 && read(pipes[0], &got, 1) == 1 && got == 'y');
}

static unsigned char *handler_frame;

static void call_with_paths(int signal)
{
	(void)signal;
	struct stat answer;
	handler_frame = __builtin_frame_address(0);
	close(open("/dev/null", O_RDONLY));
	close(openat(AT_FDCWD, "/sys/kernel", O_RDONLY));
	stat("/dev/null", &answer);
	access("/sys/class", R_OK);
	int pipes[2];
	if (pipe(pipes) == 0 && write(pipes[1], "a longer text", 13) == 13)
		close(pipes[0]), close(pipes[1]);
}

// Signal handlers on a small alternate stack open other files.
static void calls_for_other_files_take_little_stack(void)
{
	enum { SIZE = 65536, MOST = 2048 };
	static unsigned char memory[SIZE] __attribute__((aligned(16)));
	memset(memory, 0xa5, SIZE);
	stack_t stack = { .ss_sp = memory, .ss_size = SIZE };
	struct sigaction action = { .sa_handler = call_with_paths, .sa_flags = SA_ONSTACK };
	// The first calls look up the C library's functions.
	call_with_paths(0);
	// With a channel, each write may be a command.
	open_channel(0);
	CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(raise(SIGUSR1) == 0);
	unsigned char *lowest = memory;
	while (*lowest == 0xa5)
		lowest++;
	CHECK(handler_frame > lowest && handler_frame < memory + SIZE);
	CHECK(handler_frame - lowest <= MOST);
}

enum { MANY = 300, CLOSED = 100 };

static void open_many(int *channels)
{
	struct rlimit limit;
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (limit.rlim_cur < 4096) {
		limit.rlim_cur = limit.rlim_max < 4096 ? limit.rlim_max : 4096;
		CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	}
	for (int i = 0; i < MANY; i++)
		channels[i] = open_channel(0);
}

static void many_channels_are_channels(void)
{
	struct stat stat;
	int channels[MANY];
	open_many(channels);
	create(channels[MANY - 1], 1);
	// The connection manager removes closed channels after a moment, which changes nothing for others.
	for (int i = 0; i < CLOSED; i++)
		CHECK(close(channels[i]) == 0);
	for (int round = 0; round < 50; round++, usleep(10000))
		for (int i = CLOSED; i < MANY; i++)
			CHECK(fstat(channels[i], &stat) == 0 && S_ISCHR(stat.st_mode));
	for (int i = CLOSED; i < MANY; i++)
		create(channels[i], i);
}

// The connection manager reports that another program holds the RoCEv2 port. Its log output is a `write`.
static void make_it_log(int channel)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(4791) };
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6, .sin6_port = htons(4791) };
	// Another program may hold the port already.
	bind(socket(AF_INET, SOCK_DGRAM, 0), (struct sockaddr *)&any, sizeof any);
	bind(socket(AF_INET6, SOCK_DGRAM, 0), (struct sockaddr *)&any6, sizeof any6);
	CHECK(setenv("MILLSTREAM_PATH", "wire", 1) == 0);
	uint32_t id = create(channel, 1);
	struct rdma_ucm_listen listen = { .id = id, .backlog = 1 };
	CHECK(bind_to(channel, id, 0) == 0);
	CHECK(command(channel, RDMA_USER_CM_CMD_LISTEN, &listen, sizeof listen, 0) == 0);
}

static void log_output_may_go_to_a_socket(void)
{
	char text[500] = { 0 };
	int channels[MANY], sockets[2], error = dup(2);
	CHECK(error >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && dup2(sockets[0], 2) == 2);
	open_many(channels);
	make_it_log(channels[MANY - 1]);
	CHECK(recv(sockets[1], text, sizeof text - 1, MSG_DONTWAIT) > 0);
	CHECK(strstr(text, "no connections to or from other hosts"));
	CHECK(dup2(error, 2) == 2);
}

// Daemons close their standard error, and the next descriptor gets its number.
static void log_output_is_no_command(void)
{
	CHECK(close(2) == 0 && open_channel(0) == 2);
	make_it_log(2);
	create(2, 2);
}

static void *open_when_cancelled(void *path)
{
	int state;
	CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0 && pthread_cancel(pthread_self()) == 0);
	CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	pthread_testcancel();
	return (void *)(intptr_t)fd;
}

// The first use of the devices has cancellation points inside.
static void the_first_open_may_be_cancelled(const char *path)
{
	pthread_t thread;
	void *got;
	CHECK(pthread_create(&thread, NULL, open_when_cancelled, (void *)path) == 0);
	CHECK(pthread_join(thread, &got) == 0 && got == PTHREAD_CANCELED);
	CHECK(open(path, O_RDONLY | O_CLOEXEC) >= 0);
}

static void the_first_open_of_a_channel_may_be_cancelled(void)
{
	the_first_open_may_be_cancelled("/dev/infiniband/rdma_cm");
	create(open_channel(0), 1);
}

static void the_first_open_of_a_file_may_be_cancelled(void)
{
	the_first_open_may_be_cancelled("/sys/class/infiniband/mill0/node_type");
}

static const struct test tests[] = {
	TEST(is_a_device), TEST(wrong_commands_are_refused), TEST(can_be_polled_however_it_was_copied),
	TEST(waiting_ends_with_an_event_or_the_thread), TEST(a_signal_ends_waiting), TEST(children_start_afresh),
	TEST(ports_are_given_back), TEST(everything_can_be_closed),
	TEST(calls_for_other_files_take_little_stack), TEST(many_channels_are_channels),
	TEST(log_output_may_go_to_a_socket), TEST(log_output_is_no_command),
	TEST(the_first_open_of_a_channel_may_be_cancelled),
	TEST(the_first_open_of_a_file_may_be_cancelled),
};

int main(int count, char **words)
{
	return run_named(tests, sizeof tests / sizeof *tests, count, words);
}
