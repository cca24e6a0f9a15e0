#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../process_group/inner_switch.h"
#include "../process_group/late_threads.h"
#include "bindings.h"

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
InnerSwitch::Setting to_setting(py::function function) {
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
  explicit Turn(std::shared_ptr<InnerSwitch> owner) : owner_(std::move(owner)) {}

  InnerSwitch::BackendPtr enter() {
    ticket_.emplace(owner_->collective(owner_->device()));
    ticket_->issued();
    return ticket_->inner()->backend;
  }
  void exit() { ticket_.reset(); }

 private:
  const std::shared_ptr<InnerSwitch> owner_;
  std::optional<InnerSwitch::Ticket> ticket_;
};

}  // namespace

void bind_inner_switch(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Turn>(module, "Turn")
      .def("__enter__", &Turn::enter, unlocked)
      .def("__exit__", [](Turn& self, const py::args&) {
        const py::gil_scoped_release release;
        self.exit();
      });
  py::class_<InnerSwitch, std::shared_ptr<InnerSwitch>>(module, "InnerSwitch")
      .def_property_readonly("group", &InnerSwitch::group)
      .def_property_readonly("device",
                             [](const InnerSwitch& self) {
                               return c10::DeviceTypeName(self.device(), /*lower_case=*/true);
                             })
      .def_property_readonly("backend",
                             [](const InnerSwitch& self) {
                               const py::gil_scoped_release release;
                               return self.backend();
                             })
      .def_property_readonly("store",
                             [](const InnerSwitch& self) {
                               const py::gil_scoped_release release;
                               return self.store();
                             })
      .def_property_readonly("refusal",
                             [](const InnerSwitch& self) {
                               const py::gil_scoped_release release;
                               return self.refusal();
                             })
      .def_property_readonly("closed",
                             [](const InnerSwitch& self) {
                               const py::gil_scoped_release release;
                               return self.closed();
                             })
      .def_property_readonly("born", &InnerSwitch::born)
      .def_property_readonly("collectives",
                             [](const InnerSwitch& self) { return self.point().collectives(); })
      .def_property_readonly("has_transfers",
                             [](const InnerSwitch& self) {
                               const py::gil_scoped_release release;
                               return self.point().has_transfers();
                             })
      .def_property_readonly("waits",
                             [](const InnerSwitch& self) {
                               const auto waits = self.point().waits();
                               return std::make_pair(
                                   waits.count,
                                   std::chrono::duration<double>(waits.longest).count());
                             })
      .def_property_readonly("armed", [](const InnerSwitch& self) { return self.point().armed(); })
      .def_property_readonly("stopped",
                             [](const InnerSwitch& self) { return self.point().stopped(); })
      .def_property_readonly("waits_on", &InnerSwitch::waits_on)
      .def(
          "arm",
          [](InnerSwitch& self, const c10::intrusive_ptr<c10d::Backend>& next, uint64_t margin,
             std::chrono::milliseconds limit) { return to_plain(self.arm(next, margin, limit)); },
          py::arg("next"), py::arg("margin"), py::arg("limit"), unlocked)
      .def(
          "decide",
          [](InnerSwitch& self, const PlainCounts& counts) {
            return self.decide(from_plain(counts));
          },
          py::arg("counts"), unlocked)
      .def("turn", [](std::shared_ptr<InnerSwitch> self) { return Turn(std::move(self)); })
      .def(
          "apply",
          [](const InnerSwitch& self, py::function function) {
            const auto setting = to_setting(std::move(function));
            const py::gil_scoped_release release;
            self.apply(setting);
          },
          py::arg("setting"))
      .def(
          "configure",
          [](InnerSwitch& self, const std::string& name, py::function function) {
            auto setting = to_setting(std::move(function));
            const py::gil_scoped_release release;
            self.configure(name, std::move(setting));
          },
          py::arg("name"), py::arg("setting"))
      .def("forget", &InnerSwitch::forget, py::arg("name"), unlocked)
      .def("refuse", &InnerSwitch::refuse, py::arg("reason"), unlocked)
      .def("cancel", &InnerSwitch::cancel, unlocked)
      .def("finish", &InnerSwitch::finish, unlocked)
      .def("replace", &InnerSwitch::replace, py::arg("next"), unlocked)
      .def("release", &InnerSwitch::release, unlocked);
  module.def("inner_switches", &InnerSwitch::all, unlocked);
  module.def("park_late_threads", &park_late_threads);
  module.def("store_prefix", &Prefix::of, py::arg("store"));
}

}  // namespace crux
