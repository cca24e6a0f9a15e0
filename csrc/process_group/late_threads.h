#pragma once

namespace crux {

// To be called by the thread that is about to end Python, at most once. Another thread that comes
// back from a call of torch afterwards does not get the GIL: Python ends it by unwinding its stack,
// which torch's bindings don't let pass, so the process would abort. From now on such a thread
// stays where it is until the process has ended.
void park_late_threads() noexcept;

}  // namespace crux
