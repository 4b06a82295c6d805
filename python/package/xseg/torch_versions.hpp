// What differs between the releases of PyTorch that the C++ part is compiled against, from 2.9 on.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#define XSEG_TORCH_SINCE(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !XSEG_TORCH_SINCE(2, 9)
#error "xseg's C++ part needs PyTorch 2.9 or later"
#endif

namespace xseg_torch {

namespace cca = c10::cuda::CUDACachingAllocator;
using cca::BlockInfo;
using cca::SegmentInfo;
using cca::TraceEntry;

// Kinds of entries that a history leaves out; none can be before 2.11.
inline std::vector<TraceEntry::Action> actions(const std::vector<std::string>& names) {
  std::vector<TraceEntry::Action> found;
#if XSEG_TORCH_SINCE(2, 11)
  for (const auto& name : names) found.push_back(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
#endif
  return found;
}

// Where this PyTorch's segments have a place for it.
template <class Segment>
void set_order(Segment& segment, int32_t order) {
  if constexpr (requires { segment.registration_counter = order; }) segment.registration_counter = order;
}

// Bytes that are free on a device, and all that it has.
inline std::pair<size_t, size_t> memory_of(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {free, total};
}

}  // namespace xseg_torch
