// The pools with an allocator of their own, on pretended memory, streams and events.
#undef NDEBUG
#include "torch_pools.hpp"

#include <cassert>
#include <cstdio>
#include <set>
#include <string>
#include <thread>

using xseg_torch::OwnPools;

constexpr size_t MIB = size_t{1} << 20;
void* const A = reinterpret_cast<void*>(0xa0);
void* const B = reinterpret_cast<void*>(0xb0);

struct World {
  std::vector<std::string> said;
  std::set<void*> registered, held;
  // Streams that have work queued, and those that capture a graph.
  std::set<void*> busy, capturing;
  // Devices that have work queued.
  std::set<int> working;
  std::map<void*, std::pair<int, void*>> events;
  bool waits = true;
  int waited = 0;
  std::map<int, int64_t> used;
  int64_t limit = INT64_MAX;
  size_t memory = 1024 * MIB;
  uintptr_t next = 1 << 30;

  OwnPools::Outside outside() {
    return {
        [this](bool made, const OwnPools::Range& range) {
          // As NCCL does: nothing is registered twice, nothing goes that is not.
          if (made) assert(registered.insert(range.address).second);
          // The memory is there still when its end is announced.
          else assert(registered.erase(range.address) == 1 && held.count(range.address) == 1);
          said.push_back((made ? "made " : "gone ") + std::to_string(range.bytes / MIB));
        },
        [this](int device, int64_t bytes) {
          if (used[device] + bytes > limit) return false;
          used[device] += bytes;
          return true;
        },
        [this](int, void* stream) { return capturing.count(stream) == 1; },
        [this](int device, void* stream) -> void* {
          // It would be one of the graph's.
          assert(capturing.count(stream) == 0);
          auto* event = reinterpret_cast<void*>(next += 1);
          events[event] = {device, stream};
          return event;
        },
        [this](void* event) {
          const auto& [device, stream] = events.at(event);
          return working.count(device) == 0 && busy.count(stream) == 0;
        },
        [this](void* event) { assert(events.erase(event) == 1); },
        [this](int) {
          if (!waits) return false;
          waited++;
          busy.clear();
          return true;
        },
    };
  }
  OwnPools::Source source() {
    return {
        [this](size_t bytes) -> void* {
          if (bytes > memory) return nullptr;
          memory -= bytes;
          auto* block = reinterpret_cast<void*>(next += 64 * MIB);
          held.insert(block);
          return block;
        },
        [this](void* block) { assert(held.erase(block) == 1 && registered.count(block) == 0); },
    };
  }
};

const OwnPools::Id ONE{0, 1}, TWO{0, 2};
bool all(void*) { return true; }

void blocks_are_ranges_of_their_own() {
  World world;
  OwnPools pools(world.outside());
  assert(!pools.any() && !pools.take(0, MIB, A).ours);
  pools.make(0, ONE, world.source());
  assert(pools.any() && !pools.take(0, MIB, A).ours);
  pools.begin(0, ONE, all);
  void* small = pools.take(0, 1, A).block;
  void* large = pools.take(0, 5 * MIB, A).block;
  assert(!pools.take(1, MIB, A).ours);
  assert(pools.size(small) == 2 * MIB && pools.size(large) == 6 * MIB && pools.size(A) == 0);
  assert((world.said == std::vector<std::string>{"made 2", "made 6"}));
  const auto ranges = pools.ranges(ONE);
  assert(ranges.size() == 2 && ranges[0].address == small && ranges[0].order < ranges[1].order && ranges[1].requested == 5 * MIB);
  const auto figures = pools.figures(0);
  assert(figures.live == 8 * MIB && figures.requested == 5 * MIB + 1 && figures.reserved == 8 * MIB);
  // Free memory is kept for its stream, and stays announced.
  assert(pools.give(large) && !pools.give(large) && !pools.give(A));
  void* other = pools.take(0, 6 * MIB, B).block;
  assert(other != large && pools.take(0, 6 * MIB, A).block == large);
  // Nor does a small request get what is far too large for it.
  assert(pools.give(large) && pools.take(0, MIB, A).block != large);
  assert(pools.figures(0).peak_live == 14 * MIB);
  pools.end(0, ONE);
  assert(!pools.take(0, MIB, A).ours);
}

