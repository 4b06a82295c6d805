// Access of one device to the memory of another.
#pragma once

#include <atomic>
#include <cstdint>

#include "torch_heap.hpp"
#include "xseg.h"

namespace xseg_torch {

class Peers {
 public:
  // `device` reaches the heap's memory of `memory` from now on, what comes later too. Throws what the library says.
  void grant(int device, int memory) {
    check(xseg_device_enable_peer(memory, device), "give a device access to the memory of another");
    if (is_known(device) && is_known(memory)) reached_by_[memory].fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
  }

  bool granted(int device, int memory) const {
    return is_known(device) && is_known(memory) && (reached_by_[memory].load(std::memory_order_relaxed) >> device & 1) != 0;
  }

 private:
  static constexpr int kMost = 64;
  static bool is_known(int device) { return 0 <= device && device < kMost; }

  // By the memory's device: those that were granted access, by bit.
  std::atomic<uint64_t> reached_by_[kMost] = {};
};

}  // namespace xseg_torch
