// Makes a pack in fragment order from the bytes of a quantised checkpoint's file, which were copied to the device
// unchanged.
//
// quant/args.cuh explains the order. The host's packing (src/quant/tiles.rs) is the specification, and the bytes must
// be equal. Numbers describe how a format stores a matrix (StoredRows, StoredCoding), so one kernel handles all
// formats.
//
// Floor: a batch's bytes are read once and written once, 8 MB for a batch of 4 MiB: 2 us at the memory's rate, less if
// they are still in L2. The copy of a batch over the bus takes 84 us, which determines the time of a load.
//
// Design: a thread makes words of the pack, each of 8 integers or 4 bytes of two rows, and finds each integer by
// itself. That is 8 loads of a word, where the loads of a warp fall into the same few sectors, and some 150
// instructions for 4 bytes. An H200 issues some 0.9 T warp instructions per second, so 4 MiB take 5 to 10 us. This runs
// during the copy of the next batch, so it costs no time.
#include "any/any.cuh"
#include "load/args.cuh"

namespace moe {
namespace {

constexpr int kPackThreads = 256;
constexpr int kTileRows = 16;
constexpr int kTileWords = 128;  // of 4 bytes
constexpr int kEight = 8;        // gate rows, and up rows, of a tile

/// Properties of a pack's values, found by the kernels. Rust defines the same constants in src/cuda/quant/stored.rs.
enum Found : uint32_t {
  kBadZero = 1,        // a zero point that differs from the one that all must have
  kNan = 2,            // an FP8 NaN
  kNotF16 = 4,         // a scale that f16 does not hold
  kNotBf16 = 8,        // a scale that bf16 does not hold
  kHalvesDiffer = 16,  // the scales of rows 0 .. 7, or of rows 8 .. 15, of a tile differ in a group
  kRowsDiffer = 32,    // the scales of the 16 rows of a tile differ in a group
  kTilesDiffer = 64,   // the scales of tile rows 8 i .. 8 i + 7 differ
};

/// Rows of a matrix in a batch, and the places of their tensors in it. The element of stored row r and stored column c
/// (group g) is at codes + r / rows * codes_row + c / columns * codes_column, counted from the batch's first byte,
/// where `rows` and `columns` share a word; the other tensors follow the same rule. Rust writes this struct in
/// src/quant/batches.rs.
struct StoredRows {
  int64_t begin, end;                         // rows of the matrix; if none, the other fields are not read
  int64_t shift;                              // the stored row of row r is r + shift
  int64_t codes, codes_row, codes_column;     // words of 4 bytes
  int64_t zeros, zeros_row, zeros_column;     // likewise
  int64_t scales, scales_row, scales_column;  // scales
};

/// A row of a matrix in the batch.
struct Row {
  const StoredRows* at;  // null: there is no such row
  int64_t stored;
};

/// The integers of one row in a tensor.
struct Line {
  const uint32_t* words;
  int stride;
  int sub;  // its place among the rows that share a word
};

/// The entry of row `row` of a matrix, whose table begins at `table`.
__device__ __forceinline__ Row find_row(const StoredRows* table, int entries, int64_t row) {
  for (int i = 0; i < entries; ++i)
    if (row >= table[i].begin && row < table[i].end) return {table + i, row + table[i].shift};
  return {nullptr, 0};
}

__device__ __forceinline__ Line line_of(const void* stored, const StoredCoding& coding, int64_t at, int64_t row_stride,
                                        int64_t column_stride, int64_t row) {
  const uint32_t* words = static_cast<const uint32_t*>(stored) + at + (row >> coding.row_bits) * row_stride;
  return {words, static_cast<int>(column_stride), static_cast<int>(row & ((1 << coding.row_bits) - 1))};
}

/// The integer of a stored column, or group, in a line.
__device__ __forceinline__ uint32_t integer(const StoredCoding& coding, const Line& line, int column) {
  const uint32_t word = line.words[(column >> coding.column_bits) * line.stride] + coding.plus;
  const int among = line.sub + (column & ((1 << coding.column_bits) - 1));
  const int place = coding.places >> 4 * among & 15;
  return word >> place * coding.bits & ((1u << coding.bits) - 1);
}

__device__ __forceinline__ Line code_line(const QuantPackStoredArgs& a, const Row& row) {
  const StoredRows& at = *row.at;
  return line_of(a.stored, a.code, at.codes, at.codes_row, at.codes_column, row.stored);
}

/// The zero point of a row's group; `middle` if there is no tensor of zero points.
__device__ __forceinline__ uint32_t zero_point(const QuantPackStoredArgs& a, const Row& row, int group,
                                               uint32_t middle) {
  if (a.zero.bits == 0) return middle;
  const StoredRows& at = *row.at;
  const Line line = line_of(a.stored, a.zero, at.zeros, at.zeros_row, at.zeros_column, row.stored);
  return integer(a.zero, line, static_cast<int>(a.stored_group) + group);
}

/// The row of a matrix that is row `r` of its tile row `tile`, and the number of rows in the tile's range.
__device__ __forceinline__ int64_t matrix_row(const QuantPackStoredArgs& a, int64_t tile, int r, int64_t* count) {
  if (a.gate_up == 0) {
    *count = a.n - tile * kTileRows;
    return tile * kTileRows + r;
  }
  *count = a.n / 2 - tile * kEight;
  return tile * kEight + r % kEight + (r < kEight ? 0 : a.n / 2);
}

/// The row of a matrix in the batch, or none if the tile extends beyond the end of the matrix.
__device__ __forceinline__ Row tile_row(const QuantPackStoredArgs& a, const StoredRows* table, int64_t tile, int r) {
  int64_t count;
  const int64_t row = matrix_row(a, tile, r, &count);
  if ((a.gate_up == 0 ? r : r % kEight) >= count) return {nullptr, 0};
  return find_row(table, a.entries, row);
}

/// The integers of a row.
template <QuantFormat kFormat>
struct Codes {
  static constexpr bool kFp8 = kFormat == QuantFormat::kFp8;
  static constexpr uint32_t kMiddle = kFp8 ? 0 : kFormat == QuantFormat::kInt4 ? 8 : 128;
  Row row;
  Line line;

