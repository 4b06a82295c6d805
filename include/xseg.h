/* xseg: an allocator for GPU memory that defragments by remapping pages. The C interface.
 *
 * Generated from the crate xseg-capi; after a change there:
 *     XSEG_WRITE_HEADER=1 cargo test -p xseg-capi --test header
 *
 * Every function that can fail returns an xseg_status and leaves what it was to fill untouched on an error; the
 * sentence for it is xseg_last_error(). Any thread may call any function, where its text does not say otherwise.
 * In a forked child every call on a heap of the parent's gives XSEG_UNAVAILABLE; a heap that the child makes is for one
 * thread of it.
 * The functions with `torch` in their names are for PyTorch's CUDAPluggableAllocator.
 */

#ifndef XSEG_H
#define XSEG_H

#include <stddef.h>
#include <stdint.h>

// A heap: a number in a pointer's clothes. The library looks it up and never follows it.
typedef struct xseg_heap xseg_heap;

// Major version of the interface: programs built for another one do not fit.
#define XSEG_VERSION_MAJOR 0

// Minor version of the interface: later ones add to it.
#define XSEG_VERSION_MINOR 1

// Patch of the interface.
#define XSEG_VERSION_PATCH 0

// Bytes of a ticket at most, with the zero at its end.
#define XSEG_TICKET_BYTES 128

// What a function says of its success.
typedef enum xseg_status {
  // It did what it says.
  XSEG_OK = 0,
  // No memory for the request, after everything was tried. The heap is unharmed.
  XSEG_OUT_OF_MEMORY = 1,
  // The heap's addresses hold no range of this length; raise `reserve`, or no block can be as long.
  XSEG_ADDRESS_SPACE = 2,
  // An address that is no live block of the heap: foreign, freed already, or inside a block.
  XSEG_INVALID_POINTER = 3,
  // A null pointer where none may be, a value out of range, text that is not UTF-8.
  XSEG_INVALID_ARGUMENT = 4,
  // A stream that was retired, or that the driver does not know.
  XSEG_DEAD_STREAM = 5,
  // The driver refused a call. The heap is as it was.
  XSEG_DRIVER = 6,
  // The system's limit on the mappings of a process is near (`vm.max_map_count`).
  XSEG_MAPPING_LIMIT = 7,
  // The backend cannot be used here: no GPU, no driver; or a GPU has no way to another's memory.
  XSEG_UNAVAILABLE = 8,
  // A key or value of the configuration is wrong, or the plan that it names.
  XSEG_CONFIG = 9,
  // The heap was shut down.
  XSEG_SHUT_DOWN = 10,
  // The handle names no heap: it was destroyed, or never one.
  XSEG_STALE_HANDLE = 11,
  // A defect of xseg; the text says where.
  XSEG_INTERNAL = 12,
  // A file cannot be written; the text says why.
  XSEG_IO = 13,
  // Memory could not be given to or taken from another process.
  XSEG_SHARE = 14,
} xseg_status;

// What happens to a mapping.
typedef enum xseg_mapping_change {
  // It was made and is accessible.
  XSEG_MAPPED = 0,
  // It is about to be unmapped: what was registered on it must go now.
  XSEG_UNMAPPING = 1,
  // The driver refused the unmapping that was announced: it stays.
  XSEG_KEPT = 2,
} xseg_mapping_change;

// What a range of mapped addresses is.
typedef enum xseg_region_state {
  // A block of the client.
  XSEG_LIVE = 0,
  // Free memory.
  XSEG_FREE = 1,
  // Freed, waiting for the streams that it was declared used on, or for exports of it that are open.
  XSEG_PENDING = 2,
  // Still mapped, but its memory was given to another address.
  XSEG_ZOMBIE = 3,
} xseg_region_state;

// Called without any lock before an out-of-memory error, with the bytes asked for. It may free blocks, and returns
// other than 0 if it did; the request is then tried again. It must not unwind.
typedef int32_t (*xseg_out_of_memory_callback)(uint64_t bytes, void *user);

// Name of a capture pool; the client chooses it.
typedef struct xseg_pool {
  // First part.
  uint64_t first;
  // Second part.
  uint64_t second;
} xseg_pool;

// A stream: a `cudaStream_t` or `CUstream`; null is the default stream.
typedef void *xseg_stream;