void a_pool_ends_with_its_last_block() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  void* kept = pools.take(0, 2 * MIB, A).block;
  void* freed = pools.take(0, 4 * MIB, A).block;
  pools.end(0, ONE);
  pools.release(0, ONE);
  assert(pools.uses(0, ONE) == 1 && pools.give(freed) && world.held.size() == 2);
  pools.release(0, ONE);
  assert(world.held.size() == 1 && pools.any() && pools.uses(0, ONE) == 0 && pools.uses(0, TWO) == std::nullopt);
  assert(pools.give(kept) && world.held.empty() && !pools.any() && !pools.knows(ONE));
  assert((world.said == std::vector<std::string>{"made 2", "made 4", "gone 4", "gone 2"}) && world.used[0] == 0);
  assert(world.events.empty() && world.waited == 0);
}

void what_other_streams_use_waits_for_them() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  void* block = pools.take(0, 2 * MIB, A).block;
  assert(pools.use(block, 0, B) && pools.use(block, 0, B) && pools.use(block, 0, A) && !pools.use(A, 0, B));
  world.busy = {B};
  assert(pools.give(block));
  void* second = pools.take(0, 2 * MIB, A).block;
  assert(second != block && pools.trim(ONE) == 0 && world.held.count(block) == 1);
  world.busy.clear();
  assert(pools.take(0, 2 * MIB, A).block == block);
  // Its own stream may have it at once, but only who has passed gives it back.
  world.busy = {A};
  assert(pools.give(block) && pools.take(0, 2 * MIB, A).block == block && pools.give(block));
  assert(pools.trim({}) == 0 && world.held.count(block) == 1);
  world.busy.clear();
  assert(pools.trim({}) == 2 * MIB && world.held.count(block) == 0 && world.held.count(second) == 1 && world.events.empty());
}

// Default streams of all devices have the same handle.
void what_the_same_handle_of_another_device_uses_waits_for_that() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  void* block = pools.take(0, 2 * MIB, A).block;
  world.working = {1};
  assert(pools.use(block, 1, A) && pools.give(block));
  assert(pools.take(0, 2 * MIB, A).block != block);
  world.working.clear();
  assert(pools.take(0, 2 * MIB, A).block == block);
}

// What a graph was captured with is read and written by every replay, freed or not.
void what_a_graph_has_stays_as_long_as_it() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.make(0, TWO, world.source());
  pools.begin(0, ONE, all);
  void* before = pools.take(0, 2 * MIB, A).block;
  assert(pools.give(before));
  world.capturing = {A};
  // A range that was free, and one that is made.
  assert(pools.take(0, 2 * MIB, A).block == before);
  void* within = pools.take(0, 4 * MIB, A).block;
  assert(pools.give(before) && pools.give(within) && pools.take(0, 4 * MIB, A).block == within && pools.give(within));
  world.capturing.clear();
  pools.end(0, ONE);
  // The graph has a use of its own beside that of the pool's owner.
  assert(pools.uses(0, ONE) == 2 && pools.trim({}) == 0 && pools.trim(ONE) == 0);
  pools.begin(0, TWO, all);
  world.memory = 0;
  assert(pools.take(0, 2 * MIB, A).block == nullptr && world.held.size() == 2);
  pools.release(0, ONE);
  assert(world.held.size() == 2 && world.waited == 0);
  // While another graph may be captured nothing is waited for.
  pools.release(0, ONE);
  assert(world.held.size() == 2 && world.waited == 0);
  pools.end(0, TWO);
  // A last replay may still run, on whatever stream.
  world.waits = false;
  assert(pools.trim({}) == 0 && world.held.size() == 2);
  world.waits = true;
  assert(pools.trim({}) == 6 * MIB && world.held.empty() && world.waited == 1 && world.events.empty());
}

void what_other_streams_use_within_a_capture_waits_until_it_is_over() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  world.capturing = {A, B};
  void* block = pools.take(0, 2 * MIB, A).block;
  assert(pools.use(block, 0, B) && pools.give(block));
  void* second = pools.take(0, 2 * MIB, A).block;
  assert(second != block && world.events.empty());
  world.capturing.clear();
  world.busy = {B};
  assert(pools.take(0, 2 * MIB, A).block != block);
  world.busy.clear();
  assert(pools.take(0, 2 * MIB, A).block == block);
}

