//! Where each format keeps integers, zero points and scales, as data: what [`unpack`](super::unpack) reads, for devices
//! that read the bytes of a file themselves.

use candle_core::{DType, Result};
use moe_kernels::quant::{StoredBytes, StoredGrid, StoredMatrix, StoredPart, StoredTensor, StoredWords};

use super::Reader;
use super::words::AWQ_PLACE;
use crate::format::{Format, GptqZeros};

/// Places of integers that follow each other.
const IN_ORDER: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
/// FP8 bytes in a word.
const FP8_TO_A_WORD: usize = 4;

/// Words of `bits`, of which each holds neighbouring rows or columns.
fn words(
    bits: u8,
    (rows, row_stride): (usize, usize),
    (columns, column_stride): (usize, usize),
) -> StoredWords {
    let grid = StoredGrid { bytes: 4, rows, columns, row_stride, column_stride };
    StoredWords { grid, bits, place: IN_ORDER, plus: 0 }
}

/// Integers of a matrix [n, k], and its zero points if the format has them.
fn tensors(format: Format, n: usize, k: usize) -> std::result::Result<(StoredWords, StoredWords), String> {
    let groups = format.scheme().groups(k);
    match format {
        Format::Gptq { int, zeros } => {
            let size = int.per_word();
            let mut zero = words(int.bits, (size, 1), (1, n / size));
            if zeros == GptqZeros::V1 {
                zero.plus = super::words::ones(int.bits);
            }
            Ok((words(int.bits, (1, 1), (size, n)), zero))
        }
        Format::Awq { int } => {
            let of = |mut words: StoredWords| {
                words.place = AWQ_PLACE.map(|place| place as u8);
                words
            };
            let line = n / AWQ_PLACE.len();
            let all = words(int.bits, (AWQ_PLACE.len(), 1), (1, line));
            Ok((of(all), of(all)))
        }
        Format::PackQuantized { int } => {
            let size = int.per_word();
            Ok((words(int.bits, (1, k.div_ceil(size)), (size, 1)), words(int.bits, (size, groups), (1, 1))))
        }
        Format::Fp8 { .. } if k.is_multiple_of(FP8_TO_A_WORD) => {
            let all = words(8, (1, k / FP8_TO_A_WORD), (FP8_TO_A_WORD, 1));
            Ok((all, all))
        }
        Format::Fp8 { .. } => Err(format!("rows of {k} bytes are no whole words of 4")),
        Format::Ggml(_) => Err("its blocks hold codes and scales together".to_string()),
        Format::Mxfp4(_) | Format::Nvfp4(_) => Err("its scales have 8 bits".to_string()),
        Format::Plain => Err("it is stored in floats".to_string()),
    }
}

impl Reader<'_> {
    /// Where the part of the matrix that this reader returns is in its tensors.
    ///
    /// # Errors
    /// Why the rows can only be read one by one.
    pub(super) fn stored_matrix(&self) -> std::result::Result<StoredMatrix, String> {
        if self.columns.order.is_some() {
            return Err("act-order: its columns are sorted as they are read".to_string());
        }
        let (codes, zeros) = tensors(self.format, self.stored.0, self.stored.1)?;
        let scale_dtype = DType::try_from(self.scales.dtype()).map_err(|e| e.to_string())?;
        Ok(StoredMatrix {
            codes,
            zeros: self.zeros.is_some().then_some(zeros),
            scales: self.scales.grid(),
            scale_dtype,
            first_row: self.rows.start,
            first_column: self.columns.source.start,
            first_group: self.columns.groups.first().copied().unwrap_or(0),
        })
    }

    /// The one part of [`QuantRows::stored`](moe_kernels::quant::QuantRows::stored), read from `bytes`.
    ///
    /// # Errors
    /// Why the rows are only to be had one by one.
    pub fn stored_in<'a>(
        &self,
        bytes: &'a dyn StoredBytes,
    ) -> std::result::Result<Vec<StoredPart<'a>>, String> {
        Ok(vec![StoredPart { rows: self.rows.len(), matrix: self.stored_matrix()?, bytes }])
    }
}

impl StoredBytes for Reader<'_> {
    fn read_bytes(&self, tensor: StoredTensor, first: usize, out: &mut [u8]) -> Result<()> {
        let bytes = match tensor {
            StoredTensor::Codes => self.codes,
            StoredTensor::Zeros => self.zeros.unwrap_or_default(),
            StoredTensor::Scales => self.scales.bytes(),
        };
        match bytes.get(first..first + out.len()) {
            Some(bytes) => out.copy_from_slice(bytes),
            None => {
                let end = first + out.len();
                candle_core::bail!(
                    "{}: bytes {first} to {end} of {tensor:?}, which has {}",
                    self.name,
                    bytes.len()
                )
            }
        }
        Ok(())
    }
}
