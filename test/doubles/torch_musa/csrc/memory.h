// Device memory is host memory that is counted per device; pinned memory is host memory that is remembered.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

#include "device.h"

namespace musa_double {

constexpr size_t kAlignment = 512;
constexpr size_t kDeviceBytes = size_t{80} << 30; // what an S5000 has

inline void* host_malloc(size_t bytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kAlignment, bytes) == 0, "musa double: host memory exhausted");
  return pointer;
}

struct MusaAllocator final : c10::DeviceAllocator {
  struct Block {
    void* memory; // owned, unless `host` holds it
    size_t bytes;
    c10::DeviceIndex device;
    c10::Storage host;
  };

  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device); }

  c10::DataPtr allocate_on(size_t bytes, c10::DeviceIndex device) {
    check_device(device);
    if (bytes == 0) return {nullptr, {kMusa, device}};
    void* memory = host_malloc(bytes);
    return track(memory, new Block{memory, bytes, device, {}});
  }

  // Turns the result of a CPU kernel into device memory without copying it.
  c10::DataPtr adopt(const c10::Storage& host, c10::DeviceIndex device) {
    if (host.nbytes() == 0) return {nullptr, {kMusa, device}};
    void* memory = const_cast<void*>(host.data());
    return track(memory, new Block{nullptr, host.nbytes(), device, host});
  }

  c10::DataPtr track(void* memory, Block* block) {
    count(block->device, block->bytes, true);
    return {memory, block, &MusaAllocator::release, {kMusa, block->device}};
  }

  static void release(void* context);
  void count(c10::DeviceIndex device, size_t bytes, bool taken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* array : byte_stats(stats)) taken ? (*array)[0].increase(bytes) : (*array)[0].decrease(bytes);
    for (auto* array : count_stats(stats)) taken ? (*array)[0].increase(1) : (*array)[0].decrease(1);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each(device, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { each(device, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto used = static_cast<size_t>(getDeviceStats(device).allocated_bytes[0].current);
    return {kDeviceBytes - std::min(used, kDeviceBytes), kDeviceBytes};
  }

 private:
  template <typename F>
  void each(c10::DeviceIndex device, F apply) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* array : byte_stats(stats)) apply((*array)[0]);
    for (auto* array : count_stats(stats)) apply((*array)[0]);
  }
  // Only the first entry of a StatArray is kept, the sum over the large and small pools that the double lacks.
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  using Array = c10::CachingAllocator::StatArray;
  static std::array<Array*, 4> byte_stats(Stats& s) {
    return {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes};
  }
  static std::array<Array*, 3> count_stats(Stats& s) { return {&s.allocation, &s.segment, &s.active}; }

  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats_{};
};

inline MusaAllocator& musa_allocator() {
  static auto* instance = new MusaAllocator; // leaked: tensors may outlive static destruction
  return *instance;
}

inline void MusaAllocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  musa_allocator().count(block->device, block->bytes, false);
  std::free(block->memory);
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* memory = host_malloc(bytes);
    const std::lock_guard<std::mutex> lock(mutex());
    pinned().insert(memory);
    return {memory, memory, &PinnedAllocator::release, c10::Device(c10::kCPU)};
  }
  static void release(void* memory) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      pinned().erase(memory);
    }
    std::free(memory);
  }
  static bool is_pinned(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex());
    return pinned().count(memory) != 0;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }
  static std::unordered_set<const void*>& pinned() {
    static auto* instance = new std::unordered_set<const void*>;
    return *instance;
  }
};

// Gives a storage another size, keeping the bytes both sizes have in common.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto fresh = musa_allocator().allocate_on(bytes, storage->device().index());
  if (const auto common = std::min(bytes, storage->nbytes())) std::memcpy(fresh.get(), storage->data(), common);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &musa_allocator())

} // namespace musa_double
