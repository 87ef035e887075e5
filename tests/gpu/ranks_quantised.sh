#!/usr/bin/env bash
# Parts of ranks.sh, which sources this: quantised weights.

# Texts of the small trained model, quantised here (needs torch), over ranks against one GPU's. Blocks of 128 rows
# cannot be cut over tensor-parallel ranks of a model this small, so FP8 runs over data-parallel ones.
quantised() {
  local scheme label flags folder
  requests "$out/requests.jsonl" 24 32
  for scheme in gptq-int4-channel gptq-int4-act-order fp8-block; do
    folder=$out/text-$scheme
    rm -rf "$folder" && cp -r "$root/models/families/checkpoint" "$folder"
    check "quantise-$scheme" 90 python3 "$root/tests/gpu/quantise.py" "$folder" $scheme
    answers=("$qwen" batch --model "$folder-packed") one=$scheme-one
    # What would be quantised depends on how many rows a rank has.
    [ $scheme = fp8-block ] && answers+=(--fp8-activations off)
    generate $one
    while read -r label flags; do
      [[ $scheme = fp8-block && $label = tp* ]] && continue
      # shellcheck disable=SC2086
      generate "$scheme-$label" $flags
      same "$scheme-$label"
    done <<END
tp-disabled --tp $n
tp-disabled-eager --tp $n --enforce-eager
tp-local_allreduce --tp $n $ep local_allreduce
dp-allgather --dp $n $ep allgather_reducescatter
dp-deepep --dp $n $ep deepep
END
  done
  answers=("$qwen" batch) one=one
}

# Qwen3-30B-A3B in bf16, int4 and FP8 by the same forms.
quantised_bench() {
  local plain=$config scheme label flags
  while read -r label flags; do
    for scheme in bf16 gptq-int4 fp8-block; do
      config=${plain%.json}-$scheme.json
      [ $scheme = bf16 ] && config=$plain
      # shellcheck disable=SC2086
      bench_row "$label-$scheme" 60 1,8,64,256 --output 64 $flags
    done
  done <<END
tp-disabled --tp $n
dp-deepep --dp $n $ep deepep
END
  config=$plain
}
