// A backend over another one that does, when it reduces, what a backend must not do to NCCL. The
// checks must catch each kind; a library of its own, because the fakes tell callers by library.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

class Offender final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Offender(std::string kind, c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()),
        kind_(std::move(kind)),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "offender"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const c10::Device device = tensors.at(0).device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (kind_ == "timing_event") {
      c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
      event.record(guard.getStream(device));
    }
    if (kind_ == "poll") {
      auto event = std::make_shared<c10::Event>(device.type());
      event->record(before_);
      std::thread([event] {
        try {
          event->query();
        } catch (const c10::Error&) {
          // The fake has noted it.
        }
      }).join();
    }
    if (kind_ == "other_stream") {
      const c10::StreamGuard other(guard.getStreamFromGlobalPool(device, false));
      return inner_->allreduce(tensors, opts);
    }
    if (kind_ == "frees_inputs") {
      Tensors copies{tensors[0].clone()};
      auto work = inner_->allreduce(copies, opts);
      const c10::StreamGuard other(guard.getStreamFromGlobalPool(device, false));
      work->wait();
      return work;
    }
    auto work = inner_->allreduce(tensors, opts);
    if (kind_ == "synchronize") work->synchronize();
    if (kind_ == "get_future") work->getFuture()->addCallback([](c10::ivalue::Future&) {});
    if (kind_ == "wait") work->wait();
    if (kind_ == "host_sync") guard.synchronizeStream(guard.getStream(device));
    return work;
  }

  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPtr endCoalescing() override {
    auto work = inner_->endCoalescing();
    if (kind_ == "result") work->result();
    return work;
  }

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return inner_->send(tensors, dst, kind_ == "tag" ? tag + 1 : tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return inner_->recv(tensors, src, tag);
  }

  // A stream that is not captured, for "poll".
  void remember_stream(const c10::Device& device) {
    before_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
  }

 private:
  const std::string kind_;
  const c10::intrusive_ptr<c10d::Backend> inner_;
  c10::Stream before_{c10::Stream::DEFAULT, c10::Device(c10::DeviceType::PrivateUse1, 0)};
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Offender, c10d::Backend, c10::intrusive_ptr<Offender>>(module, "Offender")
      .def(py::init([](std::string kind, const c10::intrusive_ptr<c10d::Backend>& inner) {
        auto made = c10::make_intrusive<Offender>(std::move(kind), inner);
        made->remember_stream(c10::Device(c10::DeviceType::PrivateUse1, 0));
        return made;
      }));
}
