#include "trace.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <string_view>
#include <unordered_map>

#include "allocator.hpp"

namespace {

// Numbers after the letter; false if there are not `count` of them.
bool numbers(std::string_view text, std::size_t count, std::array<std::uint64_t, 4>& out) {
    for (std::size_t i = 0; i < count; ++i) {
        if (text.empty() || text.front() != ',') {
            return false;
        }
        const auto [end, error] = std::from_chars(text.data() + 1, text.data() + text.size(), out[i]);
        if (error != std::errc{}) {
            return false;
        }
        text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    }
    return text.empty();
}

std::string name_of(const std::string& path) {
    const auto slash = path.find_last_of('/');
    std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    const auto ending = name.rfind(".trace");
    return ending == std::string::npos || ending == 0 ? name : name.substr(0, ending);
}

}  // namespace

Trace read_trace(const std::string& path) {
    std::ifstream file(path);
    if (!file) {
        throw Failure("cannot read " + path);
    }
    Trace trace;
    trace.name = name_of(path);
    std::unordered_map<std::uint64_t, std::uint32_t> live, streams;
    const auto stream = [&](std::uint64_t number) {
        return streams.emplace(number, static_cast<std::uint32_t>(streams.size())).first->second;
    };
    std::uint64_t bytes_live = 0, number = 0;
    std::array<std::uint64_t, 4> field{};
    for (std::string line; std::getline(file, line);) {
        ++number;
        if (line.empty() || line[0] == '#') {
            continue;
        }
        const auto wrong = [&] { return Failure(path + ", line " + std::to_string(number) + " is no event of a trace"); };
        const std::string_view rest = std::string_view(line).substr(1);
        const bool birth = line[0] == 'a';
        if (!numbers(rest, birth ? 4 : line[0] == 'u' ? 3 : 2, field)) {
            throw wrong();
        }
        const auto found = live.find(field[0]);
        if (birth) {
            const auto block = static_cast<std::uint32_t>(trace.blocks.size());
            if (!live.emplace(field[0], block).second) {
                throw wrong();
            }
            trace.blocks.push_back({field[1], stream(field[2])});
            trace.events.push_back({'a', block, 0});
            bytes_live += field[1];
            trace.peak_requested = std::max(trace.peak_requested, bytes_live);
        } else if (found == live.end()) {
            throw wrong();
        } else if (line[0] == 'f') {
            trace.events.push_back({'f', found->second, 0});
            bytes_live -= trace.blocks[found->second].bytes;
            live.erase(found);
        } else if (line[0] == 'u') {
            trace.events.push_back({'u', found->second, stream(field[1])});
        } else {
            throw wrong();
        }
    }
    trace.streams = streams.size();
    return trace;
}
