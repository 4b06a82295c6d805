// RMM's pool over cudaMalloc (26.10; C++20).
#include "allocator.hpp"

#ifdef PEERS_RMM
#include <algorithm>
#include <cuda/stream_ref>
#include <optional>
#include <rmm/error.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "uses.hpp"

namespace {

// What cudaMalloc gives.
constexpr std::size_t ALIGNMENT = 256;

class RmmPool final : public Allocator {
public:
    RmmPool() { reset(); }
    void* alloc(std::size_t bytes, cudaStream_t stream) override {
        try {
            return pool_->allocate(cuda::stream_ref(stream), bytes, ALIGNMENT);
        } catch (const rmm::out_of_memory&) {
            return nullptr;
        }
    }
    void free(void* block, std::size_t bytes, cudaStream_t own) override {
        uses_.join(block, own);
        pool_->deallocate(cuda::stream_ref(own), block, bytes, ALIGNMENT);
    }
    void use(void* block, cudaStream_t own, cudaStream_t user) override { uses_.add(block, own, user); }
    void poll() override { reserved_ = std::max(reserved_, pool_->pool_size()); }
    void reset() override {
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        // It only grows: a new pool gives the old one's memory back.
        pool_.reset();
        pool_.emplace(rmm::mr::cuda_memory_resource{}, 0);
        reserved_ = 0;
    }
    Figures figures() override {
        poll();
        return {0, reserved_, {}};
    }
    std::string about() override { return "RMM " PEERS_RMM ", a pool of no size to begin with over cudaMalloc"; }

private:
    std::optional<rmm::mr::pool_memory_resource> pool_;
    std::size_t reserved_ = 0;
    Uses uses_;
};

}  // namespace

std::unique_ptr<Allocator> make_rmm_pool() { return std::make_unique<RmmPool>(); }
#else
std::unique_ptr<Allocator> make_rmm_pool() { return nullptr; }
#endif
