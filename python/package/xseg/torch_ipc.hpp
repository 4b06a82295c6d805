// Tensors that go to other processes: PyTorch asks for a text here and for the memory there.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>

#include "torch_heap.hpp"
#include "xseg.h"

// Python's, where this is loaded into it; its headers need not be installed.
extern "C" {
__attribute__((weak)) int PyGILState_Check(void);
__attribute__((weak)) void* PyEval_SaveThread(void);
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

namespace xseg_torch {

namespace cca = c10::cuda::CUDACachingAllocator;

// Lets other threads of Python run while this one waits for another process.
class WithoutLock {
 public:
  WithoutLock() {
    if (PyGILState_Check != nullptr && PyGILState_Check() == 1) thread_ = PyEval_SaveThread();
  }
  ~WithoutLock() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  void* thread_ = nullptr;
};

// What another process opens the block by. PyTorch keeps the block until it hears that it is used nowhere.
inline cca::ShareableHandle share(void* block) {
  char ticket[XSEG_TICKET_BYTES];
  check(xseg_device_ticket(block, ticket, sizeof ticket), "send a tensor to another process");
  return {0, ticket};
}

// The block of another process, mapped until the last of these ends; the library counts them, and maps a block once.
inline std::shared_ptr<void> receive(const std::string& ticket) {
  const int device = c10::cuda::current_device();
  void* address = nullptr;
  auto status = XSEG_OK;
  {
    WithoutLock waiting;
    status = xseg_device_open(device, ticket.c_str(), &address, nullptr);
  }
  check(status, "receive a tensor of another process");
  return {address, [](void* opened) {
            if (xseg_device_close(opened) != XSEG_OK) TORCH_WARN("xseg could not end an import: ", xseg_last_error());
          }};
}

}  // namespace xseg_torch
