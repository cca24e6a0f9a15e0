// An inner backend of a process group, and who says that its operations have ended.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "completion_table.h"
#include "recorder.h"

namespace crux {

enum class Completion { kFuture, kHook, kNobody };

struct Inner {
  // `hook_id` names the completion hook of the one who records, where the backend has such hooks.
  Inner(c10::intrusive_ptr<c10d::Backend> backend, c10::DeviceType device, int64_t hook_id,
        Recorder& recorder);
  // The tag under which a message travels that the script gave `tag`.
  int tag_of(int tag) const noexcept { return tag ^ tag_flip; }

  // Runs where the backend's own destructor can end: see teardown.h.
  ~Inner();
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  c10::intrusive_ptr<c10d::Backend> backend;
  const int64_t hook_id;
  Completion completion = Completion::kNobody;
  std::shared_ptr<CompletionTable> table;  // with Completion::kHook
  int tag_flip = 0;
};

}  // namespace crux
