/* Two processes that record to one file, on host memory. The exit status is the number of failed checks. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static const xseg_stream stream = NULL;

/* Another process that records, and may go on when it is told to. */
struct other {
  pid_t process;
  int told, tells;
};

static int records(const char *path, int told, int tells) {
  xseg_heap *heap = NULL;
  void *block = NULL;
  char go;
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_record_start(heap, path) == XSEG_OK);
  CHECK(write(tells, "r", 1) == 1 && read(told, &go, 1) == 1);
  CHECK(xseg_alloc(heap, 7 * MIB, stream, &block) == XSEG_OK && xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_record_stop(heap) == XSEG_OK && xseg_heap_destroy(heap) == XSEG_OK);
  return wrong;
}

static struct other begin(const char *path) {
  int there[2], back[2];
  char ready;
  CHECK(pipe(there) == 0 && pipe(back) == 0);
  struct other other = {fork(), there[1], back[0]};
  if (other.process == 0) {
    alarm(60);
    _exit(records(path, there[0], back[1]));
  }
  CHECK(other.process > 0 && close(there[0]) == 0 && close(back[1]) == 0 && read(other.tells, &ready, 1) == 1);
  return other;
}

static int end(struct other other) {
  int status = -1;
  CHECK(waitpid(other.process, &status, 0) == other.process && close(other.told) == 0 && close(other.tells) == 0);
  return status;
}

static int events(const char *path) {
  char line[256];
  int count = 0;
  FILE *file = fopen(path, "r");
  CHECK(file != NULL);
  while (fgets(line, sizeof line, file) != NULL) count += line[0] == 'a' || line[0] == 'f';
  fclose(file);
  return count;
}

static void is_taken(xseg_heap *heap, const char *path, int taken) {
  const xseg_status status = xseg_record_start(heap, path);
  CHECK(status == (taken ? XSEG_INVALID_ARGUMENT : XSEG_OK));
  if (taken) CHECK(strstr(xseg_last_error(), path) != NULL && strstr(xseg_last_error(), "recorded to already, by another process; name") != NULL);
  else CHECK(xseg_record_stop(heap) == XSEG_OK);
}

int main(void) {
  const char *path = getenv("TRACE");
  xseg_heap *heap = NULL;
  unlink(path);
  /* One that ends has all of its own, and leaves the file to others. */
  struct other ends = begin(path), killed, pipes = begin("/dev/null");
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK);
  is_taken(heap, path, 1);
  is_taken(heap, "/dev/null", 0);
  CHECK(write(ends.told, "g", 1) == 1 && end(ends) == 0 && events(path) == 2);
  CHECK(write(pipes.told, "g", 1) == 1 && end(pipes) == 0);
  is_taken(heap, path, 0);
  CHECK(events(path) == 0);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
  /* One that is killed leaves nothing that stands in the way. */
  killed = begin(path);
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK);
  is_taken(heap, path, 1);
  CHECK(kill(killed.process, SIGKILL) == 0 && WIFSIGNALED(end(killed)));
  is_taken(heap, path, 0);
  /* Nor does a child, which has a copy of the descriptor. */
  CHECK(xseg_record_start(heap, path) == XSEG_OK);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    pause();
    _exit(0);
  }
  CHECK(xseg_record_stop(heap) == XSEG_OK);
  is_taken(heap, path, 0);
  CHECK(child > 0 && kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
  return wrong;
}
