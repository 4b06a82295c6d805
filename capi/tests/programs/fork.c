/* A heap and a child that was forked off: the memory stays the parent's. The exit status is the number of failed checks. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "check.h"

static const xseg_stream stream = NULL;

static int child(xseg_heap *heap, void *block) {
  xseg_heap *own = NULL;
  void *other = NULL;
  uint64_t released = 1;
  CHECK(xseg_alloc(heap, 4096, stream, &other) == XSEG_UNAVAILABLE && other == NULL);
  CHECK(strstr(xseg_last_error(), "make a heap of this process's own") != NULL);
  CHECK(xseg_free(heap, block) == XSEG_UNAVAILABLE && xseg_trim(heap, &released) == XSEG_UNAVAILABLE);
  CHECK(xseg_record_stop(heap) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_heap_destroy(heap) == XSEG_STALE_HANDLE);
  CHECK(xseg_heap_from_env(&own) == XSEG_OK && xseg_alloc(own, 8 * MIB, stream, &other) == XSEG_OK);
  memset(other, 1, 8 * MIB);
  CHECK(xseg_free(own, other) == XSEG_OK && xseg_heap_destroy(own) == XSEG_OK);
  return wrong;
}

int main(void) {
  xseg_heap *heap = NULL;
  void *freed = NULL, *block = NULL;
  int status = -1;
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_record_start(heap, getenv("TRACE")) == XSEG_OK);
  CHECK(xseg_alloc(heap, 8 * MIB, stream, &freed) == XSEG_OK && xseg_alloc(heap, 40 * MIB, stream, &block) == XSEG_OK);
  memset(block, 7, 40 * MIB);
  fflush(stdout);
  const pid_t forked = fork();
  if (forked == 0) exit(child(heap, block));
  CHECK(forked > 0 && waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (uint64_t at = 0; at < 40 * MIB; at += 4096) CHECK(((unsigned char *)block)[at] == 7);
  CHECK(xseg_free(heap, freed) == XSEG_OK);
  /* Without a stop. */
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_record_stop(heap) == XSEG_INVALID_ARGUMENT);
  return wrong;
}
