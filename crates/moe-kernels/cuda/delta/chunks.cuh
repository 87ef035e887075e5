// The gated delta rule in chunks of 64 rows (Yang, Kautz and Hatamizadeh, 2024): the algebra, and what its two kernels
// share.
//
// With S the state before a chunk, G the sums of the logarithms of its decays up to each row, and q and k of length 1,
// the rows of a chunk are
//
//   R  = V - diag(e^G) K S                                    what the state before the chunk does not hold
//   D  = (I + A)^-1 diag(beta) R                              the rows that the keys of the chunk write
//        with A[i][j] = beta_i k_i k_j e^(G_i - G_j) for j < i
//   O  = (diag(e^G) Q S + P D) / sqrt(Dk)                     with P[i][j] = q_i k_j e^(G_i - G_j) for j <= i
//   S' = e^G_last S + K^T diag(e^(G_last - G)) D
//
// All exponents are at most 0. What does not depend on S is computed for all chunks at the same time
// (chunks_prepare.cu): q and k, T = (I + A)^-1 diag(beta), P and e^G. The other kernel goes through the chunks of a
// sequence in their order (chunks_walk.cu).
//
// q and k are rounded to bf16 once, and every product sees the rounded ones, so the results belong to slightly
// different keys. They differ as much in a model that computes in bf16. All other operands are two bf16 whose sum has
// 16 digits, and sums, gates and the state are f32.
//
// The first kernel stores each operand in the order in which the registers of mma.sync take it: the 16 bytes of the 32
// lanes of a tile of 16 x 16 follow each other. So the second one loads them without shared memory.
#pragma once

#include "delta/rule.cuh"

namespace moe::delta_chunks {

constexpr int kRows = 64;
constexpr int kKeyDim = 128;
/// Warps of a block. Each has a tile of 16 rows of a chunk.
constexpr int kWarps = kRows / 16;
constexpr int kThreads = 32 * kWarps;
/// 1 / sqrt(Dk), which scales P and Q S. It does not scale q itself, so a unit vector that bf16 has stays exact.
constexpr float kScale = 0.088388347648318440550f;
/// Tiles of 16 x 16 at and below the diagonal.
constexpr int kTriangle = kWarps * (kWarps + 1) / 2;

/// Number of a tile at or below the diagonal.
__host__ __device__ constexpr int triangle(int row, int column) { return row * (row + 1) / 2 + column; }

/// Operands of a chunk and key head, in the order of registers.
struct KeyPart {
  Vec16 k[kRows / 16][kKeyDim / 16][32];
  Vec16 q[kRows / 16][kKeyDim / 16][32];
  Vec16 k_columns[kKeyDim / 16][kRows / 16][32];  // of the transposed matrix
};

/// Operands of a chunk and value head: upper and lower digits.
struct ValuePart {
  Vec16 inverse[2][kTriangle][32];  // T
  Vec16 scores[2][kTriangle][32];   // P / sqrt(Dk)
  float decay[kRows];               // e^G
  float rest[kRows];                // e^(G_last - G)
};

static_assert(sizeof(KeyPart) == 49152 && sizeof(ValuePart) == 20992, "the plan has these sizes, too");

/// Where the operands of chunk number `chunk` of the workspace are.
__device__ __forceinline__ uint8_t* chunk_at(const GatedDeltaArgs& a, int chunk) {
  const size_t bytes = a.key_heads * sizeof(KeyPart) + a.value_heads * sizeof(ValuePart);
  return a.workspace + chunk * bytes;
}

__device__ __forceinline__ KeyPart* key_part(const GatedDeltaArgs& a, int chunk, int key_head) {
  return reinterpret_cast<KeyPart*>(chunk_at(a, chunk)) + key_head;
}

__device__ __forceinline__ ValuePart* value_part(const GatedDeltaArgs& a, int chunk, int head) {
  return reinterpret_cast<ValuePart*>(chunk_at(a, chunk) + a.key_heads * sizeof(KeyPart)) + head;
}

/// A sequence that is computed in chunks; `number` is -1 for none.
struct ChunkedSequence {
  int number;
  int before;  // chunks of the sequences before it
  int chunks;
};

/// The chunks of a sequence: 0 if it is not computed in chunks.
__device__ __forceinline__ int chunks_of(const GatedDeltaArgs& a, int sequence) {
  const uint32_t tokens = static_cast<uint32_t>(a.tokens);
  const int begin = static_cast<int>(min(a.query_start_loc[sequence], tokens));
  const int end = static_cast<int>(min(a.query_start_loc[sequence + 1], tokens));
  const bool has_state = a.numbers[sequence] < static_cast<uint32_t>(a.num_states);
  return has_state && end - begin >= kRows ? ceil_div(end - begin, kRows) : 0;
}

/// Finds the sequence of chunk number `wanted`, or with kByChunk = false that of number `wanted` among the sequences in
/// chunks. A warp goes through all sequences, 32 at a time.
template <bool kByChunk>
__device__ __forceinline__ ChunkedSequence find_sequence(const GatedDeltaArgs& a, int wanted) {
  const int lane = threadIdx.x % 32;
  int sequences = 0, chunks = 0;
  for (int first = 0; first < a.sequences; first += 32) {
    const int own = first + lane < a.sequences ? chunks_of(a, first + lane) : 0;
    uint32_t total;
    const int before = chunks + static_cast<int>(warp_exclusive_sum(static_cast<uint32_t>(own), &total));
    const uint32_t chunked = __ballot_sync(0xffffffffu, own > 0);
    const int rank = sequences + __popc(chunked & ((1u << lane) - 1));
    const bool hit = own > 0 && (kByChunk ? wanted >= before && wanted < before + own : wanted == rank);
    const uint32_t hits = __ballot_sync(0xffffffffu, hit);
    if (hits != 0) {
      const int at = __ffs(static_cast<int>(hits)) - 1;
      return {first + at, __shfl_sync(0xffffffffu, before, at), __shfl_sync(0xffffffffu, own, at)};
    }
    sequences += __popc(chunked);
    chunks += static_cast<int>(total);
  }
  return {-1, 0, 0};
}

/// Two numbers as bf16, and what the rounding has lost as bf16.
struct Split {
  uint32_t high, low;

  __device__ __forceinline__ Split(float x, float y) : high(pack_bf16(x, y)) {
    const float2 rounded = unpack_bf16(high);
    low = pack_bf16(x - rounded.x, y - rounded.y);
  }
};

/// Computes and stores the operands of the chunks of the workspace, whose first one is chunk `first` of the step.
cudaError_t prepare_chunks(const GatedDeltaArgs& a, int first, void* stream);

/// Computes `out` and advances the states over these chunks.
cudaError_t walk_chunks(const GatedDeltaArgs& a, int first, void* stream);

}  // namespace moe::delta_chunks
