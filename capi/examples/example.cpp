// Blocks that free themselves, an out-of-memory error that is caught, and a standard container.
//
//     c++ -std=c++17 example.cpp $(pkg-config --cflags --libs xseg) -o example && ./example
#include <cstdint>
#include <iostream>
#include <numeric>
#include <vector>
#include <xseg.hpp>

int main() {
  constexpr std::uint64_t mib = 1 << 20;
  xseg::Heap heap("backend:host,limit:64MiB");
  {
    xseg::Block first = heap.alloc(40 * mib);
    std::uint64_t batch = 32 * mib;
    xseg::Block second;
    while (!second) {
      try {
        second = heap.alloc(batch);
      } catch (const xseg::OutOfMemory& error) {
        std::cout << "with " << batch / mib << " MiB: " << error.what() << "\n";
        batch /= 2;
      }
    }
    std::cout << "went on with " << second.size() / mib << " MiB\n";
  }
  std::vector<std::uint64_t, xseg::Allocator<std::uint64_t>> numbers(1000, 0, xseg::Allocator<std::uint64_t>(heap));
  std::iota(numbers.begin(), numbers.end(), 1);
  std::cout << "sum " << std::accumulate(numbers.begin(), numbers.end(), std::uint64_t{0}) << ", live "
            << heap.stats().live_blocks << " block\n";
}
