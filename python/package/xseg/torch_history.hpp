// What torch.cuda.memory._record_memory_history keeps: the last actions of each device, with stacks.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_versions.hpp"
#include "xseg.h"

namespace xseg_torch {

using c10::cuda::MempoolId_t;

// Devices of one process, as in the library.
constexpr int kDevices = 64;

// What was recorded since PyTorch asked for a history.
class History {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void set(bool on, cca::CreateContextFn context, size_t entries, cca::RecordContext when, bool clear,
           const std::vector<std::string>& skipped) {
    std::lock_guard<std::mutex> lock(mutex_);
    context_ = context;
    most_ = std::max<size_t>(entries, 1);
    when_ = when;
    skipped_ = actions(skipped);
    if (clear || !on) {
      for (auto& trace : traces_) trace.clear();
      blocks_.clear();
    }
    on_.store(on, std::memory_order_relaxed);
  }

  // The stack of the caller, if stacks are kept for this kind of action.
  std::shared_ptr<c10::GatheredContext> context(cca::RecordContext level) {
    cca::CreateContextFn make = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (on() && when_ >= level) make = context_;
    }
    return make == nullptr ? nullptr : make();
  }

  void allocated(int device, void* block, size_t bytes, void* stream, std::shared_ptr<c10::GatheredContext> context) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[block] = Block{bytes, stream, context};
    add(TraceEntry::ALLOC, device, reinterpret_cast<size_t>(block), bytes, stream, std::move(context), xseg_tag_current());
  }

  void freed(int device, void* block, size_t bytes, std::shared_ptr<c10::GatheredContext> context) {
    std::lock_guard<std::mutex> lock(mutex_);
    void* stream = nullptr;
    const auto known = blocks_.find(block);
    if (known != blocks_.end()) {
      stream = known->second.stream;
      bytes = known->second.bytes;
      blocks_.erase(known);
    }
    const auto address = reinterpret_cast<size_t>(block);
    add(TraceEntry::FREE_REQUESTED, device, address, bytes, stream, context);
    add(TraceEntry::FREE_COMPLETED, device, address, bytes, stream, std::move(context));
  }

  void note(TraceEntry::Action action, int device, size_t address, size_t bytes, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    add(action, device, address, bytes, stream, nullptr);
  }

  std::shared_ptr<c10::GatheredContext> of(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = blocks_.find(block);
    return known == blocks_.end() ? nullptr : known->second.context;
  }

  std::vector<TraceEntry> trace(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return {traces_[device].begin(), traces_[device].end()};
  }

 private:
  struct Block {
    size_t bytes;
    void* stream;
    std::shared_ptr<c10::GatheredContext> context;
  };

  void add(TraceEntry::Action action, int device, size_t address, size_t bytes, void* stream,
           std::shared_ptr<c10::GatheredContext> context, const char* tag = nullptr) {
    if (!on() || std::find(skipped_.begin(), skipped_.end(), action) != skipped_.end()) return;
    auto& trace = traces_[device];
    if (trace.size() >= most_) trace.pop_front();
    trace.emplace_back(action, static_cast<c10::DeviceIndex>(device), address, bytes, static_cast<cudaStream_t>(stream), MempoolId_t{0, 0},
                       c10::getApproximateTime(), std::move(context));
    if (tag != nullptr) name(trace.back(), tag);
  }

  // Where this PyTorch's entries have a place for it.
  template <class Entry>
  static void name(Entry& entry, const char* tag) {
    if constexpr (requires { entry.user_metadata_ = tag; }) entry.user_metadata_ = tag;
  }

  std::mutex mutex_;
  std::atomic<bool> on_{false};
  cca::CreateContextFn context_ = nullptr;
  size_t most_ = 1;
  cca::RecordContext when_ = cca::RecordContext::NEVER;
  std::vector<TraceEntry::Action> skipped_;
  std::deque<TraceEntry> traces_[kDevices];
  std::unordered_map<void*, Block> blocks_;
};

}  // namespace xseg_torch
