// PyTorch's allocator class on xseg. Compiled on the user's machine against the PyTorch that is installed there; the C
// functions are in the library of the Python module, which this one is linked to.
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_checkpoint.hpp"
#include "torch_heap.hpp"
#include "torch_history.hpp"
#include "torch_ipc.hpp"
#include "torch_nccl.hpp"
#include "torch_peers.hpp"
#include "torch_pools.hpp"
#include "torch_snapshot.hpp"
#include "torch_stats.hpp"
#include "torch_versions.hpp"
#include "xseg.h"

namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::MempoolId_t;
using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
using xseg_torch::check;
using xseg_torch::Figures;
using xseg_torch::figures;
using xseg_torch::heap_of;
using xseg_torch::History;
using xseg_torch::kDevices;
using xseg_torch::OwnPools;
using xseg_torch::TraceEntry;
using xseg_torch::used;

// What the pools with an allocator of their own need of PyTorch.
OwnPools::Outside outside();

// Never destroyed: tensors may be freed while the process ends. References, so that the hot path asks no guard.
History& history = *new History();
OwnPools& own_pools = *new OwnPools(outside());

using Filter = std::function<bool(cudaStream_t)>;

int32_t takes(xseg_stream stream, void* user) {
  try {
    return (*static_cast<Filter*>(user))(static_cast<cudaStream_t>(stream)) ? 1 : 0;
  } catch (const std::exception&) {
    // A filter that fails takes nothing; no exception may pass through the library.
    return 0;
  }
}

void give_back(void* block);

// Allocates, or throws; the address is never null.
void* take(size_t bytes, int device, cudaStream_t stream);

class Allocator final : public CUDAPluggableAllocator {
 public:
  Allocator()
      : CUDAPluggableAllocator([](size_t bytes, int device, cudaStream_t stream) { return take(bytes, device, stream); },
                               [](void* block, size_t, int, cudaStream_t) { give_back(block); }) {}

  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::cuda::current_device();
    void* block = nullptr;
    if (bytes != 0) block = take(bytes, device, c10::cuda::getCurrentCUDAStream(device).stream());
    return {block, block, &give_back, c10::Device(c10::DeviceType::CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void* raw_alloc(size_t bytes) override {
    const auto device = c10::cuda::current_device();
    return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(device).stream());
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return bytes == 0 ? nullptr : take(bytes, c10::cuda::current_device(), stream);
  }
  void raw_delete(void* block) override { give_back(block); }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    // Memory of others, as of a tensor made from a pointer, has another deleter.
    if (block.get() == nullptr || block.get_deleter() != &give_back) return;
    const auto device = stream.device_index();
    if (own_pools.any() && own_pools.use(block.get(), device, stream.stream())) return;
    check(xseg_device_record_use_on(block.get(), stream.stream(), device), "record the use of a block");
  }

