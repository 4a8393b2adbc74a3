# shellcheck shell=bash
# Where a recipe's tokens come from.

data_settings() {
  required DATA_PATH "prefixes of Megatron .bin/.idx files, as --data-path takes them; or 'sample': a small corpus made of Python's own source"
  if [[ $DATA_PATH == sample ]]; then
    setting TOKENIZER_MODEL "" "not needed for the sample: its tokens are bytes"
  else
    required TOKENIZER_MODEL "local directory of a Hugging Face tokenizer, the one that the data was tokenised with"
  fi
  setting TOKENIZER_TYPE HuggingFaceTokenizer "Megatron's name of the kind of tokenizer"
  setting TOKENIZER_CODE no "yes: run the Python code that comes with the tokenizer, as Kimi-K2's needs"
  require_yes_or_no TOKENIZER_CODE
  setting SPLIT 990,8,2 "training, validation and test part of the data"
  setting DATA_CACHE "$OUTPUT_DIR/data-cache" "where Megatron keeps its index of the data; shared by all machines"
  required CHECKPOINT_DIR "directory of the checkpoint, which is also where a restart resumes from; or 'none'"
  setting SAVE_INTERVAL 500 "steps between checkpoints"
}

data_flags() {
  local -a prefixes
  if [[ $DATA_PATH == sample ]]; then
    FLAGS+=(--tokenizer-type NullTokenizer --data-path "$OUTPUT_DIR/sample/python")
    FLAGS+=(--split "100,0,0")
  else
    read -r -a prefixes <<<"$DATA_PATH"
    FLAGS+=(--tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL")
    [[ $TOKENIZER_CODE == no ]] || FLAGS+=(--trust-remote-code)
    FLAGS+=(--data-path "${prefixes[@]}" --split "$SPLIT")
  fi
  FLAGS+=(--data-cache-path "$DATA_CACHE" --no-create-attention-mask-in-dataloader)
  [[ $CHECKPOINT_DIR == none ]] ||
    FLAGS+=(--save "$CHECKPOINT_DIR" --load "$CHECKPOINT_DIR" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist)
}

# Before training: look at what was given, and make the sample on machine 0 while the others wait for it.
prepare_data() {
  local word waited=0
  if [[ $DATA_PATH == sample ]]; then
    if ((NODE_RANK == 0)); then
      PYTHONPATH=$ROOT "$PYTHON" -m musa_titan.recipe.corpus "$OUTPUT_DIR/sample/python" \
        "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" --include '*.py'
    fi
    until [[ -f $OUTPUT_DIR/sample/python.json ]]; do
      ((waited++ < 300)) || fail "machine 0 made no sample in $OUTPUT_DIR; is that directory shared by all machines?"
      sleep 1
    done
    return
  fi
  for word in $DATA_PATH; do
    [[ $word =~ ^[0-9.]+$ || -f $word.idx ]] || fail "DATA_PATH names $word, but there is no $word.idx"
  done
  [[ -e $TOKENIZER_MODEL ]] || fail "TOKENIZER_MODEL=$TOKENIZER_MODEL does not exist"
}
