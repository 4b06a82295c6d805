// CUDA's own ways: cudaMalloc, and the stream-ordered pool of cuMemAllocAsync.
#include <cuda.h>

#include <algorithm>
#include <unordered_map>

#include "allocator.hpp"
#include "uses.hpp"

namespace {

class CudaMalloc final : public Allocator {
public:
    void* alloc(std::size_t bytes, cudaStream_t) override {
        void* block = nullptr;
        const cudaError_t error = cudaMalloc(&block, std::max<std::size_t>(bytes, 1));
        if (error == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            return nullptr;
        }
        check(error, "cudaMalloc");
        return block;
    }
    void free(void* block, std::size_t, cudaStream_t) override { check(cudaFree(block), "cudaFree"); }
    // cudaFree waits for the device.
    void use(void*, cudaStream_t, cudaStream_t) override {}
    void poll() override { reserved_ = std::max(reserved_, start_ - std::min(start_, free_bytes())); }
    void reset() override {
        start_ = free_bytes();
        reserved_ = 0;
    }
    // How cudaMalloc rounds inside what it takes from the card is not known.
    Figures figures() override { return {0, reserved_, {}}; }
    std::string about() override { return "reserved: what the device's free memory fell by"; }

private:
    std::size_t start_ = free_bytes();
    std::size_t reserved_ = 0;
};

template <typename Function>
Function driver(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    // CUDA 11.2 has stream-ordered memory.
    check(cudaGetDriverEntryPointByVersion(name, &found, 11020, cudaEnableDefault, &result), name);
    if (found == nullptr) {
        throw Failure(std::string("the driver has no ") + name);
    }
    return reinterpret_cast<Function>(found);
}

class AsyncPool final : public Allocator {
public:
    AsyncPool() {
        check(cudaDeviceGetDefaultMemPool(&pool_, 0), "cudaDeviceGetDefaultMemPool");
        std::uint64_t all = UINT64_MAX;
        check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
    }
    void* alloc(std::size_t bytes, cudaStream_t stream) override {
        CUdeviceptr block = 0;
        const CUresult result = allocate_(&block, std::max<std::size_t>(bytes, 1), stream);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            return nullptr;
        }
        if (result != CUDA_SUCCESS) {
            throw Failure("cuMemAllocAsync: error " + std::to_string(result));
        }
        return reinterpret_cast<void*>(block);
    }
    void free(void* block, std::size_t, cudaStream_t own) override {
        uses_.join(block, own);
        const CUresult result = free_(reinterpret_cast<CUdeviceptr>(block), own);
        if (result != CUDA_SUCCESS) {
            throw Failure("cuMemFreeAsync: error " + std::to_string(result));
        }
    }
    void use(void* block, cudaStream_t own, cudaStream_t user) override { uses_.add(block, own, user); }
    void reset() override {
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check(cudaMemPoolTrimTo(pool_, 0), "cudaMemPoolTrimTo");
        std::uint64_t none = 0;
        for (const auto high : {cudaMemPoolAttrReservedMemHigh, cudaMemPoolAttrUsedMemHigh}) {
            check(cudaMemPoolSetAttribute(pool_, high, &none), "cudaMemPoolSetAttribute");
        }
    }
    Figures figures() override {
        Figures figures;
        check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemHigh, &figures.peak_allocated), "used");
        check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &figures.peak_reserved), "reserved");
        return figures;
    }
    std::string about() override { return "the device's default pool, which keeps everything (release threshold: all)"; }

private:
    using Allocate = CUresult (*)(CUdeviceptr*, std::size_t, CUstream);
    using Free = CUresult (*)(CUdeviceptr, CUstream);
    Allocate allocate_ = driver<Allocate>("cuMemAllocAsync");
    Free free_ = driver<Free>("cuMemFreeAsync");
    cudaMemPool_t pool_ = nullptr;
    Uses uses_;
};

}  // namespace

std::unique_ptr<Allocator> make_cuda_malloc() { return std::make_unique<CudaMalloc>(); }
std::unique_ptr<Allocator> make_cuda_malloc_async() { return std::make_unique<AsyncPool>(); }
