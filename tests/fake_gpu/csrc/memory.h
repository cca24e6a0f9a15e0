// The device's memory: host memory that knows which stream may use it, and when it was freed.
//
// As with CUDA's caching allocator, memory that is freed belongs to the stream it was allocated on
// at once, and to others that were recorded on it once they have passed: from then on it is
// poisoned, and whoever still uses it has a bug.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "stream.h"

namespace fake_gpu {

struct Block {
  std::shared_ptr<void> data;
  size_t bytes = 0;
  int device = 0;
  Stream* stream = nullptr;
  // Only memory that nobody else knows is poisoned.
  bool own = true;
  std::atomic<bool> freed{false};
  std::mutex mutex;
  std::vector<Stream*> users;
};
using BlockPtr = std::shared_ptr<Block>;

c10::Allocator* allocator();
// Frees its memory for good once the streams that use it have passed.
c10::DataPtr wrap_block(BlockPtr block);
// Memory that a tensor on the CPU owns, as this device's.
c10::DataPtr wrap_storage(const c10::Storage& storage, int device);
// The block behind a tensor of this device; null for anything else.
BlockPtr block_of(const at::Tensor& tensor);
void record_stream(const c10::DataPtr& data, Stream& stream);
// Bytes that are allocated now on `device`, and that were at most.
std::pair<int64_t, int64_t> memory_in_use(int device);

// The same memory seen as a tensor on the CPU; `tensor` must stay alive.
at::Tensor on_cpu(const at::Tensor& tensor);

// A tensor as an operation sees it that runs later and keeps nothing alive.
class Operand {
 public:
  explicit Operand(const at::Tensor& tensor);
  // Its memory as a tensor on the CPU; a scratch tensor, and a violation, where it was freed.
  at::Tensor on_cpu(const char* operation) const;
  int64_t bytes() const { return bytes_; }
  // Keeps the memory, for as long as a captured graph may run.
  void pin();

 private:
  std::weak_ptr<Block> block_;
  BlockPtr pinned_;
  int64_t offset_;
  int64_t bytes_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType type_;
};

}  // namespace fake_gpu
