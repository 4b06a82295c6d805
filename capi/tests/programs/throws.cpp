// Out of memory in the hook of a pluggable allocator is an exception, and the heap goes on.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <xseg.h>

int main() {
  setenv("XSEG_CONF", "backend:host,limit:64MiB", 1);
  for (int round = 0; round < 3; round++) {
    try {
      xseg_torch_alloc(std::size_t{65} << 20, 0, nullptr);
      std::puts("nothing was thrown");
      return 1;
    } catch (const std::runtime_error& error) {
      if (std::strstr(error.what(), "CUDA out of memory. ") == nullptr) return 2;
    }
    void* block = xseg_torch_alloc(std::size_t{60} << 20, 0, nullptr);
    if (block == nullptr) return 3;
    xseg_torch_free(block, 0, 0, nullptr);
  }
  return 0;
}
