/* Numbered messages in both directions, and atomic additions, while nodes are avoided and come back: numbered RANK, on a torus of
 * two nodes, until the file `enough` exists. Writes how many messages have arrived to `RANK.arrived`, the numbers of failed sends
 * to `RANK.failed`, those of messages that did not arrive to `RANK.missing`, and the number of failed receives to
 * `RANK.receives`. */
#include "common.h"
#include <rdma/fi_atomic.h>

enum { WINDOW = 4, SIZE = 100000, KEY = 5 };

struct head {
    uint64_t number;
    uint64_t is_last;
    /* In the last message: additions that have completed, and that have failed. */
    uint64_t added, unsure;
};

static const char *rank;
static unsigned char out[WINDOW][SIZE], in[SIZE];
static struct head sending[WINDOW];
static int is_sending[WINDOW], is_adding, last_arrived, last_sent;
static uint64_t sum, one = 1, added, unsure, next_number, expected, failed_receives;
static FILE *failed, *missing;

static FILE *file(const char *what, const char *mode)
{
    char name[40];
    snprintf(name, sizeof name, "%s.%s", rank, what);
    FILE *opened = fopen(name, mode);
    CHECK(opened != NULL);
    return opened;
}

static size_t size_of(uint64_t number)
{
    static const size_t sizes[] = {sizeof(struct head), 12000, 500, SIZE, 40000};
    return sizes[number % 5];
}

static unsigned char byte_of(uint64_t number, size_t i) { return (unsigned char)(number * 31 + i * 7 + i / 4096); }

static void post(void) { CALL(fi_trecv(ep, in, SIZE, NULL, FI_ADDR_UNSPEC, 0, ~0ULL, in)); }

static void send_next(int place, fi_addr_t to, int is_last)
{
    uint64_t number = next_number++;
    struct head head = {number, (uint64_t)is_last, added, unsure};
    size_t size = size_of(number);
    for (size_t i = sizeof head; i < size; i++)
        out[place][i] = byte_of(number, i);
    memcpy(out[place], &head, sizeof head);
    struct iovec part = {out[place], size};
    struct fi_msg_tagged message = {
        .msg_iov = &part, .iov_count = 1, .addr = to, .tag = number, .context = out[place]};
    /* Some complete when they are received. */
    uint64_t delivered = is_last || number % 3 == 0 ? FI_DELIVERY_COMPLETE : 0;
    sending[place] = head;
    is_sending[place] = 1;
    CALL(fi_tsendmsg(ep, &message, FI_COMPLETION | delivered));
}

static void arrived(void)
{
    struct head head;
    memcpy(&head, in, sizeof head);
    require(head.number >= expected, __LINE__, "a message twice or out of turn", (long)head.number);
    for (; expected < head.number; expected++)
        fprintf(missing, "%lu\n", expected);
    expected++;
    for (size_t i = sizeof head; i < size_of(head.number); i++)
        require(in[i] == byte_of(head.number, i), __LINE__, "a wrong byte", (long)i);
    if (head.is_last) {
        require(sum >= head.added, __LINE__, "additions are missing", (long)sum);
        require(sum <= head.added + head.unsure, __LINE__, "an addition was executed twice", (long)sum);
        last_arrived = 1;
    } else {
        post();
    }
}

/* Takes a completion, if there is one. */
static int complete(void)
{
    struct fi_cq_tagged_entry entry;
    ssize_t taken = fi_cq_read(cq, &entry, 1);
    if (taken == -FI_EAGAIN)
        return 0;
    int error = 0;
    if (taken == -FI_EAVAIL) {
        struct fi_cq_err_entry found = {0};
        CHECK(fi_cq_readerr(cq, &found, 0) == 1);
        error = found.err;
        entry.op_context = found.op_context;
        require(error == FI_ECONNABORTED, __LINE__, "an error", error);
    } else {
        require(taken == 1, __LINE__, "fi_cq_read", taken);
    }
    if (entry.op_context == in) {
        failed_receives += error != 0;
        if (error)
            post();
        else
            arrived();
        return 1;
    }
    if (entry.op_context == &sum) {
        is_adding = 0;
        *(error ? &unsure : &added) += 1;
        return 1;
    }
    for (int place = 0; place < WINDOW; place++)
        if (entry.op_context == out[place]) {
            is_sending[place] = 0;
            if (error)
                fprintf(failed, "%lu\n", sending[place].number);
            else
                last_sent |= (int)sending[place].is_last;
        }
    return 1;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    rank = argv[1];
    open_domain(FI_TAGGED | FI_ATOMIC);
    struct fid_mr *region;
    CALL(fi_endpoint(domain, info, &ep, NULL));
    enable_endpoint();
    CALL(fi_mr_reg(domain, &sum, sizeof sum, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &region, NULL));
    publish(rank);
    fi_addr_t to = find(*rank == '0' ? "1" : "0");
    failed = file("failed", "w");
    missing = file("missing", "w");
    post();
    while (!last_arrived || !last_sent) {
        int is_enough = access("enough", F_OK) == 0, is_busy = is_adding, has_done = 0;
        for (int place = 0; place < WINDOW; place++) {
            is_busy |= is_sending[place];
            if (!is_sending[place] && !is_enough) {
                send_next(place, to, 0);
                has_done = 1;
            }
        }
        if (is_enough && !is_busy && !last_sent)
            send_next(0, to, 1);
        if (!is_adding && !is_enough) {
            is_adding = 1;
            CALL(fi_atomic(ep, &one, 1, NULL, to, 0, KEY, FI_UINT64, FI_SUM, &sum));
        }
        while (complete())
            has_done = 1;
        if (expected % 50 == 0) {
            FILE *count = file("arrived", "w");
            fprintf(count, "%lu", expected);
            fclose(count);
        }
        if (!has_done)
            usleep(100);
    }
    CALL(fi_close(&ep->fid));
    FILE *receives = file("receives", "w");
    fprintf(receives, "%lu\n", failed_receives);
    CHECK(fclose(receives) == 0 && fclose(failed) == 0 && fclose(missing) == 0);
    fprintf(stderr, "%s: %lu sent, %lu arrived, %lu receives failed, %lu additions, %lu unsure\n", rank, next_number,
            expected, failed_receives, added, unsure);
    return 0;
}
