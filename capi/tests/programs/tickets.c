/* Blocks of a device's heap that other processes map by tickets, on host memory. Each failed check is printed; the exit status is
 * their number. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <xseg.h>

#include "check.h"

#define BYTES (41 * MIB + 1000)
typedef unsigned char byte;

/* What one process says to the other: a word, and a ticket. */
typedef struct message {
  char word;
  char ticket[XSEG_TICKET_BYTES];
} message;

static void say(int socket, char word, const char *ticket) {
  message said = {.word = word};
  if (ticket != NULL) strcpy(said.ticket, ticket);
  CHECK(write(socket, &said, sizeof said) == sizeof said);
}

static message hear(int socket) {
  message said = {.word = 0};
  (void)!read(socket, &said, sizeof said);
  return said;
}

static int descriptors(void) {
  int open = 0;
  for (int fd = 0; fd < 1024; fd++) open += fcntl(fd, F_GETFD) >= 0;
  return open;
}

static void nap(void) {
  struct timespec millisecond = {0, 1000000};
  nanosleep(&millisecond, NULL);
}

static xseg_statistics figures(void) {
  xseg_statistics statistics = {.size = sizeof statistics};
  xseg_heap *heap = NULL;
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK && xseg_stats(heap, &statistics) == XSEG_OK);
  return statistics;
}

/* Waits until no more descriptors are open than `most`: threads of the library close theirs a little later. */
static void few_descriptors(int most) {
  for (int turn = 0; turn < 20000 && descriptors() > most; turn++) nap();
  CHECK(descriptors() <= most);
}

/* Waits until nothing of this process's is used elsewhere. */
static void all_back(void) {
  xseg_heap *heap = NULL;
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK);
  for (int turn = 0; turn < 20000; turn++) {
    CHECK(xseg_tick(heap) == XSEG_OK);
    if (figures().exported == 0) return;
    nap();
  }
  CHECK(!"an import does not end");
}

/* Waits, without a call that does deferred work, until nothing of other processes is mapped here: the library's thread sees to it. */
static void all_gone(void) {
  for (int turn = 0; turn < 20000 && figures().imported != 0; turn++) nap();
  CHECK(figures().imported == 0);
}

static byte *make(byte first, char *ticket) {
  byte *block = NULL;
  CHECK(xseg_device_alloc(0, BYTES, NULL, (void **)&block) == XSEG_OK);
  block[0] = first;
  block[BYTES - 1] = (byte)(first + 1);
  CHECK(xseg_device_ticket(block, ticket, XSEG_TICKET_BYTES) == XSEG_OK && strlen(ticket) < XSEG_TICKET_BYTES);
  return block;
}

/* Opens what comes, checks it, and closes it: 'o' opens, 'c' closes the last one, 'f' expects a refusal, 'q' ends. */
static int importer(int socket) {
  byte *memory = NULL;
  int rounds = 0, open = 0;
  for (message said = hear(socket); said.word != 'q'; said = hear(socket)) {
    uint64_t bytes = 0;
    if (said.word == 'o') {
      CHECK(xseg_device_open(0, said.ticket, (void **)&memory, &bytes) == XSEG_OK && bytes == BYTES);
      if (wrong) return wrong;
      CHECK(memory[BYTES - 1] == (byte)(memory[0] + 1));
      memory[5 * MIB] = memory[0];
      /* After the first rounds nothing is added. */
      if (++rounds == 3) open = descriptors();
      if (rounds > 3) few_descriptors(open + 1);
    } else if (said.word == 'c') {
      CHECK(xseg_device_close(memory) == XSEG_OK);
    } else if (said.word == 'f') {
      CHECK(xseg_device_open(0, said.ticket, (void **)&memory, &bytes) == XSEG_SHARE);
      CHECK(strstr(xseg_last_error(), "the block was freed") != NULL);
    } else {
      CHECK(!"the other process is gone");
      return wrong;
    }
    say(socket, 'd', NULL);
  }
  all_gone();
  return wrong;
}

