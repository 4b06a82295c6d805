/* A heap and a child that was forked off: the memory stays the parent's. The exit status is the number of failed checks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static const xseg_stream stream = NULL;

static int child(xseg_heap *heap, void *block, void *of_device) {
  xseg_heap *own = NULL;
  void *other = NULL;
  uint64_t released = 1;
  CHECK(xseg_alloc(heap, 4096, stream, &other) == XSEG_UNAVAILABLE && other == NULL);
  CHECK(strstr(xseg_last_error(), "make a heap of this process's own") != NULL);
  CHECK(xseg_free(heap, block) == XSEG_UNAVAILABLE && xseg_trim(heap, &released) == XSEG_UNAVAILABLE);
  CHECK(xseg_record_stop(heap) == XSEG_UNAVAILABLE && xseg_record_start(heap, getenv("TRACE")) == XSEG_UNAVAILABLE);
  CHECK(xseg_device_block(of_device, NULL, NULL, NULL) == XSEG_UNAVAILABLE && xseg_device_free(of_device) == XSEG_OK);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_heap_destroy(heap) == XSEG_STALE_HANDLE);
  CHECK(xseg_heap_from_env(&own) == XSEG_OK && xseg_alloc(own, 8 * MIB, stream, &other) == XSEG_OK);
  memset(other, 1, 8 * MIB);
  CHECK(xseg_free(own, other) == XSEG_OK && xseg_heap_destroy(own) == XSEG_OK);
  return wrong;
}

static atomic_int ended;

static void *allocate(void *heap) {
  void *block = NULL;
  size_t count = 0;
  while (!ended) {
    CHECK(xseg_alloc(heap, 4096, stream, &block) == XSEG_OK && xseg_free(heap, block) == XSEG_OK);
    CHECK(xseg_tag_push("parent") == XSEG_OK && xseg_tags(0, NULL, 0, &count) == XSEG_OK && xseg_tag_pop() == XSEG_OK);
    CHECK(xseg_device_alloc(0, 3 * MIB, stream, &block) == XSEG_OK && xseg_device_free(block) == XSEG_OK);
  }
  return NULL;
}

/* Threads that a child does not have have no lock of the handles there. */
static void beside_threads(void) {
  xseg_heap *heap = NULL, *own = NULL;
  void *block = NULL, *of_device = NULL;
  size_t size = 0;
  pthread_t threads[3];
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &heap) == XSEG_OK);
  CHECK(xseg_record_start(heap, "/dev/null") == XSEG_OK);
  CHECK(xseg_device_alloc(0, MIB, stream, &of_device) == XSEG_OK);
  CHECK(xseg_torch_base_alloc(of_device, &size) == of_device && size == MIB);
  for (int at = 0; at < 3; at++) CHECK(pthread_create(&threads[at], NULL, allocate, heap) == 0);
  for (int round = 0; round < 200 && wrong == 0; round++) {
    int status = -1;
    const pid_t forked = fork();
    if (forked == 0) {
      alarm(10);
      int done = xseg_heap_from_conf("backend:host,limit:64MiB", &own) == XSEG_OK;
      for (uint64_t bytes = 512; bytes <= MIB; bytes *= 2)
        done = done && xseg_alloc(own, bytes, stream, &block) == XSEG_OK && xseg_free(own, block) == XSEG_OK;
      done = done && xseg_tag_push("child") == XSEG_OK && xseg_tag_current() == NULL && xseg_tag_pop() == XSEG_OK;
      done = done && xseg_tags(0, NULL, 0, &size) == XSEG_UNAVAILABLE;
      done = done && xseg_torch_base_alloc(of_device, &size) == of_device && size == 0;
      done = done && xseg_heap_destroy(own) == XSEG_OK && xseg_record_stop(heap) == XSEG_UNAVAILABLE;
      _exit(done && xseg_heap_destroy(heap) == XSEG_OK ? 0 : 1);
    }
    CHECK(forked > 0 && waitpid(forked, &status, 0) == forked && status == 0);
  }
  ended = 1;
  for (int at = 0; at < 3; at++) CHECK(pthread_join(threads[at], NULL) == 0);
  CHECK(xseg_device_free(of_device) == XSEG_OK && xseg_heap_destroy(heap) == XSEG_OK);
}

int main(void) {
  xseg_heap *heap = NULL;
  void *freed = NULL, *block = NULL, *of_device = NULL;
  int status = -1;
  beside_threads();
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_record_start(heap, getenv("TRACE")) == XSEG_OK);
  CHECK(xseg_alloc(heap, 8 * MIB, stream, &freed) == XSEG_OK && xseg_alloc(heap, 40 * MIB, stream, &block) == XSEG_OK);
  CHECK(xseg_device_alloc(0, 4096, stream, &of_device) == XSEG_OK);
  memset(block, 7, 40 * MIB);
  fflush(stdout);
  const pid_t forked = fork();
  if (forked == 0) exit(child(heap, block, of_device));
  CHECK(forked > 0 && waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (uint64_t at = 0; at < 40 * MIB; at += 4096) CHECK(((unsigned char *)block)[at] == 7);
  CHECK(xseg_free(heap, freed) == XSEG_OK && xseg_device_free(of_device) == XSEG_OK);
  /* Without a stop. */
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_record_stop(heap) == XSEG_STALE_HANDLE);
  return wrong;
}
