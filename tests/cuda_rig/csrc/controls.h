// What tests ask of the rig: faults, and what was called.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace cuda_rig {

// Counts a call, apart for the process's first thread and for others.
void count_call(const char* name);

// One thing that NCCL was asked to do.
struct Issued {
  std::string op;
  int communicator, rank, size, peer, type, reduction;
  uint64_t count, bytes;
  const void* stream;
  bool captured, first_thread;
  int64_t issue_ns;
  int64_t start_ns = -1, end_ns = -1;
};
// Its number, for ran().
uint64_t log_issued(Issued issued);
void log_ran(uint64_t number, int64_t start_ns, int64_t end_ns);

// A fault that a test asked for: kind "delay", "hold", "error" or "refuse".
struct Fault {
  std::string kind;
  double seconds = 0;
  // Releases before it was taken.
  uint64_t releases = 0;
};
// Takes one fault for `op`; its kind is empty where there is none.
Fault take_fault(const std::string& op, bool on_device);
// What a delay takes: alone, or more while others on this process's link take time too.
void take_time(double seconds);
// Blocks until the first release() after `fault` was taken, or until `aborted`.
void hold(const Fault& fault, const std::atomic<bool>& aborted);

}  // namespace cuda_rig
