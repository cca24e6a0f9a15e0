// Devices, memory and kernels of the CUDA runtime, and what torch asks of the driver.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unordered_map>

#include "controls.h"
#include "stream.h"

using namespace cuda_rig;

namespace {

constexpr int kVersion = CUDART_VERSION;
constexpr size_t kPage = 4096;
// Of what torch.cuda._sleep() counts, a second; what tests/rig/kind.py assumes of a GPU.
constexpr double kCyclesPerSecond = 1.5e9;

int64_t setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}
int devices() {
  static const auto found = static_cast<int>(setting("CUDA_RIG_DEVICES", 1));
  return found;
}
// Of each device, in this process: pages cost nothing until they are written.
size_t device_bytes() {
  static const auto found = static_cast<size_t>(setting("CUDA_RIG_MEMORY_BYTES", 8LL << 30));
  return found;
}

struct Block {
  size_t bytes;
  cudaMemoryType type;
  int device;
  // That other processes can map it by; -1: none.
  int file = -1;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Block> blocks;
  std::map<int, size_t> used;

  // Needs the mutex.
  const Block* find(const void* pointer) const {
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return nullptr;
    --after;
    return at < after->first + after->second.bytes ? &after->second : nullptr;
  }
};

Memory& memory() {
  static auto* const made = new Memory;
  return *made;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* mapped(int file, size_t bytes) {
  void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return found == MAP_FAILED ? nullptr : found;
}

cudaError_t allocate(void** pointer, size_t bytes, cudaMemoryType type, int file = -1) {
  *pointer = nullptr;
  if (const cudaError_t error = may_disturb_captures()) return error;
  if (bytes == 0) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  size_t& used = memory().used[current_device()];
  if (type == cudaMemoryTypeDevice && used + bytes > device_bytes()) {
    return fail(cudaErrorMemoryAllocation);
  }
  void* const found =
      file < 0 ? std::aligned_alloc(kPage, whole_pages(bytes)) : mapped(file, bytes);
  if (found == nullptr) return fail(cudaErrorMemoryAllocation);
  if (type == cudaMemoryTypeDevice) used += bytes;
  memory().blocks[reinterpret_cast<uintptr_t>(found)] = {bytes, type, current_device(), file};
  *pointer = found;
  return cudaSuccess;
}

// Waits for everything on the device, as the real one does: behind a collective that never ends it
// hangs.
cudaError_t release(void* pointer, const char* call) {
  if (pointer == nullptr) return cudaSuccess;
  count_call(call);
  if (const cudaError_t error = may_disturb_captures()) return error;
  Block block{};
  {
    const std::lock_guard<std::mutex> lock(memory().mutex);
    const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == memory().blocks.end()) return fail(cudaErrorInvalidValue);
    block = found->second;
  }
  synchronize_device(block.device);
  const std::lock_guard<std::mutex> lock(memory().mutex);
  if (block.type == cudaMemoryTypeDevice) memory().used[block.device] -= block.bytes;
  memory().blocks.erase(reinterpret_cast<uintptr_t>(pointer));
  if (block.file < 0) {
    std::free(pointer);
  } else {
    munmap(pointer, block.bytes);
    close(block.file);
  }
  return cudaSuccess;
}

// Of memory that CUDA does not know, a copy is done when the call returns.
bool pageable(const void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().find(pointer) == nullptr;
}

// Kernels by their host function. Names are the binaries' own.
struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
};
Kernels& kernels() {
  static auto* const made = new Kernels;
  return *made;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  const char* name = "";
  {
    const std::lock_guard<std::mutex> lock(kernels().mutex);
    const auto found = kernels().names.find(function);
    if (found != kernels().names.end()) name = found->second;
  }
  if (std::strstr(name, "spin_kernel") == nullptr) {
    std::fprintf(stderr, "cuda_rig: no such kernel on the rig: %.200s\n", name);
    return fail(cudaErrorNotSupported);
  }
  const auto seconds = static_cast<double>(*static_cast<int64_t*>(arguments[0])) / kCyclesPerSecond;
  Stream* const on = stream_of(stream);
  on->enqueue([seconds, device = on->device] {
    const Kernel running(device);
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
  return cudaSuccess;
}

// torch's operators follow once torch asks for a device: its libraries are whole by then.
void load_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const path = std::getenv("CUDA_RIG_OPERATORS");
    if (path == nullptr || dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY) == nullptr) return;
    if (dlopen(path, RTLD_NOW | RTLD_LOCAL) == nullptr) {
      std::fprintf(stderr, "cuda_rig: %s\n", dlerror());
      std::abort();
    }
  });
}

}  // namespace

