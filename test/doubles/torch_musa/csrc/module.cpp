// The Python side of the double, torch_musa._MUSAC. One translation unit: torch's headers dominate the build time.
#include <torch/csrc/utils/pybind.h>

#include "mccl.h"
#include "ops.h"

namespace py = pybind11;
using namespace musa_double;

static py::dict stat(const c10::CachingAllocator::StatArray& array) {
  py::dict values;
  values["current"] = array[0].current;
  values["peak"] = array[0].peak;
  values["allocated"] = array[0].allocated;
  values["freed"] = array[0].freed;
  return values;
}

static py::dict memory_stats(int device) {
  check_device(static_cast<c10::DeviceIndex>(device));
  const auto stats = musa_allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict all;
  all["allocation"] = stat(stats.allocation);
  all["segment"] = stat(stats.segment);
  all["active"] = stat(stats.active);
  all["allocated_bytes"] = stat(stats.allocated_bytes);
  all["reserved_bytes"] = stat(stats.reserved_bytes);
  all["active_bytes"] = stat(stats.active_bytes);
  all["requested_bytes"] = stat(stats.requested_bytes);
  return all;
}

PYBIND11_MODULE(_MUSAC, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.attr("_musa_version") = "4.3.4";
  m.def("_musa_getDeviceCount", [] { return static_cast<int>(device_count()); });
  m.def("_musa_getDevice", [] { return static_cast<int>(current_device); });
  m.def("_musa_exchangeDevice", [](int d) { return static_cast<int>(exchange_device(static_cast<c10::DeviceIndex>(d))); });
  m.def("_musa_memoryStats", &memory_stats);
  m.def("_musa_resetPeakMemoryStats", [](int d) { musa_allocator().resetPeakStats(static_cast<c10::DeviceIndex>(d)); });
  m.def("_musa_resetAccumulatedMemoryStats", [](int d) {
    musa_allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(d));
  });
  m.def("_musa_memGetInfo", [](int d) { return musa_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(d)); });
  m.def("_musa_defaultGenerator", [](int d) { return default_generator(static_cast<c10::DeviceIndex>(d)); });

  py::module_::import("torch._C._distributed_c10d");
  py::class_<ProcessGroupMCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupMCCL>>(m, "ProcessGroupMCCL")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>(), py::arg("gloo"));
}
