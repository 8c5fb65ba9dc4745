/* What the programs of these tests share: checks, completions, and addresses that are exchanged by files. */
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void require(int holds, int line, const char *what, long value)
{
    if (!holds) {
        fprintf(stderr, "line %d: %s (%ld)\n", line, what, value);
        exit(1);
    }
}
#define CHECK(condition) require(condition, __LINE__, #condition, 0)
#define CALL(call)                                                                                                   \
    do {                                                                                                             \
        long result = (call);                                                                                        \
        require(result == 0, __LINE__, #call, result);                                                               \
    } while (0)

static struct fi_info *hints, *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static size_t name_length;

/* Opens a domain with these capabilities, a completion queue and an address vector. */
static void open_domain(uint64_t caps)
{
    hints = fi_allocinfo();
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = caps;
    hints->fabric_attr->prov_name = strdup("millstream");
    CALL(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
    struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_TAGGED};
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
    CALL(fi_fabric(info->fabric_attr, &fabric, NULL));
    CALL(fi_domain(fabric, info, &domain, NULL));
    CALL(fi_cq_open(domain, &cq_attr, &cq, NULL));
    CALL(fi_av_open(domain, &av_attr, &av, NULL));
}

/* Binds the endpoint and enables it. */
static void enable_endpoint(void)
{
    CALL(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    CALL(fi_ep_bind(ep, &av->fid, 0));
    CALL(fi_enable(ep));
}

/* Waits for one completion. Returns its error. */
static int completed(struct fi_cq_tagged_entry *entry)
{
    for (;;) {
        ssize_t taken = fi_cq_read(cq, entry, 1);
        if (taken == 1)
            return 0;
        if (taken == -FI_EAVAIL) {
            struct fi_cq_err_entry error = {0};
            CHECK(fi_cq_readerr(cq, &error, 0) == 1);
            entry->op_context = error.op_context;
            return error.err;
        }
        require(taken == -FI_EAGAIN, __LINE__, "fi_cq_read", taken);
    }
}

static void done(void)
{
    struct fi_cq_tagged_entry entry;
    int error = completed(&entry);
    require(error == 0, __LINE__, "completion", error);
}

/* Writes the address of this endpoint to a file. */
static void publish(const char *who)
{
    char name[64], file[80];
    name_length = sizeof name;
    CALL(fi_getname(&ep->fid, name, &name_length));
    snprintf(file, sizeof file, "%s.new", who);
    FILE *out = fopen(file, "w");
    CHECK(out && fwrite(name, 1, name_length, out) == name_length && fclose(out) == 0);
    CHECK(rename(file, who) == 0);
}

/* The number of an address that another node publishes. This one has published its own. */
static fi_addr_t find(const char *who)
{
    char name[64];
    FILE *in;
    while ((in = fopen(who, "r")) == NULL)
        usleep(10000);
    CHECK(fread(name, 1, sizeof name, in) == name_length && fclose(in) == 0);
    fi_addr_t number;
    CHECK(fi_av_insert(av, name, 1, &number, 0, NULL) == 1);
    return number;
}
