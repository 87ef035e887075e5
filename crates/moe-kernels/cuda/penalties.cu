// Repetition, frequency and presence penalties on logits, before sampling (vLLM's definition), and the counts that
// they need.
//
// Floor: rows without penalties cost nothing (their blocks leave at once); a row with some reads 2 V bytes of counts
// and V / 8 of prompt bits and touches only the logits that change. Counts live per sequence slot on the device,
// so that the sampled token enters them without the host.
#include "common.cuh"
#include "ptx.cuh"

namespace moe {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;

struct PenaltyRow {
  float repetition, frequency, presence;  // 1, 0, 0 = none
  uint32_t slot;                          // of counts and prompt bits; u32::MAX = padding row
};

__global__ void __launch_bounds__(kThreads)
    penalty_kernel(float* logits, const PenaltyRow* rows, const uint16_t* counts, const uint32_t* prompt, int vocab) {
  const PenaltyRow p = rows[blockIdx.y];
  pdl_launch_dependents();
  pdl_wait();
  if (p.slot == ~0u || (p.repetition == 1.f && p.frequency == 0.f && p.presence == 0.f)) return;
  const uint16_t* n = counts + static_cast<size_t>(p.slot) * vocab;
  const uint32_t* bits = prompt + static_cast<size_t>(p.slot) * ceil_div(vocab, 32);
  float* row = logits + static_cast<size_t>(blockIdx.y) * vocab;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = (blockIdx.x * kPerThread + i) * kThreads + threadIdx.x;
    if (id >= vocab) return;
    const uint32_t count = n[id];
    if (count == 0 && (bits[id / 32] >> id % 32 & 1) == 0) continue;
    float x = row[id];
    x = x > 0.f ? x / p.repetition : x * p.repetition;
    if (count > 0) x = x - p.frequency * count - p.presence;
    row[id] = x;
  }
}

/// One token per row and launch: a slot appears once, so plain additions suffice.
__global__ void count_kernel(const uint32_t* tokens, const PenaltyRow* rows, uint16_t* counts, int count, int vocab) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count || rows[i].slot == ~0u || tokens[i] >= static_cast<uint32_t>(vocab)) return;
  uint16_t* n = counts + static_cast<size_t>(rows[i].slot) * vocab + tokens[i];
  if (*n < 0xffff) ++*n;
}

}  // namespace
}  // namespace moe

/// Edits logits [rows, vocab] by params [rows] (PenaltyRow): a token of prompt or output is divided (above 0) or
/// multiplied by `repetition`; then a token of the output loses frequency x count + presence. counts [slots, vocab]
/// u16 of output tokens; prompt [slots, ceil(vocab / 32)] u32 bits.
extern "C" int moe_penalties(float* logits, const void* params, const uint16_t* counts, const uint32_t* prompt,
                             int rows, int vocab, void* stream) {
  using namespace moe;
  if (rows < 0 || rows > 65535 || vocab <= 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const Launch l = {dim3(ceil_div(vocab, kThreads * kPerThread), rows), dim3(kThreads), stream};
  return launch(penalty_kernel, l, logits, static_cast<const PenaltyRow*>(params), counts, prompt, vocab);
}

/// Adds tokens [rows] to the counts of their slots; slots differ. u32::MAX adds nothing.
extern "C" int moe_count_tokens(const uint32_t* tokens, const void* params, uint16_t* counts, int rows, int vocab,
                                void* stream) {
  using namespace moe;
  if (rows < 0 || vocab <= 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const Launch l = {dim3(ceil_div(rows, kThreads)), dim3(kThreads), stream};
  return launch(count_kernel, l, tokens, static_cast<const PenaltyRow*>(params), counts, rows, vocab);
}
