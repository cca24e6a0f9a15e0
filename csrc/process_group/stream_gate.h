// Puts operations' passages of the gate on the streams that they are issued on (CUDA).
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>

#include "../links/gate.h"
#include "gate_ticket.h"
#include "inner.h"
#include "operation_log.h"

namespace crux {

struct StreamPassage {
  GateTicket ticket;  // empty if it does not enter, because the device can't wait for a word
  // The stream to issue the operation on in place of the current one, which must not be held.
  std::optional<c10::Stream> aside;
};

// To be called just before the operation is issued on `inner`, when its current stream is in no
// capture. An operation that may have to wait is held: the caller's own stream if that is what it
// runs on, because the caller waits for it, and a stream of the backend otherwise.
StreamPassage pass_on_stream(Gate& gate, const Gate::Route& route, Inner& inner, DeviceWatch& watch,
                             c10::Device device, const Call& call);

// Makes later work on `stream` wait for the work that is on `other` now.
void follow(const c10::Stream& stream, const c10::Stream& other);

// Lets go of all that is held; nothing is held from now on.
void release_streams() noexcept;

// Reason why the device can't hold operations, as far as was tried; empty if it can.
std::string stream_refusal();

}  // namespace crux
