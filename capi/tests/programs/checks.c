/* What the C interface promises, on host memory. Each failed check is printed; the exit status is their number. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <xseg.h>

#include "check.h"

static const xseg_stream stream = NULL;

static uint64_t mapped, unmapped;
static void watch(const xseg_mapping_event *event, void *user) {
  if (event->change == XSEG_MAPPED) mapped += event->bytes;
  if (event->change == XSEG_UNMAPPING) unmapped += event->bytes;
  *(int *)user += 1;
}

struct last {
  xseg_heap *heap;
  void *block;
  int calls;
};
static int32_t rescue(uint64_t bytes, void *user) {
  struct last *last = user;
  last->calls++;
  (void)bytes;
  if (last->block == NULL) return 0;
  CHECK(xseg_free(last->heap, last->block) == XSEG_OK);
  last->block = NULL;
  return 1;
}

static void handles(void) {
  xseg_heap *heap = NULL, *second = NULL;
  void *block = NULL;
  CHECK(xseg_heap_from_conf("backend:nothing", &heap) == XSEG_CONFIG && heap == NULL);
  CHECK(strstr(xseg_last_error(), "backend") != NULL);
  CHECK(xseg_heap_from_conf("backend:host", NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_from_conf(NULL, &heap) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_from_conf("\xff", &heap) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_from_conf("backend:cuda=63", &heap) == XSEG_UNAVAILABLE);
  CHECK(xseg_alloc(NULL, 1, stream, &block) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_alloc((xseg_heap *)&heap, 1, stream, &block) == XSEG_STALE_HANDLE);
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &heap) == XSEG_OK);
  CHECK(xseg_alloc(heap, 1, stream, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
  CHECK(xseg_heap_destroy(heap) == XSEG_STALE_HANDLE);
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &second) == XSEG_OK);
  CHECK(second != heap && xseg_tick(heap) == XSEG_STALE_HANDLE && xseg_tick(second) == XSEG_OK);
  CHECK(xseg_tick((xseg_heap *)((uintptr_t)second | (uintptr_t)1 << 48)) == XSEG_STALE_HANDLE);
  CHECK(xseg_heap_destroy(second) == XSEG_OK);
}

static void blocks(void) {
  int told = 0;
  uint64_t requested = 0, size = 0, released = 0, bytes = 0;
  void *block = NULL, *other = NULL;
  const char *name = NULL;
  xseg_heap *heap = NULL;
  xseg_heap_options options = {.size = sizeof options, .conf = "backend:host,limit:64MiB", .mapping = watch, .mapping_user = &told};
  struct last last = {0};
  CHECK(xseg_heap_create(NULL, &heap) == XSEG_INVALID_ARGUMENT);
  options.size = 4;
  CHECK(xseg_heap_create(&options, &heap) == XSEG_INVALID_ARGUMENT);
  options.size = sizeof options;
  CHECK(xseg_heap_create(&options, &heap) == XSEG_OK);
  CHECK(xseg_backend(heap, &name) == XSEG_OK && strcmp(name, "host") == 0);

  CHECK(xseg_alloc(heap, 1000, stream, &block) == XSEG_OK && (uintptr_t)block % 512 == 0);
  memset(block, 7, 1000);
  CHECK(xseg_block_size(heap, block, &requested, &size) == XSEG_OK && requested == 1000 && size == 1024);
  CHECK(xseg_free(heap, (char *)block + 512) == XSEG_INVALID_POINTER);
  CHECK(xseg_free(heap, &told) == XSEG_INVALID_POINTER);
  /* As free() and cudaFree(): no block is nothing to do, for any heap. */
  CHECK(xseg_free(heap, NULL) == XSEG_OK && xseg_free_after(heap, NULL, NULL) == XSEG_OK);
  CHECK(xseg_free(NULL, NULL) == XSEG_OK && xseg_free(NULL, block) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_record_use(heap, NULL, stream) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_record_use(heap, block, (xseg_stream)0x1234) == XSEG_OK);
  CHECK(xseg_record_use(heap, block, stream) == XSEG_OK);
  CHECK(xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_free(heap, block) == XSEG_INVALID_POINTER);
  CHECK(strstr(xseg_last_error(), "freed already") != NULL);
  CHECK(xseg_alloc(heap, 0, stream, &block) == XSEG_OK && block != NULL && xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_alloc_aligned(heap, 100, 3, stream, &block) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_alloc_aligned(heap, 100, 1 << 16, stream, &block) == XSEG_OK && (uintptr_t)block % (1 << 16) == 0);
  CHECK(xseg_free(heap, block) == XSEG_OK);
  CHECK(xseg_alloc_contiguous(heap, 3 * MIB, stream, &block) == XSEG_OK && (uintptr_t)block % (2 * MIB) == 0);
  CHECK(xseg_pin(heap, block, 4 * MIB) == XSEG_OK && xseg_unpin(heap, block, 4 * MIB) == XSEG_OK);
  CHECK(xseg_pin(heap, &told, 4 * MIB) == XSEG_INVALID_POINTER);
  CHECK(xseg_unpin(heap, block, 4 * MIB) != XSEG_OK);
  CHECK(xseg_free(heap, block) == XSEG_OK);

  CHECK(xseg_alloc(heap, UINT64_MAX, stream, &block) != XSEG_OK);
  CHECK(xseg_alloc(heap, 65 * MIB, stream, &block) == XSEG_OUT_OF_MEMORY);
  CHECK(strstr(xseg_last_error(), "limit 64.000 MiB") != NULL);
  CHECK(xseg_on_out_of_memory(heap, NULL, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_alloc(heap, 60 * MIB, stream, &last.block) == XSEG_OK);
  last.heap = heap;
  CHECK(xseg_on_out_of_memory(heap, rescue, &last) == XSEG_OK);
  CHECK(xseg_alloc(heap, 40 * MIB, stream, &other) == XSEG_OK && last.calls == 1 && last.block == NULL);
  CHECK(xseg_free(heap, other) == XSEG_OK);
  CHECK(xseg_trim(heap, &released) == XSEG_OK && released > 0);
  CHECK(xseg_limit(heap, &bytes) == XSEG_OK && bytes == 64 * MIB);
  CHECK(xseg_set_limit(heap, 32 * MIB, &bytes) == XSEG_OK && bytes == 0);
  CHECK(xseg_alloc(heap, 40 * MIB, stream, &block) == XSEG_OUT_OF_MEMORY);
  CHECK(xseg_retire_stream(heap, (xseg_stream)0x1234) == XSEG_OK);
  CHECK(xseg_retire_stream(heap, (xseg_stream)0x9999) == XSEG_DEAD_STREAM);
  CHECK(told > 0 && mapped > 0 && mapped == unmapped);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
}

