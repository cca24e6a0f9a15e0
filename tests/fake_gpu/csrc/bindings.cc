// What Python sees of the fakes; fake_gpu/__init__.py is the documentation.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "controls.h"
#include "memory.h"
#include "nccl.h"
#include "stream.h"
#include "violations.h"

namespace py = pybind11;

namespace fake_gpu {

void register_device();

namespace {

Stream& current() { return Streams::instance().current(Streams::current_device()); }

// What a completion hook saw; written on the watchdog's thread, without the GIL.
struct Completion {
  uint64_t key;
  std::optional<float> duration_ms;
  int64_t seen_ns;
};

class CompletionLog {
 public:
  void add(const Completion& completion) {
    const std::lock_guard<std::mutex> lock(mutex_);
    list_.push_back(completion);
  }
  std::vector<Completion> list() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return list_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Completion> list_;
};

py::dict as_dict(const Issued& of) {
  using namespace py::literals;
  return py::dict("op"_a = of.op, "sequence"_a = of.sequence, "group"_a = of.group,
                  "rank"_a = of.rank, "size"_a = of.size, "device"_a = of.device,
                  "current_stream"_a = of.stream, "stream"_a = of.on_stream, "bytes"_a = of.bytes,
                  "peer"_a = of.peer, "tag"_a = of.tag, "timeout_ms"_a = of.timeout_ms,
                  "async_op"_a = of.async, "captured"_a = of.captured, "coalesced"_a = of.coalesced,
                  "thread"_a = of.thread, "issue_ns"_a = of.issue_ns, "start_ns"_a = of.start_ns,
                  "end_ns"_a = of.end_ns);
}

void bind_device(py::module_& module) {
  module.def("register_device", &register_device);
  module.attr("DEVICES") = kDevices;
  module.def("current_device", [] { return Streams::current_device(); });
  module.def("set_device", [](int device) {
    TORCH_CHECK(device >= 0 && device < kDevices, "fakegpu: no such device");
    Streams::current_device() = device;
  });
  module.def(
      "drain",
      [](double seconds) { return Streams::instance().drain(static_cast<int64_t>(seconds * 1e9)); },
      py::call_guard<py::gil_scoped_release>());
  module.def("memory_in_use", &memory_in_use);
  module.def("timing_events", &timing_events);
  module.def("now_ns", &now_ns);
  module.def("sleep", [](double seconds) {
    current().enqueue(
        [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  // A kernel that runs later, as the fallback's never do.
  module.def("fill", [](const at::Tensor& tensor, double value) {
    Operand on(tensor);
    if (current().capturing()) on.pin();
    current().enqueue([on, value] { on.on_cpu("fill").fill_(value); });
  });
  module.def("add", [](const at::Tensor& tensor, double value) {
    Operand on(tensor);
    if (current().capturing()) on.pin();
    current().enqueue([on, value] { on.on_cpu("add").add_(value); });
  });
  py::class_<Capture, std::shared_ptr<Capture>>(module, "Capture")
      .def_property_readonly("size", &Capture::size)
      .def("replay", [](const std::shared_ptr<Capture>& self) {
        current().enqueue([self] { self->run(); });
      });
  module.def("begin_capture", [] { return Streams::instance().begin_capture(current()); });
  module.def("end_capture", [](const std::shared_ptr<Capture>& capture) {
    Streams::instance().end_capture(capture);
  });
  module.def("is_capturing", [] { return current().capturing(); });
}

void bind_controls(py::module_& module) {
  module.def(
      "configure",
      [](std::optional<bool> legacy, std::optional<double> watchdog_period_s,
         std::optional<bool> timing, std::optional<bool> strict_hooks) {
        Settings settings = Controls::instance().settings();
        if (legacy) settings.legacy = *legacy;
        if (watchdog_period_s) {
          settings.watchdog_period_ns = static_cast<int64_t>(*watchdog_period_s * 1e9);
        }
        if (timing) settings.timing = *timing;
        if (strict_hooks) settings.strict_hooks = *strict_hooks;
        Controls::instance().set(settings);
      },
      py::kw_only(), py::arg("legacy") = std::nullopt, py::arg("watchdog_period_s") = std::nullopt,
      py::arg("timing") = std::nullopt, py::arg("strict_hooks") = std::nullopt);
  module.def("settings", [] {
    using namespace py::literals;
    const Settings of = Controls::instance().settings();
    return py::dict("legacy"_a = of.legacy,
                    "watchdog_period_s"_a = static_cast<double>(of.watchdog_period_ns) / 1e9,
                    "timing"_a = of.timing, "strict_hooks"_a = of.strict_hooks);
  });
  module.def(
      "inject",
      [](std::string kind, std::string op, double seconds, int64_t count, int rank) {
        Controls::instance().inject({std::move(kind), std::move(op), seconds, count, rank});
      },
      py::arg("kind"), py::kw_only(), py::arg("op") = "", py::arg("seconds") = 0.0,
      py::arg("count") = 1, py::arg("rank") = -1);
  module.def("release", [] { Controls::instance().release(); });
  module.def("operations", [] {
    py::list list;
    for (const Issued& issued : Controls::instance().issued()) list.append(as_dict(issued));
    return list;
  });
  module.def("violations", [] {
    std::vector<std::pair<std::string, std::string>> list;
    for (const Violation& of : Violations::instance().list()) list.emplace_back(of.kind, of.what);
    return list;
  });
  module.def("calls", [] { return Violations::instance().calls(); });
  module.def("clear", [] {
    Violations::instance().clear();
    Controls::instance().clear();
  });
  py::class_<ScriptCall>(module, "ScriptCall");
  module.def("script_call", [] { return std::make_unique<ScriptCall>(); });
}

void bind_nccl(py::module_& module) {
  // The base classes are bound there.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<NcclConfig>(module, "NcclConfig")
      .def(py::init<>())
      .def_readwrite("min_ctas", &NcclConfig::min_ctas)
      .def_readwrite("traffic_class", &NcclConfig::traffic_class);
  py::class_<NcclOptions, c10d::Backend::Options, c10::intrusive_ptr<NcclOptions>>(module,
                                                                                   "NcclOptions")
      .def(py::init(
               [](bool high_priority) { return c10::make_intrusive<NcclOptions>(high_priority); }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("config", &NcclOptions::config)
      .def_readwrite("split_from", &NcclOptions::split_from)
      .def_readwrite("split_color", &NcclOptions::split_color)
      .def_readwrite("lazy_init", &NcclOptions::lazy_init)
      .def("__copy__",
           [](const NcclOptions& self) { return c10::make_intrusive<NcclOptions>(self); })
      .def("__deepcopy__", [](const NcclOptions& self, const py::dict&) {
        return c10::make_intrusive<NcclOptions>(self);
      });
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "Nccl")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<NcclOptions>& options) {
             const py::gil_scoped_release release;
             return c10::make_intrusive<Nccl>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def("perform_nocolor_split",
           [](Nccl& self, const py::object&) {
             const py::gil_scoped_release release;
             self.perform_nocolor_split();
           })
      .def("split",
           [](Nccl& self, const c10::intrusive_ptr<c10d::Store>& store,
              const std::vector<int>& ranks,
              const c10::intrusive_ptr<c10d::Backend::Options>& options) {
             const py::gil_scoped_release release;
             return self.split(store, ranks, options);
           })
      .def(
          "register_mem_pool",
          [](Nccl& self, const py::object&, bool symm) {
            self.count(symm ? "register_mem_pool_symm" : "register_mem_pool");
          },
          py::arg("pool"), py::arg("symm") = false)
      .def("deregister_mem_pool",
           [](Nccl& self, const py::object&) { self.count("deregister_mem_pool"); })
      .def("comm_split_count",
           [](const Nccl& self) {
             const auto counters = self.counters();
             const auto found = counters.find("split");
             return found == counters.end() ? int64_t{0} : found->second;
           })
      .def("_is_initialized", &Nccl::connected)
      .def("_set_default_timeout", &Nccl::setTimeout)
      .def_property_readonly("counters", &Nccl::counters)
      .def_property_readonly(
          "options",
          [](Nccl& self) {
            return c10::static_intrusive_pointer_cast<NcclOptions>(self.getBackendOptions());
          })
#ifdef FAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS
      .def(
          "log_completions",
          [](const c10::intrusive_ptr<Nccl>& self, int64_t id) {
            auto log = std::make_shared<CompletionLog>();
            self->registerCompletionHook(id, [log](const c10d::CompletionHookArgs& args) {
              log->add({args.completionKey, args.duration_ms, now_ns()});
            });
            return log;
          },
          py::arg("id") = 1)
      .def("bad_hook",
           [](const c10::intrusive_ptr<Nccl>& self, const std::string& kind) {
             Nccl* const backend = self.get();
             self->registerCompletionHook(2, [backend, kind](const c10d::CompletionHookArgs&) {
               if (kind == "takes_gil") {
                 const py::gil_scoped_acquire acquire;
               } else {
                 backend->enableCollectivesTiming();
               }
             });
           })
#endif
      ;
  py::class_<CompletionLog, std::shared_ptr<CompletionLog>>(module, "CompletionLog")
      .def("list", [](const CompletionLog& self) {
        std::vector<std::tuple<uint64_t, std::optional<float>, int64_t>> list;
        for (const Completion& of : self.list()) {
          list.emplace_back(of.key, of.duration_ms, of.seen_ns);
        }
        return list;
      });
#ifdef FAKE_GPU_HAS_GETCOMPLETIONKEY
  module.def("completion_key",
             [](const c10::intrusive_ptr<c10d::Work>& work) { return work->getCompletionKey(); });
#endif
  module.def("set_gloo_factory", [](py::function factory) {
    // Lives as long as the process: what may still call it is not known.
    auto* const kept = new py::function(std::move(factory));
    Nccl::set_gloo_factory([kept](const Nccl::StorePtr& store, int rank, int size) {
      const py::gil_scoped_acquire acquire;
      return (*kept)(store, rank, size).cast<Nccl::BackendPtr>();
    });
  });
}

}  // namespace
}  // namespace fake_gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  fake_gpu::bind_device(module);
  fake_gpu::bind_controls(module);
  fake_gpu::bind_nccl(module);
}
