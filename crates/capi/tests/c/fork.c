/* Forks while other threads use the device. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { FORKS = 300, LEN = 1 << 20, TIMEOUT = 60 };

static struct ibv_device *device;
static struct ibv_context *context;
static atomic_bool stop;

/* A lock that the program holds while it calls the device, and that its own handlers take at a fork. */
static pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER;

static void lock(void)
{
    pthread_mutex_lock(&own);
}

static void unlock(void)
{
    pthread_mutex_unlock(&own);
}

static void open_and_close(void)
{
    struct ibv_context *opened = ibv_open_device(device);
    CHECK(opened);
    CHECK(!ibv_close_device(opened));
}

static void *use_device(void *holds_lock)
{
    while (!stop) {
        if (holds_lock)
            lock();
        open_and_close();
        union ibv_gid gid;
        CHECK(!ibv_query_gid(context, 1, 0, &gid));
        if (holds_lock)
            unlock();
    }
    return NULL;
}

/* Forks children that execute `child`, which returns whether all is well. */
static void fork_children(int forks, int (*child)(void))
{
    for (int i = 0; i < forks; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (!pid) {
            alarm(TIMEOUT); /* ends a child that hangs */
            _exit(!child());
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(status == 0);
        usleep(100 + rand() % 300);
    }
}

static int does_nothing(void)
{
    return 1;
}

static int opens_device(void)
{
    return ibv_open_device(device) != NULL;
}

static void with_thread(int holds_lock, int forks, int (*child)(void))
{
    pthread_t thread;
    stop = 0;
    CHECK(!pthread_create(&thread, NULL, use_device, holds_lock ? &own : NULL));
    fork_children(forks, child);
    stop = 1;
    pthread_join(thread, NULL);
}

static void *fork_cancelled(void *unused)
{
    /* `fork` is no cancellation point. */
    pthread_cancel(pthread_self());
    pid_t pid = fork();
    if (!pid)
        _exit(0);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    waitpid(pid, NULL, 0);
    return unused;
}

static char *memory;

static int is_kept(void)
{
    return memory[0] == 7 && memory[LEN - 1] == 7;
}

int main(void)
{
    CHECK(!pthread_atfork(lock, unlock, unlock));
    alarm(4 * TIMEOUT);
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    device = list[0];
    context = ibv_open_device(device);
    CHECK(context);
    with_thread(1, FORKS, does_nothing);
    with_thread(0, FORKS, opens_device);

    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd);
    memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 7, LEN);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(mr);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, fork_cancelled, NULL));
    pthread_join(thread, NULL);
    CHECK(!ibv_fork_init());
    if (getenv("MILLSTREAM_DONTFORK")) {
        CHECK(ibv_is_fork_initialized() == IBV_FORK_ENABLED);
        /* A child need not have the pages, but the parent keeps them. */
        fork_children(2, does_nothing);
    } else {
        CHECK(ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
        fork_children(2, is_kept);
    }
    CHECK(!ibv_dereg_mr(mr));
    CHECK(is_kept());
    puts("done");
    return 0;
}
