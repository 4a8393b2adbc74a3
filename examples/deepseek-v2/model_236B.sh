# shellcheck shell=bash disable=SC2034 # the recipe reads it
# DeepSeek-V2. Its device-level and communication balance losses and its device-level capacity have no equivalent in
# Megatron and are not here; what balances the load is the sequence-level loss over experts.
MODEL_NAME=deepseek-v2
MODEL_ARGS=(
  --num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288
  --num-attention-heads 128 --multi-latent-attention --qk-layernorm
  --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --rotary-base 10000 --rotary-percent 1.0
  --rope-type yarn --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707
  --num-experts 160 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 3072
  --moe-layer-freq '([0]*1+[1]*59)' --moe-grouped-gemm
  --moe-router-topk 6 --moe-router-score-function softmax --moe-router-dtype fp32 --moe-router-pre-softmax
  --moe-router-topk-scaling-factor 16 --moe-router-num-groups 8 --moe-router-group-topk 3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
  --max-position-embeddings 4096 --norm-epsilon 1e-6
  --vocab-size 102400 --make-vocab-size-divisible-by 3200 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
