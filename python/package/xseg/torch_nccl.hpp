// What NCCL and others that register memory get: pools whose memory comes from an allocator of their own.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "torch_history.hpp"
#include "torch_pools.hpp"

namespace xseg_torch {

// Whether NCCL is told to register all of the allocator's memory.
inline bool registers_all() {
  for (const char* name : {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::string("1yYtT").find(value[0]) != std::string::npos) return true;
  }
  return false;
}

// The memory of a pool: that of another allocator.
inline OwnPools::Source source(std::shared_ptr<cca::CUDAAllocator> other) {
  return {
      [other](size_t bytes) -> void* {
        c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        try {
          return other->raw_alloc(bytes);
        } catch (const std::exception& error) {
          TORCH_WARN("xseg: the allocator of a pool failed: ", error.what());
          return nullptr;
        }
      },
      [other](void* block) {
        c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        other->raw_delete(block);
      },
  };
}

inline c10::DeviceGuard on(int device) {
  return c10::DeviceGuard(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
}

// Whether a stream captures a graph; of the legacy default stream the answer is an error where another's capture forbids its use.
inline bool capturing(int device, void* stream) {
  const auto guard = on(device);
  auto status = cudaStreamCaptureStatusNone;
  const auto error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaErrorStreamCaptureImplicit || (error == cudaSuccess && status != cudaStreamCaptureStatusNone);
}

// An event of the work that is queued on a stream; null where that had to be waited for.
inline void* record(int device, void* stream) {
  const auto guard = on(device);
  c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cudaEvent_t event = nullptr;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess) {
    if (cudaEventRecord(event, static_cast<cudaStream_t>(stream)) == cudaSuccess) return event;
    (void)cudaEventDestroy(event);
  }
  (void)cudaGetLastError();
  (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  return nullptr;
}

// Whether an event of `record` has completed.
inline bool passed(void* event) {
  if (event == nullptr) return true;
  c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const auto error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  // An error stays the thread's last one, which the next launch would take for its own.
  if (error != cudaSuccess) (void)cudaGetLastError();
  // That of a capture never completes.
  return error != cudaErrorNotReady && error != cudaErrorCapturedEvent;
}

inline void drop(void* event) {
  if (event != nullptr) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

// Waits for all that is queued on a device; no graph may be captured meanwhile.
inline bool idle(int device) {
  const auto guard = on(device);
  if (cudaDeviceSynchronize() == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

}  // namespace xseg_torch
