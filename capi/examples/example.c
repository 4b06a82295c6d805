/* Blocks of different sizes, until free memory is scattered; then one that is larger than any hole. Memory is moved behind it.
 *
 *     cc example.c $(pkg-config --cflags --libs xseg) -o example && XSEG_CONF=backend:host ./example
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <xseg.h>

static int failed(xseg_status status) {
  if (status == XSEG_OK) return 0;
  fprintf(stderr, "%s: %s\n", xseg_status_name(status), xseg_last_error());
  return 1;
}

int main(void) {
  enum { COUNT = 16 };
  const uint64_t mib = 1 << 20;
  xseg_heap *heap = NULL;
  void *blocks[COUNT];
  void *large = NULL;
  uint64_t released = 0;
  xseg_statistics statistics = {.size = sizeof statistics};
  xseg_stream stream = NULL; /* or a cudaStream_t */

  if (failed(xseg_heap_from_env(&heap))) return 1;
  if (failed(xseg_set_limit(heap, COUNT * 4 * mib, NULL))) return 1;
  for (int i = 0; i < COUNT; i++) {
    if (failed(xseg_alloc(heap, 4 * mib, stream, &blocks[i]))) return 1;
  }
  /* Every second one is freed: half of the memory is idle, in holes of 4 MiB. */
  for (int i = 0; i < COUNT; i += 2) {
    if (failed(xseg_free(heap, blocks[i]))) return 1;
  }
  if (failed(xseg_alloc(heap, 24 * mib, stream, &large))) return 1;
  if (failed(xseg_stats(heap, &statistics))) return 1;
  printf("xseg %s: %" PRIu64 " MiB live, %" PRIu64 " MiB reserved, %" PRIu64 " MiB moved, %" PRIu64 " bytes copied\n",
         xseg_version_string(), statistics.allocated / mib, statistics.reserved / mib, statistics.bytes_moved / mib,
         statistics.bytes_copied);
  if (failed(xseg_free(heap, large))) return 1;
  for (int i = 1; i < COUNT; i += 2) {
    if (failed(xseg_free(heap, blocks[i]))) return 1;
  }
  if (failed(xseg_trim(heap, &released))) return 1;
  printf("%" PRIu64 " MiB given back\n", released / mib);
  return failed(xseg_heap_destroy(heap));
}
