#include "pairs.hpp"

#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <thread>

#include "clock.hpp"
#include "line.hpp"

namespace {

constexpr std::size_t KIB = 1024, MIB = 1024 * KIB;
constexpr std::size_t SAMPLES = 31, SAMPLES_MIN = 3;
// A pattern ends after this time, once it has enough samples.
constexpr double PATTERN_SECONDS = 1.0;
// Time of one sample of pairs.
constexpr double SAMPLE_NANOS = 4e6;
constexpr int THREADS = 8;

// The same numbers as in Rust.
class Random {
public:
    std::uint64_t below(std::uint64_t bound) {
        state_ = state_ * 6'364'136'223'846'793'005ULL + 1'442'695'040'888'963'407ULL;
        return (state_ >> 33) % bound;
    }
    // 512 B to 1 MiB, each power of two as often.
    std::size_t size() {
        const std::size_t base = std::size_t{512} << below(11);
        return base + below(base);
    }

private:
    std::uint64_t state_ = 0x9E37'79B9'7F4A'7C15ULL;
};

// One for each thread. They are never destroyed: expandable segments wait for theirs when they give memory back.
std::array<cudaStream_t, THREADS> streams;
// The default stream, which programs use first: the patterns of one stream are on it.
constexpr cudaStream_t DEFAULT = nullptr;

void* must(Allocator& allocator, std::size_t bytes, cudaStream_t stream) {
    void* block = allocator.alloc(bytes, stream);
    if (block == nullptr) {
        throw Failure("no memory for " + std::to_string(bytes) + " bytes");
    }
    return block;
}

struct Pattern {
    const char* name;
    const char* operation;
    // Of one block; 0 where sizes are random.
    std::size_t bytes;
    // Blocks live at once on a thread.
    std::size_t live;
    int threads;
    int streams;
    std::size_t operations;
    // Bytes requested in one sample, to see that both programs do the same.
    std::uint64_t requested;
};

void print(const char* allocator, const Pattern& pattern, std::vector<double>& samples) {
    const double median = quantile(samples, 0.5);
    Line("pairs")
        .add("allocator", allocator)
        .add("pattern", pattern.name)
        .add("operation", pattern.operation)
        .add("bytes", pattern.bytes)
        .add("live", pattern.live)
        .add("threads", pattern.threads)
        .add("streams", pattern.streams)
        .add("operations", pattern.operations)
        .add("samples", samples.size())
        .add("requested_bytes", pattern.requested)
        .add("median_ns", median)
        .add("min_ns", samples.front())
        .print();
}

// Samples until there are enough or the time is up. The first is a warm-up.
void sample(bool quick, const std::function<void()>& once, const std::function<std::size_t()>& taken) {
    const auto start = Clock::now();
    const std::size_t most = quick ? SAMPLES_MIN : SAMPLES;
    once();
    while (taken() < most && (taken() < SAMPLES_MIN || seconds_since(start) < PATTERN_SECONDS)) {
        once();
    }
}

// Time of `count` pairs of one size, in nanoseconds.
double pairs(Allocator& allocator, std::size_t bytes, cudaStream_t stream, std::size_t count) {
    const auto start = Clock::now();
    for (std::size_t i = 0; i < count; ++i) {
        allocator.free(must(allocator, bytes, stream), bytes, stream);
    }
    return nanos(Clock::now() - start);
}

// Pairs that take about the time of a sample.
std::size_t pairs_a_sample(Allocator& allocator, std::size_t bytes, cudaStream_t stream) {
    std::size_t count = 16;
    while (count < (1u << 20) && pairs(allocator, bytes, stream, count) < SAMPLE_NANOS) {
        count *= 2;
    }
    return count;
}

void one_size(const char* name, Allocator& allocator, std::size_t bytes, bool quick) {
    const cudaStream_t stream = DEFAULT;
    const std::size_t count = pairs_a_sample(allocator, bytes, stream);
    std::vector<double> times;
    int round = 0;
    const auto once = [&] {
        const double time = pairs(allocator, bytes, stream, count);
        if (round++ > 0) {
            times.push_back(time / static_cast<double>(count));
        }
    };
    sample(quick, once, [&] { return times.size(); });
    print(name, {"pair", "pair", bytes, 1, 1, 1, count, bytes * count}, times);
}

// A block of those that live is freed and one of another size allocated, at random.
void churn(const char* name, Allocator& allocator, std::size_t live, bool quick) {
    const cudaStream_t stream = DEFAULT;
    Random random;
    struct Block {
        void* at;
        std::size_t bytes;
    };
    std::vector<Block> blocks(live);
    for (auto& block : blocks) {
        block.bytes = random.size();
        block.at = must(allocator, block.bytes, stream);
    }
    std::vector<std::pair<std::size_t, std::size_t>> steps(live);
    std::vector<double> times;
    std::uint64_t requested = 0;
    int round = 0;
    const auto once = [&] {
        for (auto& [slot, bytes] : steps) {
            slot = random.below(live);
            bytes = random.size();
        }
        const auto start = Clock::now();
        for (const auto& [slot, bytes] : steps) {
            allocator.free(blocks[slot].at, blocks[slot].bytes, stream);
            blocks[slot] = {must(allocator, bytes, stream), bytes};
        }
        const double time = nanos(Clock::now() - start);
        if (round++ > 0) {
            times.push_back(time / static_cast<double>(steps.size()));
        } else {
            for (const auto& step : steps) {
                requested += step.second;
            }
        }
    };
    sample(quick, once, [&] { return times.size(); });
    for (const auto& block : blocks) {
        allocator.free(block.at, block.bytes, stream);
    }
    print(name, {"churn", "pair", 0, live, 1, 1, steps.size(), requested}, times);
}

// So many blocks of random sizes are allocated in order and freed in a scattered order.
void many_live(const char* name, Allocator& allocator, std::size_t live, bool quick) {
    const cudaStream_t stream = DEFAULT;
    Random random;
    std::vector<std::size_t> sizes(live), order(live);
    for (auto& bytes : sizes) {
        bytes = random.size();
    }
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t last = live - 1; last > 0; --last) {
        std::swap(order[last], order[random.below(last + 1)]);
    }
    std::vector<void*> blocks(live);
    std::vector<double> allocs, frees;
    int round = 0;
    const auto once = [&] {
        const auto start = Clock::now();
        for (std::size_t i = 0; i < live; ++i) {
            blocks[i] = must(allocator, sizes[i], stream);
        }
        const auto middle = Clock::now();
        for (const std::size_t i : order) {
            allocator.free(blocks[i], sizes[i], stream);
        }
        const auto end = Clock::now();
        if (round++ > 0) {
            allocs.push_back(nanos(middle - start) / static_cast<double>(live));
            frees.push_back(nanos(end - middle) / static_cast<double>(live));
        }
    };
    sample(quick, once, [&] { return allocs.size(); });
    const auto requested = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
    print(name, {"live", "alloc", 0, live, 1, 1, live, requested}, allocs);
    print(name, {"live", "free", 0, live, 1, 1, live, requested}, frees);
}