  __device__ __forceinline__ Codes(const QuantPackStoredArgs& a, const Row& of) : row(of), line{} {
    if (row.at != nullptr) line = code_line(a, row);
  }

  /// The integer of a column. A column that does not exist has its group's zero point, which means a weight of zero.
  __device__ __forceinline__ uint32_t at(const QuantPackStoredArgs& a, int column) const {
    if (row.at == nullptr) return kMiddle;
    if (column < a.k) return integer(a.code, line, static_cast<int>(a.column) + column);
    if (kFp8 || a.zeros == nullptr) return kMiddle;
    const int64_t group = column / a.group;
    return zero_point(a, row, static_cast<int>(group < a.groups ? group : a.groups - 1), kMiddle);
  }
};

/// The part that one of the tile's rows adds to a thread's words of the tile; quant/args.cuh explains the positions.
/// `first` is the first of the thread's columns.
template <QuantFormat kFormat>
__device__ __forceinline__ uint32_t half_word(const QuantPackStoredArgs& a, const Codes<kFormat>& codes, int first) {
  uint32_t word = 0;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    word |= codes.at(a, first + odd) << 16 * odd;
    if constexpr (kFormat == QuantFormat::kInt4) word |= codes.at(a, first + odd + 8) << (16 * odd + 8);
  }
  return word;
}

/// Whether a byte of a word is an FP8 NaN.
__device__ __forceinline__ bool has_nan(uint32_t word) { return __vcmpeq4(word & 0x7f7f7f7f, 0x7f7f7f7f) != 0; }

/// Makes words of a tile row. A thread has the same position in every tile that it makes, and so the same two rows.
template <QuantFormat kFormat>
__device__ __forceinline__ bool pack_codes(const QuantPackStoredArgs& a, const StoredRows* table, int64_t row,
                                           int64_t tile) {
  constexpr bool kFour = kFormat == QuantFormat::kInt4;
  constexpr int kColumns = kFour ? 64 : 32, kTilesAtOnce = kPackThreads / kTileWords;
  const int place = threadIdx.x % kTileWords, lane = place / 4, part = place % 4, g = lane / 4, c = lane % 4;
  const int inside = kFour ? part * 16 + 2 * c : part / 2 * 16 + part % 2 * 8 + 2 * c;
  const int tiles = static_cast<int>(a.k_packed / kColumns);
  const Codes<kFormat> low(a, tile_row(a, table, tile, g)), high(a, tile_row(a, table, tile, g + kEight));
  uint32_t* q = reinterpret_cast<uint32_t*>(a.q) + row * tiles * kTileWords + place;
  bool nan = false;
  for (int t = blockIdx.y * kTilesAtOnce + threadIdx.x / kTileWords; t < tiles; t += gridDim.y * kTilesAtOnce) {
    const int first = t * kColumns + inside;
    const uint32_t word = half_word(a, low, first) | half_word(a, high, first) << (kFour ? 4 : 8);
    nan |= Codes<kFormat>::kFp8 && has_nan(word);
    q[t * kTileWords] = word;
  }
  return nan;
}

/// Makes scales and zero points of a tile row. Rows that do not exist get the scales of the last existing row.
template <QuantFormat kFormat, class Scale>
__device__ __forceinline__ uint32_t pack_groups(const QuantPackStoredArgs& a, const StoredRows* table, int64_t row,
                                                int64_t tile) {
  constexpr uint32_t kMiddle = Codes<kFormat>::kMiddle;
  uint32_t found = 0;
  const int count = static_cast<int>(a.groups) * kTileRows;
  for (int i = blockIdx.y * kPackThreads + threadIdx.x; i < count; i += gridDim.y * kPackThreads) {
    const int group = i / kTileRows, r = i % kTileRows, in_run = a.gate_up == 0 ? r : r % kEight;
    int64_t rows;
    const int64_t wanted = matrix_row(a, tile, r, &rows), behind = in_run - (rows - 1);
    const Row of = find_row(table, a.entries, behind > 0 ? wanted - behind : wanted);
    if (of.at == nullptr) continue;  // the host has checked that there is one
    const Scale* scales = static_cast<const Scale*>(a.stored) + of.at->scales;
    const int64_t at =
        of.stored / a.rows_to_scale * of.at->scales_row + (a.stored_group + group) * of.at->scales_column;
    a.scales[row * count + i] = widen(scales[at]);
    if (kFormat == QuantFormat::kFp8) continue;
    const uint32_t zero = behind > 0 ? kMiddle : zero_point(a, of, group, kMiddle);
    if (a.zeros != nullptr) a.zeros[row * count + i] = static_cast<uint8_t>(zero);
    else if (zero != kMiddle) found |= kBadZero;
  }
  return found;
}

/// The threads of a block make words of one tile row. The grid is tile rows x parts of their words.
template <QuantFormat kFormat, class Scale>
__global__ void __launch_bounds__(kPackThreads, 4) pack_stored(const QuantPackStoredArgs a) {
  const int64_t row = a.first + blockIdx.x, matrix = row / a.n_tiles, tile = row - matrix * a.n_tiles;
  const StoredRows* table = static_cast<const StoredRows*>(a.stored) + (matrix - a.first / a.n_tiles) * a.entries;
  const bool nan = pack_codes<kFormat>(a, table, row, tile);
  const uint32_t found = pack_groups<kFormat, Scale>(a, table, row, tile) | (nan ? kNan : 0);
  if (found != 0) atomicOr(a.found, found);
}

/// Finds out which scales are equal, and which types can represent them.
__global__ void __launch_bounds__(kAnyThreads)
    look_at_scales(const float* scales, int64_t count, int64_t of_tile, uint32_t* found) {
  uint32_t own = 0;
  for (int64_t i = element_start(); i < count; i += element_step()) {
    const float scale = scales[i];
    const auto holds = [scale](float narrowed) { return narrowed == scale || scale != scale; };
    if (!holds(widen(narrow<__half>(scale)))) own |= kNotF16;
    if (!holds(widen(narrow<bf16>(scale)))) own |= kNotBf16;
    if (!(scale == scales[i & ~int64_t{7}])) own |= kHalvesDiffer;
    if (!(scale == scales[i & ~int64_t{15}])) own |= kRowsDiffer;
    const int64_t tile = i / of_tile;
    if (!(scale == scales[i - tile % 8 * of_tile])) own |= kTilesDiffer;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own |= __shfl_xor_sync(0xffffffffu, own, step);
  if (threadIdx.x % 32 == 0 && own != 0) atomicOr(found, own);
}

/// out[i] = scales[i * step].
template <class T>
__global__ void __launch_bounds__(kAnyThreads) narrow_scales(const float* scales, int64_t count, int step, T* out) {
  for (int64_t i = element_start(); i < count; i += element_step()) out[i] = narrow<T>(scales[i * step]);
}

template <QuantFormat kFormat>
cudaError_t pack(const QuantPackStoredArgs& a, void* stream) {
  const int64_t words = a.k_packed / (kFormat == QuantFormat::kInt4 ? 64 : 32) * kTileWords;
  // Each thread makes four words.
  const int64_t parts = ceil_div(words, kPackThreads * 4);
  const dim3 grid(static_cast<unsigned>(a.count), static_cast<unsigned>(parts < 64 ? parts : 64));
  Launch l = {grid, dim3(kPackThreads), stream};
  l.overlap = false;
  return with_dtype(a.scale_dtype,
                    [&](auto type) { return launch(pack_stored<kFormat, typename decltype(type)::type>, l, a); });
}

bool is_coding(const StoredCoding& c, int bits) {
  return c.bits == bits && c.row_bits >= 0 && c.column_bits >= 0 && c.row_bits + c.column_bits <= 3;
}

bool is_pack(const QuantPackStoredArgs& a) {
  const int bits = a.format == QuantFormat::kInt4 ? 4 : 8, columns = a.format == QuantFormat::kInt4 ? 64 : 32;
  const int64_t most = int64_t{1} << 24;  // columns of a row: the kernel counts their words in 32 bits
  return is_code(a.format, QuantFormat::kFp8) && is_coding(a.code, bits) &&
         (a.zero.bits == 0 || is_coding(a.zero, bits)) && a.n > 0 && a.k > 0 && a.n_tiles > 0 && a.k_packed >= a.k &&
         a.k_packed % columns == 0 && a.k_packed <= most && a.group > 0 && a.groups > 0 && a.groups <= most &&
         a.column >= 0 && a.column <= most && a.stored_group >= 0 && a.stored_group <= most && a.rows_to_scale > 0 &&
         a.entries > 0 && a.first >= 0 && a.count < int64_t{1} << 31;
}

}  // namespace
}  // namespace moe

