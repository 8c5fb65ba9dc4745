// A program that uses the device's files. Each test is one function, named on the command line. It prints the error and exits
// with 1, or prints nothing.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "cases.h"

#define FAILS(what, error) do { errno = 0; CHECK((what) == -1 && errno == (error)); } while (0)

#define SYSFS "/sys/class/infiniband/mill0"
#define CHANNEL "/dev/infiniband/rdma_cm"
#define VERBS "/dev/infiniband/uverbs0"

// Signal handlers must not allocate.
static volatile int may_not_allocate;
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static void allocates(void)
{
	if (may_not_allocate) {
		static const char text[] = "it allocates memory\n";
		(void)!write(1, text, sizeof text - 1);
		_exit(1);
	}
}

void *malloc(size_t len) { return allocates(), __libc_malloc(len); }
void *calloc(size_t n, size_t len) { return allocates(), __libc_calloc(n, len); }
void *realloc(void *old, size_t len) { return allocates(), __libc_realloc(old, len); }
int posix_memalign(void **to, size_t align, size_t len)
{
	allocates();
	return (*to = __libc_memalign(align, len)) ? 0 : ENOMEM;
}

static int is_device(const struct stat *stat)
{
	return S_ISCHR(stat->st_mode) && stat->st_rdev == makedev(10, 120);
}

static int is_channel(int fd)
{
	struct stat stat;
	return fd >= 0 && fstat(fd, &stat) == 0 && is_device(&stat) && close(fd) == 0;
}

static void read_line(const char *path, char *line, int room)
{
	FILE *file = fopen(path, "r");
	CHECK(file && fgets(line, room, file) && fclose(file) == 0);
}

static void files_cannot_be_changed(void)
{
	struct stat stat_;
	char before[80], after[80];
	const char *path = SYSFS "/node_desc";
	read_line(path, before, sizeof before);
	for (const char *const *mode = (const char *const[]) { "w", "a", "r+", "w+", "a+e", NULL }; *mode; mode++)
		CHECK((errno = 0, !fopen(path, *mode)) && errno == EACCES);
	CHECK((errno = 0, !fopen64(path, "wx")) && errno == EEXIST);
	FAILS(open(path, O_RDWR), EACCES);
	FAILS(open64(path, O_RDONLY | O_TRUNC), EACCES);
	FAILS(openat(AT_FDCWD, path, O_WRONLY), EACCES);
	FAILS(open(path, O_RDWR | O_CREAT | O_EXCL, 0600), EEXIST);
	FAILS(open(path, O_WRONLY | O_DIRECTORY), ENOTDIR);
	FAILS(open(SYSFS "/new", O_RDWR | O_CREAT, 0600), EACCES);
	FAILS(open(SYSFS "/new", O_RDWR), ENOENT);
	FAILS(open(SYSFS, O_RDWR), EISDIR);
	CHECK(close(open(path, O_RDONLY | O_CREAT, 0600)) == 0);
	CHECK(stat(path, &stat_) == 0 && stat_.st_mode == (S_IFREG | 0444));
	CHECK(stat(SYSFS, &stat_) == 0 && stat_.st_mode == (S_IFDIR | 0555));
	read_line(path, after, sizeof after);
	CHECK(!strcmp(before, after));
}

static void devices_open_as_the_kernels(void)
{
	struct stat stat_;
	FILE *file = fopen(CHANNEL, "r+e");
	CHECK(file && fcntl(fileno(file), F_GETFD) == FD_CLOEXEC);
	CHECK(fstat(fileno(file), &stat_) == 0 && is_device(&stat_) && fclose(file) == 0);
	CHECK(is_channel(open(CHANNEL, O_RDWR | O_CREAT, 0600)));
	CHECK((errno = 0, !fopen(VERBS, "r+")) && errno == ENXIO);
	FAILS(open(CHANNEL, O_RDWR | O_CREAT | O_EXCL, 0600), EEXIST);
	FAILS(open(CHANNEL, O_RDONLY | O_DIRECTORY), ENOTDIR);
	FAILS(open(CHANNEL "/", O_RDWR), ENOTDIR);
	FAILS(stat(CHANNEL "/.", &stat_), ENOTDIR);
	FAILS(stat(SYSFS "/node_type/", &stat_), ENOTDIR);
	FAILS(open("/dev/infiniband/uverbs1", O_RDWR), ENOENT);
	// A descriptor for the path alone is no channel.
	char name[64], link[PATH_MAX];
	int path = open(CHANNEL, O_PATH);
	CHECK(path >= 0 && snprintf(name, sizeof name, "/proc/self/fd/%d", path) > 0);
	CHECK(readlink(name, link, sizeof link) > 0 && link[0] == '/');
	CHECK(open(VERBS, O_PATH) >= 0);
}

