#include "replay.hpp"

#include <functional>
#include <optional>

#include "clock.hpp"
#include "line.hpp"
#include "trace.hpp"

namespace {

constexpr std::size_t MIB = 1u << 20, GRANULE = 2 * MIB;
// Steps of peak requested in the search for the least memory: 0.05 % each, as `xseg least`.
constexpr std::uint64_t STEPS = 2000;
// Refused requests after which a run ends: each costs a flush of everything.
constexpr std::uint64_t REFUSED_MAX = 200;

// Plain memory that leaves no more than so much free for others.
class Ballast {
public:
    // A stack of pieces, so that small changes cost little.
    void leave(std::size_t bytes) {
        while (!pieces_.empty() && free_bytes() < bytes) {
            pop();
        }
        // What the last piece costs beyond its size is only known after it.
        for (int round = 0; round < 3; ++round) {
            const std::size_t free = free_bytes();
            const std::size_t more = free > bytes ? (free - bytes) / GRANULE * GRANULE : 0;
            void* piece = nullptr;
            if (more == 0 || cudaMalloc(&piece, more) != cudaSuccess) {
                cudaGetLastError();
                return;
            }
            pieces_.push_back(piece);
        }
    }
    void clear() {
        while (!pieces_.empty()) {
            pop();
        }
    }
    ~Ballast() {
        for (void* piece : pieces_) {
            cudaFree(piece);
        }
    }

private:
    void pop() {
        check(cudaFree(pieces_.back()), "cudaFree");
        pieces_.pop_back();
    }
    std::vector<void*> pieces_;
};

struct Outcome {
    std::uint64_t events_run = 0;
    std::uint64_t ooms = 0;
    std::optional<std::uint64_t> first_oom;
    bool cut_short = false;
    std::uint64_t peak_requested = 0;
    double wall_ms = 0.0, calls_ms = 0.0;
    double p50_us = 0.0, p99_us = 0.0, max_us = 0.0;
    Figures figures;
    bool completed(const Trace& trace) const { return ooms == 0 && events_run == trace.events.size(); }
};

class Streams {
public:
    cudaStream_t at(std::size_t index) {
        while (all_.size() <= index) {
            cudaStream_t stream = nullptr;
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
            all_.push_back(stream);
        }
        return all_[index];
    }

private:
    std::vector<cudaStream_t> all_;
};

// Runs the events, each call timed. A refused request is left out, unless the first is to end the run.
Outcome replay(const Trace& trace, Allocator& allocator, Streams& streams, bool end_at_oom, double seconds) {
    Outcome outcome;
    std::vector<void*> blocks(trace.blocks.size(), nullptr);
    std::vector<double> latencies;
    latencies.reserve(trace.blocks.size());
    std::uint64_t live = 0, polled = 0;
    Clock::duration calls{}, aside{};
    const auto start = Clock::now();
    for (const Event& event : trace.events) {
        const Block& block = trace.blocks[event.block];
        void*& at = blocks[event.block];
        const cudaStream_t own = streams.at(block.stream);
        const auto before = Clock::now();
        if ((outcome.events_run & 0xFF) == 0 && nanos(before - start) > seconds * 1e9) {
            outcome.cut_short = true;
            break;
        }
        if (event.kind == 'a') {
            at = allocator.alloc(block.bytes, own);
            const auto took = Clock::now() - before;
            calls += took;
            latencies.push_back(nanos(took) / 1e3);
            if (at == nullptr) {
                ++outcome.ooms;
                outcome.first_oom = outcome.first_oom.value_or(outcome.events_run);
                if (end_at_oom || outcome.ooms >= REFUSED_MAX) {
                    outcome.cut_short = !end_at_oom;
                    break;
                }
            } else {
                live += block.bytes;
                if (live > outcome.peak_requested) {
                    outcome.peak_requested = live;
                    if (live == trace.peak_requested || live > polled + trace.peak_requested / 512) {
                        const auto poll = Clock::now();
                        allocator.poll();
                        polled = live;
                        aside += Clock::now() - poll;
                    }
                }
            }
        } else if (at != nullptr) {
            if (event.kind == 'f') {
                allocator.free(at, block.bytes, own);
                live -= block.bytes;
                at = nullptr;
            } else {
                allocator.use(at, own, streams.at(event.stream));
            }
            calls += Clock::now() - before;
        }
        ++outcome.events_run;
    }
    outcome.wall_ms = nanos(Clock::now() - start - aside) / 1e6;
    outcome.calls_ms = nanos(calls) / 1e6;
    outcome.figures = allocator.figures();
    outcome.p50_us = quantile(latencies, 0.5);
    outcome.p99_us = quantile(latencies, 0.99);
    outcome.max_us = quantile(latencies, 1.0);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i] != nullptr) {
            allocator.free(blocks[i], trace.blocks[i].bytes, streams.at(trace.blocks[i].stream));
        }
    }
    return outcome;
}

