// What several files do with lists of tensors.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fake_gpu {

inline void append(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// Equal parts of a tensor, flat, in its order.
inline std::vector<at::Tensor> chunks(const at::Tensor& tensor, int size) {
  std::vector<at::Tensor> parts;
  const at::Tensor flat = tensor.view(-1);
  const int64_t each = flat.numel() / size;
  for (int i = 0; i < size; ++i) parts.push_back(flat.narrow(0, i * each, each));
  return parts;
}

}  // namespace fake_gpu
