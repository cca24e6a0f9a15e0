#include "memory.h"

#include <ATen/ATen.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "violations.h"

namespace fake_gpu {
namespace {

constexpr int kPoison = 0xCD;
constexpr size_t kAlignment = 64;

std::atomic<int64_t> in_use[kDevices];
std::atomic<int64_t> at_most[kDevices];

void count(int device, int64_t bytes) {
  const int64_t now = in_use[device] += bytes;
  int64_t most = at_most[device];
  while (now > most && !at_most[device].compare_exchange_weak(most, now)) {
  }
}

void free_for_good(const BlockPtr& block) {
  block->freed = true;
  if (block->own && block->bytes) std::memset(block->data.get(), kPoison, block->bytes);
}

// What a DataPtr of this device has as its context.
struct Handle {
  BlockPtr block;
};

void release(void* context) {
  const std::unique_ptr<Handle> handle(static_cast<Handle*>(context));
  const BlockPtr block = handle->block;
  if (!block) return;
  count(block->device, -static_cast<int64_t>(block->bytes));
  std::vector<MomentPtr> moments;
  for (Stream* user : block->users) {
    if (user != block->stream && !user->capturing()) moments.push_back(user->record());
  }
  // A graph has a pool of its own, whose memory lives as long as the graph.
  if (block->stream->capturing()) return;
  bool idle = block->stream->idle();
  for (const auto& moment : moments) idle = idle && moment->reached();
  if (idle) return free_for_good(block);
  block->stream->enqueue([block, moments] {
    for (const auto& moment : moments) moment->wait();
    free_for_good(block);
  });
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_shared<Block>();
    block->device = Streams::current_device();
    block->stream = &Streams::instance().current(block->device);
    block->bytes = bytes;
    if (bytes) {
      const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      void* data = std::aligned_alloc(kAlignment, rounded);
      if (!data) throw std::bad_alloc();
      block->data.reset(data, std::free);
    }
    return wrap_block(std::move(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* allocator() {
  static auto* const allocator = new Allocator;
  return allocator;
}

c10::DataPtr wrap_block(BlockPtr block) {
  void* const data = block->data.get();
  const c10::Device device(c10::DeviceType::PrivateUse1,
                           static_cast<c10::DeviceIndex>(block->device));
  count(block->device, static_cast<int64_t>(block->bytes));
  auto handle = std::make_unique<Handle>(Handle{std::move(block)});
  return {data, handle.release(), &release, device};
}

c10::DataPtr wrap_storage(const c10::Storage& storage, int device) {
  auto block = std::make_shared<Block>();
  block->device = device;
  block->stream = &Streams::instance().current(device);
  block->bytes = storage.nbytes();
  block->own = storage.use_count() == 1;
  auto keep = std::make_shared<c10::Storage>(storage);
  block->data = std::shared_ptr<void>(keep, storage.mutable_data());
  return wrap_block(std::move(block));
}

BlockPtr block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &release) return nullptr;
  return static_cast<Handle*>(data.get_context())->block;
}

void record_stream(const c10::DataPtr& data, Stream& stream) {
  if (data.get_deleter() != &release) return;
  const BlockPtr block = static_cast<Handle*>(data.get_context())->block;
  const std::lock_guard<std::mutex> lock(block->mutex);
  block->users.push_back(&stream);
}

std::pair<int64_t, int64_t> memory_in_use(int device) { return {in_use[device], at_most[device]}; }

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  // It may be resized by the operation, so it needs an allocator; see Fallback.
  const c10::Storage& storage = tensor.storage();
  c10::Storage alias(c10::Storage::use_byte_size_t{}, storage.nbytes(),
                     c10::DataPtr(storage.mutable_data(), c10::Device(c10::DeviceType::CPU)),
                     c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
  at::Tensor on = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  on.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                  tensor.storage_offset());
  // Copies are given tensors that are yet to be conjugated or negated.
  on._set_conj(tensor.is_conj());
  on._set_neg(tensor.is_neg());
  return on;
}

Operand::Operand(const at::Tensor& tensor)
    : block_(block_of(tensor)),
      offset_(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())),
      bytes_(static_cast<int64_t>(tensor.nbytes())),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      type_(tensor.scalar_type()) {
  TORCH_CHECK(block_.lock(), "fakenccl: not a tensor of a fakegpu");
}

void Operand::pin() { pinned_ = block_.lock(); }

at::Tensor Operand::on_cpu(const char* operation) const {
  const BlockPtr block = block_.lock();
  const auto options = at::TensorOptions().dtype(type_);
  if (!block || block->freed) {
    Violations::instance().add("use_after_free",
                               std::string(operation) + " runs on memory that was freed");
    at::Tensor scratch = at::empty_strided(sizes_, strides_, options);
    std::memset(scratch.mutable_data_ptr(), kPoison, scratch.nbytes());
    return scratch;
  }
  if (!block->data) return at::empty_strided(sizes_, strides_, options);
  return at::from_blob(
      static_cast<char*>(block->data.get()) + offset_, sizes_, strides_, [block](void*) {},
      options);
}

}  // namespace fake_gpu
