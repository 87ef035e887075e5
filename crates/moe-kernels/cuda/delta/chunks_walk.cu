// The gated delta rule in chunks: the states (chunks.cuh). A block has 32 columns of a value head of one sequence, with
// its state in f32 in the registers of its warps, and goes through the chunks of the sequence.
//
// A warp has 16 rows of a chunk, and 32 rows of the state. Operands that do not depend on the state come from the
// workspace in the order of registers, some products before they are used; the next chunk's are asked for in L2. The
// others (the state itself, R and D) are exchanged in shared memory, as upper and lower digits: three barriers a chunk.
// With one sequence a scheduler has one warp, so the products between two barriers are one sequence of instructions
// without branches, and K S and Q S have their operands in common.
//
// Floor: a block reads 76 KB of a chunk, most of it from L2, where the four blocks of a head and the heads that share a
// key head find the same bytes: 1.25 GB for 8,192 rows of 32 heads of 128 columns. Their products take 0.13 ms at the
// rate of mma.sync.
#include "delta/chunks.cuh"

namespace moe::delta_chunks {
namespace {

/// Columns of a block, and their tiles of 8.
constexpr int kColumns = 32;
constexpr int kTiles = kColumns / 8;
/// Steps of 16 of a sum over key dimensions, and over the rows of a chunk.
constexpr int kKeySteps = kKeyDim / 16;
constexpr int kRowSteps = kRows / 16;

/// Rows of kColumns numbers in shared memory, as upper and lower digits. The four 16-byte parts of a row change places,
/// so that the same part of 8 rows is in different banks.
template <int kCount>
struct Digits {
  bf16 at[2][kCount * kColumns];

  __device__ __forceinline__ static int place(int row, int part) { return row * kColumns + (part ^ (row / 2 % 4)) * 8; }

  /// Stores columns 8 part + 2 t and the next one, t = lane % 4.
  __device__ __forceinline__ void store(int row, int part, float x, float y) {
    const int to = place(row, part) + threadIdx.x % 4 * 2;
    const Split split(x, y);
    *reinterpret_cast<uint32_t*>(&at[0][to]) = split.high;
    *reinterpret_cast<uint32_t*>(&at[1][to]) = split.low;
  }

  /// Rows 16 step to 16 step + 15 as the second operand, for each tile of 8 columns.
  __device__ __forceinline__ void load(uint32_t (&b)[kTiles][2], int digits, int step) const {
    const int lane = threadIdx.x % 32, i = lane / 8, row = step * 16 + i % 2 * 8 + lane % 8;
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      uint32_t m[4];
      ldmatrix_x4_trans(m, &at[digits][place(row, pair * 2 + i / 2)]);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[pair * 2 + j / 2][j % 2] = m[j];
    }
  }
};

struct alignas(16) Shared {
  Digits<kKeyDim> state;
  Digits<kRows> missing;   // R
  Digits<kRows> written;   // D
  Digits<kRows> decaying;  // diag(e^(G_last - G)) D
};

/// 16 rows and kColumns columns: lane 4g + t holds columns 8n + 2t and 8n + 2t + 1 of row g, then of row g + 8.
struct Tile {
  float at[kTiles][4] = {};

  __device__ __forceinline__ void add(const Vec16& a, const uint32_t (&b)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma_bf16(at[n], a.word, b[n][0], b[n][1]);
  }

