/* Import of a device and its objects within one process. */
#include "verbs.h"

#include <fcntl.h>
#include <unistd.h>

int main(void)
{
	open_device();
	int fd = dup(context->cmd_fd), nothing = open("/dev/null", O_RDWR);
	REFUSED(ibv_import_device(nothing), EOPNOTSUPP);
	REFUSED(ibv_import_device(-1), EBADF);
	struct ibv_context *again = ibv_import_device(fd);
	CHECK(again && again != context && again->device == context->device);

	REFUSED(ibv_import_pd(again, pd->handle + 1000), ENOENT);
	struct ibv_pd *domain = ibv_import_pd(again, pd->handle);
	CHECK(domain && domain->context == again);
	CHECK(ibv_dealloc_pd(domain) == EINVAL);

	struct ibv_pd *stranger = ibv_alloc_pd(again);
	REFUSED(ibv_import_mr(stranger, mr->handle), ENOENT);
	CHECK(ibv_dealloc_pd(stranger) == 0);
	struct ibv_mr *region = ibv_import_mr(domain, mr->handle);
	CHECK(region && region->lkey == mr->lkey && region->rkey == mr->rkey);
	CHECK(region->length == SIZE && !region->addr);
	CHECK(ibv_dereg_mr(region) == EINVAL);
	ibv_unimport_mr(region);

	/* Created through one context, used through the other. */
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(context, &attr);
	CHECK(dm);
	REFUSED(ibv_import_dm(again, dm->handle + 1000), ENOENT);
	struct ibv_dm *view = ibv_import_dm(again, dm->handle);
	uint32_t in = 0x12345678, out = 0;
	CHECK(view && ibv_memcpy_to_dm(dm, 4, &in, 4) == 0 && ibv_memcpy_from_dm(&out, view, 4, 4) == 0);
	CHECK(in == out);
	CHECK(ibv_free_dm(view) == EINVAL);
	ibv_unimport_dm(view);
	CHECK(ibv_free_dm(dm) == 0);

	/* A region of the imported domain keeps the domain busy for both handles. */
	struct ibv_mr *own = ibv_reg_mr(domain, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	CHECK(own && ibv_dealloc_pd(pd) == EBUSY);
	CHECK(ibv_dereg_mr(own) == 0);
	ibv_unimport_pd(domain);

	/* The device is open until its last context is closed. */
	struct ibv_context *third = ibv_import_device(again->cmd_fd);
	CHECK(third);
	CHECK(ibv_close_device(again) == 0);
	CHECK(ibv_close_device(third) == 0);
	close_device();
	REFUSED(ibv_import_device(fd), EOPNOTSUPP);
	close(fd);
	close(nothing);
	puts("done");
	return 0;
}