static void names_below_an_open_directory_are_devices(void)
{
	struct stat stat_;
	int devices = open("/dev/infiniband", O_RDONLY | O_DIRECTORY), class = open("/sys/class/infiniband", O_RDONLY);
	CHECK(devices >= 0 && class >= 0);
	CHECK(is_channel(openat(devices, "rdma_cm", O_RDWR)));
	CHECK(fstatat(devices, "rdma_cm", &stat_, 0) == 0 && is_device(&stat_));
	CHECK(fstatat(devices, "uverbs0", &stat_, 0) == 0 && S_ISCHR(stat_.st_mode));
	FAILS(openat(devices, "uverbs0", O_RDWR), ENXIO);
	CHECK(close(openat(devices, "../null", O_RDWR)) == 0);
	CHECK(faccessat(class, "../net", F_OK, 0) == 0);
	CHECK(close(openat(class, "mill0/node_type", O_RDONLY)) == 0);
}

static void descriptors_of_channels_are_devices(void)
{
	struct stat stat_;
	struct statx statx_;
	int fd = open(CHANNEL, O_RDWR), pipes[2];
	CHECK(fd >= 0 && pipe(pipes) == 0);
	CHECK(fstatat(fd, "", &stat_, AT_EMPTY_PATH) == 0 && is_device(&stat_));
	CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &statx_) == 0 && S_ISCHR(statx_.stx_mode));
	CHECK(statx_.stx_rdev_major == 10 && statx_.stx_rdev_minor == 120);
	FAILS(fstatat(fd, "", &stat_, 0), ENOENT);
	CHECK(fstatat(pipes[0], "", &stat_, AT_EMPTY_PATH) == 0 && S_ISFIFO(stat_.st_mode));
}

static void parents_lead_to_other_files(void)
{
	CHECK(close(open("/dev/infiniband/../null", O_RDWR)) == 0);
	CHECK(close(open("/sys/class/infiniband/../net/lo/mtu", O_RDONLY)) == 0);
	CHECK(access(SYSFS "/../../net", F_OK) == 0);
	CHECK(access("/dev/infiniband/../infiniband/rdma_cm", R_OK | W_OK) == 0);
	FAILS(access("/sys/class/infiniband/none/../mill0", F_OK), ENOENT);
	FAILS(access(SYSFS "/node_type/../node_desc", F_OK), ENOTDIR);
}

static void bad_paths_are_errors(void)
{
	struct stat stat_;
	char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED && mprotect(page + 4096, 4096, PROT_NONE) == 0);
	for (int i = 0; i < 3; i++) {
		const char *volatile path = (const char *[]) { (char *)8, page + 4096, page + 4096 - 4 }[i];
		memcpy(page + 4096 - 4, "/dev", 4);
		FAILS(open(path, O_RDONLY), EFAULT);
		FAILS(stat(path, &stat_), EFAULT);
		FAILS(access(path, F_OK), EFAULT);
	}
	errno = EPROTO;
	CHECK(close(open("/dev/null", O_RDONLY)) == 0 && errno == EPROTO);
}

static void nothing_is_allocated_after_the_first_use(void)
{
	char link[80];
	struct stat stat_;
	CHECK(chdir("/sys/class") == 0);
	for (int round = 0; round < 2; round++) {
		CHECK(stat(SYSFS "/node_type", &stat_) == 0 && stat(CHANNEL, &stat_) == 0);
		CHECK(access(SYSFS "/../../net/lo", F_OK) == 0 && access("infiniband/mill0", R_OK) == 0);
		CHECK(close(open(SYSFS "/node_type", O_RDONLY)) == 0 && open(SYSFS "/none", O_RDWR) == -1);
		CHECK(readlink(SYSFS, link, sizeof link) == -1 && open(VERBS, O_RDWR) == -1);
		may_not_allocate = !round;
	}
	may_not_allocate = 0;
}

