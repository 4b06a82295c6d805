// PyTorch's two allocators by their own C++ entry points.
#include "allocator.hpp"

#ifdef PEERS_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <array>

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

class Torch final : public Allocator {
public:
    explicit Torch(bool expandable) : expandable_(expandable) {
        int devices = 0;
        check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        caching::init(devices);
        allocator_ = caching::get();
        deleter_ = allocator_->raw_deleter();
        // The setting comes from the environment; what it did is what counts.
        void* block = allocator_->raw_alloc_with_stream(1, nullptr);
        const auto snapshot = caching::snapshot();
        allocator_->raw_delete(block);
        if (snapshot.segments.empty() || snapshot.segments[0].is_expandable != expandable) {
            throw Failure("PyTorch's allocator is not in the mode that was asked for; "
                          "is PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF read?");
        }
        reset();
    }
    void* alloc(std::size_t bytes, cudaStream_t stream) override {
        try {
            return allocator_->raw_alloc_with_stream(bytes, stream);
        } catch (const c10::OutOfMemoryError&) {
            return nullptr;
        }
    }
    void free(void* block, std::size_t, cudaStream_t) override { allocator_->raw_delete(block); }
    void use(void* block, cudaStream_t, cudaStream_t user) override {
        // Only what carries the allocator's own deleter is taken for a block of it.
        c10::DataPtr pointer(block, block, deleter_, c10::Device(c10::DeviceType::CUDA, 0));
        allocator_->recordStream(pointer, c10::cuda::getStreamFromExternal(user, 0));
        pointer.release_context();
    }
    void reset() override {
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        caching::emptyCache();
        caching::resetPeakStats(0);
        caching::resetAccumulatedStats(0);
    }
    Figures figures() override {
        const auto stats = caching::getDeviceStats(0);
        const auto peak = [](const c10::CachingAllocator::StatArray& all) {
            return static_cast<std::uint64_t>(all[0].peak);
        };
        return {peak(stats.allocated_bytes),
                peak(stats.reserved_bytes),
                {{"flushes", stats.num_alloc_retries},
                 {"device_allocs", stats.num_device_alloc},
                 {"device_frees", stats.num_device_free},
                 {"waits_for_all_streams", stats.num_sync_all_streams}}};
    }
    std::string about() override {
        return "PyTorch " TORCH_VERSION ", expandable_segments:" + std::string(expandable_ ? "True" : "False");
    }

private:
    bool expandable_;
    caching::CUDAAllocator* allocator_ = nullptr;
    c10::DeleterFnPtr deleter_ = nullptr;
};

}  // namespace

std::unique_ptr<Allocator> make_torch(bool expandable) { return std::make_unique<Torch>(expandable); }
#else
std::unique_ptr<Allocator> make_torch(bool) { return nullptr; }
#endif