// Does this stream's memory go to the pool (other than 0)? Asked at every allocation while the pool is open, by the
// allocating thread. It must not call the heap and must not unwind.
typedef int32_t (*xseg_stream_filter)(xseg_stream stream, void *user);

// A change of one mapping. Later versions may add fields at the end.
typedef struct xseg_mapping_event {
  // What happens.
  enum xseg_mapping_change change;
  // Number of the device.
  uint32_t device;
  // First address.
  void *address;
  // Length in bytes.
  uint64_t bytes;
} xseg_mapping_event;

// Told of every mapping, in the order of the driver calls and by the thread that makes them. It may call the driver, but
// not the heap, and must not unwind. `event` is valid during the call.
typedef void (*xseg_mapping_callback)(const struct xseg_mapping_event *event, void *user);

// How a heap is made. Set `size` and leave what is not wanted zero.
typedef struct xseg_heap_options {
  // `sizeof(xseg_heap_options)` of the program, so that later versions can add fields.
  size_t size;
  // The policy, in the form of the environment variable `XSEG_CONF`; null: what that variable says.
  const char *conf;
  // Told of every mapping; may be null.
  xseg_mapping_callback mapping;
  // Passed to `mapping`.
  void *mapping_user;
} xseg_heap_options;

// One range of mapped addresses.
typedef struct xseg_region {
  // First address.
  void *address;
  // Length in bytes.
  uint64_t bytes;
  // Bytes that the client asked for; 0 where it has nothing.
  uint64_t requested;
  // The stream that it was allocated on, or freed by; null also where any may have it.
  xseg_stream stream;
  // The capture pool that it belongs to; zeros: none.
  struct xseg_pool pool;
  // What it is.
  enum xseg_region_state state;
  // Other than 0: memory for small blocks.
  uint32_t small;
} xseg_region;

// Part of a piece of physical memory that another process may map.
typedef struct xseg_exported_handle {
  // A descriptor, which the caller closes.
  int fd;
  // First byte of the part in what the descriptor stands for.
  uint64_t offset;
  // Bytes of the part.
  uint64_t bytes;
  // Bytes of the whole piece, which is what an importer maps.
  uint64_t handle_bytes;
} xseg_exported_handle;

