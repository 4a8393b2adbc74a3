// Devices, streams and events of the pretend driver. Everything is synchronous: a stream is an id, an event a time.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>

namespace musa_double {

constexpr auto kMusa = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

inline c10::DeviceIndex device_count() {
  static const int count = [] {
    const char* text = std::getenv("MUSA_DOUBLE_DEVICES");
    const int asked = text && *text ? std::atoi(text) : 8;
    return std::min(std::max(asked, 0), kMaxDevices);
  }();
  return static_cast<c10::DeviceIndex>(count);
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};

inline void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "musa double: invalid device ordinal ", static_cast<int>(index), " of ", static_cast<int>(device_count()));
}

inline c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const auto previous = current_device;
  if (index >= 0) {
    check_device(index);
    current_device = index;
  }
  return previous;
}

struct Event {
  std::chrono::steady_clock::time_point when;
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kMusa; }
  c10::Device exchangeDevice(c10::Device d) const override { return {kMusa, exchange_device(d.index())}; }
  c10::Device getDevice() const override { return {kMusa, current_device}; }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count()) current_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeDevice(c10::DeviceIndex) const override {}

  c10::Stream make(c10::Device d, c10::StreamId id) const {
    const auto index = d.index() < 0 ? current_device : d.index();
    check_device(index);
    return c10::Stream(c10::Stream::UNSAFE, {kMusa, index}, id);
  }
  c10::Stream getStream(c10::Device d) const override {
    return make(d, current_stream.at(d.index() < 0 ? current_device : d.index()));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(d, 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return make(d, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = getStream(s.device());
    current_stream.at(s.device_index()) = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(s.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->when = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    const auto span = static_cast<Event*>(end)->when - static_cast<Event*>(begin)->when;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

} // namespace musa_double
