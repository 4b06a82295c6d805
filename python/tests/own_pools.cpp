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
  std::set<void*> registered, held, pending;
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
        [this](int, void* stream) {
          pending.insert(stream);
          return stream;
        },
        [this](void* event) { return pending.count(event) == 0; },
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
  assert(world.held.size() == 1 && pools.any() && pools.uses(0, ONE) == 0);
  assert(pools.give(kept) && world.held.empty() && !pools.any() && !pools.knows(ONE));
  assert((world.said == std::vector<std::string>{"made 2", "made 4", "gone 4", "gone 2"}) && world.used[0] == 0);
}

void what_other_streams_use_waits_for_them() {
  World world;
  OwnPools pools(world.outside());
  pools.make(0, ONE, world.source());
  pools.begin(0, ONE, all);
  void* block = pools.take(0, 2 * MIB, A).block;
  assert(pools.use(block, B) && pools.use(block, B) && pools.use(block, A) && !pools.use(A, B));
  assert(pools.give(block));
  void* second = pools.take(0, 2 * MIB, A).block;
  assert(second != block);
  pools.trim(ONE);
  assert(world.held.count(block) == 1);
  world.pending.clear();
  assert(pools.take(0, 2 * MIB, A).block == block);
  assert(pools.give(block));
  pools.trim({});
  assert(world.held.count(block) == 0 && world.held.count(second) == 1);
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
  // A pool may be opened within itself.
  pools.begin(0, ONE, all);
  pools.end(0, ONE);
  assert(pools.take(0, MIB, A).ours);
  pools.end(0, TWO);
  assert(pools.take(0, MIB, B).ours && pools.ranges(TWO).size() == 1);
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
  refused = pools.take(0, 4 * MIB, A);
  assert(refused.ours && refused.block == nullptr && world.used[0] == static_cast<int64_t>(8 * MIB));
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
  the_innermost_pool_takes_what_its_filter_says();
  out_of_memory_gives_free_ranges_back_first();
  threads();
  std::puts("ok");
}