// What a heap did and holds. Sizes in bytes. Exact when no other thread is at work on the heap. Later versions add
// fields at the end.
typedef struct xseg_statistics {
  // Set it to `sizeof(xseg_statistics)` before the call. Afterwards: how many bytes the library filled.
  uint64_t size;
  // Bytes in live blocks, rounded to 512 B.
  uint64_t allocated;
  // Bytes in live blocks as the client asked for them.
  uint64_t requested;
  // Physical memory of all handles that exist, mapped or not.
  uint64_t reserved;
  // Most `allocated` at once.
  uint64_t peak_allocated;
  // Most `requested` at once.
  uint64_t peak_requested;
  // Most `reserved` at once.
  uint64_t peak_reserved;
  // Most physical memory that may exist; `UINT64_MAX`: no bound.
  uint64_t limit;
  // Live blocks.
  uint64_t live_blocks;
  // Free bytes behind free addresses.
  uint64_t free;
  // Largest free range at one place.
  uint64_t largest_free;
  // Bytes of free ranges that share a granule with a live block (internal to granules: no use to others).
  uint64_t partly_live_granules;
  // Granules that small blocks hold with less than a quarter of their bytes live (internal fragmentation).
  uint64_t pinned_by_small;
  // Bytes that freed blocks hold until the streams they were declared used on have passed and imports by other
  // processes have ended.
  uint64_t pending;
  // Bytes of addresses whose memory was moved away and that are still mapped.
  uint64_t zombie;
  // Bytes inside pinned ranges.
  uint64_t pinned;
  // Capture pools that exist, also released ones with live blocks.
  uint64_t capture_pools;
  // Bytes of memory behind addresses of capture pools; their free part counts in `free` too.
  uint64_t captured;
  // Allocations so far.
  uint64_t allocs;
  // Frees so far.
  uint64_t frees;
  // Requests, also those that failed, that needed more than a fitting free block.
  uint64_t slow_allocs;
  // Requests that ended in an out-of-memory error.
  uint64_t ooms;
  // Requests that waited on the host.
  uint64_t host_waits;
  // Waits put on a stream of the device.
  uint64_t gpu_waits;
  // Handles moved by remapping.
  uint64_t handles_moved;
  // Bytes moved by remapping: growth that the moves saved.
  uint64_t bytes_moved;
  // Handles mapped a second time, so that an idle end of them is used while the rest is live elsewhere.
  uint64_t handles_joined;
  // Idle handles given up so that smaller ones could be created.
  uint64_t handles_rechunked;
  // Their bytes.
  uint64_t bytes_rechunked;
  // Handles given back by trimming and shrinking.
  uint64_t handles_trimmed;
  // Their bytes.
  uint64_t bytes_trimmed;
  // Bytes created so far.
  uint64_t bytes_created;
  // Bytes copied: always 0.
  uint64_t bytes_copied;
  // Handles created so far.
  uint64_t calls_create;
  // Handles mapped so far.
  uint64_t calls_map;
  // Mappings made accessible so far.
  uint64_t calls_set_access;
  // Mappings unmapped so far.
  uint64_t calls_unmap;
  // Handles released so far.
  uint64_t calls_release;
  // Address ranges reserved so far.
  uint64_t calls_reserve;
  // Time in driver calls in nanoseconds: modelled on `sim` and `host`, measured on `cuda`.
  uint64_t driver_nanos;
  // Of it: in calls that count in `calls_create`.
  uint64_t nanos_create;
  // Of it: in calls that count in `calls_map`.
  uint64_t nanos_map;
  // Of it: in calls that count in `calls_set_access`.
  uint64_t nanos_set_access;
  // Of it: in calls that count in `calls_unmap`.
  uint64_t nanos_unmap;
  // Of it: in calls that count in `calls_release`.
  uint64_t nanos_release;
  // Of it: in calls that count in `calls_reserve`.
  uint64_t nanos_reserve;
  // Host memory that the heap's tables hold, without untouched pages.
  uint64_t metadata_bytes;
  // Bytes of blocks that other processes may use, live or pending.
  uint64_t exported;
  // Bytes of other processes' blocks that are mapped here; they count nowhere else.
  uint64_t imported;
  // Blocks so far that lie where the plan (`plan` in `XSEG_CONF`) says.
  uint64_t planned;
  // Blocks so far that the plan foresaw and that lie elsewhere, since their place was not free.
  uint64_t planned_elsewhere;
  // What became of the plan: 0 none was set, 1 no request of a size that is planned came yet, 2 it is followed, 3 it was
  // followed to its end, 4 it was left, 5 it foresaw none of the requests so far, 6 it takes more than the limit, 7 the heap
  // has no addresses for it, 8 it was given up after too many moves.
  uint64_t plan_state;
  // Bytes so far of the ends for which handles were mapped a second time.
  uint64_t bytes_joined;
  // Second mappings so far that ended, so that the handle is one again where it was.
  uint64_t joins_ended;
} xseg_statistics;

// What blocks with a tag take up on a device. Sizes in bytes.
typedef struct xseg_tag_figures {
  // The tag, as text that lives as long as the process.
  const char *name;
  // Bytes in live blocks, rounded to 512 B.
  uint64_t allocated;
  // Most of them at once.
  uint64_t peak_allocated;
  // Live blocks.
  uint64_t live_blocks;
  // Allocations so far.
  uint64_t allocs;
} xseg_tag_figures;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Version of the library in use: major × 65536 + minor × 256 + patch.
uint32_t xseg_version(void);

// Version of the library in use as text, which lives as long as the library.
const char *xseg_version_string(void);

// Adds a function that may free memory before an out-of-memory error. When it says that it did, the request is tried again, and
// the function called again while less and less is live: until the limit has room, and, where the device has nothing more to
// wait for, until there is a place; for what is larger than the limit once.
//
// What the caller promises:
// Any thread may call `callback` with `user` until the heap is destroyed.
enum xseg_status xseg_on_out_of_memory(xseg_heap *handle,
                                       xseg_out_of_memory_callback callback,
                                       void *user);

