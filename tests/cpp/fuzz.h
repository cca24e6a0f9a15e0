// What a fuzzer's target is given: LLVMFuzzerTestOneInput, and bytes read as numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace crux {

// Reads an input from its front. Past its end all is zero.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }

  template <typename T>
  T take() {
    T value{};
    const size_t read = std::min(sizeof value, left_);
    if (read > 0) std::memcpy(&value, data_, read);
    data_ += read;
    left_ -= read;
    return value;
  }

  // 0 to `most`, of one byte.
  unsigned up_to(unsigned most) { return take<uint8_t>() % (most + 1); }

  // Mostly small and round numbers, sometimes any double there is.
  double number() {
    const unsigned kind = up_to(7);
    if (kind == 0) return take<double>();
    const double whole = take<uint16_t>();
    return kind < 5 ? whole / 256.0 : kind == 5 ? whole : kind == 6 ? whole * 1e9 : whole * 1e-9;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace crux