  void emptyCache(MempoolId_t pool) override {
    own_pools.trim({pool.first, pool.second});
    for (int device = 0; device < kDevices; device++) {
      if (used(device)) check(xseg_trim(heap_of(device), nullptr), "trim");
    }
  }
  double getMemoryFraction(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    const auto limit = static_cast<double>(limit_of(device)) + static_cast<double>(in_pools_[device]) - static_cast<double>(over_[device]);
    return limit / static_cast<double>(xseg_torch::memory_of(device).second);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    TORCH_CHECK_VALUE(0 <= fraction && fraction <= 1, "a memory fraction is 0 to 1, not ", fraction);
    const auto bytes = static_cast<uint64_t>(fraction * static_cast<double>(xseg_torch::memory_of(device).second));
    std::lock_guard<std::mutex> lock(budget_mutex_);
    check(xseg_set_limit(heap_of(device), bytes - std::min(bytes, in_pools_[device]), nullptr), "set the limit");
    over_[device] = in_pools_[device] - std::min(bytes, in_pools_[device]);
  }
  // What a pool with an allocator of its own takes is the heap's no more: its limit falls by that much, or the pool may not.
  bool pools_grow(int device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    const uint64_t limit = limit_of(device);
    if (limit != UINT64_MAX) {
      if (bytes > 0 && static_cast<uint64_t>(bytes) > limit) return false;
      // What the pools have above the limit is nobody's when they give it back.
      const int64_t above = bytes < 0 ? std::min(static_cast<int64_t>(over_[device]), -bytes) : 0;
      const uint64_t left = limit - bytes - above;
      uint64_t reserved = 0;
      check(xseg_set_limit(heap_of(device), left, &reserved), "set the limit");
      if (bytes > 0 && reserved > left) {
        check(xseg_set_limit(heap_of(device), limit, nullptr), "set the limit");
        return false;
      }
      over_[device] -= above;
    }
    in_pools_[device] += bytes;
    return true;
  }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
    const auto now = figures(device).now;
    const size_t room = now.limit > now.reserved ? now.limit - now.reserved : 0;
    *largest = std::max({*largest, static_cast<size_t>(now.largest_free), std::min(room, xseg_torch::memory_of(device).first)});
  }
  void* getBaseAllocation(void* block, size_t* bytes) override {
    const size_t own = own_pools.any() ? own_pools.size(block) : 0;
    if (own == 0) return xseg_torch_base_alloc(block, bytes);
    if (bytes != nullptr) *bytes = own;
    return block;
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return xseg_torch::statistics(figures(device), baseline(device), own_pools.figures(device));
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const auto now = figures(device);
    std::lock_guard<std::mutex> lock(mutex_);
    since_[device] = now;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    own_pools.reset_peaks(device);
    check(xseg_tags_reset_peaks(device), "reset the peaks of tags");
    if (used(device)) check(xseg_reset_peaks(heap_of(device)), "reset the peaks");
  }

#if XSEG_TORCH_SINCE(2, 11)
  cca::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return xseg_torch::snapshot(pool, traces, history, own_pools);
  }
  void recordHistory(bool on, cca::CreateContextFn context, size_t entries, cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    history.set(on, context, entries, when, clear, skipped);
  }
#else
  cca::SnapshotInfo snapshot(MempoolId_t pool) override { return xseg_torch::snapshot(pool, true, history, own_pools); }
  void recordHistory(bool on, cca::CreateContextFn context, size_t entries, cca::RecordContext when, bool clear) override {
    history.set(on, context, entries, when, clear, {});
  }
#endif
  bool isHistoryEnabled() override { return history.on(); }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
    std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }
  // Told of all mappings, and of the ranges of pools with an allocator of their own as segments, which NCCL's tracker registers.
  // That one must not register the heap's memory: it moves, and lies in other pieces on each rank.
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    TORCH_CHECK(!xseg_torch::registers_all(),
                "NCCL cannot register all memory under xseg, which moves it; unset TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK, and "
                "register a torch.cuda.MemPool(backend.mem_allocator) by backend.register_mem_pool instead");
    std::lock_guard<std::mutex> lock(mutex_);
    trackers_.push_back(std::move(tracker));
    tracked_.store(true, std::memory_order_relaxed);
  }
  void tell_trackers(const TraceEntry& entry) {
    if (!tracked_.load(std::memory_order_relaxed)) return;
    std::vector<cca::AllocatorTraceTracker> told;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      told = trackers_;
    }
    for (const auto& tracker : told) {
      try {
        tracker(entry);
      } catch (const std::exception& error) {
        // No exception may pass through the library.
        TORCH_WARN("xseg: a tracker of mappings failed: ", error.what());
      }
    }
  }

  void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t pool, Filter filter) override {
    const auto own_takes = [filter](void* stream) { return filter(static_cast<cudaStream_t>(stream)); };
    const auto begun = own_pools.begin(device, {pool.first, pool.second}, own_takes);
    TORCH_CHECK(begun != OwnPools::Begun::open_already, "allocations go to pool ", pool.first, ",", pool.second, " already; end that first");
    if (begun == OwnPools::Begun::yes) return;
    std::lock_guard<std::mutex> lock(pools_mutex_);
    auto own = std::make_unique<Filter>(std::move(filter));
    check(xseg_device_begin_pool(device, {pool.first, pool.second}, &takes, own.get()), "open a pool");
    filters_[{device, pool}] = std::move(own);
  }
  void endAllocateToPool(c10::DeviceIndex device, MempoolId_t pool) override {
    if (own_pools.end(device, {pool.first, pool.second})) return;
    std::lock_guard<std::mutex> lock(pools_mutex_);
    check(xseg_device_end_pool(device, {pool.first, pool.second}), "close a pool");
    filters_.erase({device, pool});
  }
  void releasePool(c10::DeviceIndex device, MempoolId_t pool) override {
    // Called by destructors, which an exception would end the process in; a forked child, too, destroys what it has copies of.
    xseg_heap* heap = nullptr;
    auto status = xseg_device_heap(device, &heap);
    if (status == XSEG_OK) {
      if (own_pools.release(device, {pool.first, pool.second})) return;
      status = xseg_release_capture(heap, {pool.first, pool.second});
    }
    if (status != XSEG_OK) TORCH_WARN("xseg could not release a pool: ", xseg_last_error());
  }
