// Pools of torch.cuda.MemPool that have an allocator of their own, as NCCL's for the buffers that it registers. Each block is a
// range of that allocator: it never moves, is never cut or joined, and is announced as it comes and goes, so that whoever registers
// ranges finds every block in exactly one of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace xseg_torch {

// Without PyTorch's types, so that it can be tested where there is no GPU.
class OwnPools {
 public:
  using Id = std::pair<uint64_t, uint64_t>;
  using Filter = std::function<bool(void* stream)>;

  // Where the memory of a pool comes from; `take` gives null when there is none.
  struct Source {
    std::function<void*(size_t bytes)> take;
    std::function<void(void* block)> give;
  };

  struct Range {
    void* address = nullptr;
    size_t bytes = 0;
    size_t requested = 0;
    void* stream = nullptr;
    int device = 0;
    Id pool;
    // Counts the ranges as they were made.
    int32_t order = 0;
    bool live = false;
    std::vector<void*> used_on;
    std::vector<void*> events;
  };

  struct Outside {
    // A range was made, or is going to be given back. Called without the lock of this class.
    std::function<void(bool made, const Range& range)> announce;
    // May a device's pools grow by that many bytes? Told of a shrink by a negative number.
    std::function<bool(int device, int64_t bytes)> budget;
    // An event that completes when the work queued on a stream of a device has.
    std::function<void*(int device, void* stream)> record;
    // Whether it has; it is destroyed if so.
    std::function<bool(void* event)> passed;
  };

  struct Taken {
    // Whether a pool was open for the request; no block then means that it has no memory.
    bool ours = false;
    void* block = nullptr;
  };

  struct Figures {
    uint64_t live = 0, requested = 0, reserved = 0;
    uint64_t peak_live = 0, peak_requested = 0, peak_reserved = 0;
  };

  // Whole granules, as the functions that export memory want them.
  static constexpr size_t kGranule = size_t{2} << 20;

  explicit OwnPools(Outside outside) : outside_(std::move(outside)) {}

  // Whether there is any pool, or a block of one: what is asked on every allocation and free.
  bool any() const { return any_.load(std::memory_order_relaxed); }

  bool knows(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return pools_.count({device, id}) != 0;
  }
  bool knows(Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(pools_.begin(), pools_.end(), [&](const auto& pool) { return pool.first.second == id; });
  }

