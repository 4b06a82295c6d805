// The library's C functions with PyTorch's exceptions.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xseg.h"

namespace xseg_torch {

// What the calling thread's last call failed with, as PyTorch's exception.
[[noreturn]] inline void raise(xseg_status status, const std::string& doing) {
  const std::string why = xseg_last_error();
  if (status == XSEG_OUT_OF_MEMORY || status == XSEG_ADDRESS_SPACE) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. xseg: ", why);
  }
  TORCH_CHECK(false, "xseg could not ", doing, ": ", why);
}

inline void check(xseg_status status, const char* doing) {
  if (status != XSEG_OK) raise(status, doing);
}

// The heap of a device; made by the first call.
inline xseg_heap* heap_of(int device) {
  xseg_heap* heap = nullptr;
  check(xseg_device_heap(device, &heap), "make the heap of a device");
  return heap;
}

inline bool used(int device) {
  uint64_t allocated = 0;
  check(xseg_device_totals(device, &allocated, nullptr), "count");
  return allocated != 0;
}

struct Figures {
  xseg_statistics now{};
  uint64_t allocated = 0;
  uint64_t requested = 0;
};

inline Figures figures(int device) {
  Figures found;
  found.now.size = sizeof found.now;
  if (!used(device)) return found;
  check(xseg_stats(heap_of(device), &found.now), "read statistics");
  check(xseg_device_totals(device, &found.allocated, &found.requested), "count");
  return found;
}

// All mapped ranges of a heap, by address.
inline std::vector<xseg_region> regions(xseg_heap* heap) {
  std::vector<xseg_region> found;
  size_t count = 0;
  do {
    // Others may allocate between the two calls.
    found.resize(count + count / 8 + 64);
    check(xseg_regions(heap, found.data(), found.size(), &count), "list the blocks");
  } while (count > found.size());
  found.resize(count);
  return found;
}

}  // namespace xseg_torch
