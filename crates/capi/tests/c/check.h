/* Checks that print their line and end the program. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(true_thing)                                                                            \
	do {                                                                                         \
		if (!(true_thing)) {                                                                 \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #true_thing,   \
				errno);                                                              \
			exit(1);                                                                     \
		}                                                                                    \
	} while (0)
