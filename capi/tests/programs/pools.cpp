// The hooks of a pluggable allocator for pools. A refused opening is an exception, and leaves the open pool as it is.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <xseg.h>

static int wrong;
#define CHECK(what)                                             \
  do {                                                          \
    if (!(what)) std::printf("line %d: %s\n", __LINE__, #what), wrong++; \
  } while (0)

// Why a pool was not opened; empty: it was.
static std::string open(uint64_t pool, void* filter = nullptr) {
  try {
    xseg_torch_begin_pool(0, 0, pool, filter);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

static bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

static void an_open_pool_is_not_opened_again() {
  xseg_heap* heap = nullptr;
  uint32_t uses = 0;
  CHECK(xseg_device_heap(0, &heap) == XSEG_OK);
  CHECK(open(1).empty());
  CHECK(contains(open(1), "(0, 1) already"));
  std::thread([] { CHECK(contains(open(1), "(0, 1) already")); }).join();
  CHECK(xseg_capture_uses(heap, {0, 1}, &uses) == XSEG_OK && uses == 1);
  xseg_torch_end_pool(0, 0, 1);
  CHECK(xseg_device_end_pool(0, {0, 1}) == XSEG_INVALID_ARGUMENT);
  CHECK(open(1).empty());
  xseg_torch_end_pool(0, 0, 1);
  for (int use = 0; use < 2; use++) xseg_torch_release_pool(0, 0, 1);
  CHECK(xseg_capture_uses(heap, {0, 1}, &uses) == XSEG_OK && uses == 0);
}

int main() {
  an_open_pool_is_not_opened_again();
  return wrong;
}
