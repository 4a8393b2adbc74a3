# shellcheck shell=bash disable=SC2034 # the recipe reads it
# DeepSeek-V2-Lite: queries without a low rank
MODEL_NAME=deepseek-v2-lite
MODEL_ARGS=(
  --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944
  --num-attention-heads 16 --multi-latent-attention --qk-layernorm
  --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --rotary-base 10000 --rotary-percent 1.0
  --rope-type yarn --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707
  --num-experts 64 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
  --moe-layer-freq '([0]*1+[1]*26)' --moe-grouped-gemm
  --moe-router-topk 6 --moe-router-score-function softmax --moe-router-dtype fp32 --moe-router-pre-softmax
  --moe-router-topk-scaling-factor 1
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
  --max-position-embeddings 4096 --norm-epsilon 1e-6
  --vocab-size 102400 --make-vocab-size-divisible-by 3200 --untie-embeddings-and-output-weights
  --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0
)
