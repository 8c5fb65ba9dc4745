/* Queries of the device through the extended calls of verbs.h. */
#include "verbs.h"

static void the_device_offers_what_it_has(void)
{
	struct ibv_device_attr plain;
	size_t attributes = offsetof(struct ibv_device_attr, phys_port_cnt) + 1;
	struct ibv_device_attr_ex all;
	struct ibv_query_device_ex_input input = { 0 };
	CHECK(ibv_query_device(context, &plain) == 0);
	memset(&all, 0xff, sizeof all);
	CHECK(ibv_query_device_ex(context, &input, &all) == 0);
	CHECK(memcmp(&plain, &all.orig_attr, attributes) == 0);
	CHECK(plain.vendor_id != 0 && plain.phys_port_cnt == all.phys_port_cnt_ex);
	CHECK((uint32_t)all.device_cap_flags_ex == plain.device_cap_flags);
	CHECK(all.comp_mask == 0);
	/* Features of Ethernet, PCI and other adapters. */
	CHECK(all.tso_caps.max_tso == 0 && all.rss_caps.supported_qpts == 0 && all.max_wq_type_rq == 0);
	CHECK(all.packet_pacing_caps.supported_qpts == 0 && all.raw_packet_caps == 0);
	CHECK(all.pci_atomic_caps.fetch_add == 0 && all.tm_caps.max_num_tags == 0);
	/* Programs compiled with a shorter struct get only its fields. */
	struct verbs_context *verbs = verbs_get_ctx(context);
	CHECK(verbs);
	memset(&all, 0xff, sizeof all);
	CHECK(verbs->query_device_ex(context, NULL, &all, sizeof plain) == 0);
	CHECK(memcmp(&plain, &all.orig_attr, attributes) == 0 && all.comp_mask == 0xffffffff);
	CHECK(verbs->query_device_ex(context, NULL, &all, sizeof plain - 1) == EINVAL);
	input.comp_mask = 1;
	CHECK(verbs->query_device_ex(context, &input, &all, sizeof all) == EINVAL);
}

static void the_clock_runs_as_fast_as_it_says(void)
{
	struct ibv_device_attr_ex device;
	struct ibv_values_ex before = { .comp_mask = ~0u }, after = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct timespec start, end, pause = { .tv_nsec = 50000000 };
	CHECK(ibv_query_device_ex(context, NULL, &device) == 0);
	clock_gettime(CLOCK_MONOTONIC_RAW, &start);
	CHECK(ibv_query_rt_values_ex(context, &before) == 0);
	nanosleep(&pause, NULL);
	CHECK(ibv_query_rt_values_ex(context, &after) == 0);
	clock_gettime(CLOCK_MONOTONIC_RAW, &end);
	CHECK(before.comp_mask == IBV_VALUES_MASK_RAW_CLOCK && after.comp_mask == before.comp_mask);
	CHECK(before.raw_clock.tv_sec == 0 && after.raw_clock.tv_sec == 0);
	double ms = 1e-6 * (end.tv_nsec - start.tv_nsec) + 1e3 * (end.tv_sec - start.tv_sec);
	double ticks = after.raw_clock.tv_nsec - before.raw_clock.tv_nsec;
	CHECK(ticks >= 50.0 * device.hca_core_clock && ticks <= ms * device.hca_core_clock);
	before.comp_mask = 0;
	CHECK(ibv_query_rt_values_ex(context, &before) == 0 && before.comp_mask == 0);
}

static void the_gid_table_is_given_whole(void)
{
	static const union ibv_gid zero;
	struct ibv_gid_entry entries[256], one;
	struct ibv_port_attr port;
	ssize_t count = ibv_query_gid_table(context, entries, 256, 0);
	CHECK(ibv_query_port(context, 1, &port) == 0);
	CHECK(count >= 2 && count <= port.gid_tbl_len && port.gid_tbl_len <= 256);
	CHECK(ibv_query_gid_table(context, entries, count, 0) == count);
	CHECK(ibv_query_gid_table(context, entries, count - 1, 0) == -EINVAL);
	CHECK(ibv_query_gid_table(context, entries, 0, 0) == -EINVAL);
	CHECK(ibv_query_gid_table(context, entries, count, 1) == -EINVAL);
	ssize_t found = 0;
	for (int i = 0; i < port.gid_tbl_len; i++) {
		int empty = found == count || entries[found].gid_index != (uint32_t)i;
		CHECK(ibv_query_gid_ex(context, 1, i, &one, 0) == (empty ? ENODATA : 0));
		CHECK(ibv_query_gid(context, 1, i, &gid) == 0);
		CHECK(memcmp(&gid, empty ? &zero : &one.gid, 16) == 0);
		CHECK(empty || memcmp(&one, &entries[found++], sizeof one) == 0);
	}
	CHECK(found == count && found < port.gid_tbl_len);
	CHECK(ibv_query_gid_ex(context, 1, port.gid_tbl_len, &one, 0) == EINVAL);
	CHECK(ibv_query_gid_ex(context, 2, 0, &one, 0) == EINVAL);
	CHECK(ibv_query_gid_ex(context, 1, 0, &one, 1) == EINVAL);
	CHECK(ibv_query_gid(context, 1, port.gid_tbl_len, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_query_gid(context, 1, -1, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_query_gid(context, 2, 0, &gid) == -1 && errno == EINVAL);
}

static void roce_v2_gids_come_first(void)
{
	struct ibv_gid_entry entries[256];
	ssize_t count = ibv_query_gid_table(context, entries, 256, 0);
	CHECK(count >= 2);
	for (ssize_t i = 0; i < count; i++)
		CHECK(entries[i].gid_type == (i < count / 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1));
}

static void all_advertised_completion_queues_exist(void)
{
	struct ibv_device_attr device;
	CHECK(ibv_query_device(context, &device) == 0);
	struct ibv_cq **queues = calloc(device.max_cq, sizeof *queues);
	for (int i = 0; i < device.max_cq; i++)
		CHECK((queues[i] = ibv_create_cq(context, 1, NULL, NULL, 0)));
	for (int i = 0; i < device.max_cq; i++)
		CHECK(ibv_destroy_cq(queues[i]) == 0);
	free(queues);
}

static void what_queue_pairs_do_not_promise(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = description(IBV_QPT_RC, cq, IBV_QP_EX_WITH_SEND);
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	struct ibv_ece ece = { 0 };
	struct ibv_qp_rate_limit_attr rate = { 0 };
	CHECK(ibv_query_qp_data_in_order(qp, IBV_WR_RDMA_WRITE, 0) == 0);
	CHECK(ibv_query_ece(qp, &ece) == EOPNOTSUPP);
	CHECK(ibv_set_ece(qp, &ece) == EOPNOTSUPP);
	CHECK(ibv_modify_qp_rate_limit(qp, &rate) == EOPNOTSUPP);
	CHECK(ibv_destroy_qp(qp) == 0);
	CHECK(ibv_destroy_cq(cq) == 0);
}

int main(void)
{
	open_device();
	the_device_offers_what_it_has();
	the_clock_runs_as_fast_as_it_says();
	the_gid_table_is_given_whole();
	roce_v2_gids_come_first();
	all_advertised_completion_queues_exist();
	what_queue_pairs_do_not_promise();
	close_device();
	puts("done");
	return 0;
}
