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
#include <optional>
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

  // What a free waits for: that a stream has done what was queued.
  struct Wait {
    // Whose stream it is; default streams of all devices have the same handle.
    int device = 0;
    void* stream = nullptr;
    void* event = nullptr;
    // Not while the stream captures a graph, to which an event would belong.
    bool recorded = false;
    // The range's own stream, which may have the range again at once.
    bool own = false;
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
    // A graph was captured with it, and uses it in every replay, freed or not: it stays until the pool is over.
    bool captured = false;
    // By device.
    std::vector<std::pair<int, void*>> used_on;
    std::vector<Wait> waits;
  };

  struct Outside {
    // A range was made, or is going to be given back. Called without the lock of this class.
    std::function<void(bool made, const Range& range)> announce;
    // May a device's pools grow by that many bytes? Told of a shrink by a negative number.
    std::function<bool(int device, int64_t bytes)> budget;
    // Does a stream capture a graph?
    std::function<bool(int device, void* stream)> capturing;
    // An event that completes when the work queued on a stream of a device has.
    std::function<void*(int device, void* stream)> record;
    // Whether it has.
    std::function<bool(void* event)> passed;
    // Ends an event.
    std::function<void(void* event)> drop;
    // Waits until a device has done all that was queued; false where that cannot be, since a graph is captured. Called without the lock.
    std::function<bool(int device)> idle;
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

  bool knows(Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(pools_.begin(), pools_.end(), [&](const auto& pool) { return pool.first.second == id; });
  }

  // How many pools are open.
  size_t open() {
    std::lock_guard<std::mutex> lock(mutex_);
    return open_.size();
  }

  // Makes a pool, with one use.
  void make(int device, Id id, Source source) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pools_[{device, id}];
    pool.source = std::move(source);
    pool.uses++;
    any_.store(true, std::memory_order_relaxed);
  }
  // One use more; false for a pool that is not known.
  bool retain(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto pool = pools_.find({device, id});
    if (pool == pools_.end()) return false;
    pool->second.uses++;
    return true;
  }
  // None for a pool that is not known.
  std::optional<int> uses(int device, Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto pool = pools_.find({device, id});
    if (pool == pools_.end()) return std::nullopt;
    return pool->second.uses;
  }

  enum class Begun { yes, unknown, open_already };

  // From now on requests that the filter takes come from the pool, which gets one use more. It may be open once: nobody could tell
  // whose end it is that comes.
  Begun begin(int device, Id id, Filter filter) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto pool = pools_.find({device, id});
    if (pool == pools_.end()) return Begun::unknown;
    if (is_open(pool->first)) return Begun::open_already;
    pool->second.uses++;
    open_.emplace_back(pool->first, std::move(filter));
    return Begun::yes;
  }
  // False for a pool that is not known.
  bool end(int device, Id id) {
    const Key key{device, id};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (pools_.count(key) == 0) return false;
      open_.erase(std::remove_if(open_.begin(), open_.end(), [&](const auto& one) { return one.first == key; }), open_.end());
    }
    // Its last use may have ended before.
    sweep(key, false);
    return true;
  }

  // Ends one use; with the last one the pool gives back what is free now, and the rest as it is freed. False for a pool that is not
  // known.
  bool release(int device, Id id) {
    const Key key{device, id};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto pool = pools_.find(key);
      if (pool == pools_.end()) return false;
      if (pool->second.uses > 0) pool->second.uses--;
      if (pool->second.uses > 0) return true;
    }
    sweep(key, true);
    return true;
  }

  Taken take(int device, size_t bytes, void* stream) {
    Key key;
    Source source;
    size_t need = 0;
    bool captured = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // The pool that was opened last, as contexts nest.
      const auto wanted = std::find_if(open_.rbegin(), open_.rend(),
                                       [&](const auto& one) { return one.first.first == device && one.second(stream); });
      if (wanted == open_.rend()) return {};
      // More than any device has, and more than fits into the sums here.
      if (bytes > size_t{1} << 62) return {true, nullptr};
      need = std::max((bytes + kGranule - 1) / kGranule, size_t{1}) * kGranule;
      key = wanted->first;
      captured = outside_.capturing(device, stream);
      if (void* block = reuse(key, need, bytes, stream, captured)) return {true, block};
      source = pools_.at(key).source;
    }
    void* block = grow(device, need, source);
    // What gives memory back may wait for the device, which no capture may.
    if (block == nullptr && !captured && trim_device(device) > 0) block = grow(device, need, source);
    if (block == nullptr) return {true, nullptr};
    Range range;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& made = pools_.at(key).ranges[block];
      made.address = block;
      made.bytes = need;
      made.requested = bytes;
      made.stream = stream;
      made.device = device;
      made.pool = key.second;
      made.order = next_++;
      made.live = true;
      made.captured = captured;
      owners_[block] = key;
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
    Key key;
    bool ended = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto* range = find(block);
      if (range == nullptr || !range->live) return false;
      count(*range, false);
      range->live = false;
      for (const auto& [device, stream] : range->used_on) range->waits.push_back({device, stream, nullptr, false, false});
      range->used_on.clear();
      range->waits.push_back({range->device, range->stream, nullptr, false, true});
      arm(*range);
      key = owners_.at(block);
      ended = pools_.at(key).uses <= 0;
    }
    if (ended) sweep(key, true, block);
    return true;
  }

  // Says that work on a device's stream uses a block; false for one that is of no pool.
  bool use(void* block, int device, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* range = find(block);
    if (range == nullptr || !range->live) return false;
    auto& streams = range->used_on;
    const std::pair<int, void*> user{device, stream};
    const bool known = user == std::make_pair(range->device, range->stream) || std::find(streams.begin(), streams.end(), user) != streams.end();
    if (!known) streams.push_back(user);
    return true;
  }

  // Bytes of a block's range; 0 for one that is of no pool.
  size_t size(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto* range = find(block);
    return range == nullptr ? 0 : range->bytes;
  }

  // Gives free ranges back: of one pool, or of all where `id` is zeros. Bytes.
  size_t trim(Id id) {
    return sweep_all([&](const Key& key) { return id == Id{} || key.second == id; });
  }

  // The ranges of one pool, or of all where `id` is zeros, by age.
  std::vector<Range> ranges(Id id) {
    std::vector<Range> found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, pool] : pools_) {
      if (id != Id{} && key.second != id) continue;
      for (const auto& [address, range] : pool.ranges) found.push_back(range);
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
    std::unordered_map<void*, Range> ranges;
  };

  // All that follow are called with the lock, but for those that say otherwise.

  bool is_open(const Key& key) const {
    return std::any_of(open_.begin(), open_.end(), [&](const auto& one) { return one.first == key; });
  }

  Range* find(void* block) {
    const auto owner = owners_.find(block);
    return owner == owners_.end() ? nullptr : &pools_.at(owner->second).ranges.at(block);
  }

  // A free range of the same stream that is not much too large.
  void* reuse(const Key& key, size_t need, size_t bytes, void* stream, bool captured) {
    Range* best = nullptr;
    for (auto& [address, range] : pools_.at(key).ranges) {
      if (range.live || range.stream != stream || range.bytes < need || range.bytes > need + need / 4) continue;
      if (best != nullptr && std::make_pair(best->bytes, best->order) < std::make_pair(range.bytes, range.order)) continue;
      if (settled(range, true)) best = &range;
    }
    if (best == nullptr) return nullptr;
    for (const auto& wait : best->waits) {
      if (wait.recorded) outside_.drop(wait.event);
    }
    best->waits.clear();
    best->live = true;
    best->captured |= captured;
    best->requested = bytes;
    count(*best, true);
    return best->address;
  }

  // Records the events of a free range that could not be before.
  void arm(Range& range) {
    for (auto& wait : range.waits) {
      if (wait.recorded || outside_.capturing(wait.device, wait.stream)) continue;
      wait.event = outside_.record(wait.device, wait.stream);
      wait.recorded = true;
    }
  }

  // Whether the streams that used a range have passed its free, but for its own where that asks.
  bool settled(Range& range, bool for_own) {
    arm(range);
    auto& waits = range.waits;
    const auto over = [&](const Wait& wait) {
      if (!wait.recorded || !outside_.passed(wait.event)) return false;
      outside_.drop(wait.event);
      return true;
    };
    waits.erase(std::remove_if(waits.begin(), waits.end(), over), waits.end());
    return std::all_of(waits.begin(), waits.end(), [&](const Wait& wait) { return for_own && wait.own; });
  }

  void count(const Range& range, bool up) {
    auto& figures = figures_[range.device];
    figures.live += up ? range.bytes : -range.bytes;
    figures.requested += up ? range.requested : -range.requested;
    figures.peak_live = std::max(figures.peak_live, figures.live);
    figures.peak_requested = std::max(figures.peak_requested, figures.requested);
  }

  // Called without the lock.
  void* grow(int device, size_t bytes, const Source& source) {
    const auto size = static_cast<int64_t>(bytes);
    if (!outside_.budget(device, size)) return nullptr;
    void* block = source.take(bytes);
    if (block == nullptr) outside_.budget(device, -size);
    return block;
  }

  // Called without the lock.
  size_t trim_device(int device) {
    return sweep_all([&](const Key& key) { return key.first == device; });
  }

  // Called without the lock.
  size_t sweep_all(const std::function<bool(const Key&)>& wanted) {
    std::vector<Key> keys;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [key, pool] : pools_) {
        if (wanted(key)) keys.push_back(key);
      }
    }
    size_t bytes = 0;
    for (const Key& key : keys) bytes += sweep(key, true);
    return bytes;
  }

  // Gives back free ranges of a pool, or one of them, and forgets it where it is over. Bytes. Called without the lock.
  size_t sweep(const Key& key, bool ranges, void* only = nullptr) {
    // Frees never wait.
    const bool idle = ranges && only == nullptr && has_captured(key) && outside_.idle(key.first);
    std::vector<Range> going;
    Source source;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = pools_.find(key);
      if (found == pools_.end()) return 0;
      auto& pool = found->second;
      source = pool.source;
      const auto goes = [&](Range& range) {
        return !range.live && settled(range, false) && (!range.captured || (idle && pool.uses <= 0));
      };
      const auto go = [&](const Range& range) {
        figures_[range.device].reserved -= range.bytes;
        owners_.erase(range.address);
        going.push_back(range);
      };
      if (only != nullptr) {
        const auto at = pool.ranges.find(only);
        if (at != pool.ranges.end() && goes(at->second)) {
          go(at->second);
          pool.ranges.erase(at);
        }
      } else if (ranges) {
        for (auto at = pool.ranges.begin(); at != pool.ranges.end();) {
          if (goes(at->second)) {
            go(at->second);
            at = pool.ranges.erase(at);
          } else {
            ++at;
          }
        }
      }
      if (pool.uses <= 0 && pool.ranges.empty() && !is_open(key)) pools_.erase(found);
      any_.store(!pools_.empty(), std::memory_order_relaxed);
    }
    size_t bytes = 0;
    for (const auto& range : going) {
      outside_.announce(false, range);
      source.give(range.address);
      outside_.budget(range.device, -static_cast<int64_t>(range.bytes));
      bytes += range.bytes;
    }
    return bytes;
  }

  // Whether a pool that is over has free ranges of graphs, whose last replays may still run on any stream, and none is open, into which
  // a graph may be captured. Called without the lock.
  bool has_captured(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pools_.find(key);
    if (found == pools_.end() || found->second.uses > 0 || !open_.empty()) return false;
    const auto& ranges = found->second.ranges;
    return std::any_of(ranges.begin(), ranges.end(), [](const auto& one) { return one.second.captured && !one.second.live; });
  }

  Outside outside_;
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<Key, Pool> pools_;
  // Pools that are open, each once and the last opened at the end, with what they take.
  std::vector<std::pair<Key, Filter>> open_;
  std::unordered_map<void*, Key> owners_;
  std::map<int, Figures> figures_;
  int32_t next_ = 0;
};

}  // namespace xseg_torch
