// Arithmetic of collectives by NCCL's types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "nccl_api.h"

namespace cuda_rig {

inline size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

struct Bfloat16 {
  uint16_t bits;
  explicit Bfloat16(double number) {
    const auto of = static_cast<float>(number);
    uint32_t wide;
    std::memcpy(&wide, &of, sizeof wide);
    // To nearest, ties to even.
    bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float found;
    std::memcpy(&found, &wide, sizeof found);
    return found;
  }
};

// Calls `function` with a value of the type; false where there is no arithmetic for it.
template <class Function>
bool with_type(ncclDataType_t type, const Function& function) {
  switch (type) {
    case ncclInt8:
      return function(int8_t{}), true;
    case ncclUint8:
      return function(uint8_t{}), true;
    case ncclInt32:
      return function(int32_t{}), true;
    case ncclUint32:
      return function(uint32_t{}), true;
    case ncclInt64:
      return function(int64_t{}), true;
    case ncclUint64:
      return function(uint64_t{}), true;
    case ncclFloat16:
      return function(_Float16{}), true;
    case ncclBfloat16:
      return function(Bfloat16{0.0}), true;
    case ncclFloat32:
      return function(float{}), true;
    case ncclFloat64:
      return function(double{}), true;
    default:
      return false;
  }
}

// into[i] = into[i] op from[i]; an average and a scaled sum are sums here.
inline void reduce(void* into, const void* from, size_t count, ncclDataType_t type, int op) {
  with_type(type, [&](auto value) {
    using T = decltype(value);
    auto* const a = static_cast<T*>(into);
    const auto* const b = static_cast<const T*>(from);
    for (size_t i = 0; i < count; ++i) {
      switch (op) {
        case ncclProd:
          a[i] = static_cast<T>(a[i] * b[i]);
          break;
        case ncclMax:
          a[i] = b[i] > a[i] ? b[i] : a[i];
          break;
        case ncclMin:
          a[i] = b[i] < a[i] ? b[i] : a[i];
          break;
        default:
          a[i] = static_cast<T>(a[i] + b[i]);
      }
    }
  });
}

// of[i] = of[i] * by / through.
inline void scale(void* of, size_t count, ncclDataType_t type, double by, double through) {
  with_type(type, [&](auto value) {
    using T = decltype(value);
    auto* const a = static_cast<T*>(of);
    for (size_t i = 0; i < count; ++i) {
      a[i] = static_cast<T>(static_cast<double>(a[i]) * by / through);
    }
  });
}

}  // namespace cuda_rig