  /// Adds the products of the digits of both operands, but that of both lower ones.
  template <int kCount>
  __device__ __forceinline__ void add_digits(const Vec16 (&a)[2], const Digits<kCount>& from, int step) {
    uint32_t low[kTiles][2], high[kTiles][2];
    from.load(low, 1, step);
    from.load(high, 0, step);
    add(a[0], low);
    add(a[1], high);
    add(a[0], high);
  }
};

/// Adds the products of two times 16 rows with the state.
__device__ __forceinline__ void add_state(Tile& k_sum, Tile& q_sum, const Vec16 (&k)[kKeySteps],
                                          const Vec16 (&q)[kKeySteps], const Digits<kKeyDim>& state) {
  // The next part of the state is on its way while one is multiplied.
  uint32_t b[2][kTiles][2];
  state.load(b[0], 1, 0);
#pragma unroll
  for (int i = 0; i < 2 * kKeySteps; ++i) {
    if (i + 1 < 2 * kKeySteps) state.load(b[(i + 1) % 2], i % 2, (i + 1) / 2);
    k_sum.add(k[i / 2], b[i % 2]);
    q_sum.add(q[i / 2], b[i % 2]);
  }
}

/// Loads 16 bytes of the workspace. Unlike loads of constant data these stay after the barrier before them, so that no
/// more registers wait for data than there are.
__device__ __forceinline__ Vec16 load_tile(const Vec16* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}

/// The 16 rows of q or k of a warp.
__device__ __forceinline__ void load_rows(Vec16 (&to)[kKeySteps], const Vec16 (*from)[kKeySteps][32]) {
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) to[step] = load_tile(&from[threadIdx.x / 32][step][threadIdx.x % 32]);
}

/// What a warp needs at the beginning of a chunk.
struct Keys {
  Vec16 k[kKeySteps], q[kKeySteps];
  float2 v[kTiles][2];
  float decay[2], rest[2], last;  // of rows g and g + 8; of the last row

  /// `v`: the columns of this lane in row g of the warp.
  __device__ __forceinline__ void load(const KeyPart& keys, const ValuePart& part, const float* from, int stride,
                                       int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    load_rows(k, keys.k);
    load_rows(q, keys.q);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp * 16 + lane / 4 + 8 * h;
      decay[h] = part.decay[row];
      rest[h] = part.rest[row];
      const float* own = from + static_cast<size_t>(8 * h) * stride;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        v[n][h] = row < rows ? *reinterpret_cast<const float2*>(own + n * 8) : float2{0.f, 0.f};
    }
    last = part.decay[kRows - 1];
  }
};

/// The tiles of a warp's 16 rows of a triangle, upper and lower digits. Those after the diagonal are zeros, and are
/// multiplied, too: branches between products would cost more, and the last warp multiplies all tiles in any case.
struct Triangle {
  Vec16 at[kRowSteps][2];

  __device__ __forceinline__ void load(const Vec16 (&from)[2][kTriangle][32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
#pragma unroll
      for (int digits = 0; digits < 2; ++digits)
        at[step][digits] = step <= warp ? load_tile(&from[digits][triangle(warp, step)][lane]) : Vec16{};
  }

  /// sum += this product.
  __device__ __forceinline__ void multiply(Tile& sum, const Digits<kRows>& by) const {
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) sum.add_digits(at[step], by, step);
  }
};

/// The 32 rows of the state of a warp.
struct State {
  Tile at[2];