// Pairs of one size on several threads at once: time over all pairs of all threads.
void threads(const char* name, Allocator& allocator, int count, int apart, bool quick) {
    constexpr std::size_t bytes = 64 * KIB;
    // One thread's sample, so that several take about as long or longer.
    const std::size_t each = std::max<std::size_t>(pairs_a_sample(allocator, bytes, streams[0]) / 2, 16);
    std::vector<double> times;
    int round = 0;
    const auto once = [&] {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false}, failed{false};
        std::vector<Clock::time_point> ends(static_cast<std::size_t>(count));
        std::vector<std::thread> all;
        for (int number = 0; number < count; ++number) {
            all.emplace_back([&, number] {
                const cudaStream_t stream = streams[static_cast<std::size_t>(number % apart)];
                try {
                    check(cudaSetDevice(0), "cudaSetDevice");
                    pairs(allocator, bytes, stream, 16);
                    ++ready;
                    while (!go.load(std::memory_order_acquire)) {
                    }
                    pairs(allocator, bytes, stream, each);
                } catch (const std::exception&) {
                    failed = true;
                    ++ready;
                }
                ends[static_cast<std::size_t>(number)] = Clock::now();
            });
        }
        while (ready.load() < count) {
            std::this_thread::yield();
        }
        const auto start = Clock::now();
        go.store(true, std::memory_order_release);
        for (auto& thread : all) {
            thread.join();
        }
        if (failed) {
            throw Failure("a thread's allocation failed");
        }
        const double time = nanos(*std::max_element(ends.begin(), ends.end()) - start);
        if (round++ > 0) {
            times.push_back(time / static_cast<double>(each * static_cast<std::size_t>(count)));
        }
    };
    sample(quick, once, [&] { return times.size(); });
    const std::size_t operations = each * static_cast<std::size_t>(count);
    print(name, {"threads", "pair", bytes, 1, count, apart, operations, bytes * operations}, times);
}

}  // namespace

void run_pairs(const char* name, Allocator& allocator, bool quick) {
    for (cudaStream_t& stream : streams) {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    for (const std::size_t bytes : {std::size_t{512}, 64 * KIB, MIB, 20 * MIB, 128 * MIB}) {
        one_size(name, allocator, bytes, quick);
    }
    churn(name, allocator, 10'000, quick);
    many_live(name, allocator, 20'000, quick);
    threads(name, allocator, 1, 1, quick);
    threads(name, allocator, THREADS, THREADS, quick);
    threads(name, allocator, THREADS, 1, quick);
    allocator.reset();
}
