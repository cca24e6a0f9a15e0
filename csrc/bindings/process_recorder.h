// The one recorder of this process.
#pragma once

#include "../process_group/recorder.h"

namespace crux {

// Created by the first call, with its capacity.
Recorder& process_recorder(size_t capacity);

}  // namespace crux
