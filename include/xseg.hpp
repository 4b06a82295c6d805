// xseg for C++17: heaps, blocks and capture pools that end themselves, and errors as exceptions. Header only; link libxseg.
#ifndef XSEG_HPP
#define XSEG_HPP

#include "xseg.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace xseg {

/// A failure of the library: its status and sentence.
class Error : public std::runtime_error {
 public:
  Error(xseg_status status, const std::string& why) : std::runtime_error(why), status_(status) {}
  xseg_status status() const noexcept { return status_; }

 private:
  xseg_status status_;
};

/// No memory for a request. The heap is unharmed.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& why) : Error(XSEG_OUT_OF_MEMORY, why) {}
};

/// Throws what the calling thread's last call failed with.
inline void check(xseg_status status) {
  if (status == XSEG_OK) return;
  if (status == XSEG_OUT_OF_MEMORY) throw OutOfMemory(xseg_last_error());
  throw Error(status, xseg_last_error());
}

class Heap;

/// A block of device memory, freed when it ends. It must not outlive its heap.
class Block {
 public:
  Block() noexcept = default;
  Block(Block&& other) noexcept : heap_(other.heap_), address_(std::exchange(other.address_, nullptr)) {}
  Block& operator=(Block&& other) noexcept {
    if (this != &other) {
      reset();
      heap_ = other.heap_;
      address_ = std::exchange(other.address_, nullptr);
    }
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { reset(); }

  void* get() const noexcept { return address_; }
  explicit operator bool() const noexcept { return address_ != nullptr; }

  /// Frees the block now.
  void reset() noexcept {
    if (address_ != nullptr) xseg_free(heap_, std::exchange(address_, nullptr));
  }

  /// The bare address, which the caller frees.
  void* release() noexcept { return std::exchange(address_, nullptr); }

  /// Work on `stream`, queued before the block ends, uses it too.
  void record_use(xseg_stream stream) const { check(xseg_record_use(heap_, address_, stream)); }
  // Of another GPU's stream.
  void record_use(xseg_stream stream, int device) const { check(xseg_record_use_on(heap_, address_, stream, device)); }

  /// Bytes that were asked for.
  std::uint64_t size() const {
    std::uint64_t bytes = 0;
    check(xseg_block_size(heap_, address_, &bytes, nullptr));
    return bytes;
  }

 private:
  friend class Heap;
  Block(xseg_heap* heap, void* address) noexcept : heap_(heap), address_(address) {}

  xseg_heap* heap_ = nullptr;
  void* address_ = nullptr;
};

/// A block of another process, mapped until this ends. It must not outlive its heap.
class Import {
 public:
  Import() noexcept = default;
  Import(Import&& other) noexcept
      : heap_(other.heap_), address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  Import& operator=(Import&& other) noexcept {
    if (this != &other) {
      reset();
      heap_ = other.heap_;
      address_ = std::exchange(other.address_, nullptr);
      bytes_ = other.bytes_;
    }
    return *this;
  }
  Import(const Import&) = delete;
  Import& operator=(const Import&) = delete;
  ~Import() { reset(); }

  void* get() const noexcept { return address_; }
  std::uint64_t size() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return address_ != nullptr; }

  /// Ends it; it is unmapped when work that was queued before has passed.
  void reset() noexcept {
    if (address_ != nullptr) xseg_import_end(heap_, std::exchange(address_, nullptr));
  }
  /// Ends it and waits until it is unmapped.
  void close() {
    if (address_ != nullptr) check(xseg_import_close(heap_, std::exchange(address_, nullptr)));
  }

 private:
  friend class Heap;
  Import(xseg_heap* heap, void* address, std::uint64_t bytes) noexcept
      : heap_(heap), address_(address), bytes_(bytes) {}