/* A process that is forked off before this one has a heap; `socket` is for talking to it. */
static pid_t other_process(int (*role)(int), int *socket) {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  pid_t other = fork();
  if (other == 0) {
    close(sockets[0]);
    _exit(role(sockets[1]));
  }
  close(sockets[1]);
  *socket = sockets[0];
  return other;
}

static void ends(pid_t other) {
  int status = -1;
  CHECK(waitpid(other, &status, 0) == other && status == 0);
}

static void do_as(int socket, char word, const char *ticket) {
  say(socket, word, ticket);
  CHECK(hear(socket).word == 'd');
}

static int both_ends_in_either_order(int unused) {
  char ticket[XSEG_TICKET_BYTES], again[XSEG_TICKET_BYTES], second[XSEG_TICKET_BYTES];
  byte *block, *next = NULL;
  int socket, open = 0;
  pid_t other = other_process(&importer, &socket);
  (void)unused;
  for (int round = 0; round < 200; round++) {
    block = make((byte)round, ticket);
    CHECK(xseg_device_ticket(block, again, sizeof again) == XSEG_OK && strcmp(ticket, again) == 0);
    do_as(socket, 'o', ticket);
    CHECK(block[5 * MIB] == (byte)round && figures().exported >= BYTES);
    if (round % 2 == 0) {
      /* Freed here first: nobody gets its memory, and its ticket has ended. */
      CHECK(xseg_device_free(block) == XSEG_OK && figures().pending >= BYTES);
      CHECK(xseg_device_alloc(0, BYTES, NULL, (void **)&next) == XSEG_OK && next != block);
      memset(next, 0xee, BYTES);
      do_as(socket, 'c', NULL);
      do_as(socket, 'f', ticket);
      all_back();
      CHECK(xseg_device_free(next) == XSEG_OK);
    } else {
      do_as(socket, 'c', NULL);
      all_back();
      CHECK(block[0] == (byte)round && xseg_device_free(block) == XSEG_OK && xseg_device_free(block) != XSEG_OK);
    }
    CHECK(figures().pending == 0 && figures().pinned == 0);
    /* The same place again, and another ticket. */
    block = make((byte)round, second);
    CHECK(strcmp(ticket, second) != 0 && xseg_device_free(block) == XSEG_OK);
    if (round == 2) open = descriptors();
    if (round > 2) few_descriptors(open);
    if (wrong) break;
  }
  say(socket, 'q', NULL);
  ends(other);
  CHECK(figures().reserved <= 3 * BYTES);
  return wrong;
}

static int exporter(int socket) {
  char ticket[XSEG_TICKET_BYTES];
  make('e', ticket);
  /* A child that outlives its parent must not be taken for it. */
  pid_t child = fork();
  if (child == 0) {
    hear(socket);
    _exit(0);
  }
  say(socket, 't', ticket);
  sleep(60);
  return 1;
}

static int exporter_without_descriptors(int socket) {
  char ticket[XSEG_TICKET_BYTES];
  int taken[64], count = 0;
  struct rlimit few = {48, 48};
  make('l', ticket);
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  while (count < 64 && (taken[count] = dup(socket)) >= 0) count++;
  CHECK(count > 0 && count < 64);
  say(socket, 't', ticket);
  CHECK(hear(socket).word == 'f');
  while (count > 0) close(taken[--count]);
  say(socket, 'd', NULL);
  CHECK(hear(socket).word == 'q');
  return wrong;
}

