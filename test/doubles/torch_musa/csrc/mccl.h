// The mccl backend: gloo on the bytes of musa tensors. It takes nothing but musa tensors of one device.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "host_view.h"

namespace musa_double {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

// Several works that are waited for together, as NCCL-style coalescing returns them.
struct Works final : Work {
  explicit Works(std::vector<WorkPtr> parts) : parts(std::move(parts)) {}
  bool isCompleted() override {
    return std::all_of(parts.begin(), parts.end(), [](auto& w) { return w->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    return std::all_of(parts.begin(), parts.end(), [&](auto& w) { return w->wait(timeout); });
  }
  std::vector<WorkPtr> parts;
};

class ProcessGroupMCCL final : public c10d::Backend {
 public:
  ProcessGroupMCCL(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "mccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "mccl (musa double): endCoalescing without startCoalescing");
    auto works = c10::make_intrusive<Works>(std::move(*coalesced_));
    coalesced_.reset();
    return works;
  }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return gloo_->barrier(opts); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host("broadcast", tensors);
    return started(gloo_->broadcast(host, opts));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = on_host("allreduce", tensors);
    return reducing(opts, host, [&](const auto& o) { return gloo_->allreduce(host, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto host = on_host("allreduce_coalesced", tensors);
    return reducing(opts, host, [&](const auto& o) { return gloo_->allreduce_coalesced(host, o); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host("reduce", tensors);
    auto targets = getRank() == opts.rootRank ? host : Tensors{};
    return reducing(opts, targets, [&](const auto& o) { return gloo_->reduce(host, o); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto out = on_host("allgather", outputs);
    auto in = on_host("allgather", inputs);
    return started(gloo_->allgather(out, in, opts));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto out = on_host("_allgather_base", output), in = on_host("_allgather_base", input);
    return started(gloo_->_allgather_base(out, in, opts));
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto out = on_host("allgather_into_tensor", outputs), in = on_host("allgather_into_tensor", inputs);
    return started(gloo_->allgather_into_tensor_coalesced(out, in, opts));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto out = on_host("gather", outputs);
    auto in = on_host("gather", inputs);
    return started(gloo_->gather(out, in, opts));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto out = on_host("scatter", outputs);
    auto in = on_host("scatter", inputs);
    return started(gloo_->scatter(out, in, opts));
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = on_host("reduce_scatter", outputs);
    auto in = on_host("reduce_scatter", inputs);
    return reducing(opts, out, [&](const auto& o) { return gloo_->reduce_scatter(out, in, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto out = on_host("_reduce_scatter_base", output), in = on_host("_reduce_scatter_base", input);
    return reducing(opts, {out}, [&](const auto& o) { return gloo_->_reduce_scatter_base(out, in, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = on_host("reduce_scatter_tensor", outputs), in = on_host("reduce_scatter_tensor", inputs);
    return reducing(opts, out, [&](const auto& o) { return gloo_->reduce_scatter_tensor_coalesced(out, in, o); });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    auto out = on_host("alltoall_base", output), in = on_host("alltoall_base", input);
    return started(gloo_->alltoall_base(out, in, output_splits, input_splits, opts));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    auto out = on_host("alltoall", outputs), in = on_host("alltoall", inputs);
    return started(gloo_->alltoall(out, in, opts));
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = on_host("send", tensors);
    return started(gloo_->send(host, to, tag));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host("recv", tensors);
    return started(gloo_->recv(host, from, tag));
  }

 private:
  static at::Tensor on_host(const char* what, const at::Tensor& tensor) {
    TORCH_CHECK(
        is_musa(tensor), "mccl (musa double): ", what, " got a tensor on ", tensor.device(),
        "; MCCL moves device memory only. Move it to musa, or use a gloo group.");
    return HostView().to_host(tensor);
  }
  static Tensors on_host(const char* what, const Tensors& tensors) {
    Tensors host;
    for (const auto& t : tensors) host.push_back(on_host(what, t));
    return host;
  }
  static std::vector<Tensors> on_host(const char* what, const std::vector<Tensors>& lists) {
    std::vector<Tensors> host;
    for (const auto& list : lists) host.push_back(on_host(what, list));
    return host;
  }

  // Gloo cannot average: sum, wait, divide. The returned work is then already complete.
  template <typename Options, typename F>
  WorkPtr reducing(Options opts, Tensors results, F run) {
    if (opts.reduceOp != c10d::ReduceOp::AVG) return started(run(opts));
    opts.reduceOp = c10d::ReduceOp::SUM;
    auto work = run(opts);
    work->wait();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (auto& t : results) t.div_(getSize());
    return started(work);
  }

  WorkPtr started(WorkPtr work) {
    if (coalesced_) coalesced_->push_back(work);
    return work;
  }

  std::optional<std::vector<WorkPtr>> coalesced_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace musa_double
