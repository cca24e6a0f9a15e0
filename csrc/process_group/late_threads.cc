#include "late_threads.h"

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace crux {
namespace {

pthread_t ending_thread;
std::terminate_handler handler_before = nullptr;

[[noreturn]] void park_or_terminate() {
  const bool unwound_by_python = !Py_IsInitialized() && !std::current_exception() &&
                                 pthread_equal(pthread_self(), ending_thread) == 0;
  while (unwound_by_python) pause();
  handler_before();
  std::abort();
}

}  // namespace

void park_late_threads() noexcept {
  ending_thread = pthread_self();
  handler_before = std::set_terminate(park_or_terminate);
}

}  // namespace crux
