// Access of other devices to a heap's memory, on a stand-in driver with four devices, of which 2 has no way to any other.
#include <dlfcn.h>

#include <string>
#include <xseg.hpp>

#include "check.h"

static uint64_t reached_by(const void* block) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  static auto* access = reinterpret_cast<uint64_t (*)(const void*)>(dlsym(library, "fake_access"));
  return access(block);
}

static bool said(const char* part) { return std::string(xseg_last_error()).find(part) != std::string::npos; }

int main() {
  xseg_heap* heap = nullptr;
  void *before = nullptr, *after = nullptr;
  CHECK(xseg_heap_from_env(&heap) == XSEG_OK && xseg_alloc(heap, 4 * MIB, nullptr, &before) == XSEG_OK);
  CHECK(xseg_enable_peer(heap, 1) == XSEG_OK && xseg_enable_peer(heap, 1) == XSEG_OK && xseg_enable_peer(heap, 0) == XSEG_OK);
  CHECK(xseg_alloc(heap, 64 * MIB, nullptr, &after) == XSEG_OK);
  CHECK(reached_by(before) == 0x3 && reached_by(after) == 0x3);
  CHECK(xseg_enable_peer(heap, 2) == XSEG_UNAVAILABLE && said("cannot reach the memory of device 0"));
  CHECK(xseg_enable_peer(heap, 4) == XSEG_INVALID_ARGUMENT && said("does not exist"));
  CHECK(xseg_enable_peer(heap, -1) == XSEG_INVALID_ARGUMENT && said("-1"));
  CHECK(xseg_enable_peer(nullptr, 1) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_heap_destroy(heap) == XSEG_OK && xseg_enable_peer(heap, 1) == XSEG_STALE_HANDLE);

  // Heaps of devices: memory first, then who gets access. One way is not the other.
  void *here = nullptr, *there = nullptr;
  CHECK(xseg_device_alloc(1, 4 * MIB, nullptr, &here) == XSEG_OK && xseg_device_alloc(3, 4 * MIB, nullptr, &there) == XSEG_OK);
  CHECK(xseg_device_enable_peer(1, 3) == XSEG_OK && reached_by(here) == 0xa && reached_by(there) == 0x8);
  CHECK(xseg_device_enable_peer(3, 1) == XSEG_OK && xseg_device_enable_peer(3, 3) == XSEG_OK && reached_by(there) == 0xa);
  CHECK(xseg_device_enable_peer(1, 2) == XSEG_UNAVAILABLE && xseg_device_enable_peer(64, 1) == XSEG_INVALID_ARGUMENT);
  CHECK(xseg_device_free(here) == XSEG_OK && xseg_device_free(there) == XSEG_OK);

  xseg::Heap owned;
  const auto block = owned.alloc(4 * MIB);
  owned.enable_peer(3);
  CHECK(reached_by(block.get()) == 0x9);
  try {
    owned.enable_peer(2);
    CHECK(!"an exception");
  } catch (const xseg::Error& error) {
    CHECK(error.status() == XSEG_UNAVAILABLE);
  }
  const xseg::Heap host("backend:host");
  CHECK(xseg_enable_peer(host.get(), 1) == XSEG_INVALID_ARGUMENT && said("backend:cuda"));
  return wrong;
}
