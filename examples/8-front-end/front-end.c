/* A front end: pushes the fragments of some sources into the ring of a readout unit.
 *
 *     front-end NAME EVENTS
 *
 * NAME is readout.ring.name of the configuration. A fragment holds its source and its event as text.
 */
#define _GNU_SOURCE
#include "millstream_front_end.h"

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: front-end NAME EVENTS\n");
        return 2;
    }
    struct msfe ring;
    if (msfe_connect(&ring, argv[1], 20000) != 0) {
        fprintf(stderr, "front-end: cannot connect to %s: %s\n", argv[1], strerror(errno));
        return 1;
    }
    uint64_t events = strtoull(argv[2], NULL, 10), busy = 0;
    for (uint64_t event = 0; event < events; event++) {
        for (uint32_t source = ring.first_source; source < ring.first_source + ring.sources; source++) {
            char text[64];
            int len = snprintf(text, sizeof text, "source %u event %llu;", source, (unsigned long long)event);
            busy += (uint64_t)msfe_is_busy(&ring);
            if (msfe_push_waiting(&ring, source, event, text, (uint32_t)len) != MSFE_ACCEPTED) {
                fprintf(stderr, "front-end: event %llu of source %u was not accepted\n", (unsigned long long)event,
                        source);
                msfe_close(&ring);
                return 1;
            }
        }
    }
    printf("%llu events of %u sources pushed, busy %llu times\n", (unsigned long long)events, ring.sources,
           (unsigned long long)busy);
    msfe_close(&ring);
    return 0;
}