  /// Calls f(i, h, n, row) for each pair of neighbouring columns of the lane: at[i].at[n][2 h] and the next one.
  template <class F>
  __device__ __forceinline__ static void each(F f) {
    const int first = threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) f(i, h, n, first + 16 * i + 8 * h);
  }

  /// `from`: column 2t of the block's in row 0, t = lane % 4.
  __device__ __forceinline__ void load(const float* from, int stride) {
    each([&](int i, int h, int n, int row) {
      const float2 x = *reinterpret_cast<const float2*>(from + static_cast<size_t>(row) * stride + n * 8);
      at[i].at[n][2 * h] = x.x;
      at[i].at[n][2 * h + 1] = x.y;
    });
  }

  __device__ __forceinline__ void store(float* to, int stride) const {
    each([&](int i, int h, int n, int row) {
      const float2 x = {at[i].at[n][2 * h], at[i].at[n][2 * h + 1]};
      *reinterpret_cast<float2*>(to + static_cast<size_t>(row) * stride + n * 8) = x;
    });
  }

  __device__ __forceinline__ void share(Digits<kKeyDim>& to) const {
    each([&](int i, int h, int n, int row) { to.store(row, n, at[i].at[n][2 * h], at[i].at[n][2 * h + 1]); });
  }

  /// Decays by the whole chunk and adds what its keys write.
  __device__ __forceinline__ void advance(float decay, const Vec16 (&k_columns)[2][kRowSteps],
                                          const Digits<kRows>& decaying) {
    each([&](int i, int h, int n, int) {
      at[i].at[n][2 * h] *= decay;
      at[i].at[n][2 * h + 1] *= decay;
    });
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
#pragma unroll
      for (int digits = 1; digits >= 0; --digits) {
        uint32_t b[kTiles][2];
        decaying.load(b, digits, step);
#pragma unroll
        for (int i = 0; i < 2; ++i) at[i].add(k_columns[i][step], b);
      }
  }
};

/// Asks for a chunk's operands of a head, and the columns of its values, in L2. The blocks of a head share the work.
__device__ __forceinline__ void prefetch(const KeyPart& keys, const ValuePart& part, const float* v, int stride,
                                         int rows, int block, int blocks) {
  constexpr int kLine = 128, kKeys = sizeof(KeyPart) / kLine, kAll = kKeys + sizeof(ValuePart) / kLine;
  const auto ask = [](const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); };
  for (int i = block * kThreads + threadIdx.x; i < kAll; i += blocks * kThreads)
    ask(i < kKeys ? reinterpret_cast<const uint8_t*>(&keys) + i * kLine
                  : reinterpret_cast<const uint8_t*>(&part) + (i - kKeys) * kLine);
  if (static_cast<int>(threadIdx.x) < min(rows, kRows)) ask(v + static_cast<size_t>(threadIdx.x) * stride);
}

