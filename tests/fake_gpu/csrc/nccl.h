// The fake NCCL: a c10d backend for fakegpu tensors with the contracts of torch's NCCL backends.
//
// Every operation runs really, through Gloo on the same memory, as a task of a stream: that of the
// communicator, or the current one where the operation is synchronous. The operations of one
// communicator run one after the other, in the order of issue. Flavour "nccl2" follows
// torch/csrc/distributed/c10d/nccl2, "legacy" follows ProcessGroupNCCL.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "controls.h"
#include "memory.h"
#include "stream.h"
#include "work.h"

namespace fake_gpu {

class Nccl;

// Fields of ncclConfig_t that scripts set.
struct NcclConfig {
  // NCCL_CONFIG_UNDEF_INT of <nccl.h>.
  static constexpr int kUndefined = std::numeric_limits<int>::min();

  int min_ctas = kUndefined;
  int traffic_class = kUndefined;
};

struct NcclOptions final : c10d::Backend::Options {
  explicit NcclOptions(bool high_priority = false);
#ifdef FAKE_GPU_HAS_CLONE
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<NcclOptions>(*this);
  }
#endif

  bool is_high_priority_stream;
  NcclConfig config;
  c10::intrusive_ptr<Nccl> split_from;
  int64_t split_color = 0;
  bool lazy_init = false;
};

// One part of an operation, as Gloo does it.
struct Step {
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  struct Started {
    Works works;
    // After the works have ended; may be empty.
    std::function<void()> finish;
  };
  std::function<Started(c10d::Backend&)> start;
};

// What the tasks on streams need of a communicator; it outlives the backend.
class Communicator {
 public:
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Starts all steps, then waits for them. Throws where the communicator is aborted meanwhile.
  void run(const std::vector<Step>& steps);
  void abort();
  const std::atomic<bool>& aborted() const { return aborted_; }
  // Ranks' values, in rank order.
  std::vector<int64_t> exchange(int64_t value, int size);

  // The end of the last operation, which the next one starts behind.
  MomentPtr last;

 private:
  void wait(const Step::Works& works);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex running_;
  std::atomic<bool> aborted_{false};
  std::mutex transfers_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> transfers_;
};

class Nccl final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  // Makes the Gloo that a communicator runs on: store, rank, size.
  using GlooFactory = std::function<BackendPtr(const StorePtr&, int, int)>;

  static void set_gloo_factory(GlooFactory factory);

  Nccl(StorePtr store, int rank, int size, c10::intrusive_ptr<NcclOptions> options);
  ~Nccl() override;

  const std::string getBackendName() const override { return settings_.legacy ? "nccl" : "nccl2"; }
  OptionsPtr getBackendOptions() override { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override;
  // This rank's part of a split that it is no member of.
  void perform_nocolor_split();

  void setTimeout(std::chrono::milliseconds timeout) override;
#ifdef FAKE_GPU_HAS_ADDEPHEMERALTIMEOUT
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#endif
#ifdef FAKE_GPU_HAS_ISINITIALIZED
  bool isInitialized() override { return connected(); }
#endif
#ifdef FAKE_GPU_HAS_SUPPORTSABORTHOOKS
  bool supportsAbortHooks() const override { return !settings_.legacy; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef FAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS
  bool supportsCompletionHooks() const override { return !settings_.legacy; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif
#ifdef FAKE_GPU_HAS_SETBOUNDDEVICEID
  void setBoundDeviceId(std::optional<at::Device> device) override;
#endif
  void eagerConnectSingleDevice(at::Device device) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  void abort() override;
  void shutdown() override;

  bool connected() const;
  // Calls that are only counted: "connect", "split", "register_mem_pool", ...
  void count(const std::string& what);
  std::map<std::string, int64_t> counters() const;

 private:
  // An operation on its way to the stream.
  struct Call {
    Call(c10d::OpType of, Step step, Tensors given, Tensors results, int64_t size)
        : type(of),
          steps{std::move(step)},
          inputs(std::move(given)),
          outputs(std::move(results)),
          bytes(size) {}

    // What the script said beside the tensors.
    template <typename GivenOptions>
    Call with(const GivenOptions& opts, int64_t root = -1) && {
      timeout = opts.timeout;
      async = opts.asyncOp;
      peer = static_cast<int>(root);
      return std::move(*this);
    }

    c10d::OpType type;
    std::vector<Step> steps;
    Tensors inputs;
    Tensors outputs;
    int64_t bytes;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool async = true;
    int peer = -1;
    int tag = 0;
    bool host_blocking = false;
    int device = -1;
  };
  // What was issued since startCoalescing: nccl2 issues collectives at once and transfers at the
  // end, the legacy class everything at the end.
  struct Block {
    std::vector<Call> calls;
    std::vector<OperationPtr> operations;
    WorkPtr last;
  };

  void enter(const char* method);
  void connect(int device);
  WorkPtr issue(Call call);
  WorkPtr launch(Call call, bool coalesced);
  // Each on its own, as nccl2's coalesced operations are; the last one stands for all.
  WorkPtr issue_all(std::vector<Call> calls);
  static Call together(std::vector<Call> calls, c10d::OpType type);
  void watch();
  // Retires what has ended, and says what failed.
  void retire();
  void report(const OperationPtr& operation);
  void run_abort_hooks();
  void throw_if_failed();
  void stop_watchdog();
  // Takes part in a split of this communicator: the members' ranks here, in order of `key`.
  std::vector<int> split_on(int64_t color, int64_t key);

  const Settings settings_;
  const StorePtr store_;
  const c10::intrusive_ptr<NcclOptions> options_;
  mutable std::mutex mutex_;
  std::shared_ptr<Communicator> communicator_;
  Stream* stream_ = nullptr;
  int device_ = -1;
  bool closed_ = false;
  std::atomic<bool> timing_;
  std::atomic<uint64_t> sequence_{0};
  std::optional<Block> block_;
  std::vector<std::chrono::milliseconds> ephemeral_;
  std::map<std::string, int64_t> counters_;

  std::mutex queue_mutex_;
  std::map<Stream*, std::deque<OperationPtr>> queues_;
  std::atomic<int> error_{0};

  std::mutex hooks_mutex_;
#ifdef FAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS
  std::unordered_map<int64_t, c10d::CompletionHook> completion_hooks_;
  std::unordered_map<int64_t, c10d::AbortHook> abort_hooks_;
#endif

  std::thread watchdog_;
  std::mutex watchdog_mutex_;
  std::condition_variable watchdog_changed_;
  bool stopping_ = false;
};

}  // namespace fake_gpu
