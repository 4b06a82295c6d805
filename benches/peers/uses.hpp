// Declared uses, for allocators that only know the stream of the free.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"

// Before a block is freed, its own stream is made to wait for those that use it. One thread.
class Uses {
public:
    void add(void* block, cudaStream_t own, cudaStream_t user) {
        if (user == own) {
            return;
        }
        auto& users = users_[block];
        if (std::find(users.begin(), users.end(), user) == users.end()) {
            users.push_back(user);
        }
    }
    // No cost where nothing was declared.
    void join(void* block, cudaStream_t own) {
        if (users_.empty()) {
            return;
        }
        const auto found = users_.find(block);
        if (found == users_.end()) {
            return;
        }
        if (event_ == nullptr) {
            check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
        }
        for (const cudaStream_t user : found->second) {
            check(cudaEventRecord(event_, user), "cudaEventRecord");
            check(cudaStreamWaitEvent(own, event_, 0), "cudaStreamWaitEvent");
        }
        users_.erase(found);
    }

private:
    std::unordered_map<void*, std::vector<cudaStream_t>> users_;
    // A wait keeps to the record before it, so one event serves all.
    cudaEvent_t event_ = nullptr;
};
