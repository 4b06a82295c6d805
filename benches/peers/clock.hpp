// Time and samples.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

using Clock = std::chrono::steady_clock;

inline double nanos(Clock::duration time) { return std::chrono::duration<double, std::nano>(time).count(); }
inline double seconds_since(Clock::time_point start) { return nanos(Clock::now() - start) / 1e9; }

// The smallest value that at least this share of all does not exceed; 0 for none. Sorts.
inline double quantile(std::vector<double>& values, double share) {
    if (values.empty()) {
        return 0.0;
    }
    std::sort(values.begin(), values.end());
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(values.size()) + 0.999999);
    return values[std::min(std::max<std::size_t>(rank, 1), values.size()) - 1];
}

// Time of one reading of the clock, in nanoseconds: what each timed call is too long by.
inline double clock_nanos() {
    constexpr int readings = 100'000;
    const auto start = Clock::now();
    for (int i = 0; i < readings; ++i) {
        [[maybe_unused]] const volatile auto now = Clock::now().time_since_epoch().count();
    }
    return nanos(Clock::now() - start) / readings;
}
