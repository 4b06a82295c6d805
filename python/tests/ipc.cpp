// What PyTorch calls to send and to receive tensors, on host memory: device 0 is the one that is current.
#include "torch_ipc.hpp"

#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>

// In place of PyTorch's, which needs a GPU.
namespace c10::cuda {
DeviceIndex current_device() { return 0; }
}  // namespace c10::cuda

namespace {
std::string said;
std::map<std::string, std::shared_ptr<void>> held;
}  // namespace

// The ticket of a block, or why there is none after a `!`.
extern "C" __attribute__((visibility("default"))) const char* test_share(void* block) {
  try {
    const auto shared = xseg_torch::share(block);
    said = shared.offset == 0 ? shared.handle : "!an offset";
  } catch (const std::exception& error) {
    said = std::string("!") + error.what();
  }
  return said.c_str();
}

// Holds the block of a ticket under a name; its address, or null and why not in `why`.
extern "C" __attribute__((visibility("default"))) void* test_receive(const char* name, const char* ticket, const char** why) {
  try {
    return (held[name] = xseg_torch::receive(ticket)).get();
  } catch (const std::exception& error) {
    said = error.what();
    *why = said.c_str();
    return nullptr;
  }
}

extern "C" __attribute__((visibility("default"))) void test_drop(const char* name) { held.erase(name); }
