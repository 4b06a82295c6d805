// What the patterns and replays need of an allocator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A failure of the device or of an allocator that is no lack of memory.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(cudaError_t error, const char* call) {
    if (error != cudaSuccess) {
        throw Failure(std::string(call) + ": " + cudaGetErrorString(error));
    }
}

// Free bytes of the device.
inline std::size_t free_bytes() {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
}

// What an allocator says of itself since the last `reset`. Sizes in bytes.
struct Figures {
    std::uint64_t peak_allocated = 0;
    std::uint64_t peak_reserved = 0;
    // Other counters by name.
    std::vector<std::pair<const char*, std::int64_t>> more;
};

// `alloc` and `free` are called from any thread, all else from one.
class Allocator {
public:
    virtual ~Allocator() = default;
    // Memory for `stream`; null where there is none.
    virtual void* alloc(std::size_t bytes, cudaStream_t stream) = 0;
    // Frees a block of `bytes` of the stream `own`.
    virtual void free(void* block, std::size_t bytes, cudaStream_t own) = 0;
    // `user` works on a block of `own`: what record_stream says.
    virtual void use(void* block, cudaStream_t own, cudaStream_t user) = 0;
    // Looks at what is reserved, where the allocator keeps no peak itself. Not timed.
    virtual void poll() {}
    // With no block live: gives all memory back and sets the figures to 0.
    virtual void reset() = 0;
    virtual Figures figures() = 0;
    // Versions and settings, for the report.
    virtual std::string about() = 0;
};

std::unique_ptr<Allocator> make_cuda_malloc();
std::unique_ptr<Allocator> make_cuda_malloc_async();
// Null where this program was built without it.
std::unique_ptr<Allocator> make_torch(bool expandable);
std::unique_ptr<Allocator> make_rmm_pool();
