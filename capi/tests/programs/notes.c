/* Tags and recordings, on host memory. Each failed check is printed; the exit status is their number. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xseg.h>

#include "check.h"

static const xseg_stream stream = NULL;

static xseg_tag_figures figures(int device, const char *name) {
  xseg_tag_figures found[8], none;
  size_t count = 0;
  memset(&none, 0, sizeof none);
  CHECK(xseg_tags(device, found, 8, &count) == XSEG_OK && count <= 8);
  for (size_t at = 0; at < count; at++) {
    if (strcmp(found[at].name, name) == 0) return found[at];
  }
  return none;
}

static void *untagged(void *block) {
  /* Tags are a thread's own; a block keeps its own whoever frees it. */
  CHECK(xseg_tag_current() == NULL && xseg_tag_pop() == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_free(block) == XSEG_OK);
  return NULL;
}

static void tags(void) {
  void *before = NULL, *outer = NULL, *inner = NULL, *other = NULL;
  size_t count = 9;
  pthread_t thread;
  CHECK(xseg_tags(0, NULL, 0, &count) == XSEG_OK && count == 0);
  CHECK(xseg_tags(-1, NULL, 0, &count) == XSEG_INVALID_ARGUMENT && xseg_tags(0, NULL, 1, &count) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_tag_push(NULL) == XSEG_INVALID_ARGUMENT && xseg_tag_current() == NULL);
  CHECK(xseg_device_alloc(0, 1000, stream, &before) == XSEG_OK);
  CHECK(xseg_tag_push("weights") == XSEG_OK && xseg_device_alloc(0, 1000, stream, &outer) == XSEG_OK);
  CHECK(xseg_tag_push("activations") == XSEG_OK && strcmp(xseg_tag_current(), "activations") == 0);
  CHECK(xseg_device_alloc(0, 3 * MIB, stream, &inner) == XSEG_OK);
  CHECK(xseg_device_alloc(1, MIB, stream, &other) == XSEG_OK);
  CHECK(xseg_tag_pop() == XSEG_OK && strcmp(xseg_tag_current(), "weights") == 0);
  CHECK(xseg_tag_pop() == XSEG_OK && xseg_tag_pop() == XSEG_INVALID_ARGUMENT);
  CHECK(figures(0, "weights").allocated == 1024 && figures(0, "weights").live_blocks == 1);
  CHECK(figures(0, "activations").allocated == 3 * MIB && figures(1, "activations").allocated == MIB);
  CHECK(xseg_device_free(before) == XSEG_OK && figures(0, "weights").live_blocks == 1);
  CHECK(pthread_create(&thread, NULL, untagged, inner) == 0 && pthread_join(thread, NULL) == 0);
  CHECK(figures(0, "activations").allocated == 0 && figures(0, "activations").peak_allocated == 3 * MIB);
  CHECK(figures(0, "activations").allocs == 1 && figures(0, "activations").live_blocks == 0);
  CHECK(xseg_tags_reset_peaks(0) == XSEG_OK && figures(0, "activations").peak_allocated == 0);
  CHECK(figures(0, "weights").peak_allocated == 1024 && figures(1, "activations").peak_allocated == MIB);
  CHECK(xseg_device_free(inner) == XSEG_INVALID_POINTER && figures(0, "activations").live_blocks == 0);
  CHECK(xseg_device_free(outer) == XSEG_OK && xseg_device_free(other) == XSEG_OK);
}

struct piped {
  xseg_heap *heap;
  const char *path;
};

static void *record_to_pipe(void *given) {
  const struct piped *piped = given;
  CHECK(xseg_record_start(piped->heap, piped->path) == XSEG_OK);
  return NULL;
}