void print(const char* name, const Trace& trace, const char* run, std::size_t left, const Outcome& outcome) {
    Line line("replay");
    line.add("allocator", name)
        .add("trace", trace.name)
        .add("run", run)
        .add("events", trace.events.size())
        .add("events_run", outcome.events_run)
        .add("completed", outcome.completed(trace))
        .add("cut_short", outcome.cut_short)
        .add("ooms", outcome.ooms)
        .add("first_oom_event", outcome.first_oom)
        .add("trace_peak_requested_bytes", trace.peak_requested)
        .add("peak_requested_bytes", outcome.peak_requested)
        .add("peak_allocated_bytes", outcome.figures.peak_allocated)
        .add("peak_reserved_bytes", outcome.figures.peak_reserved)
        .add("left_free_bytes", left)
        .add("wall_ms", outcome.wall_ms)
        .add("calls_ms", outcome.calls_ms)
        .add("alloc_p50_us", outcome.p50_us)
        .add("alloc_p99_us", outcome.p99_us)
        .add("alloc_max_us", outcome.max_us);
    for (const auto& [counter, value] : outcome.figures.more) {
        line.add(counter, value);
    }
    line.print();
}

// The least free memory, to a step, by halving between what cannot be enough and what is.
void search(const char* name, const Trace& trace, Allocator& allocator, Streams& streams, std::uint64_t reserved,
            const std::function<bool()>& in_time, double seconds_a_run) {
    const std::uint64_t step = std::max<std::uint64_t>(trace.peak_requested / STEPS, 1);
    const auto target = [&](std::uint64_t steps) { return trace.peak_requested + steps * step; };
    Ballast ballast;
    std::uint64_t tries = 0;
    std::optional<std::uint64_t> least;
    double calls_ms = 0.0;
    const auto completes = [&](std::uint64_t steps) {
        allocator.reset();
        ballast.leave(target(steps));
        const std::size_t left = free_bytes();
        ++tries;
        const Outcome outcome = replay(trace, allocator, streams, true, seconds_a_run);
        if (outcome.completed(trace)) {
            least = left;
            calls_ms = outcome.calls_ms;
        }
        return outcome.completed(trace);
    };
    std::uint64_t low = 0;
    // What was reserved with all memory there, and as much again for what the driver needs itself.
    std::uint64_t high = (reserved + 128 * MIB - std::min(reserved, trace.peak_requested)) / step + 1;
    bool ended = completes(high);
    for (int more = 0; !ended && more < 4 && in_time(); ++more) {
        low = high + 1;
        high += STEPS;
        ended = completes(high);
    }
    while (ended && low < high && in_time()) {
        const std::uint64_t middle = low + (high - low) / 2;
        if (completes(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const bool found = ended && low == high;
    Line("least")
        .add("allocator", name)
        .add("trace", trace.name)
        .add("trace_peak_requested_bytes", trace.peak_requested)
        .add("least_bytes", found ? least : std::optional<std::uint64_t>{})
        .add("enough_bytes", least)
        .add("step_bytes", step)
        .add("tries", tries)
        .add("calls_ms", calls_ms)
        .add("cut_short", !found)
        .print();
    allocator.reset();
}

}  // namespace

void run_replays(const char* name, Allocator& allocator, const ReplayOptions& options) {
    const auto start = Clock::now();
    const auto in_time = [&] { return seconds_since(start) < options.seconds; };
    Streams streams;
    std::vector<Trace> traces;
    for (const std::string& path : options.traces) {
        traces.push_back(read_trace(path));
    }
    std::vector<std::uint64_t> reserved(traces.size(), 0);
    const auto skipped = [&](const Trace& trace, const char* run) {
        Line("skipped").add("allocator", name).add("trace", trace.name).add("run", run).add("why", "out of time").print();
    };
    // All plenty first, then all limited, then the searches: what time is short for is the dearest.
    for (std::size_t i = 0; i < traces.size(); ++i) {
        if (!in_time()) {
            skipped(traces[i], "plenty");
            continue;
        }
        allocator.reset();
        const std::size_t left = free_bytes();
        const Outcome outcome = replay(traces[i], allocator, streams, false, options.seconds_a_run);
        reserved[i] = outcome.completed(traces[i]) ? outcome.figures.peak_reserved : 0;
        print(name, traces[i], "plenty", left, outcome);
    }
    for (std::size_t i = 0; i < traces.size(); ++i) {
        if (!in_time()) {
            skipped(traces[i], "limited");
            continue;
        }
        allocator.reset();
        Ballast ballast;
        ballast.leave(static_cast<std::size_t>(options.factor * static_cast<double>(traces[i].peak_requested)) + options.extra);
        // Once more: what is free to begin with has changed.
        allocator.reset();
        const std::size_t left = free_bytes();
        print(name, traces[i], "limited", left, replay(traces[i], allocator, streams, false, options.seconds_a_run));
        allocator.reset();
    }
    for (std::size_t i = 0; options.least && i < traces.size(); ++i) {
        if (!in_time() || reserved[i] == 0) {
            skipped(traces[i], "least");
            continue;
        }
        search(name, traces[i], allocator, streams, reserved[i], in_time, options.seconds_a_run);
    }
}