#if XSEG_TORCH_SINCE(2, 11)
  void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> other) override {
#else
  // The pool's owner keeps the allocator for as long as the pool.
  void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t pool, CUDAAllocator* given) override {
    std::shared_ptr<CUDAAllocator> other(std::shared_ptr<void>(), given);
#endif
    if (other != nullptr && other.get() != this) return own_pools.make(device, {pool.first, pool.second}, xseg_torch::source(std::move(other)));
    if (own_pools.retain(device, {pool.first, pool.second})) return;
    check(xseg_retain_capture(heap_of(device), {pool.first, pool.second}), "make a pool");
  }
  int getPoolUseCount(c10::DeviceIndex device, MempoolId_t pool) override {
    if (const auto own = own_pools.uses(device, {pool.first, pool.second})) return *own;
    uint32_t uses = 0;
    check(xseg_capture_uses(heap_of(device), {pool.first, pool.second}, &uses), "count the uses of a pool");
    return static_cast<int>(uses);
  }

#if XSEG_TORCH_SINCE(2, 11)
  // The end of every pool sets this to false.
  void setUseOnOOM(c10::DeviceIndex, MempoolId_t, bool wanted) override {
    TORCH_CHECK(!wanted, "torch.cuda.MemPool(use_on_oom=True) does not work on xseg; leave it out");
  }
#else
  void setUseOnOOM(c10::DeviceIndex, MempoolId_t) override {
    TORCH_CHECK(false, "torch.cuda.MemPool(use_on_oom=True) does not work on xseg; leave it out");
  }
#endif
#if XSEG_TORCH_SINCE(2, 10)
  void setNoSplit(c10::DeviceIndex, MempoolId_t) override {
    TORCH_CHECK(false, "torch.cuda.MemPool(no_split=True) does not work on xseg; leave it out");
  }
