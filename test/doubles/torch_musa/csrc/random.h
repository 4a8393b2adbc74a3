// One generator per device, separate from torch's CPU generator as on a GPU. Inside each is a CPU generator, because
// CPU kernels draw the numbers. MUSA_DOUBLE_SHARED_RNG=1 puts torch's default CPU generator inside all of them, so that
// a run draws the same numbers as one on the CPU backend.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "memory.h"

namespace musa_double {

inline bool shared_rng() {
  static const bool shared = [] {
    const char* text = std::getenv("MUSA_DOUBLE_SHARED_RNG");
    return text && std::string(text) == "1";
  }();
  return shared;
}

struct MusaGenerator final : c10::GeneratorImpl {
  MusaGenerator(c10::DeviceIndex device, at::Generator inner)
      : GeneratorImpl({kMusa, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "musa double: the generator has no Philox offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "musa double: the generator has no Philox offset"); }
  MusaGenerator* clone_impl() const override { return new MusaGenerator(device_.index(), inner.clone()); }

  at::Generator inner;
};

inline at::Generator new_generator(c10::DeviceIndex device) {
  auto inner = at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom());
  inner.set_current_seed(c10::default_rng_seed_val);
  return at::make_generator<MusaGenerator>(device < 0 ? current_device : device, inner);
}

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      auto inner = shared_rng() ? at::detail::getDefaultCPUGenerator() : new_generator(i).get<MusaGenerator>()->inner;
      all->push_back(at::make_generator<MusaGenerator>(i, inner));
    }
    return all;
  }();
  device = device < 0 ? current_device : device;
  check_device(device);
  return (*generators)[device];
}

// What a CPU kernel has to draw from in place of `generator`.
inline at::Generator host_generator(const at::Generator& generator) {
  return generator.get<MusaGenerator>()->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override { return new_generator(device); }
  at::Device getDeviceFromPtr(void*) const override { return {kMusa, current_device}; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* instance = new PinnedAllocator;
    return instance;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace musa_double