// A graph is going to be captured: from now on what `filter` says yes to is allocated from `pool`, which gets one use more
// and whose memory stays where it is until it is released. A null `filter` takes every stream. Call it before the
// capture begins.
//
// What the caller promises:
// Any thread may call `filter` with `user` until `xseg_end_capture` has returned and requests that were under way have too.
enum xseg_status xseg_begin_capture(xseg_heap *handle,
                                    struct xseg_pool pool,
                                    xseg_stream_filter filter,
                                    void *user);

// As `xseg_begin_capture`, for the `count` streams at `streams`, of which there is one at least.
//
// What the caller promises:
// `streams` is valid for reading `count` of them, which exist.
enum xseg_status xseg_begin_capture_of(xseg_heap *handle,
                                       struct xseg_pool pool,
                                       const xseg_stream *streams,
                                       size_t count);

// Ends the recording of a pool: allocations are ordinary again, the pool stays. Call it when the capture has ended.
enum xseg_status xseg_end_capture(xseg_heap *handle, struct xseg_pool pool);

// Adds one use to a pool without sending allocations there.
enum xseg_status xseg_retain_capture(xseg_heap *handle, struct xseg_pool pool);

// Ends one use of a pool, as when a graph is destroyed. With the last one its memory is ordinary when its blocks are freed.
enum xseg_status xseg_release_capture(xseg_heap *handle,
                                      struct xseg_pool pool);

// Uses of a pool; 0 for one that is released or never was.
//
// What the caller promises:
// `uses` is null or valid for writing.
enum xseg_status xseg_capture_uses(xseg_heap *handle, struct xseg_pool pool, uint32_t *uses);

// The process's heap of a GPU, made by the first call for it with the policy of `XSEG_CONF`. It lives as long as the process;
// the handle is for all functions but `xseg_heap_destroy`. Not to be called first while a graph is being captured.
//
// What the caller promises:
// `heap` is null or valid for writing.
enum xseg_status xseg_device_heap(int device,
                                  xseg_heap **heap);

// As `xseg_alloc`, on a device's heap.
//
// What the caller promises:
// As `xseg_alloc`.
enum xseg_status xseg_device_alloc(int device, uint64_t bytes, xseg_stream stream, void **block);

// As `xseg_free`, for a block of any device's heap. In a forked child, and for a null `block`, it does nothing.
//
// What the caller promises:
// As `xseg_free`.
enum xseg_status xseg_device_free(void *block);

// As `xseg_record_use`, for a block of any device's heap.
//
// What the caller promises:
// As `xseg_record_use`.
enum xseg_status xseg_device_record_use(const void *block, xseg_stream stream);

// As `xseg_record_use_on`, for a block of any device's heap.
//
// What the caller promises:
// As `xseg_record_use`.
enum xseg_status xseg_device_record_use_on(const void *block, xseg_stream stream, int device);

// Bytes of all allocations so far on a device's heap: rounded, and as asked for. Either place may be null; 0 where the
// device has no heap yet.
//
// What the caller promises:
// The places are null or valid for writing.
enum xseg_status xseg_device_totals(int device, uint64_t *allocated, uint64_t *requested);

// The device whose heap a block is of, the bytes that were asked for, and those that it takes up; each place may be null.
//
// What the caller promises:
// The places are null or valid for writing.
enum xseg_status xseg_device_block(const void *block,
                                   int *device,
                                   uint64_t *requested,
                                   uint64_t *size);

// From now on `callback` is told of every mapping of the devices' heaps, for as long as the process lives.
//
// What the caller promises:
// Any thread may call `callback` with `user` from now on; what it may do is said at `xseg_mapping_callback`.
enum xseg_status xseg_device_watch(xseg_mapping_callback callback, void *user);

// Ends a heap: waits for the device, releases all of its memory, live blocks too, and makes the handle stale.
// Calls on other threads that are under way fail with `XSEG_SHUT_DOWN`. A recording of the heap ends, as by `xseg_record_stop`.
enum xseg_status xseg_heap_destroy(xseg_heap *handle);

// Makes a heap as the options say, and gives its handle in `heap`.
//
// What the caller promises:
// `options` points to a structure of the size that it states, with a `conf` that is null or a string; `heap` is
// null or valid for writing. `mapping` may be called by any thread until the heap is destroyed.
enum xseg_status xseg_heap_create(const struct xseg_heap_options *options, xseg_heap **heap);

