// The heap's figures in the shape of PyTorch's.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdint>

#include "torch_heap.hpp"
#include "torch_pools.hpp"
#include "xseg.h"

namespace xseg_torch {

inline void set(c10::CachingAllocator::StatArray& stat, uint64_t current, uint64_t peak, uint64_t allocated, uint64_t freed) {
  c10::CachingAllocator::Stat one;
  one.current = static_cast<int64_t>(current);
  one.peak = static_cast<int64_t>(std::max(current, peak));
  one.allocated = static_cast<int64_t>(allocated);
  one.freed = static_cast<int64_t>(freed);
  stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)] = one;
  // xseg counts small and large blocks together; they are shown as large ones.
  stat[static_cast<size_t>(c10::CachingAllocator::StatType::LARGE_POOL)] = one;
}

// What there is on a device, counted from `since`, with the pools that have an allocator of their own.
inline c10::CachingDeviceAllocator::DeviceStats statistics(const Figures& found, const Figures& since, const OwnPools::Figures& own) {
  const auto& now = found.now;
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto allocs = now.allocs - since.now.allocs, frees = now.frees - since.now.frees;
  const auto made = now.calls_create - since.now.calls_create, gone = now.calls_release - since.now.calls_release;
  const auto bytes = found.allocated - since.allocated, asked = found.requested - since.requested;
  const auto created = now.bytes_created - since.now.bytes_created;
  set(stats.allocation, now.live_blocks, 0, allocs, frees);
  set(stats.active, now.live_blocks, 0, allocs, frees);
  set(stats.segment, now.calls_create - now.calls_release, 0, made, gone);
  // The two peaks need not have been at the same time: their sum is a bound.
  const auto live = now.allocated + own.live, requested = now.requested + own.requested, reserved = now.reserved + own.reserved;
  const auto peak = now.peak_allocated + own.peak_live;
  const auto freed = bytes - now.allocated + since.now.allocated;
  set(stats.allocated_bytes, live, peak, bytes + own.live, freed);
  set(stats.active_bytes, live + now.pending, peak, bytes + own.live, freed);
  set(stats.requested_bytes, requested, now.peak_requested + own.peak_requested, asked + own.requested,
      asked - now.requested + since.now.requested);
  set(stats.reserved_bytes, reserved, now.peak_reserved + own.peak_reserved, created + own.reserved,
      created - now.reserved + since.now.reserved);
  set(stats.inactive_split_bytes, now.partly_live_granules, 0, 0, 0);
  stats.num_alloc_retries = static_cast<int64_t>(now.host_waits - since.now.host_waits);
  stats.num_ooms = static_cast<int64_t>(now.ooms - since.now.ooms);
  stats.num_device_alloc = static_cast<int64_t>(made);
  stats.num_device_free = static_cast<int64_t>(gone);
  stats.max_split_size = -1;
  return stats;
}

}  // namespace xseg_torch
