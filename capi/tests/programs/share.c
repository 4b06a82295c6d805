/* Memory of one process used by another, on host memory. Each failed check is printed; the exit status is their number. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xseg.h>

#include "check.h"

#define BYTES (21 * MIB + 1000)
static const xseg_stream stream = NULL;
static const char *const small_handles = "backend:host,limit:256MiB,handle_max:2MiB,growth:exact";

static uint64_t exported(xseg_heap *heap) {
  xseg_statistics statistics = {.size = sizeof statistics};
  CHECK(xseg_stats(heap, &statistics) == XSEG_OK);
  return statistics.exported;
}

static int descriptors(void) {
  int open = 0;
  for (int fd = 0; fd < 1024; fd++) open += fcntl(fd, F_GETFD) >= 0;
  return open;
}

/* The other process, forked before this one has a heap: imports what comes over `socket` until that ends. */
static int importer(int socket) {
  xseg_heap *heap = NULL;
  char word;
  CHECK(xseg_heap_from_conf("backend:host", &heap) == XSEG_OK);
  for (int round = 0; round < 3; round++) {
    unsigned char *memory = NULL;
    uint64_t bytes = 0;
    CHECK(xseg_import_receive(heap, socket, (void **)&memory, &bytes) == XSEG_OK && bytes == BYTES);
    if (wrong) return wrong;
    CHECK(memory[0] == 'a' + round && memory[bytes - 1] == 'A' + round);
    memory[0] = 'x';
    memory[bytes - 1] = 'X';
    CHECK(write(socket, "r", 1) == 1 && read(socket, &word, 1) == 1);
    if (round == 0) CHECK(xseg_import_close(heap, memory) == XSEG_OK);
    if (round == 1) CHECK(xseg_import_end(heap, memory) == XSEG_OK && xseg_import_end(heap, memory) == XSEG_SHARE);
    /* The last one is left to the end of the heap. */
    if (round == 2) CHECK(xseg_heap_destroy(heap) == XSEG_OK);
    CHECK(write(socket, "e", 1) == 1);
  }
  return wrong;
}

static void two_processes(void) {
  int sockets[2], status = -1;
  char word = 0;
  pid_t other;
  xseg_heap *heap = NULL;
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  other = fork();
  if (other == 0) {
    close(sockets[0]);
    _exit(importer(sockets[1]));
  }
  close(sockets[1]);
  CHECK(xseg_heap_from_conf(small_handles, &heap) == XSEG_OK);
  for (int round = 0; round < 3; round++) {
    unsigned char *block = NULL;
    CHECK(xseg_alloc(heap, BYTES, stream, (void **)&block) == XSEG_OK);
    block[0] = (unsigned char)('a' + round);
    block[BYTES - 1] = (unsigned char)('A' + round);
    CHECK(xseg_export_send(heap, block, sockets[0]) == XSEG_OK && exported(heap) >= BYTES);
    CHECK(read(sockets[0], &word, 1) == 1 && word == 'r');
    CHECK(block[0] == 'x' && block[BYTES - 1] == 'X');
    CHECK(xseg_free(heap, block) == XSEG_OK && xseg_tick(heap) == XSEG_OK && exported(heap) >= BYTES);
    CHECK(write(sockets[0], "e", 1) == 1 && read(sockets[0], &word, 1) == 1 && word == 'e');
    CHECK(xseg_tick(heap) == XSEG_OK && exported(heap) == 0);
  }
  CHECK(waitpid(other, &status, 0) == other && status == 0);
  close(sockets[0]);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
}

static void one_process(void) {
  xseg_heap *here = NULL, *there = NULL;
  unsigned char *block = NULL, *memory = NULL;
  uint64_t bytes = 0;
  int fd = -1, open, sockets[2];
  size_t count = 0;
  xseg_exported_handle handles[16];
  CHECK(xseg_heap_from_conf(small_handles, &here) == XSEG_OK);
  CHECK(xseg_heap_from_conf("backend:host", &there) == XSEG_OK);
  CHECK(xseg_alloc(here, BYTES, stream, (void **)&block) == XSEG_OK);
  memset(block, 7, BYTES);
  open = descriptors();

  CHECK(xseg_export(here, block, NULL) == XSEG_INVALID_ARGUMENT && xseg_export(here, NULL, &fd) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_export(here, block + 512, &fd) == XSEG_INVALID_POINTER && fd == -1);
  CHECK(xseg_export(here, block, &fd) == XSEG_OK && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
  CHECK(xseg_import(there, fd, (void **)&memory, NULL) == XSEG_OK && memory != block);
  CHECK(memory[0] == 7 && memory[BYTES - 1] == 7);
  memory[5 * MIB] = 9;
  CHECK(block[5 * MIB] == 9);
  CHECK(xseg_free(there, memory) == XSEG_INVALID_POINTER);
  CHECK(xseg_import_close(there, memory) == XSEG_OK && xseg_import_close(there, memory) == XSEG_SHARE);
  CHECK(strstr(xseg_last_error(), "no open import") != NULL);
  CHECK(strcmp(xseg_status_name(XSEG_SHARE), "XSEG_SHARE") == 0);

  /* An error takes the descriptor too. */
  CHECK(xseg_export(here, block, &fd) == XSEG_OK && xseg_import(there, fd, NULL, &bytes) == XSEG_INVALID_ARGUMENT);
  CHECK(fcntl(fd, F_GETFD) < 0);
  CHECK(xseg_import(there, -1, (void **)&memory, &bytes) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_import(there, 1000, (void **)&memory, &bytes) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_export_send(here, block, -1) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_import_receive(there, 1000, (void **)&memory, &bytes) == XSEG_INVALID_ARGUMENT);
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && write(sockets[0], "something", 9) == 9);
  CHECK(xseg_import_receive(there, sockets[1], (void **)&memory, &bytes) == XSEG_SHARE);
  CHECK(strstr(xseg_last_error(), "something else than an export came") != NULL);
  close(sockets[0]);
  close(sockets[1]);

  /* Bare descriptors, which the system maps: the first whole piece of the block. */
  CHECK(xseg_export_handles(here, block, NULL, 1, &count) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_export_handles(here, block, NULL, 0, &count) == XSEG_OK && count == 11);
  CHECK(xseg_export_handles(here, block, handles, 16, &count) == XSEG_OK && count == 11);
  for (size_t i = 0; i < count; i++) {
    unsigned char *part = mmap(NULL, handles[i].bytes, PROT_READ, MAP_SHARED, handles[i].fd, (off_t)handles[i].offset);
    CHECK(part != MAP_FAILED && part[0] == block[bytes] && handles[i].handle_bytes == 2 * MIB);
    bytes += handles[i].bytes;
    CHECK(munmap(part, handles[i].bytes) == 0 && close(handles[i].fd) == 0);
  }
  CHECK(bytes == (BYTES + 511) / 512 * 512);

  CHECK(xseg_tick(here) == XSEG_OK && exported(here) == 0 && descriptors() == open);
  for (int round = 0; round < 1000; round++) {
    CHECK(xseg_export(here, block, &fd) == XSEG_OK && xseg_import(there, fd, (void **)&memory, &bytes) == XSEG_OK);
    CHECK(xseg_import_close(there, memory) == XSEG_OK);
    if (wrong) break;
  }
  CHECK(xseg_tick(here) == XSEG_OK && exported(here) == 0 && descriptors() == open);
  CHECK(xseg_heap_destroy(there) == XSEG_OK && xseg_heap_destroy(here) == XSEG_OK);
}

int main(void) {
  two_processes();
  one_process();
  return wrong;
}