// Makes a heap with the policy of the environment variable `XSEG_CONF`: a GPU where there is one, else host memory.
//
// What the caller promises:
// `heap` is null or valid for writing.
enum xseg_status xseg_heap_from_env(xseg_heap **heap);

// Makes a heap with the policy `conf`, such as `"backend:host,limit:4GiB"`, whatever the environment says.
//
// What the caller promises:
// `conf` is null or a string; `heap` is null or valid for writing.
enum xseg_status xseg_heap_from_conf(const char *conf, xseg_heap **heap);

// Allocates `bytes` for work on `stream`, aligned to 512 bytes. Size 0 gives a block of which nothing may be used.
// Ordered by the stream, not by the host: work that is queued on `stream` after the call may use the block. The host waits
// for the device only as the last step before an error, and not longer than `wait_limit` of the policy.
//
// What the caller promises:
// `block` is null or valid for writing; `stream` exists.
enum xseg_status xseg_alloc(xseg_heap *heap,
                            uint64_t bytes,
                            xseg_stream stream,
                            void **block);

// As `xseg_alloc`, at a multiple of `align` bytes, a power of two up to 2 MiB.
//
// What the caller promises:
// As `xseg_alloc`.
enum xseg_status xseg_alloc_aligned(xseg_heap *heap, uint64_t bytes, uint64_t align, xseg_stream stream, void **block);

// As `xseg_alloc`, on one piece of physical memory of its own, for libraries that take memory by the handle. Takes up
// whole granules of 2 MiB.
//
// What the caller promises:
// As `xseg_alloc`.
enum xseg_status xseg_alloc_contiguous(xseg_heap *heap, uint64_t bytes, xseg_stream stream, void **block);

// Frees a block. Never waits: work that was queued on the block's stream before the call may still use it, and other
// streams get the memory only when every stream has passed the call. A null `block` is `XSEG_OK`, and nothing is done.
//
// What the caller promises:
// No work that is queued after the call uses the block.
enum xseg_status xseg_free(xseg_heap *heap, void *block);

// As `xseg_free`, once `event` (a `cudaEvent_t` or `CUevent` that was recorded) has completed. What the event stands for
// now counts; it may be recorded again or destroyed right afterwards. On an error the block lives on.
// A null `block` is `XSEG_OK`, and nothing is done.
//
// What the caller promises:
// As `xseg_free`; `event` exists.
enum xseg_status xseg_free_after(xseg_heap *heap,
                                 void *block,
                                 void *event);

// The bytes that were asked for and those that the block takes up; either place may be null.
//
// What the caller promises:
// `requested` and `size` are null or valid for writing.
enum xseg_status xseg_block_size(xseg_heap *heap, const void *block, uint64_t *requested, uint64_t *size);

// Says that work on `stream`, queued up to the block's free, uses the block: it is reused only when that work is done.
// The stream may be of another GPU than the heap, but a default stream is taken for the heap's: see `xseg_record_use_on`.
//
// What the caller promises:
// `stream` exists.
enum xseg_status xseg_record_use(xseg_heap *heap,
                                 const void *block,
                                 xseg_stream stream);

// As `xseg_record_use`, for a stream of the GPU `device`, a default stream as well. A stream of another GPU has to exist when the
// block is freed: else all that was queued on that GPU is waited for, once no heap has announced a capture there, and before CUDA 12.5
// the memory is kept until the heap ends.
//
// What the caller promises:
// As `xseg_record_use`.
enum xseg_status xseg_record_use_on(xseg_heap *heap,
                                    const void *block,
                                    xseg_stream stream,
                                    int device);

// The stream is going to be destroyed: what it freed belongs to all when its work has passed. Later use of it is an error.
//
// What the caller promises:
// `stream` still exists.
enum xseg_status xseg_retire_stream(xseg_heap *heap,
                                    xseg_stream stream);

// Gives idle memory whose use has passed back to the driver, down to `keep` of the policy. `released` gets its bytes; it
// may be null.
//
// What the caller promises:
// `released` is null or valid for writing.
enum xseg_status xseg_trim(xseg_heap *heap,
                           uint64_t *released);

// Sets the most physical memory that may exist, in bytes, rounded down to granules of 2 MiB; `UINT64_MAX`: no bound. Idle
// memory above it is released as far as its use has passed; `reserved` gets what exists afterwards and may be null.
//
// What the caller promises:
// `reserved` is null or valid for writing.
enum xseg_status xseg_set_limit(xseg_heap *heap,
                                uint64_t bytes,
                                uint64_t *reserved);

