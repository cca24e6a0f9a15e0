// The one recorder of this process.
#pragma once

#include "../process_group/recorder.h"

namespace crux {

// Made at the first call, with that call's capacity.
Recorder& process_recorder(size_t capacity);

}  // namespace crux