static void statistics(void) {
  xseg_heap *heap = NULL;
  void *block = NULL;
  xseg_statistics all = {.size = sizeof all};
  struct {
    uint64_t size, allocated, beyond;
  } old = {.size = 16, .beyond = 42};
  struct {
    xseg_statistics known;
    uint64_t unknown;
  } later = {.known = {.size = sizeof later}, .unknown = 42};
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &heap) == XSEG_OK);
  CHECK(xseg_alloc(heap, 3 * MIB + 1, stream, &block) == XSEG_OK);
  CHECK(xseg_stats(heap, &all) == XSEG_OK && all.size == sizeof all);
  CHECK(all.requested == 3 * MIB + 1 && all.allocated == 3 * MIB + 512 && all.live_blocks == 1);
  CHECK(all.reserved >= 4 * MIB && all.limit == 64 * MIB && all.calls_create > 0 && all.bytes_copied == 0);
  CHECK(xseg_stats(heap, (xseg_statistics *)&old) == XSEG_OK && old.size == 16);
  CHECK(old.allocated == all.allocated && old.beyond == 42);
  CHECK(xseg_stats(heap, &later.known) == XSEG_OK && later.known.size == sizeof all && later.unknown == 42);
  all.size = 0;
  CHECK(xseg_stats(heap, &all) == XSEG_INVALID_ARGUMENT && xseg_stats(heap, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_free(heap, block) == XSEG_OK && xseg_reset_peaks(heap) == XSEG_OK);
  all.size = sizeof all;
  CHECK(xseg_stats(heap, &all) == XSEG_OK && all.peak_requested == 0 && all.frees == 1);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
}

