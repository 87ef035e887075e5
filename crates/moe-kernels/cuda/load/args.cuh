// Arguments of the kernels that reorder the bytes of a file.
#pragma once

#include "codes.cuh"

namespace moe {

/// The coding of integers in words: row r and column c are number places[r % rows + c % columns] of a word, counted
/// from the lowest bits.
struct StoredCoding {
  int row_bits, column_bits;  // 2^bits rows and columns share a word
  int bits;                   // 4 or 8; 0: there is no such tensor
  uint32_t places;            // four bits each, the first one's lowest
  uint32_t plus;              // added to a word before its integers are taken
};

/// Arguments for making tile rows of a quantised pack from a file's bytes.
struct QuantPackStoredArgs {
  const void* stored;            // a batch: StoredRows [matrices, entries], then the bytes at the places that they name
  uint8_t* q;                    // out, from the first tile row of the pack on
  float* scales;                 // out [E, n_tiles, groups, 16], from the first tile row of the pack on
  uint8_t* zeros;                // out, like `scales`; null: all zero points are the same
  uint32_t* found;               // out: the bits of what was found are set
  int64_t first, count;          // the batch's tile rows first .. first + count - 1 of the pack
  int64_t n, k;                  // of a matrix
  int64_t n_tiles, k_packed;     // as in QuantPack
  int64_t group, groups;         // likewise
  int64_t column, stored_group;  // the stored column, and the stored group, of column 0
  int64_t rows_to_scale;         // rows that share a scale
  StoredCoding code, zero;
  Dtype scale_dtype;  // of the file
  QuantFormat format;
  int entries;
  int gate_up;
};

}  // namespace moe

extern "C" int moe_quant_pack_stored(const moe::QuantPackStoredArgs* args, void* stream);
extern "C" int moe_quant_look_at_scales(const float* scales, int64_t tile_rows, int64_t groups, uint32_t* found,
                                        void* stream);
extern "C" int moe_quant_narrow_scales(const float* scales, int64_t count, void* out, moe::Dtype dtype, int rows,
                                       void* stream);
