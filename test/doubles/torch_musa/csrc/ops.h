// The operators a backend must have before any fallback can serve it: making, viewing, resizing and copying tensors.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace musa_double {

inline c10::DeviceGuard guard_for(std::optional<at::Device> device) {
  return c10::DeviceGuard(device && device->index() >= 0 ? *device : c10::Device(kMusa, current_device));
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_for(device);
  return at::detail::empty_generic(
      size, &musa_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const auto guard = guard_for(device);
  return at::detail::empty_strided_generic(
      size, stride, &musa_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

inline void grow(c10::TensorImpl* tensor, size_t bytes) {
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
}

inline void place(const at::Tensor& self, at::IntArrayRef size, at::OptionalIntArrayRef stride, int64_t offset) {
  auto* impl = self.unsafeGetTensorImpl();
  if (stride) {
    impl->set_sizes_and_strides(size, *stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() > 0)
    grow(impl, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.dtype().itemsize(), offset));
}

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) place(self, size, std::nullopt, self.storage_offset());
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage_offset_(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kMusa, "musa double: set_ got a storage on ", source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  place(self, size, stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt, offset);
  return self;
}

inline at::Tensor& set_storage_(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset_(self, std::move(source), 0, {length}, {});
}

inline at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage_offset_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_(at::Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, &musa_allocator(), true);
  nothing.set_data_ptr_noswap(musa_allocator().allocate_on(0, self.device().index()));
  return set_storage_offset_(self, std::move(nothing), 0, {0}, {});
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  HostView view;
  view.to_host(dst).copy_(view.to_host(self));
  return dst;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  HostView view;
  return view.to_host(self).item();
}

inline void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&host_fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("set_.source_Storage", &set_storage_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  // Composite kernels win over a fallback. These are the differentiable ones of which CPU and GPU have their own kernel
  // (dispatch table of torch 2.13); the composite forms round differently.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&host_fallback>());
}

} // namespace musa_double