// Does deferred work: call it now and then. It never waits for the device, but where page tables may not be edited beside
// running kernels.
enum xseg_status xseg_tick(xseg_heap *heap);

// Keeps the memory behind a range of addresses where it is until `xseg_unpin`: for graphs, network cards and other
// processes that hold the address.
//
// What the caller promises:
// None beyond a valid handle: the range is checked.
enum xseg_status xseg_pin(xseg_heap *heap, const void *address, uint64_t bytes);

// Ends one `xseg_pin` of the same granules of 2 MiB, to which ranges are rounded outwards.
//
// What the caller promises:
// Nothing outside relies on the range any more.
enum xseg_status xseg_unpin(xseg_heap *heap, const void *address, uint64_t bytes);

// From now on the GPU `device` reads and writes all of the heap's memory: what is mapped, imports too, and what will be,
// wherever it moves. That is for good. Ordering the work of both devices is the caller's. For a device that has access, by this or by
// `peers` of the policy, and for the heap's own nothing is done. Takes a driver call for each mapping there is. Refused by the driver
// (`XSEG_DRIVER`) the device has access to nothing that it had none to; one that cannot reach the heap's device at all gives
// `XSEG_UNAVAILABLE`, one that does not exist, and memory of no GPU, `XSEG_INVALID_ARGUMENT`. Also while a graph is captured.
enum xseg_status xseg_enable_peer(xseg_heap *heap,
                                  int device);

// As `xseg_enable_peer`, of the process's heap of the GPU `memory`, which is made if it is not there yet (see `xseg_device_heap`): `device`
// gets access to it. Access is one way; the other one is a call of its own.
enum xseg_status xseg_device_enable_peer(int memory,
                                         int device);

// From now on every allocation, free and declared use of a heap is written to a trace file, which `xseg replay` reads,
// beginning with the blocks that are live. Times are microseconds since the call. A heap has one recording at a time, and a file, too, of
// whichever process: a second one is refused by `XSEG_INVALID_ARGUMENT`. What other
// threads allocate or free while this is called may stay live in the trace. Only allocations by this interface are seen. What cannot be
// written is said by `xseg_record_stop`, raises no signal, and disturbs nothing else. The path may be a pipe's: allocations of all heaps that
// are being recorded then wait for a reader that is slow.
//
// What the caller promises:
// `path` is null or a string.
enum xseg_status xseg_record_start(xseg_heap *handle,
                                   const char *path);

// Ends the recording of a heap; its file is whole when this returns. To be called before the process ends, unless
// `xseg_heap_destroy` is.
enum xseg_status xseg_record_stop(xseg_heap *handle);

// Makes a block of a capture pool live again where it lay: `block` is what `xseg_regions` said of it while it was live, and all
// of its memory must be free by now, for its stream. With the frees of what came after it this is a checkpoint of a pool.
//
// What the caller promises:
// `block` is null or valid for reading; its stream exists.
enum xseg_status xseg_restore_block(xseg_heap *handle,
                                    const struct xseg_region *block);

// Lists all mapped ranges by address. `count` gets how many there are; the first `capacity` of them are written to `regions`,
// which may be null where `capacity` is 0.
//
// What the caller promises:
// `regions` is valid for writing `capacity` of them; `count` is null or valid for writing.
enum xseg_status xseg_regions(xseg_heap *handle,
                              struct xseg_region *regions,
                              size_t capacity,
                              size_t *count);

// Descriptors of the memory behind a block, one for each piece in address order. `count` gets how many there are; the first
// `capacity` of them are written to `handles`, which may be null where `capacity` is 0. While another process uses the
// memory, keep the block; `xseg_export` sees to that by itself.
//
// What the caller promises:
// `handles` is valid for writing `capacity` of them; `count` is null or valid for writing.
enum xseg_status xseg_export_handles(xseg_heap *heap,
                                     const void *block,
                                     struct xseg_exported_handle *handles,
                                     size_t capacity,
                                     size_t *count);