#endif

  bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return xseg_torch::are_live(device, pool, expected);
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device, MempoolId_t pool) override {
    return xseg_torch::take_checkpoint(device, pool);
  }
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) override {
    return xseg_torch::apply_checkpoint(device, state, history, &give_back);
  }
  cca::ShareableHandle shareIpcHandle(void* block) override { return xseg_torch::share(block); }
  std::shared_ptr<void> getIpcDevPtr(std::string ticket) override { return xseg_torch::receive(ticket); }

  // PyTorch asks once for each pair, before `dev` first copies to or from memory of `dev_to_access`, and reads and writes that by kernels
  // from then on.
  void enablePeerAccess(c10::DeviceIndex dev, c10::DeviceIndex dev_to_access) override {
    // For memory that is not the heap's.
    CUDAPluggableAllocator::enablePeerAccess(dev, dev_to_access);
    peers_.grant(dev, dev_to_access);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peers) override {
    // Where the device that copies was not given access, only the call that names both can copy mapped memory. Memory of a pool with
    // an allocator of its own is that one's to give access to.
    const bool reached = peers && peers_.granted(from_device, to_device) && !own_pools.any();
    if (to_device != from_device && !reached) return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
    return CUDAPluggableAllocator::memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  std::string name() override { return "xseg"; }

  // Waits for a device, where no pool is open into which a graph may be captured.
  bool wait_for(int device) {
    std::lock_guard<std::mutex> lock(pools_mutex_);
    return filters_.empty() && xseg_torch::idle(device);
  }
  // The same for a request of a pool with an allocator of its own.
  bool wait_for(int device, cudaStream_t stream) {
    if (own_pools.open() > 1 || xseg_torch::capturing(device, stream) || !wait_for(device)) return false;
    return xseg_tick(heap_of(device)) == XSEG_OK;
  }

  // Before the exception for it: PyTorch's observers.
  void tell_out_of_memory(int device, size_t bytes) {
    std::vector<cca::OutOfMemoryObserver> told;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      told = observers_;
    }
    if (told.empty() && !history.on()) return;
    const auto memory = xseg_torch::memory_of(static_cast<c10::DeviceIndex>(device));
    history.note(TraceEntry::OOM, device, memory.first, bytes, nullptr);
    for (const auto& observer : told) observer(device, bytes, memory.second, memory.first);
  }

 private:
  uint64_t limit_of(int device) {
    uint64_t limit = 0;
    check(xseg_limit(heap_of(device), &limit), "read the limit");
    return limit;
  }

  // What counting began with.
  Figures baseline(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return since_[device];
  }

  // Never held while the heap is called, whose callbacks take it.
  std::mutex mutex_;
  std::vector<cca::OutOfMemoryObserver> observers_;
  std::vector<cca::AllocatorTraceTracker> trackers_;
  std::atomic<bool> tracked_{false};
  std::mutex budget_mutex_;
  // Bytes of pools with an allocator of their own.
  uint64_t in_pools_[kDevices] = {};
  // How much of them is above the limit: it was set below what they had.
  uint64_t over_[kDevices] = {};
  xseg_torch::Peers peers_;
  std::mutex pools_mutex_;
  std::map<std::pair<int, MempoolId_t>, std::unique_ptr<Filter>> filters_;
  Figures since_[kDevices];
};

// Never destroyed either.
std::shared_ptr<Allocator>& allocator() {
  static auto* one = new std::shared_ptr<Allocator>();
  return *one;
}

void report(void* block, int64_t bytes, int device) {
  const auto now = figures(device).now;
  c10::reportMemoryUsageToProfiler(block, bytes, now.allocated, now.reserved,
                                   c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
}

// Lets others that hold memory give some up, as PyTorch's own allocator does; says whether any did.
bool others_freed() {
  bool freed = own_pools.any() && own_pools.trim({}) > 0;
  for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
    freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  }
  return freed;
}

OwnPools::Outside outside() {
  return {
      [](bool made, const OwnPools::Range& range) {
        allocator()->tell_trackers(TraceEntry(made ? TraceEntry::SEGMENT_ALLOC : TraceEntry::SEGMENT_FREE,
                                              static_cast<c10::DeviceIndex>(range.device), reinterpret_cast<size_t>(range.address),
                                              range.bytes, static_cast<cudaStream_t>(range.stream), MempoolId_t{range.pool.first, range.pool.second},
                                              c10::getApproximateTime()));
      },
      [](int device, int64_t bytes) { return allocator()->pools_grow(device, bytes); },
      &xseg_torch::capturing,
      &xseg_torch::record,
      &xseg_torch::passed,
      &xseg_torch::drop,
      [](int device) { return allocator()->wait_for(device); },
  };
}

