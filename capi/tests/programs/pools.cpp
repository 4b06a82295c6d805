// The hooks of a pluggable allocator for pools. A refused opening is an exception, and leaves the open pool as it is.
#include <cstdio>
#include <functional>
#include <memory>
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

static void without_a_filter_a_pool_is_the_only_one() {
  std::function<bool(void*)> empty, none = [](void*) { return false; };
  CHECK(open(1).empty());
  CHECK(contains(open(2), "pool (0, 1) is open") && contains(open(2, &none), "pool (0, 1) is open"));
  xseg_torch_begin_pool(1, 0, 2, nullptr);
  xseg_torch_end_pool(1, 0, 2);
  xseg_torch_end_pool(0, 0, 1);
  CHECK(open(2, &none).empty() && open(3, &none).empty());
  CHECK(contains(open(1), ") is open") && contains(open(1, &empty), ") is open"));
  for (uint64_t pool : {2, 3}) xseg_torch_end_pool(0, 0, pool);
  CHECK(open(1, &empty).empty());
  xseg_torch_end_pool(0, 0, 1);
}

// A filter is copied, and its copy is destroyed when the pool is not open any more, or was not opened.
static void filters_end_with_the_opening() {
  auto counted = std::make_shared<int>(7);
  std::function<bool(void*)> large = [counted, padding = std::string(100, ' ')](void*) { return padding.empty(); };
  CHECK(counted.use_count() == 2 && open(4, &large).empty());
  large = nullptr;
  CHECK(counted.use_count() == 2);
  std::function<bool(void*)> second = [counted](void*) { return true; };
  CHECK(contains(open(4, &second), "already") && counted.use_count() == 3);
  xseg_torch_end_pool(0, 0, 4);
  CHECK(counted.use_count() == 2);
}

int main() {
  an_open_pool_is_not_opened_again();
  without_a_filter_a_pool_is_the_only_one();
  filters_end_with_the_opening();
  return wrong;
}
