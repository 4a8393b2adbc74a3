# shellcheck shell=bash
# Qwen3-30B-A3B as slime and miles train it: GRPO on mathematics, trainers and engines on the same devices.

# shellcheck disable=SC2034 # job.sh uses them
MODEL_ARGS=(
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
  --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000
  --untie-embeddings-and-output-weights --vocab-size 151936
  --num-experts 128 --moe-ffn-hidden-size 768 --moe-layer-freq "[1]*48"
  --moe-router-topk 8 --moe-router-score-function softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 0
  --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs --moe-grouped-gemm --moe-permute-fusion
)

qwen3_settings() {
  required HF_CHECKPOINT "folder of Qwen3-30B-A3B in Hugging Face's format"
  required REF_LOAD "the same as torch_dist; the framework's tools/convert_hf_to_torch_dist.py writes it"
  required PROMPT_DATA "prompts with answers, JSON lines with the keys prompt and label"
  required SAVE_DIR "checkpoints of this run; resumed from when it is not empty"
  setting GPUS_PER_NODE 8 "devices of a machine"
  setting NNODES 1 "machines"
  setting TP 4 "tensor parallelism of the trainer"
  setting EP 8 "expert parallelism of the trainer"
  setting CP 1 "context parallelism of the trainer"
  setting RESPONSE_LENGTH 8192 "longest response, tokens"
  setting CONTEXT_LENGTH "" "longest prompt and response together, tokens; empty: as the engine allows"
  setting TOKENS_PER_GPU 20480 "tokens of a micro-batch on a device; at least CONTEXT_LENGTH / CP"
  setting ENGINE_GPUS 8 "devices of a rollout engine"
  setting MEMORY_FRACTION 0.7 "of device memory for the engine"
  setting NUM_ROLLOUT 3000 "iterations"
  setting OFFLOAD no "yes: trainer and engine leave the device in turn, which needs a torch_memory_saver built for MUSA"
}

qwen3_flags() {
  require_number GPUS_PER_NODE NNODES TP EP CP RESPONSE_LENGTH TOKENS_PER_GPU ENGINE_GPUS NUM_ROLLOUT
  require_yes_or_no OFFLOAD
  if ((RESPONSE_LENGTH > TOKENS_PER_GPU * CP)); then
    fail "RESPONSE_LENGTH=$RESPONSE_LENGTH does not fit into TOKENS_PER_GPU=$TOKENS_PER_GPU times CP=$CP: raise either"
  fi
  # shellcheck disable=SC2034 # job.sh uses it
  TRAINING=(
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "$HF_CHECKPOINT" --ref-load "$REF_LOAD" --load "$SAVE_DIR" --save "$SAVE_DIR" --save-interval 20
    --prompt-data "$PROMPT_DATA" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout "$NUM_ROLLOUT" --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len "$RESPONSE_LENGTH" --rollout-temperature 1 --global-batch-size 256 --balance-data
    --tensor-model-parallel-size "$TP" --sequence-parallel --pipeline-model-parallel-size 1
    --context-parallel-size "$CP" --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu "$TOKENS_PER_GPU"
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0 --kl-loss-type low_var_kl --entropy-coef 0
    --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
    --rollout-num-gpus-per-engine "$ENGINE_GPUS" --sglang-mem-fraction-static "$MEMORY_FRACTION"
    --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash
    --actor-num-nodes "$NNODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --colocate
  )
  [[ -z $CONTEXT_LENGTH ]] || TRAINING+=(--rollout-max-context-len "$CONTEXT_LENGTH")
  [[ $OFFLOAD == yes ]] || TRAINING+=(--no-offload-train --no-offload-rollout)
}