/* Another heap's recording goes to a pipe that nobody reads yet: that holds up nobody else. */
static void beside_a_pipe(xseg_heap *heap, xseg_heap *second, const char *path) {
  char name[4096], line[64];
  void *block = NULL;
  pthread_t thread;
  struct piped piped = {second, name};
  snprintf(name, sizeof name, "%s.pipe", path);
  unlink(name);
  CHECK(mkfifo(name, 0600) == 0 && pthread_create(&thread, NULL, record_to_pipe, &piped) == 0);
  alarm(60);
  for (int round = 0; round < 200; round++) {
    CHECK(xseg_alloc(heap, MIB, stream, &block) == XSEG_OK && xseg_free(heap, block) == XSEG_OK);
    usleep(100);
  }
  FILE *reader = fopen(name, "r");
  CHECK(reader != NULL && pthread_join(thread, NULL) == 0 && xseg_record_stop(second) == XSEG_OK);
  CHECK(fgets(line, sizeof line, reader) != NULL && strncmp(line, "# recorded by xseg ", 19) == 0);
  alarm(0);
  fclose(reader);
  unlink(name);
}

/* What ends the writing of a recording ends nothing else: `why` it failed is said where it ends. */
static void unwritten(xseg_heap *heap, const char *name, const char *why) {
  void *block = NULL;
  /* More than is kept to be written together. */
  for (int round = 0; round < 20000; round++) {
    CHECK(xseg_alloc(heap, 4096, stream, &block) == XSEG_OK && xseg_free(heap, block) == XSEG_OK);
  }
  CHECK(xseg_record_stop(heap) == XSEG_IO && strstr(xseg_last_error(), name) != NULL && strstr(xseg_last_error(), why) != NULL);
}

static int caught;
static void catch (int signal) { caught += signal; }

static void no_signals(xseg_heap *heap, const char *path) {
  char name[4096];
  struct piped piped = {heap, name};
  pthread_t thread;
  sigset_t set, pending;
  struct rlimit limit, small;
  snprintf(name, sizeof name, "%s.unread", path);
  unlink(name);
  /* Signals do what they do without anyone's word, which is the program's end; then they wait for the program, which keeps its own. */
  for (int waiting = 0; waiting < 2; waiting++) {
    sigemptyset(&set);
    if (waiting) {
      sigaddset(&set, SIGPIPE);
      CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0 && raise(SIGPIPE) == 0);
    }
    CHECK(mkfifo(name, 0600) == 0 && pthread_create(&thread, NULL, record_to_pipe, &piped) == 0);
    const int reader = open(name, O_RDONLY);
    CHECK(reader >= 0 && pthread_join(thread, NULL) == 0 && close(reader) == 0 && unlink(name) == 0);
    unwritten(heap, name, "Broken pipe");
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == waiting);
  }
  /* The program's own is still there. */
  CHECK(signal(SIGPIPE, catch) == SIG_DFL && pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0 && caught == SIGPIPE);
  CHECK(signal(SIGPIPE, SIG_DFL) == catch);
  /* A file that may not be so long. */
  CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  small = limit;
  small.rlim_cur = 1000;
  CHECK(xseg_record_start(heap, name) == XSEG_OK && setrlimit(RLIMIT_FSIZE, &small) == 0);
  unwritten(heap, name, "File too large");
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0 && unlink(name) == 0);
}

static void *record_a_dead_heap(void *given) {
  const struct piped *piped = given;
  CHECK(xseg_record_start(piped->heap, piped->path) == XSEG_STALE_HANDLE);
  return NULL;
}

static _Atomic(xseg_heap *) shown;
static _Atomic int ended;

static void *record_what_is_shown(void *path) {
  while (!ended) {
    const xseg_status status = xseg_record_start(shown, path);
    CHECK(status == XSEG_OK || status == XSEG_STALE_HANDLE || status == XSEG_INVALID_ARGUMENT);
  }
  return NULL;
}

