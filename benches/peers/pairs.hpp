// The patterns of `src/device_suite/pairs.rs`, request by request, on another allocator.
#pragma once

#include "allocator.hpp"

// Measures every pattern and prints a line for each.
void run_pairs(const char* name, Allocator& allocator, bool quick);
