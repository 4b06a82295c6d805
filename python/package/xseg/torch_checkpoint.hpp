// Checkpoints of a pool, for the graph trees of torch.compile(mode="reduce-overhead"): which blocks are live, and making just these
// live again, at their addresses.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_heap.hpp"
#include "torch_history.hpp"
#include "xseg.h"

namespace xseg_torch {

struct Checkpoint final : cca::AllocatorState {
  MempoolId_t pool;
  std::vector<xseg_region> live;
};

inline std::vector<xseg_region> live_blocks(int device, MempoolId_t pool) {
  auto found = regions(heap_of(device));
  const auto other = [&](const xseg_region& region) {
    return region.state != XSEG_LIVE || region.pool.first != pool.first || region.pool.second != pool.second;
  };
  found.erase(std::remove_if(found.begin(), found.end(), other), found.end());
  return found;
}

inline std::shared_ptr<cca::AllocatorState> take_checkpoint(int device, MempoolId_t pool) {
  auto made = std::make_shared<Checkpoint>();
  made->pool = pool;
  made->live = live_blocks(device, pool);
  return made;
}

// Whether just these blocks of a pool are live.
inline bool are_live(int device, MempoolId_t pool, const std::unordered_set<void*>& expected) {
  const auto live = live_blocks(device, pool);
  return live.size() == expected.size() && std::all_of(live.begin(), live.end(), [&](const xseg_region& region) {
           return expected.count(region.address) == 1;
         });
}

// Makes the blocks of a checkpoint live, and no others of its pool. PyTorch is told of all that were live as freed, and of all that
// are as allocated, whether or not they stayed.
inline cca::CheckpointDelta apply_checkpoint(int device, const std::shared_ptr<cca::AllocatorState>& state, History& history,
                                             c10::DeleterFnPtr deleter) {
  const auto* wanted = dynamic_cast<const Checkpoint*>(state.get());
  TORCH_CHECK(wanted != nullptr, "this is no checkpoint of a pool on xseg");
  std::unordered_map<void*, uint64_t> kept;
  for (const auto& region : wanted->live) kept[region.address] = region.bytes;
  cca::CheckpointDelta delta;
  for (const auto& region : live_blocks(device, wanted->pool)) {
    delta.ptrs_freed.push_back(region.address);
    const auto same = kept.find(region.address);
    if (same != kept.end() && same->second == region.bytes) {
      kept.erase(same);
    } else {
      deleter(region.address);
    }
  }
  auto* heap = heap_of(device);
  for (const auto& region : wanted->live) {
    if (kept.count(region.address) == 1) {
      auto status = xseg_restore_block(heap, &region);
      if (status != XSEG_OK) {
        // What another stream freed is free for all once the device has passed it.
        (void)cudaDeviceSynchronize();
        check(xseg_tick(heap), "do deferred work");
        check(xseg_tick(heap), "do deferred work");
        check(xseg_restore_block(heap, &region), "restore a block of a checkpoint");
      }
      if (history.on()) history.allocated(device, region.address, region.bytes, region.stream, nullptr);
    }
    delta.dataptrs_allocd.emplace_back(region.address, region.address, deleter,
                                       c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
  }
  return delta;
}

}  // namespace xseg_torch
