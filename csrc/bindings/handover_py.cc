#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../process_group/handover.h"

namespace py = pybind11;

namespace crux {
namespace {

using TransferCount = std::tuple<int, int, bool, uint64_t>;  // peer, tag, sends, count
using PlainCounts = std::tuple<uint64_t, std::vector<TransferCount>, bool>;

PlainCounts to_plain(const Counts& counts) {
  std::vector<TransferCount> transfers;
  transfers.reserve(counts.transfers.size());
  for (const auto& [key, count] : counts.transfers) {
    transfers.emplace_back(key.peer, key.tag, key.sends, count);
  }
  return {counts.collectives, std::move(transfers), counts.transfers_stay};
}

Counts from_plain(const PlainCounts& plain) {
  const auto& [collectives, transfers, stay] = plain;
  Counts counts{collectives, {}, stay};
  for (const auto& [peer, tag, sends, count] : transfers) {
    counts.transfers[{peer, tag, sends}] = count;
  }
  return counts;
}

// The prefix of the keys in the store underneath, which c10d does not expose.
struct Prefix : c10d::PrefixStore {
  static std::string of(const c10::intrusive_ptr<c10d::Store>& store) {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    if (!prefixed) return "";
    return of(prefixed->getUnderlyingStore()) + prefixed->*(&Prefix::prefix_) + "/";
  }
};

// A Python function that is applied to an inner backend; may be called and dropped without the GIL.
Handover::Setting to_setting(py::function function) {
  const std::shared_ptr<py::function> kept(new py::function(std::move(function)),
                                           [](py::function* dropped) {
                                             const py::gil_scoped_acquire acquire;
                                             delete dropped;
                                           });
  return [kept](c10d::Backend& inner) {
    const py::gil_scoped_acquire acquire;
    (*kept)(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&inner));
  };
}

// Counts as a collective while c10d runs one that bypasses the group.
class Turn {
 public:
  explicit Turn(std::shared_ptr<Handover> owner) : owner_(std::move(owner)) {}

  Handover::BackendPtr enter() {
    ticket_.emplace(owner_->collective(owner_->device()));
    ticket_->issued();
    return ticket_->inner()->backend;
  }
  void exit() { ticket_.reset(); }

 private:
  const std::shared_ptr<Handover> owner_;
  std::optional<Handover::Ticket> ticket_;
};

}  // namespace

void bind_handover(py::module_& module) {
  using namespace py::literals;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  const auto unlocked_get = [&](auto method) { return py::cpp_function(method, unlocked); };
  py::class_<Turn>(module, "Turn")
      .def("__enter__", &Turn::enter, unlocked)
      .def("__exit__", [](Turn& self, const py::args&) {
        const py::gil_scoped_release release;
        self.exit();
      });
  py::class_<Handover, std::shared_ptr<Handover>>(module, "Handover")
      .def_property_readonly("group", &Handover::group)
      .def_property_readonly("device",
                             [](const Handover& self) {
                               return c10::DeviceTypeName(self.device(), /*lower_case=*/true);
                             })
      .def_property_readonly("backend", unlocked_get(&Handover::backend))
      .def_property_readonly("store", unlocked_get(&Handover::store))
      .def_property_readonly("refusal", unlocked_get(&Handover::refusal))
      .def_property_readonly("closed", unlocked_get(&Handover::closed))
      .def_property_readonly("born", &Handover::born)
      .def_property_readonly("collectives", &Handover::collectives)
      .def_property_readonly("has_transfers", unlocked_get(&Handover::has_transfers))
      .def_property_readonly("waits",
                             [](const Handover& self) {
                               const auto waits = self.waits();
                               return std::make_pair(
                                   waits.count,
                                   std::chrono::duration<double>(waits.longest).count());
                             })
      .def_property_readonly("armed", &Handover::armed)
      .def_property_readonly("stopped", &Handover::stopped)
      .def_property_readonly("waits_on", &Handover::waits_on)
      .def(
          "arm",
          [](Handover& self, const c10::intrusive_ptr<c10d::Backend>& next, uint64_t margin,
             std::chrono::milliseconds limit) { return to_plain(self.arm(next, margin, limit)); },
          "next"_a, "margin"_a, "limit"_a, unlocked)
      .def(
          "decide",
          [](Handover& self, const PlainCounts& counts) { return self.decide(from_plain(counts)); },
          "counts"_a, unlocked)
      .def("turn", [](std::shared_ptr<Handover> self) { return Turn(std::move(self)); })
      .def(
          "apply",
          [](const Handover& self, py::function function) {
            const auto setting = to_setting(std::move(function));
            const py::gil_scoped_release release;
            self.apply(setting);
          },
          "setting"_a)
      .def(
          "configure",
          [](Handover& self, const std::string& name, py::function function) {
            auto setting = to_setting(std::move(function));
            const py::gil_scoped_release release;
            self.configure(name, std::move(setting));
          },
          "name"_a, "setting"_a)
      .def("forget", &Handover::forget, "name"_a, unlocked)
      .def("refuse", &Handover::refuse, "reason"_a, unlocked)
      .def("cancel", &Handover::cancel, unlocked)
      .def("finish", &Handover::finish, unlocked)
      .def("replace", &Handover::replace, "next"_a, unlocked)
      .def("release", &Handover::release, unlocked);
  module.def("handovers", &Handover::all, unlocked);
  module.def("store_prefix", &Prefix::of, "store"_a);
}

}  // namespace crux