void* take(size_t bytes, int device, cudaStream_t stream) {
  if (C10_UNLIKELY(own_pools.any())) {
    auto taken = own_pools.take(device, bytes, stream);
    if (taken.block != nullptr) return taken.block;
    // The heap may have memory that its streams have not passed, which it gives up then.
    if (taken.ours && (others_freed() || allocator()->wait_for(device, stream))) {
      taken = own_pools.take(device, bytes, stream);
      if (taken.block != nullptr) return taken.block;
    }
    if (taken.ours) {
      allocator()->tell_out_of_memory(device, bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. xseg: the own allocator of a torch.cuda.MemPool, or the limit, has no ",
                       bytes, " bytes");
    }
  }
  void* block = nullptr;
  auto status = xseg_device_alloc(device, bytes, stream, &block);
  if (C10_UNLIKELY(status == XSEG_OUT_OF_MEMORY) && others_freed()) {
    status = xseg_device_alloc(device, bytes, stream, &block);
  }
  if (C10_UNLIKELY(status != XSEG_OK)) {
    const std::string why = xseg_last_error();
    if (status == XSEG_OUT_OF_MEMORY) allocator()->tell_out_of_memory(device, bytes);
    if (status == XSEG_OUT_OF_MEMORY || status == XSEG_ADDRESS_SPACE) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. xseg: ", why);
    }
    TORCH_CHECK(false, "xseg could not allocate: ", why);
  }
  if (C10_UNLIKELY(history.on())) {
    size_t rounded = 0;
    xseg_torch_base_alloc(block, &rounded);
    history.allocated(device, block, rounded, stream, history.context(cca::RecordContext::STATE));
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) report(block, static_cast<int64_t>(bytes), device);
  return block;
}

void give_back(void* block) {
  if (block == nullptr) return;
  if (C10_UNLIKELY(own_pools.any())) {
    // In a forked child, where it is the parent's, as all blocks are.
    if (xseg_device_block(block, nullptr, nullptr, nullptr) == XSEG_UNAVAILABLE) return;
    if (own_pools.give(block)) return;
  }
  const bool recorded = history.on(), profiled = c10::memoryProfilingEnabled();
  if (C10_UNLIKELY(recorded || profiled)) {
    int device = 0;
    uint64_t asked = 0, rounded = 0;
    if (xseg_device_block(block, &device, &asked, &rounded) == XSEG_OK) {
      // Before the free, so that no other thread's allocation of the same address comes first.
      if (recorded) history.freed(device, block, rounded, history.context(cca::RecordContext::ALL));
      if (profiled) report(block, -static_cast<int64_t>(asked), device);
    }
  }
  const auto status = xseg_device_free(block);
  if (C10_UNLIKELY(status != XSEG_OK)) TORCH_WARN("xseg could not free a block: ", xseg_last_error());
}

void watch(const xseg_mapping_event* event, void*) {
  const auto action = event->change == XSEG_UNMAPPING ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_MAP;
  const auto device = static_cast<int>(event->device);
  const auto address = reinterpret_cast<size_t>(event->address);
  if (history.on()) history.note(action, device, address, event->bytes, nullptr);
  allocator()->tell_trackers(TraceEntry(action, static_cast<c10::DeviceIndex>(device), address, event->bytes, nullptr,
                                        MempoolId_t{0, 0}, c10::getApproximateTime()));
}

}  // namespace

// Whether a pool has an allocator of its own.
extern "C" __attribute__((visibility("default"))) int xseg_torch_own_pool(uint64_t first, uint64_t second) {
  return own_pools.knows(OwnPools::Id{first, second}) ? 1 : 0;
}

// Makes xseg the allocator of this process; null, or why not.
extern "C" __attribute__((visibility("default"))) const char* xseg_torch_install() {
  static auto* why = new std::string();
  try {
    allocator() = std::make_shared<Allocator>();
    if (xseg_device_watch(&watch, nullptr) != XSEG_OK) {
      *why = xseg_last_error();
      return why->c_str();
    }
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(allocator());
    // `torch.accelerator` and others look here.
    c10::SetAllocator(c10::DeviceType::CUDA, allocator().get(), 255);
  } catch (const std::exception& error) {
    *why = error.what();
    return why->c_str();
  }
  return nullptr;
}