static void regions(void) {
  xseg_heap *heap = NULL;
  void *first = NULL, *second = NULL;
  xseg_region found[16];
  size_t count = 0;
  uint64_t live = 0, mapped_bytes = 0;
  xseg_pool pool = {3, 4};
  xseg_statistics statistics = {.size = sizeof statistics};
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &heap) == XSEG_OK);
  CHECK(xseg_alloc(heap, 5 * MIB - 100, stream, &first) == XSEG_OK);
  CHECK(xseg_begin_capture(heap, pool, NULL, NULL) == XSEG_OK);
  CHECK(xseg_alloc(heap, 700, stream, &second) == XSEG_OK && xseg_end_capture(heap, pool) == XSEG_OK);
  CHECK(xseg_regions(heap, NULL, 1, &count) == XSEG_INVALID_ARGUMENT && xseg_regions(heap, found, 16, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_regions(heap, NULL, 0, &count) == XSEG_OK && count >= 4 && count <= 16);
  CHECK(xseg_regions(heap, found, 16, &count) == XSEG_OK);
  for (size_t i = 0; i < count; i++) {
    mapped_bytes += found[i].bytes;
    CHECK(i == 0 || (char *)found[i - 1].address + found[i - 1].bytes <= (char *)found[i].address);
    if (found[i].address == first) CHECK(found[i].state == XSEG_LIVE && found[i].requested == 5 * MIB - 100 && !found[i].small && found[i].pool.first == 0);
    if (found[i].address == second) CHECK(found[i].state == XSEG_LIVE && found[i].bytes == 1024 && found[i].small && found[i].pool.second == 4);
    if (found[i].state == XSEG_LIVE) live += found[i].bytes;
  }
  CHECK(xseg_stats(heap, &statistics) == XSEG_OK && live == statistics.allocated && mapped_bytes == statistics.reserved);
  CHECK(xseg_restore_block(heap, NULL) == XSEG_INVALID_ARGUMENT);
  for (size_t i = 0; i < count; i++) {
    if (found[i].address != second) continue;
    CHECK(xseg_restore_block(heap, &found[i]) == XSEG_INVALID_ARGUMENT);
    CHECK(xseg_free(heap, second) == XSEG_OK && xseg_restore_block(heap, &found[i]) == XSEG_OK);
    CHECK(xseg_block_size(heap, second, &live, NULL) == XSEG_OK && live == 700);
  }
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
}

static int32_t all_streams(xseg_stream asked, void *user) {
  (void)asked;
  ++*(int *)user;
  return 1;
}

static void captures(void) {
  int asked = 0;
  uint32_t uses = 9;
  xseg_heap *heap = NULL;
  void *block = NULL;
  xseg_pool pool = {0, 5};
  xseg_stream streams[] = {NULL};
  xseg_statistics statistics = {.size = sizeof statistics};
  CHECK(xseg_heap_from_conf("backend:host,limit:64MiB", &heap) == XSEG_OK);
  CHECK(xseg_end_capture(heap, pool) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_begin_capture(heap, pool, all_streams, &asked) == XSEG_OK);
  CHECK(xseg_begin_capture(heap, pool, NULL, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_alloc(heap, 4 * MIB, stream, &block) == XSEG_OK && asked > 0);
  CHECK(xseg_end_capture(heap, pool) == XSEG_OK);
  CHECK(xseg_begin_capture_of(heap, pool, streams, 0) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_begin_capture_of(heap, pool, streams, 1) == XSEG_OK && xseg_end_capture(heap, pool) == XSEG_OK);
  CHECK(xseg_retain_capture(heap, pool) == XSEG_OK);
  CHECK(xseg_capture_uses(heap, pool, &uses) == XSEG_OK && uses == 3);
  CHECK(xseg_stats(heap, &statistics) == XSEG_OK && statistics.captured >= 4 * MIB && statistics.capture_pools == 1);
  CHECK(xseg_free(heap, block) == XSEG_OK);
  for (int i = 0; i < 3; i++) CHECK(xseg_release_capture(heap, pool) == XSEG_OK);
  CHECK(xseg_release_capture(heap, pool) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_stats(heap, &statistics) == XSEG_OK && statistics.captured == 0);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK);
}

static void *elsewhere(void *unused) {
  (void)unused;
  CHECK(strcmp(xseg_last_error(), "") == 0);
  CHECK(xseg_tick(NULL) == XSEG_INVALID_ARGUMENT && strcmp(xseg_last_error(), "") != 0);
  return NULL;
}

static void *open_again(void *pool) {
  int asked = 0;
  CHECK(xseg_device_begin_pool(0, *(xseg_pool *)pool, all_streams, &asked) == XSEG_INVALID_ARGUMENT && asked == 0);
  return NULL;
}

/* Device heaps: XSEG_CONF says backend:host, which stands for each device here. */
static uint64_t told_of;
static void device_watch(const xseg_mapping_event *event, void *user) {
  if (event->device == *(uint32_t *)user && event->change == XSEG_MAPPED) told_of += event->bytes;
}

