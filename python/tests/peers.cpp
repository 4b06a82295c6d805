// Access of one device to the memory of another, as the C++ part gives it.
#include "torch_peers.hpp"

#include <string>

namespace {
std::string said;
xseg_torch::Peers peers;
}  // namespace

// Null, or why there is no access.
extern "C" __attribute__((visibility("default"))) const char* test_grant(int device, int memory) {
  try {
    peers.grant(device, memory);
    return nullptr;
  } catch (const c10::Error& error) {
    return (said = error.what_without_backtrace()).c_str();
  }
}

extern "C" __attribute__((visibility("default"))) int test_granted(int device, int memory) { return peers.granted(device, memory) ? 1 : 0; }
