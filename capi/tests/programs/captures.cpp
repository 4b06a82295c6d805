// Two graphs captured at once through the hooks of a pluggable allocator, on the stand-in driver: each one's memory comes from its
// own pool.
#include <dlfcn.h>

#include <cstdio>
#include <functional>
#include <vector>
#include <xseg.h>

static int wrong;
#define CHECK(what)                                             \
  do {                                                          \
    if (!(what)) std::printf("line %d: %s\n", __LINE__, #what), wrong++; \
  } while (0)

template <typename Type>
static Type* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Type*>(dlsym(library, name));
}

// Stands for PyTorch's, which compares the stream's capture with its graph's.
struct Graph {
  void* stream = nullptr;
  bool capturing = false;
  std::function<bool(void*)> filter() {
    return [this](void* asked) { return capturing && asked == stream; };
  }
};

// The pool of what a stream gets now; it is freed again.
static uint64_t pool_of_next(void* stream) {
  void* block = xseg_torch_alloc(4 << 20, 0, stream);
  xseg_heap* heap = nullptr;
  size_t count = 0;
  xseg_device_heap(0, &heap);
  xseg_regions(heap, nullptr, 0, &count);
  std::vector<xseg_region> regions(count);
  xseg_regions(heap, regions.data(), count, &count);
  uint64_t pool = 99;
  for (const auto& region : regions) {
    if (region.address == block) pool = region.pool.second;
  }
  xseg_torch_free(block, 4 << 20, 0, stream);
  return pool;
}

static void open(uint64_t pool, Graph& graph) {
  // The hook's is gone when it returns, as PyTorch's.
  auto filter = graph.filter();
  xseg_torch_begin_pool(0, 0, pool, &filter);
}

int main() {
  auto* capture = driver<bool(void*)>("fake_capture");
  Graph a, b;
  CHECK(driver<unsigned(unsigned)>("cuInit")(0) == 0);
  // The stand-in's context of device 0.
  CHECK(driver<unsigned(uint64_t)>("cuCtxPushCurrent_v2")(0xC000) == 0);
  void* beside = nullptr;
  for (void** stream : {&a.stream, &b.stream, &beside}) CHECK(driver<unsigned(void**, unsigned)>("cuStreamCreate")(stream, 1) == 0);
  CHECK(pool_of_next(beside) == 0);
  open(1, a);
  open(2, b);
  CHECK(pool_of_next(a.stream) == 0 && pool_of_next(b.stream) == 0);
  a.capturing = b.capturing = true;
  // The stand-in knows one capture at a time.
  for (int round = 0; round < 2; round++) {
    capture(b.stream);
    CHECK(pool_of_next(b.stream) == 2 && pool_of_next(beside) == 0);
    capture(a.stream);
    CHECK(pool_of_next(a.stream) == 1 && pool_of_next(beside) == 0);
  }
  // A capture that no pool was opened for, beside theirs.
  capture(beside);
  CHECK(pool_of_next(beside) == 0);
  // One ends: the other goes on.
  capture(b.stream);
  a.capturing = false;
  xseg_torch_end_pool(0, 0, 1);
  xseg_torch_release_pool(0, 0, 1);
  CHECK(pool_of_next(b.stream) == 2);
  capture(nullptr);
  b.capturing = false;
  xseg_torch_end_pool(0, 0, 2);
  CHECK(pool_of_next(b.stream) == 0);
  // Without a filter a pool takes from whichever stream captures.
  xseg_torch_begin_pool(0, 0, 2, nullptr);
  capture(a.stream);
  CHECK(pool_of_next(a.stream) == 2 && pool_of_next(b.stream) == 0);
  capture(nullptr);
  xseg_torch_end_pool(0, 0, 2);
  for (int use = 0; use < 2; use++) xseg_torch_release_pool(0, 0, 2);
  return wrong;
}
