// The part of NVML's interface that Crux calls, over the runtime's devices.
//
// The wheels have no nvml.h: the structs below are those of NVIDIA's NVML API reference.
#include <cuda_runtime_api.h>
#include <strings.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "stream.h"

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 2, kNotFound = 6 };

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};

// Handles are device numbers, from 1.
using Handle = uintptr_t;

bool properties(Handle handle, cudaDeviceProp* of) {
  int count = 0;
  cudaGetDeviceCount(&count);
  const int device = static_cast<int>(handle) - 1;
  return device >= 0 && device < count && cudaGetDeviceProperties(of, device) == cudaSuccess;
}

std::string address_of(const cudaDeviceProp& of) {
  char text[32];
  std::snprintf(text, sizeof text, "%08X:%02X:%02X.0", of.pciDomainID, of.pciBusID, of.pciDeviceID);
  return text;
}

Result told(const std::string& text, char* to, unsigned bytes) {
  if (text.size() >= bytes) return kInvalidArgument;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return kSuccess;
}

// When a device was last asked how busy it is, and for how long it had been.
struct Asked {
  int64_t at_ns, busy_ns;
};
std::mutex asked_mutex;
std::map<Handle, Asked>& asked() {
  static auto* const made = new std::map<Handle, Asked>;
  return *made;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int) { return "refused by the rig"; }
int nvmlSystemGetDriverVersion(char* to, unsigned bytes) { return told("580.65.06", to, bytes); }

int nvmlDeviceGetCount_v2(unsigned* count) {
  int found = 0;
  cudaGetDeviceCount(&found);
  *count = static_cast<unsigned>(found);
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* handle) {
  cudaDeviceProp of;
  *handle = index + 1;
  return properties(*handle, &of) ? kSuccess : kInvalidArgument;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, Handle* handle) {
  cudaDeviceProp of;
  // A domain may have four digits or eight.
  for (*handle = 1; properties(*handle, &of); ++*handle) {
    const std::string own = address_of(of);
    if (strcasecmp(own.c_str(), address) == 0 || strcasecmp(own.c_str() + 4, address) == 0) {
      return kSuccess;
    }
  }
  return kNotFound;
}
int nvmlDeviceGetName(Handle handle, char* to, unsigned bytes) {
  cudaDeviceProp of;
  return properties(handle, &of) ? told(of.name, to, bytes) : kInvalidArgument;
}
int nvmlDeviceGetUUID(Handle handle, char* to, unsigned bytes) {
  cudaDeviceProp of;
  if (!properties(handle, &of)) return kInvalidArgument;
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof of.uuid.bytes; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(of.uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += "-";
    text += digits;
  }
  return told(text, to, bytes);
}
int nvmlDeviceGetPciInfo_v3(Handle handle, PciInfo* to) {
  cudaDeviceProp of;
  if (!properties(handle, &of)) return kInvalidArgument;
  *to = {};
  to->domain = static_cast<unsigned>(of.pciDomainID);
  to->bus = static_cast<unsigned>(of.pciBusID);
  to->device = static_cast<unsigned>(of.pciDeviceID);
  told(address_of(of).substr(4), to->legacy, sizeof to->legacy);
  return told(address_of(of), to->address, sizeof to->address);
}
int nvmlDeviceGetMemoryInfo(Handle handle, Memory* to) {
  cudaDeviceProp of;
  if (!properties(handle, &of)) return kInvalidArgument;
  size_t free = 0, total = 0;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(static_cast<int>(handle) - 1);
  cudaMemGetInfo(&free, &total);
  cudaSetDevice(before);
  *to = {total, free, total - free};
  return kSuccess;
}
int nvmlDeviceGetCudaComputeCapability(Handle handle, int* major, int* minor) {
  cudaDeviceProp of;
  if (!properties(handle, &of)) return kInvalidArgument;
  *major = of.major;
  *minor = of.minor;
  return kSuccess;
}
// The share of time in which a kernel ran, since it was last asked; NVML's own is over a period
// that the device chooses.
int nvmlDeviceGetUtilizationRates(Handle handle, Utilization* to) {
  cudaDeviceProp of;
  if (!properties(handle, &of)) return kInvalidArgument;
  const Asked now{cuda_rig::now_ns(), cuda_rig::busy_ns(static_cast<int>(handle) - 1)};
  const std::lock_guard<std::mutex> lock(asked_mutex);
  const Asked before = asked()[handle];
  asked()[handle] = now;
  *to = {};
  if (before.at_ns > 0) {
    to->gpu = static_cast<unsigned>(100 * (now.busy_ns - before.busy_ns) /
                                    std::max<int64_t>(1, now.at_ns - before.at_ns));
  }
  return kSuccess;
}

}  // extern "C"