void ends_come_in_any_order() {
  World world;
  OwnPools pools(world.outside());
  assert(pools.begin(0, ONE, all) == OwnPools::Begun::unknown && !pools.end(0, ONE) && !pools.release(0, ONE) && !pools.retain(0, ONE));
  pools.make(0, ONE, world.source());
  assert(pools.begin(0, ONE, all) == OwnPools::Begun::yes && pools.begin(0, ONE, all) == OwnPools::Begun::open_already);
  for (int more = 0; more < 3; more++) assert(pools.release(0, ONE));
  assert(pools.uses(0, ONE) == 0 && pools.take(0, MIB, A).block != nullptr);
  assert(pools.end(0, ONE) && !pools.take(0, MIB, A).ours && pools.any());
  assert(pools.give(pools.ranges(ONE)[0].address) && !pools.any() && !pools.knows(ONE));
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  pools.release(0, ONE);
  pools.release(0, ONE);
  assert(pools.any() && pools.end(0, ONE) && !pools.any());
  // The same numbers on another device are another pool.
  pools.make(1, ONE, world.source());
  assert(pools.begin(1, ONE, all) == OwnPools::Begun::yes && !pools.end(0, ONE) && pools.end(1, ONE));
}

void the_innermost_pool_takes_what_its_filter_says() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.make(0, TWO, world.source());
  pools.begin(0, ONE, all);
  pools.begin(0, TWO, [](void* stream) { return stream == B; });
  void* first = pools.take(0, MIB, A).block;
  void* second = pools.take(0, MIB, B).block;
  assert(pools.ranges(ONE)[0].address == first && pools.ranges(TWO)[0].address == second && pools.ranges({}).size() == 2);
  pools.end(0, ONE);
  assert(!pools.take(0, MIB, A).ours && pools.take(0, MIB, B).ours && pools.ranges(TWO).size() == 2);
}

void out_of_memory_gives_free_ranges_back_first() {
  World world;
  world.limit = 8 * MIB;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  void* block = pools.take(0, 6 * MIB, A).block;
  auto refused = pools.take(0, 4 * MIB, A);
  assert(refused.ours && refused.block == nullptr && world.used[0] == static_cast<int64_t>(6 * MIB));
  assert(pools.give(block) && pools.take(0, 8 * MIB, B).block != nullptr && world.held.count(block) == 0);
  world.limit = INT64_MAX;
  world.memory = 0;
  for (const size_t bytes : {4 * MIB, SIZE_MAX - 100, SIZE_MAX, SIZE_MAX / 2}) {
    refused = pools.take(0, bytes, A);
    assert(refused.ours && refused.block == nullptr && world.used[0] == static_cast<int64_t>(8 * MIB));
  }
}

void threads() {
  World world;
  std::mutex mutex;
  auto outside = world.outside();
  const auto announce = outside.announce;
  outside.announce = [&](bool made, const OwnPools::Range& range) {
    std::lock_guard<std::mutex> lock(mutex);
    announce(made, range);
  };
  outside.budget = [](int, int64_t) { return true; };
  outside.capturing = [](int, void*) { return false; };
  outside.record = [](int, void* stream) { return stream; };
  outside.passed = [](void*) { return true; };
  outside.drop = [](void*) {};
  OwnPools pools(outside);
  std::atomic<uintptr_t> next{1};
  OwnPools::Source source{
      [&](size_t) {
        std::lock_guard<std::mutex> lock(mutex);
        auto* block = reinterpret_cast<void*>(next += MIB);
        world.held.insert(block);
        return block;
      },
      [&](void* block) {
        std::lock_guard<std::mutex> lock(mutex);
        assert(world.held.erase(block) == 1);
      }};
  pools.make(0, ONE, source);
  pools.begin(0, ONE, all);
  std::vector<std::thread> working;
  for (uintptr_t number = 1; number <= 4; number++) {
    working.emplace_back([&, number] {
      for (int round = 0; round < 500; round++) {
        void* block = pools.take(0, (1 + round % 3) * 2 * MIB, reinterpret_cast<void*>(number)).block;
        if (round % 50 == 0) pools.trim({});
        assert(block != nullptr && pools.give(block));
      }
    });
  }
  for (auto& thread : working) thread.join();
  pools.end(0, ONE);
  pools.release(0, ONE);
  pools.release(0, ONE);
  assert(world.held.empty() && world.registered.empty() && pools.figures(0).live == 0 && pools.figures(0).reserved == 0);
}

int main() {
  blocks_are_ranges_of_their_own();
  a_pool_ends_with_its_last_block();
  what_other_streams_use_waits_for_them();
  what_the_same_handle_of_another_device_uses_waits_for_that();
  what_a_graph_has_stays_as_long_as_it();
  what_other_streams_use_within_a_capture_waits_until_it_is_over();
  ends_come_in_any_order();
  the_innermost_pool_takes_what_its_filter_says();
  out_of_memory_gives_free_ranges_back_first();
  threads();
  std::puts("ok");
}