// Exports a block for one import by another process: `fd` gets a descriptor, which the other process gives to `xseg_import`.
// It may be sent over a Unix socket or inherited (`FD_CLOEXEC` is set); the caller closes its own copy. The block may be freed
// at any time afterwards: its memory goes to nobody else until the import has ended, by the importer's word or with its
// process, which is looked at by `xseg_tick` and the like. What the importer reads must have been written before.
//
// What the caller promises:
// `fd` is null or valid for writing.
enum xseg_status xseg_export(xseg_heap *heap,
                             const void *block,
                             int *fd);

// As `xseg_export`, sent over a connected Unix socket, from which the other process takes it by `xseg_import_receive`.
//
// What the caller promises:
// No other thread closes `socket` meanwhile.
enum xseg_status xseg_export_send(xseg_heap *heap, const void *block, int socket);

// Maps a block that another process exported; `address` gets where it starts and `bytes`, which may be null, its length. The
// descriptor is the library's from now on, also after an error. The memory counts towards no limit of this heap.
//
// What the caller promises:
// `fd` is the caller's to give away; `address` and `bytes` are null or valid for writing.
enum xseg_status xseg_import(xseg_heap *heap,
                             int fd,
                             void **address,
                             uint64_t *bytes);

// As `xseg_import`, of what `xseg_export_send` sent over a Unix socket. Waits for it 10 s at most.
//
// What the caller promises:
// No other thread closes `socket` meanwhile; `address` and `bytes` are null or valid for writing.
enum xseg_status xseg_import_receive(xseg_heap *heap, int socket, void **address, uint64_t *bytes);

// Ends an import by its address. Never waits: it is unmapped, and the exporter told, when work that was queued before has
// passed, which is looked at by `xseg_tick` and the like.
//
// What the caller promises:
// No work that is queued after the call uses the memory.
enum xseg_status xseg_import_end(xseg_heap *heap,
                                 void *address);

// As `xseg_import_end`, and waits until it is unmapped, at most `wait_limit` of the policy. With `XSEG_SHARE` for an import
// that work still uses it has ended all the same, and is unmapped later.
//
// What the caller promises:
// As `xseg_import_end`.
enum xseg_status xseg_import_close(xseg_heap *heap,
                                   void *address);

// Fills `statistics`, as far as both the program and the library know its fields.
//
// What the caller promises:
// `statistics` is null or valid for writing as many bytes as its `size` says.
enum xseg_status xseg_stats(xseg_heap *handle, struct xseg_statistics *statistics);

// Sets the peaks to the present values.
enum xseg_status xseg_reset_peaks(xseg_heap *handle);

// The limit in bytes; `UINT64_MAX`: none.
//
// What the caller promises:
// `bytes` is null or valid for writing.
enum xseg_status xseg_limit(xseg_heap *handle, uint64_t *bytes);

// The backend: `"cuda"`, `"host"` or `"sim"`, as text that lives as long as the library.
//
// What the caller promises:
// `name` is null or valid for writing.
enum xseg_status xseg_backend(xseg_heap *handle, const char **name);

// The sentence of the last call on this thread that failed; empty before the first. Never null. It is valid until
// another call on this thread fails.
const char *xseg_last_error(void);

// The name of a status, as text that lives as long as the library; `"unknown status"` for another number.
const char *xseg_status_name(int status);

// From now on what this thread allocates on devices' heaps has the tag `name`, until `xseg_tag_pop`. Tags nest; the
// innermost counts. A process has up to 1024 different names. Until the first call tags cost nothing. In a forked child they mean
// nothing, and this and `xseg_tag_pop` do nothing.
//
// What the caller promises:
// `name` is null or a string.
enum xseg_status xseg_tag_push(const char *name);

// Ends the innermost tag of this thread.
enum xseg_status xseg_tag_pop(void);

// The innermost tag of this thread, as text that lives as long as the process; null where there is none.
const char *xseg_tag_current(void);

// The figures of every tag on a device, in the order of their first use. `count` gets how many there are; the first
// `capacity` of them are written to `figures`, which may be null where `capacity` is 0.
//
// What the caller promises:
// `figures` is valid for writing `capacity` of them; `count` is null or valid for writing.
enum xseg_status xseg_tags(int device, struct xseg_tag_figures *figures, size_t capacity, size_t *count);

// Sets the peaks of all tags on a device to the present values.
enum xseg_status xseg_tags_reset_peaks(int device);