__global__ void __launch_bounds__(kThreads, 2) delta_walk_chunks(const GatedDeltaArgs a, int first, int parts) {
  __shared__ Shared shared;
  pdl_wait();
  const int column = static_cast<int>(blockIdx.x) % parts * kColumns;
  const int head = static_cast<int>(blockIdx.x) / parts % a.value_heads;
  const ChunkedSequence sequence = find_sequence<false>(a, static_cast<int>(blockIdx.x) / parts / a.value_heads);
  if (sequence.number < 0) return;
  // The chunks of this sequence that are in the workspace.
  const int begin = max(first - sequence.before, 0);
  const int end = min(first + a.chunks - sequence.before, sequence.chunks);
  if (begin >= end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const DeltaSizes sizes(a);
  const DeltaBlock at(a, sequence.number, head, column);
  const int rows = at.end - at.begin, key_head = head / (a.value_heads / a.key_heads);
  const int own_column = column + 2 * t;
  float* const place = at.state + own_column;
  State state;
  if (begin > 0 || !at.is_empty) state.load(place, a.value_dim);
  const auto keys_of = [&](int chunk) -> const KeyPart& {
    return *key_part(a, sequence.before + chunk - first, key_head);
  };
  const auto part_of = [&](int chunk) -> const ValuePart& {
    return *value_part(a, sequence.before + chunk - first, head);
  };
  Keys keys;
  const auto load_keys = [&](int chunk) {
    const int row = min(chunk * kRows + warp * 16 + g, rows - 1);
    const float* v = at.row(a, sizes, at.begin + row).v + own_column;
    keys.load(keys_of(chunk), part_of(chunk), v, sizes.channels, rows - chunk * kRows);
  };
  load_keys(begin);
  state.share(shared.state);
  __syncthreads();
  for (int chunk = begin; chunk < end; ++chunk) {
    const int next = min(chunk + 1, end - 1);
    prefetch(keys_of(next), part_of(next), at.row(a, sizes, at.begin + next * kRows).v + column, sizes.channels,
             rows - next * kRows, column / kColumns, parts);
    const ValuePart& part = part_of(chunk);
    Triangle inverse;
    inverse.load(part.inverse);
    Tile held, out;  // K S and Q S
    add_state(held, out, keys.k, keys.q, shared.state);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float decay = keys.decay[h];
        const float2 v = keys.v[n][h];
        shared.missing.store(warp * 16 + g + 8 * h, n, v.x - decay * held.at[n][2 * h],
                             v.y - decay * held.at[n][2 * h + 1]);
      }
    __syncthreads();  // R is complete, and S has been read
    Vec16 k_columns[2][kRowSteps];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step)
        k_columns[i][step] = load_tile(&keys_of(chunk).k_columns[warp * 2 + i][step][lane]);
    Triangle scores;
    scores.load(part.scores);
    Tile written;
    inverse.multiply(written, shared.missing);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out.at[n][e] *= keys.decay[e / 2] * kScale;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int row = warp * 16 + g + 8 * h;
        const float x = written.at[n][2 * h], y = written.at[n][2 * h + 1];
        shared.written.store(row, n, x, y);
        shared.decaying.store(row, n, x * keys.rest[h], y * keys.rest[h]);
      }
    const float decay = keys.last;
    __syncthreads();  // D is complete, and R has been read
    state.advance(decay, k_columns, shared.decaying);
    load_keys(next);  // without a branch, which would cost registers
    state.share(shared.state);
    scores.multiply(out, shared.written);
    float* const to = a.out + static_cast<size_t>(at.begin) * sizes.value_width + head * a.value_dim + own_column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = chunk * kRows + warp * 16 + g + 8 * h;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        *reinterpret_cast<float2*>(to + static_cast<size_t>(row) * sizes.value_width + n * 8) = {out.at[n][2 * h],
                                                                                                 out.at[n][2 * h + 1]};
    }
    __syncthreads();  // S is complete, and D has been read
  }
  state.store(place, a.value_dim);
}

/// The most sequences that may be in chunks: each has at least 64 rows.
int most_sequences(const GatedDeltaArgs& a) { return min(a.sequences, a.tokens / kRows); }

}  // namespace

cudaError_t walk_chunks(const GatedDeltaArgs& a, int first, void* stream) {
  const int parts = a.value_dim / kColumns;
  const int64_t blocks = static_cast<int64_t>(most_sequences(a)) * a.value_heads * parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(delta_walk_chunks, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream}, a, first, parts);
}

}  // namespace moe::delta_chunks

/// Computes `out` and the states of the sequences that have rows: heads of 128 key dimensions and a multiple of 32
/// value dimensions, and 16-byte aligned arrays.
extern "C" int moe_gated_delta_chunks(const moe::GatedDeltaArgs* args, void* stream) {
  using namespace moe;
  using namespace moe::delta_chunks;
  const GatedDeltaArgs& a = *args;
  const bool aligned = is_aligned(a.mixed) && is_aligned(a.states) && is_aligned(a.out) && is_aligned(a.workspace);
  if (!is_valid(a) || a.key_dim != kKeyDim || a.value_dim % kColumns != 0 || !aligned || a.chunks <= 0)
    return cudaErrorInvalidValue;
  if (a.tokens == 0) return cudaSuccess;
  cudaError_t e = gated_delta_registers(a, kRows, stream);
  const int sequences = most_sequences(a);
  if (sequences == 0) return e;
  // Each sequence has at most one chunk that is not full.
  const int most = a.tokens / kRows + sequences;
  GatedDeltaArgs pass = a;
  for (int first = 0; first < most && e == cudaSuccess; first += a.chunks) {
    pass.chunks = min(a.chunks, most - first);
    e = prepare_chunks(pass, first, stream);
    if (e == cudaSuccess) e = walk_chunks(pass, first, stream);
  }
  return e;
}
