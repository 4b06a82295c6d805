// Traces through an allocator: with all memory, with little, and the least in which they complete.
#pragma once

#include <string>
#include <vector>

#include "allocator.hpp"

struct ReplayOptions {
    // Left free for the runs with little memory: this times peak requested, and so much more.
    double factor = 1.02;
    std::uint64_t extra = 64u << 20;
    // Search the least.
    bool least = false;
    // No run and no try is started later than this.
    double seconds = 60.0;
    // A run is ended after so long.
    double seconds_a_run = 10.0;
    std::vector<std::string> traces;
};

// Prints a line for each run and each search.
void run_replays(const char* name, Allocator& allocator, const ReplayOptions& options);