// A ticket for a live block of a device's heap: text of at most `XSEG_TICKET_BYTES`, with a zero at its end. Other processes of
// this user (and this one) give it to `xseg_device_open`, any number of times until the block is freed; its memory goes to nobody
// else before they have all closed it. It is a secret like the block's content. Asked again the answer is the same, and never
// again that of another block. The first ticket starts a thread that answers the others.
//
// What the caller promises:
// `ticket` is valid for writing `capacity` bytes.
enum xseg_status xseg_device_ticket(const void *block,
                                    char *ticket,
                                    size_t capacity);

// Maps the block that a ticket of another process is for, by the heap of a device, which must be the block's. `address` gets where it
// starts and `bytes`, which may be null, its length. A block that is open already is found where it is; each call needs an
// `xseg_device_close`. What is read must have been written before. Waits 10 s at most for the other process's answer, and then as
// `xseg_import_receive` for what it hands over. While it is open it costs two descriptors there and one here.
//
// What the caller promises:
// `ticket` is null or a text that ends with a zero; `address` and `bytes` are null or valid for writing.
enum xseg_status xseg_device_open(int device,
                                  const char *ticket,
                                  void **address,
                                  uint64_t *bytes);

// Ends one `xseg_device_open`. After the last one of a block it is unmapped when the work queued so far has passed, and the exporter
// told, by a thread of the library. Never waits. In a forked child it does nothing.
//
// What the caller promises:
// No work that is queued after the last call uses the memory.
enum xseg_status xseg_device_close(void *address);

// `CUDAPluggableAllocator`'s allocation. Size 0 gives null.
//
// What the caller promises:
// The caller is C++ that catches exceptions, or lets itself be unwound: out of memory is `std::runtime_error`. `stream` exists.
void *xseg_torch_alloc(size_t bytes,
                       int device,
                       xseg_stream stream);

// `CUDAPluggableAllocator`'s free.
//
// What the caller promises:
// As `xseg_free`.
void xseg_torch_free(void *block, size_t bytes, int device, xseg_stream stream);

// `CUDAPluggableAllocator`'s `record_stream`.
//
// What the caller promises:
// As `xseg_record_use`.
void xseg_torch_record_stream(void *block, xseg_stream stream);

// `CUDAPluggableAllocator`'s reset, that is `torch.cuda.empty_cache()`: every device's idle memory goes back.
void xseg_torch_reset(void);

// `CUDAPluggableAllocator`'s memory fraction: the limit is this share of the device's memory.
void xseg_torch_memory_fraction(double fraction, int device);

// `CUDAPluggableAllocator`'s base of an allocation: a block is its own.
//
// What the caller promises:
// `size` is null or valid for writing.
void *xseg_torch_base_alloc(void *block, size_t *size);

// `CUDAPluggableAllocator`'s opening of a pool: it takes what those streams ask for that capture a graph and that the filter
// says yes to. A pool that is open is not opened again. Without a filter (a null pointer or an empty one, or in a process without
// GCC's C++ library) a pool takes from all captures, and is the only one that is open on its device.
//
// What the caller promises:
// The caller is C++ that catches exceptions, or lets itself be unwound: a refusal is `std::runtime_error`. `filter` is null or a
// `std::function<bool(cudaStream_t)>`, which is copied. Any thread may call the copy until `xseg_torch_end_pool` has returned.
void xseg_torch_begin_pool(int device,
                           uint64_t first,
                           uint64_t second,
                           void *filter);

// A pool is opened with a filter of the caller's; see `xseg_begin_capture`. While a pool is open a second opening
// of it is refused, from whichever thread.
//
// What the caller promises:
// As `xseg_begin_capture`.
enum xseg_status xseg_device_begin_pool(int device, struct xseg_pool pool, xseg_stream_filter filter, void *user);

// Ends `xseg_device_begin_pool` of a pool. Its filter is not called any more when this returns.
enum xseg_status xseg_device_end_pool(int device, struct xseg_pool pool);

// `CUDAPluggableAllocator`'s end of a pool's opening.
void xseg_torch_end_pool(int device, uint64_t first, uint64_t second);

// `CUDAPluggableAllocator`'s release of a pool.
void xseg_torch_release_pool(int device, uint64_t first, uint64_t second);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* XSEG_H */
