// Other allocators, measured: `peers pairs --allocator NAME`, `peers replay --allocator NAME TRACE...`.
// One allocator a process, since PyTorch's reads its mode at start. JSON objects on stdout, one a line.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>

#include "clock.hpp"
#include "line.hpp"
#include "pairs.hpp"
#include "replay.hpp"

namespace {

constexpr const char* USAGE =
    "peers pairs --allocator NAME [--quick]\n"
    "peers replay --allocator NAME [--factor 1.02] [--extra BYTES] [--least] [--seconds N] [--seconds-a-run N] TRACE...\n"
    "peers list\n";
constexpr const char* NAMES[] = {"cuda-malloc", "cuda-malloc-async", "torch-native", "torch-expandable", "rmm-pool"};

std::unique_ptr<Allocator> make(const std::string& name) {
    std::unique_ptr<Allocator> made;
    if (name == "cuda-malloc") {
        made = make_cuda_malloc();
    } else if (name == "cuda-malloc-async") {
        made = make_cuda_malloc_async();
    } else if (name == "torch-native" || name == "torch-expandable") {
        made = make_torch(name == "torch-expandable");
    } else if (name == "rmm-pool") {
        made = make_rmm_pool();
    } else {
        throw Failure("there is no allocator " + name + "; `peers list` prints those there are");
    }
    if (made == nullptr) {
        throw Failure("built without " + name);
    }
    return made;
}

// Starts again with PyTorch's mode in the environment, which is read before `main`.
void restart_in_mode(const std::string& name, char** arguments) {
    if (name.rfind("torch-", 0) != 0) {
        return;
    }
    const char* mode = name == "torch-expandable" ? "expandable_segments:True" : "expandable_segments:False";
    const char* now = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
    if (now != nullptr && std::strcmp(now, mode) == 0) {
        return;
    }
    unsetenv("PYTORCH_ALLOC_CONF");
    setenv("PYTORCH_CUDA_ALLOC_CONF", mode, 1);
    execv("/proc/self/exe", arguments);
    throw Failure("cannot start again with PYTORCH_CUDA_ALLOC_CONF=" + std::string(mode));
}

std::string list() {
    std::string names;
    for (const char* name : NAMES) {
#ifndef PEERS_TORCH
        if (std::strncmp(name, "torch-", 6) == 0) {
            continue;
        }
#endif
#ifndef PEERS_RMM
        if (std::strcmp(name, "rmm-pool") == 0) {
            continue;
        }
#endif
        names += std::string(name) + "\n";
    }
    return names;
}

int run(int count, char** arguments) {
    const std::string mode = count > 1 ? arguments[1] : "";
    if (mode == "list") {
        std::cout << list();
        return 0;
    }
    std::string name;
    bool quick = false;
    ReplayOptions options;
    for (int i = 2; i < count; ++i) {
        const std::string word = arguments[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == count) {
                throw Failure(word + " needs a value");
            }
            return arguments[++i];
        };
        if (word == "--allocator") {
            name = value();
        } else if (word == "--quick") {
            quick = true;
        } else if (word == "--factor") {
            options.factor = std::stod(value());
        } else if (word == "--extra") {
            options.extra = std::stoull(value());
        } else if (word == "--least") {
            options.least = true;
        } else if (word == "--seconds") {
            options.seconds = std::stod(value());
        } else if (word == "--seconds-a-run") {
            options.seconds_a_run = std::stod(value());
        } else if (word.rfind("--", 0) == 0) {
            throw Failure("there is no " + word + "\n" + USAGE);
        } else {
            options.traces.push_back(word);
        }
    }
    if ((mode != "pairs" && mode != "replay") || name.empty() || (mode == "replay" && options.traces.empty())) {
        std::cerr << USAGE;
        return 2;
    }
    restart_in_mode(name, arguments);
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaFree(nullptr), "the device");
    const auto allocator = make(name);
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    Line("program")
        .add("allocator", name)
        .add("about", allocator->about())
        .add("cuda_runtime", runtime)
        .add("cuda_driver", driver)
        .add("clock_ns", clock_nanos())
        .print();
    if (mode == "pairs") {
        run_pairs(name.c_str(), *allocator, quick);
    } else {
        run_replays(name.c_str(), *allocator, options);
    }
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        return run(count, arguments);
    } catch (const std::exception& error) {
        std::cerr << "peers: " << error.what() << "\n";
        return 1;
    }
}
