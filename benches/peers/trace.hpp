// The text form of a trace: `a,ID,BYTES,STREAM,TIME_US`, `f,ID,TIME_US`, `u,ID,STREAM,TIME_US`, `#` comments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct Event {
    // 'a', 'f' or 'u'.
    char kind;
    // Index in `blocks`.
    std::uint32_t block;
    // Index of the stream that uses the block, of a 'u'.
    std::uint32_t stream;
};

struct Block {
    std::uint64_t bytes;
    // Index of its stream.
    std::uint32_t stream;
};

struct Trace {
    std::string name;
    std::vector<Event> events;
    std::vector<Block> blocks;
    std::size_t streams = 0;
    std::uint64_t peak_requested = 0;
};

// Throws Failure with the line that is wrong.
Trace read_trace(const std::string& path);
