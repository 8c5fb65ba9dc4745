// Tests of one program: each is a function, named on the command line. Without a name, the program lists them.

#ifndef CASES_H
#define CASES_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) do { if (!(what)) { \
	printf("%s:%d: %s (errno %s)\n", __func__, __LINE__, #what, strerror(errno)); exit(1); } } while (0)

struct test { const char *name; void (*run)(void); };
#define TEST(name) { #name, name }

static int run_named(const struct test *tests, size_t tests_len, int count, char **words)
{
	for (size_t i = 0; i < tests_len; i++) {
		if (count < 2)
			puts(tests[i].name);
		else if (!strcmp(words[1], tests[i].name)) {
			tests[i].run();
			return 0;
		}
	}
	return count < 2 ? 0 : 2;
}

#endif