static int an_exporter_without_descriptors_says_so(int unused) {
  int socket;
  pid_t other = other_process(&exporter_without_descriptors, &socket);
  message said = hear(socket);
  byte *memory = NULL;
  (void)unused;
  CHECK(said.word == 't');
  for (int turn = 0; turn < 3; turn++) {
    CHECK(xseg_device_open(0, said.ticket, (void **)&memory, NULL) == XSEG_SHARE);
    CHECK(strstr(xseg_last_error(), "refused it") != NULL && strstr(xseg_last_error(), "ulimit -n") != NULL);
  }
  do_as(socket, 'f', NULL);
  CHECK(xseg_device_open(0, said.ticket, (void **)&memory, NULL) == XSEG_OK && memory[0] == 'l');
  CHECK(xseg_device_close(memory) == XSEG_OK);
  say(socket, 'q', NULL);
  ends(other);
  return wrong;
}

typedef struct opening {
  const char *ticket;
  byte *memory;
} opening;

static void *open_it(void *argument) {
  opening *one = argument;
  CHECK(xseg_device_open(0, one->ticket, (void **)&one->memory, NULL) == XSEG_OK);
  return NULL;
}

static int an_import_is_made_once_and_outlives_its_exporter(int unused) {
  int socket, status, open;
  pid_t other = other_process(&exporter, &socket);
  message said = hear(socket);
  pthread_t threads[8];
  opening opened[8];
  byte *memory = NULL;
  (void)unused;
  CHECK(said.word == 't');
  for (int i = 0; i < 8; i++) {
    opened[i] = (opening){said.ticket, NULL};
    CHECK(pthread_create(&threads[i], NULL, &open_it, &opened[i]) == 0);
  }
  for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0 && opened[i].memory == opened[0].memory);
  if (wrong) return wrong;
  CHECK(figures().imported == (BYTES + 511) / 512 * 512);
  open = descriptors();
  CHECK(kill(other, SIGKILL) == 0 && waitpid(other, &status, 0) == other);
  for (int i = 0; i < 8; i++) {
    CHECK(opened[i].memory[0] == 'e' && opened[i].memory[BYTES - 1] == 'f');
    CHECK(xseg_device_close(opened[i].memory) == XSEG_OK);
  }
  CHECK(xseg_device_close(opened[0].memory) == XSEG_SHARE && strstr(xseg_last_error(), "more often than opened") != NULL);
  all_gone();
  few_descriptors(open - 1);
  time_t began = time(NULL);
  CHECK(xseg_device_open(0, said.ticket, (void **)&memory, NULL) == XSEG_SHARE);
  CHECK(strstr(xseg_last_error(), "has ended") != NULL && time(NULL) - began < 5);
  close(socket);
  return wrong;
}

static int connected(const char *ticket) {
  char name[XSEG_TICKET_BYTES];
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int stream = socket(AF_UNIX, SOCK_STREAM, 0);
  CHECK(sscanf(ticket, "xseg-ticket 1 %*u %s", name) == 1);
  strcpy(address.sun_path + 1, name);
  socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
  CHECK(connect(stream, (struct sockaddr *)&address, length) == 0);
  return stream;
}