using namespace moe;

/// Makes tile rows first .. first + count - 1 of a pack, see QuantPackStoredArgs. Bits that are set in `found` stay
/// set.
extern "C" int moe_quant_pack_stored(const moe::QuantPackStoredArgs* args, void* stream) {
  if (!is_pack(*args)) return cudaErrorInvalidValue;
  if (args->count <= 0) return cudaSuccess;
  switch (args->format) {
    case QuantFormat::kInt4: return pack<QuantFormat::kInt4>(*args, stream);
    case QuantFormat::kInt8: return pack<QuantFormat::kInt8>(*args, stream);
    default: return pack<QuantFormat::kFp8>(*args, stream);
  }
}

/// Sets the bits in `found` for the properties of scales [tile_rows, groups, 16].
extern "C" int moe_quant_look_at_scales(const float* scales, int64_t tile_rows, int64_t groups, uint32_t* found,
                                        void* stream) {
  const int64_t of_tile = groups * kTileRows, count = tile_rows * of_tile;
  if (count <= 0) return cudaSuccess;
  Launch l = over_elements(count, stream);
  l.overlap = false;
  return launch(look_at_scales, l, scales, count, of_tile, found);
}

/// `out` gets `count` scales of `dtype`, each the first of 16 / `rows` scales in `scales`.
extern "C" int moe_quant_narrow_scales(const float* scales, int64_t count, void* out, moe::Dtype dtype, int rows,
                                       void* stream) {
  if (rows < 1 || rows > kTileRows || kTileRows % rows != 0) return cudaErrorInvalidValue;
  if (count <= 0) return cudaSuccess;
  Launch l = over_elements(count, stream);
  l.overlap = false;
  return with_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch(narrow_scales<T>, l, scales, count, kTileRows / rows, static_cast<T*>(out));
  });
}