namespace cuda_rig {

cudaError_t allocate_shared(void** pointer, size_t bytes) {
  bytes = whole_pages(bytes);
  const int file = memfd_create("cuda_rig", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    if (file >= 0) close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  const cudaError_t error = allocate(pointer, bytes, cudaMemoryTypeDevice, file);
  if (*pointer == nullptr) close(file);
  return error;
}

SharedMemory shared_at(const void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory().blocks.end() || found->second.file < 0) return {};
  return {getpid(), found->second.file, found->second.bytes};
}

void* map_shared(const SharedMemory& of) {
  const std::string path = "/proc/" + std::to_string(of.process) + "/fd/" + std::to_string(of.file);
  const int file = of.bytes == 0 ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const found = mapped(file, of.bytes);
  close(file);
  if (found == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[reinterpret_cast<uintptr_t>(found)] = {of.bytes, cudaMemoryTypeDevice,
                                                         current_device()};
  return found;
}

void unmap_shared(void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory().blocks.end()) return;
  munmap(pointer, found->second.bytes);
  memory().blocks.erase(found);
}

}  // namespace cuda_rig

extern "C" {

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {
  load_operators();
  *count = devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorNotSupported:
      return "operation not supported";
    default: {
      static thread_local char text[32];
      std::snprintf(text, sizeof text, "CUDA error %d", static_cast<int>(error));
      return text;
    }
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  *of = {};
  std::snprintf(of->name, sizeof of->name, "NVIDIA H100 80GB HBM3");
  std::memset(&of->uuid, 0x11 + device, sizeof of->uuid);
  of->major = 9;
  of->totalGlobalMem = device_bytes();
  of->multiProcessorCount = 132;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxThreadsPerBlock = 1024;
  of->warpSize = 32;
  of->sharedMemPerBlock = 48 << 10;
  of->sharedMemPerMultiprocessor = 228 << 10;
  of->sharedMemPerBlockOptin = 227 << 10;
  of->regsPerMultiprocessor = of->regsPerBlock = 65536;
  of->l2CacheSize = 50 << 20;
  of->maxGridSize[0] = 0x7fffffff;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->pciBusID = 0x3a + device;
  of->memoryBusWidth = 5120;
  of->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = of.major;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = of.multiProcessorCount;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", 0x3a + device);
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return allocate(pointer, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return allocate(pointer, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMallocHost(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) { return release(pointer, "cudaFree"); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, "cudaFreeHost"); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  *total = device_bytes();
  *free = *total - memory().used[current_device()];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* pointer) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const Block* const block = memory().find(pointer);
  void* const address = const_cast<void*>(pointer);
  *of = {};
  of->type = block == nullptr ? cudaMemoryTypeUnregistered : block->type;
  of->device = block == nullptr ? -2 : block->device;
  of->devicePointer = block == nullptr ? nullptr : address;
  of->hostPointer = of->type == cudaMemoryTypeDevice ? nullptr : address;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  stream_of(stream)->enqueue([=] { std::memmove(to, from, bytes); });
  if (pageable(to) || pageable(from)) stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = may_disturb_captures()) return error;
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  stream_of(nullptr)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  stream_of(stream)->enqueue([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (const cudaError_t error = may_disturb_captures()) return error;
  cudaMemsetAsync(to, value, bytes, nullptr);
  stream_of(nullptr)->synchronize();
  return cudaSuccess;
}

// Kernels. torch's are known by name, and run as the CPU's operators instead: operators.cc.

void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names[host] = name;
}

static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(function, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* with, const void* function,
                                void** arguments) {
  return launch(function, arguments, with->stream);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  *of = {};
  of->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* of, int threads,
                                                          size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, of, threads, shared, 0);
}

// The driver, which torch looks up by name, and loads for the compiler of its kernels.

// Whoever calls it says what it wanted.
static int refuse() { return cudaErrorNotSupported; }
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  // CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, without which ProcessGroupNCCL has no allocator.
  if (attribute == 132) {
    *value = 1;
    return 0;
  }
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = &memory();
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuGetErrorString(int error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return 0;
}
#define REFUSED(name) \
  int name() { return refuse(); }
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(&refuse), &own);
  void* const library = dlopen(own.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  *found = library == nullptr ? nullptr : dlsym(library, name);
  if (*found == nullptr) *found = reinterpret_cast<void*>(&refuse);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