static int what_is_no_ticket_is_refused(int unused) {
  char ticket[XSEG_TICKET_BYTES], forged[XSEG_TICKET_BYTES], text[200];
  byte *memory = NULL, *block = make('r', ticket);
  int open = descriptors(), stream;
  const char *const none[] = {"", "\001\001\177", "xseg-ticket", "xseg-ticket 1", "xseg-ticket 1 7 other 0123456789abcdef0123456789abcdef",
                              "xseg-ticket 1 7 xseg-a 0123", "xseg-ticket 1 7 xseg-a +123456789abcdef0123456789abcdef0 more"};
  (void)unused;
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    CHECK(xseg_device_open(0, none[i], (void **)&memory, NULL) == XSEG_SHARE);
    CHECK(strstr(xseg_last_error(), "no ticket of xseg") != NULL && strstr(xseg_last_error(), "xseg.install()") != NULL);
  }
  CHECK(xseg_device_open(0, "xseg-ticket 2 7 xseg-a x", (void **)&memory, NULL) == XSEG_SHARE);
  CHECK(strstr(xseg_last_error(), "another version") != NULL);
  strcpy(forged, ticket);
  forged[strlen(forged) - 1] = forged[strlen(forged) - 1] == '0' ? '1' : '0';
  CHECK(xseg_device_open(0, forged, (void **)&memory, NULL) == XSEG_SHARE && strstr(xseg_last_error(), "freed") != NULL);
  CHECK(xseg_device_open(0, NULL, (void **)&memory, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_open(0, ticket, NULL, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_open(-1, ticket, (void **)&memory, NULL) == XSEG_INVALID_ARGUMENT && memory == NULL);
  CHECK(xseg_device_ticket(block, NULL, XSEG_TICKET_BYTES) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_ticket(block, text, 10) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_ticket(block + 512, text, sizeof text) == XSEG_SHARE && strstr(xseg_last_error(), "parts of a block") != NULL);
  CHECK(xseg_device_close(block) == XSEG_SHARE);
  /* Who says nothing, something else, or too little, gets nothing and stops nobody for long. */
  int silent = connected(ticket);
  stream = connected(ticket);
  CHECK(write(stream, "something else and more", 24) == 24 && read(stream, text, sizeof text) > 1 && text[0] == 2);
  close(stream);
  stream = connected(ticket);
  CHECK(write(stream, "few", 3) == 3 && shutdown(stream, SHUT_WR) == 0 && read(stream, text, sizeof text) <= 0);
  close(stream);
  CHECK(read(silent, text, sizeof text) <= 0);
  close(silent);
  /* A refused free leaves the ticket as it was; this process may open it too. */
  xseg_heap *another = NULL;
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &another) == XSEG_OK);
  CHECK(xseg_free(another, block) == XSEG_INVALID_POINTER && xseg_heap_destroy(another) == XSEG_OK);
  CHECK(xseg_device_open(0, ticket, (void **)&memory, NULL) == XSEG_OK && memory != block && memory[0] == 'r');
  CHECK(xseg_device_close(memory) == XSEG_OK);
  all_back();
  all_gone();
  few_descriptors(open);
  /* Another function that frees ends it too. */
  xseg_heap *heap = NULL;
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK && xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_device_open(0, ticket, (void **)&memory, NULL) == XSEG_SHARE && strstr(xseg_last_error(), "freed") != NULL);
  return wrong;
}

/* What a capture keeps is given back after it, though nobody asks the heap for anything more, also where page tables may be edited
 * on a quiet device alone. */
static int an_import_that_is_closed_during_a_capture(int unused) {
  char ticket[XSEG_TICKET_BYTES];
  xseg_heap *heap = NULL;
  xseg_pool pool = {0, 6};
  byte *memory = NULL;
  (void)unused;
  CHECK(setenv("XSEG_CONF", "backend:host,limit:256MiB,remap:quiesce", 1) == 0);
  make('c', ticket);
  CHECK(xseg_device_open(0, ticket, (void **)&memory, NULL) == XSEG_OK && memory[0] == 'c');
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK && xseg_begin_capture(heap, pool, NULL, NULL) == XSEG_OK);
  CHECK(xseg_device_close(memory) == XSEG_OK);
  for (int turn = 0; turn < 100; turn++) nap();
  CHECK(figures().imported >= BYTES);
  CHECK(xseg_end_capture(heap, pool) == XSEG_OK && xseg_release_capture(heap, pool) == XSEG_OK);
  all_gone();
  all_back();
  return wrong;
}

static void in_a_process(int (*test)(int)) {
  int status = -1;
  pid_t other = fork();
  if (other == 0) _exit(test(0));
  CHECK(waitpid(other, &status, 0) == other);
  if (status != 0) wrong++;
}

int main(void) {
  in_a_process(&both_ends_in_either_order);
  in_a_process(&an_import_is_made_once_and_outlives_its_exporter);
  in_a_process(&an_exporter_without_descriptors_says_so);
  in_a_process(&what_is_no_ticket_is_refused);
  in_a_process(&an_import_that_is_closed_during_a_capture);
  return wrong;
}
