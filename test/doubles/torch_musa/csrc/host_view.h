// Musa tensors seen as CPU tensors over the same bytes, and CPU results turned into musa tensors: the way a CPU kernel
// or gloo works on "device" memory without copies.
#pragma once
#include <c10/core/CPUAllocator.h>

#include <unordered_map>

#include "random.h"

namespace musa_double {

inline bool is_musa(const at::Tensor& t) {
  return t.defined() && t.device().type() == kMusa;
}

// One object per call: tensors that share a storage must still share one when the CPU kernel looks at them.
class HostView {
 public:
  at::Tensor to_host(const at::Tensor& t) {
    if (!is_musa(t)) return t;
    auto* impl = t.unsafeGetTensorImpl();
    if (const auto known = tensors_.find(impl); known != tensors_.end()) return known->second.host;
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (impl->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.emplace(impl, Pair{t, host});
    originals_.emplace(host.unsafeGetTensorImpl(), t);
    return host;
  }

  // A kernel result as a musa tensor: the argument itself, a view of an argument, or new memory.
  at::Tensor to_device(const at::Tensor& result, c10::DeviceIndex device) {
    if (!result.defined() || is_musa(result)) return result;
    if (const auto original = originals_.find(result.unsafeGetTensorImpl()); original != originals_.end())
      return original->second;
    auto* key = result.storage().unsafeGetStorageImpl();
    auto musa = musa_storages_.find(key);
    if (musa == musa_storages_.end()) {
      const auto bytes = result.storage().nbytes();
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), bytes, musa_allocator().adopt(result.storage(), device), &musa_allocator(),
          true);
      musa = musa_storages_.emplace(key, storage).first;
    }
    auto wrapped = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(musa->second), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    wrapped.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return wrapped;
  }

  // After the kernel: an `out=` argument may have been resized, or its memory replaced.
  void write_back() {
    for (auto& [impl, pair] : tensors_) {
      auto& [musa, host] = pair;
      if (host.storage().data() != musa.storage().data()) {
        auto* storage = musa.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(musa_allocator().adopt(host.storage(), musa.device().index()));
        storage->set_nbytes(host.storage().nbytes());
      }
      if (host.sizes() != musa.sizes() || host.strides() != musa.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  struct Pair {
    at::Tensor musa, host;
  };

  c10::Storage host_storage(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (const auto known = host_storages_.find(key); known != host_storages_.end()) return known->second;
    c10::DataPtr borrowed(
        const_cast<void*>(storage.data()), new c10::Storage(storage),
        [](void* owner) { delete static_cast<c10::Storage*>(owner); }, c10::Device(c10::kCPU));
    c10::Storage host(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(borrowed), c10::GetCPUAllocator(), true);
    host_storages_.emplace(key, host);
    musa_storages_.emplace(host.unsafeGetStorageImpl(), storage);
    return host;
  }

  std::unordered_map<c10::TensorImpl*, Pair> tensors_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> musa_storages_;
};

} // namespace musa_double