  xseg_heap* heap_ = nullptr;
  void* address_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// A heap, destroyed with all of its memory when it ends. Any thread may use it.
class Heap {
 public:
  /// With the policy of XSEG_CONF.
  Heap() { check(xseg_heap_from_env(&heap_)); }
  /// With a policy in the form of XSEG_CONF.
  explicit Heap(const std::string& conf) { check(xseg_heap_from_conf(conf.c_str(), &heap_)); }
  explicit Heap(const xseg_heap_options& options) { check(xseg_heap_create(&options, &heap_)); }
  Heap(Heap&& other) noexcept : heap_(std::exchange(other.heap_, nullptr)) {}
  Heap& operator=(Heap&& other) noexcept {
    if (this != &other) {
      close();
      heap_ = std::exchange(other.heap_, nullptr);
    }
    return *this;
  }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  ~Heap() { close(); }

  xseg_heap* get() const noexcept { return heap_; }

  /// Bytes for work on `stream`; throws OutOfMemory.
  Block alloc(std::uint64_t bytes, xseg_stream stream = nullptr) const {
    void* address = nullptr;
    check(xseg_alloc(heap_, bytes, stream, &address));
    return Block(heap_, address);
  }

  /// Sends a block to another process over a connected Unix socket.
  void send(const Block& block, int socket) const { check(xseg_export_send(heap_, block.get(), socket)); }
  /// Maps the block that another process sends over a Unix socket.
  Import receive(int socket) const {
    void* address = nullptr;
    std::uint64_t bytes = 0;
    check(xseg_import_receive(heap_, socket, &address, &bytes));
    return Import(heap_, address, bytes);
  }

  xseg_statistics stats() const {
    xseg_statistics statistics{};
    statistics.size = sizeof statistics;
    check(xseg_stats(heap_, &statistics));
    return statistics;
  }

  /// Gives idle memory back; says how many bytes.
  std::uint64_t trim() const {
    std::uint64_t released = 0;
    check(xseg_trim(heap_, &released));
    return released;
  }

  /// Sets the most physical memory that may exist; says how much does.
  std::uint64_t set_limit(std::uint64_t bytes) const {
    std::uint64_t reserved = 0;
    check(xseg_set_limit(heap_, bytes, &reserved));
    return reserved;
  }

  /// Gives a GPU access to all memory of the heap, now and later.
  void enable_peer(int device) const { check(xseg_enable_peer(heap_, device)); }

  void tick() const { check(xseg_tick(heap_)); }
  void retire(xseg_stream stream) const { check(xseg_retire_stream(heap_, stream)); }

 private:
  void close() noexcept {
    if (heap_ != nullptr) xseg_heap_destroy(std::exchange(heap_, nullptr));
  }

  xseg_heap* heap_ = nullptr;
};

/// Allocations go to a graph's capture pool while this lives (a trace of a heap's allocations is `xseg_record_start`'s); the pool itself is ended by `xseg_release_capture`.
class Recording {
 public:
  Recording(const Heap& heap, xseg_pool pool, xseg_stream_filter filter = nullptr, void* user = nullptr)
      : heap_(heap.get()), pool_(pool) {
    check(xseg_begin_capture(heap_, pool_, filter, user));
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() { xseg_end_capture(heap_, pool_); }

 private:
  xseg_heap* heap_;
  xseg_pool pool_;
};

/// A standard allocator on the null stream, for containers whose memory the host may touch (`backend:host`).
template <typename T>
class Allocator {
 public:
  using value_type = T;

  explicit Allocator(const Heap& heap) noexcept : heap_(heap.get()) {}
  template <typename U>
  Allocator(const Allocator<U>& other) noexcept : heap_(other.heap()) {}

  T* allocate(std::size_t count) {
    if (count > SIZE_MAX / sizeof(T)) throw std::bad_array_new_length();
    void* address = nullptr;
    check(xseg_alloc(heap_, count * sizeof(T), nullptr, &address));
    return static_cast<T*>(address);
  }
  void deallocate(T* address, std::size_t) noexcept { xseg_free(heap_, address); }
  xseg_heap* heap() const noexcept { return heap_; }

  friend bool operator==(const Allocator& a, const Allocator& b) noexcept { return a.heap_ == b.heap_; }
  friend bool operator!=(const Allocator& a, const Allocator& b) noexcept { return a.heap_ != b.heap_; }

 private:
  xseg_heap* heap_;
};

}  // namespace xseg

#endif
