/* What the programs of these tests share: each failed check is printed, and `wrong` is their number. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
#include <xseg.h>

static int wrong;
#define CHECK(what)                                                                                      \
  do {                                                                                                   \
    if (!(what)) {                                                                                       \
      printf("%d: line %d: %s; last error: %s\n", (int)getpid(), __LINE__, #what, xseg_last_error());     \
      fflush(stdout);                                                                                    \
      wrong++;                                                                                           \
    }                                                                                                    \
  } while (0)

#define MIB ((uint64_t)1 << 20)
