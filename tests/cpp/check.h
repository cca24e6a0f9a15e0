// CHECK for tests: a condition that does not hold is named with its place, and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

// _Exit, for a check may fail on any thread while others run.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)