static void devices(void) {
  uint32_t second = 1;
  int number = 9;
  xseg_heap *heap = NULL;
  void *block = NULL, *other = NULL;
  uint64_t allocated = 0, requested = 0;
  size_t size = 0;
  xseg_pool pool = {0, 6};
  uint32_t uses = 0;
  pthread_t thread;
  int asked = 0;
  CHECK(xseg_device_free(NULL) == XSEG_OK && xseg_device_free(&heap) == XSEG_INVALID_POINTER);
  CHECK(xseg_device_heap(-1, &heap) == XSEG_INVALID_ARGUMENT && xseg_device_heap(64, &heap) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_watch(NULL, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_watch(device_watch, &second) == XSEG_OK);
  CHECK(xseg_device_alloc(0, 1000, stream, &block) == XSEG_OK && told_of == 0);
  CHECK(xseg_device_heap(1, &heap) == XSEG_OK && xseg_heap_destroy(heap) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_alloc(heap, 1000, stream, &other) == XSEG_OK && told_of >= 2 * MIB);
  CHECK(xseg_device_block(other, &number, &requested, &allocated) == XSEG_OK);
  CHECK(number == 1 && requested == 1000 && allocated == 1024);
  CHECK(xseg_device_block(&number, NULL, NULL, NULL) == XSEG_INVALID_POINTER);
  CHECK(xseg_device_totals(0, &allocated, &requested) == XSEG_OK && allocated == 1024 && requested == 1000);
  CHECK(xseg_device_free(block) == XSEG_OK && xseg_device_free(other) == XSEG_OK);
  CHECK(xseg_device_free(other) == XSEG_INVALID_POINTER && xseg_device_free(&heap) == XSEG_INVALID_POINTER);

  CHECK(xseg_torch_alloc(0, 0, stream) == NULL);
  block = xseg_torch_alloc(5000, 0, stream);
  CHECK(block != NULL && xseg_torch_base_alloc(block, &size) == block && size == 5120);
  xseg_torch_record_stream(block, stream);
  xseg_torch_free(block, 5000, 0, stream);
  xseg_torch_free(NULL, 0, 0, stream);
  xseg_torch_reset();
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK);
  /* A pool that is open is not opened again, and the refused opening has no part in it. */
  CHECK(xseg_device_begin_pool(0, pool, NULL, NULL) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_begin_pool(0, pool, all_streams, &asked) == XSEG_OK);
  CHECK(pthread_create(&thread, NULL, open_again, &pool) == 0 && pthread_join(thread, NULL) == 0);
  CHECK(xseg_device_begin_pool(0, pool, all_streams, &asked) == XSEG_INVALID_ARGUMENT);
  CHECK(strstr(xseg_last_error(), "(0, 6) already") != NULL);
  CHECK(xseg_capture_uses(heap, pool, &uses) == XSEG_OK && uses == 1);
  CHECK(xseg_device_alloc(0, 1000, stream, &block) == XSEG_OK && asked == 1);
  CHECK(xseg_device_end_pool(0, pool) == XSEG_OK && xseg_device_end_pool(0, pool) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_alloc(0, 1000, stream, &other) == XSEG_OK && asked == 1);
  CHECK(xseg_device_free(block) == XSEG_OK && xseg_device_free(other) == XSEG_OK);
  CHECK(xseg_device_begin_pool(0, pool, all_streams, &asked) == XSEG_OK);
  CHECK(xseg_device_begin_pool(1, pool, all_streams, &asked) == XSEG_OK);
  xseg_torch_end_pool(0, 0, 6);
  CHECK(xseg_device_end_pool(1, pool) == XSEG_OK && xseg_device_end_pool(0, pool) == XSEG_INVALID_ARGUMENT);
  xseg_torch_release_pool(0, 0, 6);
  CHECK(xseg_release_capture(heap, pool) == XSEG_OK && xseg_release_capture(heap, pool) == XSEG_INVALID_ARGUMENT);
}

int main(void) {
  pthread_t thread;
  CHECK(xseg_version() == (XSEG_VERSION_MAJOR << 16 | XSEG_VERSION_MINOR << 8 | XSEG_VERSION_PATCH));
  CHECK(strcmp(xseg_last_error(), "") == 0);
  CHECK(strcmp(xseg_status_name(XSEG_DEAD_STREAM), "XSEG_DEAD_STREAM") == 0);
  CHECK(strcmp(xseg_status_name(-1), "unknown status") == 0);
  handles();
  blocks();
  statistics();
  captures();
  regions();
  devices();
  CHECK(pthread_create(&thread, NULL, elsewhere, NULL) == 0 && pthread_join(thread, NULL) == 0);
  return wrong;
}
