// Every operator without a musa kernel of its own runs the CPU kernel on the same bytes. Like a real device, and unlike
// at::native::cpu_fallback, it refuses to mix devices.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <optional>

#include "host_view.h"

namespace musa_double {

// Operators that take CPU tensors of any shape beside device tensors on a GPU too (indices, mostly).
inline bool may_mix_devices(const std::string& op) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put", "aten::_foreach_copy_"};
  return names.count(op) != 0;
}

class Placement {
 public:
  explicit Placement(const std::string& op) : op_(op) {}

  void see(const at::Tensor& t) {
    if (!t.defined()) return;
    if (is_musa(t)) {
      if (device_ && device_->index() != t.device().index()) refuse(*device_, t.device());
      device_ = t.device();
    } else if (t.dim() > 0 && !may_mix_devices(op_)) {
      stray_ = t.device(); // judged at the end: the device argument may come later
    }
  }
  void see(c10::Device requested) {
    if (requested.type() == kMusa && !device_) device_ = requested;
  }
  void check() const {
    if (device_ && stray_) refuse(*device_, *stray_);
  }
  c10::DeviceIndex index() const { return device_ && device_->index() >= 0 ? device_->index() : current_device; }

 private:
  [[noreturn]] void refuse(c10::Device a, c10::Device b) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
        "! (musa double, in ", op_, ")");
  }
  std::string op_;
  std::optional<c10::Device> device_, stray_;
};

// Operators that draw random numbers but take no generator use torch's default CPU generator; lend it our state.
class LentRandomState {
 public:
  explicit LentRandomState(const at::Generator& device_generator)
      : host_(host_generator(device_generator)), cpu_(at::detail::getDefaultCPUGenerator()) {
    if (host_ == cpu_) return; // shared: restoring would roll the stream back
    saved_ = cpu_.get_state();
    cpu_.set_state(host_.get_state());
  }
  ~LentRandomState() {
    if (!saved_.defined()) return;
    host_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator host_, cpu_;
  at::Tensor saved_;
};

inline void visit_tensors(c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& t : list) t = change(t);
    value = c10::IValue(std::move(list));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(change(*t)) : std::nullopt);
    value = c10::IValue(std::move(list));
  }
}

inline void host_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arity = schema.arguments().size();
  const auto begin = stack->size() - arity;
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  Placement placement(schema.name());
  HostView view;
  std::optional<size_t> generator_slot;

  for (size_t i = 0; i < arity; ++i) {
    auto& value = (*stack)[begin + i];
    visit_tensors(value, [&](const at::Tensor& t) {
      placement.see(t);
      return view.to_host(t);
    });
    if (value.isDevice()) {
      placement.see(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().type() == kMusa) value = host_generator(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[i].type()->str() == "Generator?") {
      generator_slot = i;
    }
  }
  placement.check();
  std::optional<LentRandomState> lent;
  if (random && generator_slot)
    (*stack)[begin + *generator_slot] = host_generator(default_generator(placement.index()));
  else if (random)
    lent.emplace(default_generator(placement.index()));

  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  view.write_back();
  const auto results = stack->size() - schema.returns().size();
  for (size_t i = results; i < stack->size(); ++i)
    visit_tensors((*stack)[i], [&](const at::Tensor& t) { return view.to_device(t, placement.index()); });
}

} // namespace musa_double