  // Makes a pool, with one use.
  void make(int device, Id id, Source source) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pools_[{device, id}];
    pool.source = std::move(source);
    pool.uses++;
    any_.store(true, std::memory_order_relaxed);
  }
  void retain(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    pools_.at({device, id}).uses++;
  }
  int uses(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto pool = pools_.find({device, id});
    return pool == pools_.end() ? 0 : pool->second.uses;
  }

  // From now on requests that the filter takes come from the pool, which gets one use more.
  void begin(int device, Id id, Filter filter) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pools_.at({device, id});
    pool.uses++;
    pool.filters.push_back(std::move(filter));
    open_.push_back({device, id});
  }
  void end(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pools_.at({device, id});
    if (!pool.filters.empty()) pool.filters.pop_back();
    const auto last = std::find(open_.rbegin(), open_.rend(), Key{device, id});
    if (last != open_.rend()) open_.erase(std::next(last).base());
  }

  // Ends one use; with the last one the pool gives back what is free now, and the rest as it is freed.
  void release(int device, Id id) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto pool = pools_.find({device, id});
      if (pool == pools_.end() || --pool->second.uses > 0) return;
    }
    sweep([&](const Range& range) { return range.device == device && range.pool == id; });
  }

  Taken take(int device, size_t bytes, void* stream) {
    const size_t need = std::max((bytes + kGranule - 1) / kGranule, size_t{1}) * kGranule;
    Key key;
    Source source;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // The pool that was opened last, as contexts nest.
      const auto wanted = std::find_if(open_.rbegin(), open_.rend(), [&](const Key& one) {
        if (one.first != device) return false;
        const auto& filters = pools_.at(one).filters;
        return std::any_of(filters.begin(), filters.end(), [&](const Filter& takes) { return takes(stream); });
      });
      if (wanted == open_.rend()) return {};
      key = *wanted;
      if (void* block = reuse(key, need, bytes, stream)) return {true, block};
      source = pools_.at(key).source;
    }
    void* block = grow(device, need, source);
    if (block == nullptr) {
      sweep([&](const Range& range) { return range.device == device; });
      block = grow(device, need, source);
    }
    if (block == nullptr) return {true, nullptr};
    Range range;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& made = ranges_[block];
      made.address = block;
      made.bytes = need;
      made.requested = bytes;
      made.stream = stream;
      made.device = device;
      made.pool = key.second;
      made.order = next_++;
      made.live = true;
      auto& figures = figures_[device];
      figures.reserved += need;
      figures.peak_reserved = std::max(figures.peak_reserved, figures.reserved);
      count(made, true);
      range = made;
    }
    outside_.announce(true, range);
    return {true, block};
  }

  // Frees a block; false for one that is of no pool.
  bool give(void* block) {
    bool ended = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = ranges_.find(block);
      if (found == ranges_.end() || !found->second.live) return false;
      auto& range = found->second;
      count(range, false);
      range.live = false;
      for (void* stream : range.used_on) range.events.push_back(outside_.record(range.device, stream));
      range.used_on.clear();
      const auto pool = pools_.find({range.device, range.pool});
      ended = pool == pools_.end() || pool->second.uses <= 0;
    }
    if (ended) sweep([&](const Range& range) { return range.address == block; });
    return true;
  }

  // Says that work on a stream uses a block; false for one that is of no pool.
  bool use(void* block, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranges_.find(block);
    if (found == ranges_.end() || !found->second.live) return false;
    auto& streams = found->second.used_on;
    const bool known = stream == found->second.stream || std::find(streams.begin(), streams.end(), stream) != streams.end();
    if (!known) streams.push_back(stream);
    return true;
  }

  // Bytes of a block's range; 0 for one that is of no pool.
  size_t size(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranges_.find(block);
    return found == ranges_.end() ? 0 : found->second.bytes;
  }

  // Gives free ranges back: of one pool, or of all where `id` is zeros.
  void trim(Id id) {
    sweep([&](const Range& range) { return id == Id{} || range.pool == id; });
  }

  // The ranges of one pool, or of all where `id` is zeros, by age.
  std::vector<Range> ranges(Id id) {
    std::vector<Range> found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [address, range] : ranges_) {
      if (id == Id{} || range.pool == id) found.push_back(range);
    }
    std::sort(found.begin(), found.end(), [](const Range& a, const Range& b) { return a.order < b.order; });
    return found;
  }

  Figures figures(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return figures_[device];
  }
  void reset_peaks(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& one = figures_[device];
    one.peak_live = one.live;
    one.peak_requested = one.requested;
    one.peak_reserved = one.reserved;
  }

 private:
  using Key = std::pair<int, Id>;
  struct Pool {
    Source source;
    int uses = 0;
    std::vector<Filter> filters;
  };

  // A free range of the same stream that is not much too large. Called with the lock.
  void* reuse(const Key& key, size_t need, size_t bytes, void* stream) {
    Range* best = nullptr;
    for (auto& [address, range] : ranges_) {
      if (range.live || range.device != key.first || range.pool != key.second || range.stream != stream) continue;
      if (range.bytes < need || range.bytes > need + need / 4 || !settled(range)) continue;
      if (best == nullptr || std::make_pair(range.bytes, range.order) < std::make_pair(best->bytes, best->order)) best = &range;
    }
    if (best == nullptr) return nullptr;
    best->live = true;
    best->requested = bytes;
    count(*best, true);
    return best->address;
  }

  // Whether the streams that used a range have passed its free. Called with the lock.
  bool settled(Range& range) {
    auto& events = range.events;
    events.erase(std::remove_if(events.begin(), events.end(), [&](void* event) { return outside_.passed(event); }), events.end());
    return events.empty();
  }

  void count(const Range& range, bool up) {
    auto& figures = figures_[range.device];
    figures.live += up ? range.bytes : -range.bytes;
    figures.requested += up ? range.requested : -range.requested;
    figures.peak_live = std::max(figures.peak_live, figures.live);
    figures.peak_requested = std::max(figures.peak_requested, figures.requested);
  }

  void* grow(int device, size_t bytes, const Source& source) {
    const auto size = static_cast<int64_t>(bytes);
    if (!outside_.budget(device, size)) return nullptr;
    void* block = source.take(bytes);
    if (block == nullptr) outside_.budget(device, -size);
    return block;
  }

  // Gives back free ranges that `wanted` says, and forgets pools that are over.
  void sweep(const std::function<bool(const Range&)>& wanted) {
    std::vector<std::pair<Range, Source>> going;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto at = ranges_.begin(); at != ranges_.end();) {
        auto& range = at->second;
        if (range.live || !wanted(range) || !settled(range)) {
          ++at;
          continue;
        }
        figures_[range.device].reserved -= range.bytes;
        going.emplace_back(range, pools_.at({range.device, range.pool}).source);
        at = ranges_.erase(at);
      }
      for (auto at = pools_.begin(); at != pools_.end();) {
        const bool held = std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& one) {
          return one.second.device == at->first.first && one.second.pool == at->first.second;
        });
        at = at->second.uses <= 0 && !held ? pools_.erase(at) : std::next(at);
      }
      any_.store(!pools_.empty(), std::memory_order_relaxed);
    }
    for (auto& [range, source] : going) {
      outside_.announce(false, range);
      source.give(range.address);
      outside_.budget(range.device, -static_cast<int64_t>(range.bytes));
    }
  }

  Outside outside_;
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<Key, Pool> pools_;
  // Pools that are open, the last opened at the end.
  std::vector<Key> open_;
  std::unordered_map<void*, Range> ranges_;
  std::map<int, Figures> figures_;
  int32_t next_ = 0;
};

}  // namespace xseg_torch