/* A heap that is destroyed while its recording begins leaves none, nor an open file. */
static void destroyed_meanwhile(const char *path) {
  char name[4096];
  xseg_heap *heap = NULL;
  pthread_t thread;
  struct piped piped = {NULL, name};
  snprintf(name, sizeof name, "%s.late", path);
  unlink(name);
  /* The recording waits for a reader of its pipe, and has found its heap by then. */
  CHECK(xseg_heap_from_env(&piped.heap) == XSEG_OK && mkfifo(name, 0600) == 0);
  CHECK(pthread_create(&thread, NULL, record_a_dead_heap, &piped) == 0 && usleep(50000) == 0);
  CHECK(xseg_heap_destroy(piped.heap) == XSEG_OK);
  const int reader = open(name, O_RDONLY);
  CHECK(reader >= 0 && pthread_join(thread, NULL) == 0 && close(reader) == 0 && unlink(name) == 0);
  /* Where the two calls meet is another place each time. A recording that was left would have the file. */
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK);
  shown = heap;
  CHECK(pthread_create(&thread, NULL, record_what_is_shown, name) == 0);
  for (int round = 0; round < 300; round++) {
    xseg_heap *next = NULL;
    void *block = NULL;
    CHECK(xseg_heap_from_env(&next) == XSEG_OK && xseg_alloc(next, 4096, stream, &block) == XSEG_OK);
    shown = next;
    for (volatile int wait = 0; wait < round * 37 % 4000; wait++) {
    }
    CHECK(xseg_heap_destroy(heap) == XSEG_OK);
    heap = next;
  }
  ended = 1;
  CHECK(pthread_join(thread, NULL) == 0 && xseg_heap_destroy(heap) == XSEG_OK);
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_record_start(heap, name) == XSEG_OK);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && unlink(name) == 0);
}

static void recordings(const char *path) {
  xseg_heap *heap = NULL, *second = NULL;
  void *early = NULL, *block = NULL, *elsewhere = NULL;
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_heap_from_env(&second) == XSEG_OK);
  CHECK(xseg_record_stop(heap) == XSEG_INVALID_ARGUMENT && xseg_record_start(heap, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_record_start(heap, "/nowhere/at.trace") == XSEG_IO && strstr(xseg_last_error(), "/nowhere/at.trace") != NULL);
  CHECK(xseg_alloc(heap, 7 * MIB, stream, &early) == XSEG_OK);
  CHECK(xseg_record_start(heap, path) == XSEG_OK && xseg_record_start(heap, path) == XSEG_INVALID_ARGUMENT);
  /* One file takes one recording. */
  CHECK(xseg_record_start(second, path) == XSEG_INVALID_ARGUMENT && strstr(xseg_last_error(), path) != NULL);
  CHECK(xseg_alloc(second, MIB, stream, &elsewhere) == XSEG_OK);
  CHECK(xseg_alloc(heap, 5000, (xseg_stream)7, &block) == XSEG_OK);
  CHECK(xseg_record_use(heap, block, (xseg_stream)9) == XSEG_OK);
  CHECK(xseg_free(heap, early) == XSEG_OK && xseg_free(heap, early) == XSEG_INVALID_POINTER);
  CHECK(xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_alloc_contiguous(heap, 2 * MIB, stream, &block) == XSEG_OK);
  /* A child that was forked off writes nothing of it; the trace is read by the caller, in which a line twice would be an error. */
  int status = 1;
  const pid_t child = fork();
  if (child == 0) _exit(xseg_record_stop(heap) == XSEG_UNAVAILABLE && strstr(xseg_last_error(), "forked") != NULL ? 0 : 1);
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  CHECK(xseg_record_stop(heap) == XSEG_OK && xseg_record_stop(heap) == XSEG_INVALID_ARGUMENT);
  char other[4096];
  snprintf(other, sizeof other, "%s.other", path);
  CHECK(xseg_record_start(heap, other) == XSEG_OK);
  beside_a_pipe(heap, second, path);
  no_signals(second, path);
  CHECK(xseg_record_stop(heap) == XSEG_OK && unlink(other) == 0);
  CHECK(xseg_free(heap, block) == XSEG_OK && xseg_free(second, elsewhere) == XSEG_OK);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_heap_destroy(second) == XSEG_OK);
}

int main(void) {
  tags();
  recordings(getenv("TRACE"));
  destroyed_meanwhile(getenv("TRACE"));
  return wrong;
}