static int finds(const char *pattern, const char *name)
{
	glob_t found;
	int failed = glob(pattern, 0, NULL, &found);
	return !failed && found.gl_pathc == 1 && !strcmp(found.gl_pathv[0], name);
}

static void results_are_original_paths(void)
{
	char path[PATH_MAX], run[] = "/tmp/millstream-XXXXXX", odd[80], *resolved;
	CHECK(mkdtemp(run) && snprintf(odd, sizeof odd, "%s/[x]", run) > 0 && mkdir(odd, 0700) == 0);
	CHECK(setenv("XDG_RUNTIME_DIR", odd, 1) == 0);
	CHECK(finds("/sys/class/infiniband/*", SYSFS));
	CHECK(finds("/sys/class/infiniband/../infiniband/mill*", SYSFS));
	CHECK(finds("/dev/infiniband/r*", CHANNEL));
	CHECK(chdir("/sys/class") == 0 && finds("infiniband/*", "infiniband/mill0"));
	CHECK((resolved = realpath(SYSFS "/../mill0/device/", path)) && !strcmp(path, SYSFS "/device"));
	int verbs = open("/sys/class/infiniband_verbs", O_RDONLY);
	CHECK(verbs >= 0 && fchdir(verbs) == 0);
	CHECK(finds("../infiniband/*", SYSFS) && finds("uverbs*", "uverbs0"));
	CHECK(rmdir(odd) == 0 && rmdir(run) == 0);
}

static void links_to_the_runtime_directory_are_resolved(void)
{
	char path[PATH_MAX], run[] = "/tmp/millstream-XXXXXX", link[80];
	CHECK(mkdtemp(run) && snprintf(link, sizeof link, "%s/link", run) > 0 && symlink(".", link) == 0);
	CHECK(setenv("XDG_RUNTIME_DIR", link, 1) == 0);
	CHECK(realpath(SYSFS, path) && !strcmp(path, SYSFS));
	CHECK(snprintf(path, sizeof path, "chmod -R u+w %s && rm -r %s", run, run) > 0);
	CHECK(unsetenv("LD_PRELOAD") == 0 && system(path) == 0);
}

// An empty root directory has no place for the files. The devices need none; a warning says what is missing.
static void devices_need_no_files(void)
{
	struct stat stat_;
	char root[] = "/tmp/millstream-XXXXXX", dev[80], null[80];
	CHECK(mkdtemp(root) && snprintf(dev, sizeof dev, "%s/dev", root) > 0 && mkdir(dev, 0700) == 0);
	CHECK(snprintf(null, sizeof null, "%s/null", dev) > 0 && close(creat(null, 0600)) == 0);
	int outside = open("/", O_RDONLY | O_DIRECTORY);
	CHECK(outside >= 0);
	CHECK(geteuid() == 0 || unshare(CLONE_NEWUSER) == 0);
	CHECK(chroot(root) == 0 && chdir("/") == 0);
	CHECK(unsetenv("XDG_RUNTIME_DIR") == 0);
	CHECK(is_channel(open(CHANNEL, O_RDWR)));
	CHECK(stat(CHANNEL, &stat_) == 0 && is_device(&stat_));
	CHECK(access(CHANNEL, R_OK | W_OK) == 0);
	FAILS(open(VERBS, O_RDWR), ENXIO);
	FAILS(open(SYSFS "/node_type", O_RDONLY), ENOENT);
	CHECK(!realpath(CHANNEL, NULL) && errno == ENOENT);
	CHECK(fchdir(outside) == 0 && unlinkat(AT_FDCWD, null + 1, 0) == 0);
	CHECK(unlinkat(AT_FDCWD, dev + 1, AT_REMOVEDIR) == 0 && unlinkat(AT_FDCWD, root + 1, AT_REMOVEDIR) == 0);
}

static const struct test tests[] = {
	TEST(files_cannot_be_changed), TEST(devices_open_as_the_kernels), TEST(names_below_an_open_directory_are_devices),
	TEST(descriptors_of_channels_are_devices), TEST(parents_lead_to_other_files), TEST(bad_paths_are_errors),
	TEST(nothing_is_allocated_after_the_first_use), TEST(results_are_original_paths),
	TEST(links_to_the_runtime_directory_are_resolved), TEST(devices_need_no_files),
};

int main(int count, char **words)
{
	return run_named(tests, sizeof tests / sizeof *tests, count, words);
}
