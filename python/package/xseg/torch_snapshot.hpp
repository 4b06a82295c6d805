// What torch.cuda.memory._snapshot shows.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "torch_heap.hpp"
#include "torch_history.hpp"
#include "torch_pools.hpp"
#include "torch_versions.hpp"
#include "xseg.h"

namespace xseg_torch {

inline cca::SnapshotInfo snapshot(MempoolId_t pool, bool traces, History& history, OwnPools& own_pools) {
  cca::SnapshotInfo found;
  const bool all = pool.first == 0 && pool.second == 0;
  found.device_traces.resize(std::max<int>(c10::cuda::device_count(), 1));
  for (int device = 0; device < static_cast<int>(found.device_traces.size()); device++) {
    if (!used(device)) continue;
    size_t end = 0;
    MempoolId_t owner{0, 0};
    for (const auto& region : regions(heap_of(device))) {
      const MempoolId_t own{region.pool.first, region.pool.second};
      if (!all && own != pool) continue;
      const auto address = reinterpret_cast<size_t>(region.address);
      if (found.segments.empty() || end != address || own != owner || found.segments.back().device != device) {
        SegmentInfo segment;
        segment.device = static_cast<c10::DeviceIndex>(device);
        segment.address = address;
        // Streams share one address space; each block's stream is in the trace.
        segment.stream = nullptr;
        segment.is_large = region.small == 0;
        segment.is_expandable = true;
        segment.owner_private_pool_id = own;
        found.segments.push_back(std::move(segment));
      }
      end = address + region.bytes;
      owner = own;
      auto& segment = found.segments.back();
      BlockInfo block;
      block.size = region.bytes;
      block.requested_size = region.requested;
      block.allocated = region.state == XSEG_LIVE;
      // A history says of every block that its free is completed at once; the viewers take it by its word.
      block.active = block.allocated;
      if (block.allocated) block.context_when_allocated = history.of(region.address);
      segment.total_size += block.size;
      if (block.allocated) segment.allocated_size += block.size;
      if (block.active) segment.active_size += block.size;
      if (block.allocated) segment.requested_size += block.requested_size;
      segment.blocks.push_back(std::move(block));
    }
    if (traces) {
      history.note(TraceEntry::SNAPSHOT, device, 0, figures(device).now.reserved, nullptr);
      found.device_traces[device] = history.trace(device);
    }
  }
  for (const auto& range : own_pools.ranges({pool.first, pool.second})) {
    SegmentInfo segment;
    segment.device = static_cast<c10::DeviceIndex>(range.device);
    set_order(segment, range.order);
    segment.address = reinterpret_cast<size_t>(range.address);
    segment.stream = static_cast<cudaStream_t>(range.stream);
    segment.is_large = true;
    segment.owner_private_pool_id = MempoolId_t{range.pool.first, range.pool.second};
    segment.total_size = range.bytes;
    BlockInfo block;
    block.size = range.bytes;
    if (range.live) {
      block.allocated = block.active = true;
      block.requested_size = range.requested;
      segment.allocated_size = segment.active_size = range.bytes;
      segment.requested_size = range.requested;
    }
    segment.blocks.push_back(std::move(block));
    found.segments.push_back(std::move(segment));
  }
  // Clock ticks become microseconds, as the rest of PyTorch expects them.
  c10::ApproximateClockToUnixTimeConverter clock;
  const auto convert = clock.makeConverter();
  for (auto& trace : found.device_traces) {
    for (auto& entry : trace) entry.time_.t_ = convert(entry.time_.approx_t_) / 1000;
  }
  auto& config = found.config_metadata;
  config.garbage_collection_threshold = 0;
  config.max_split_size = SIZE_MAX;
  config.pinned_num_register_threads = 1;
  config.expandable_segments = true;
  config.release_lock_on_malloc = false;
  config.pinned_use_host_register = false;
  config.graph_capture_record_stream_reuse = false;
  config.last_allocator_settings = "xseg";
  return found;
}

}  // namespace xseg_torch
