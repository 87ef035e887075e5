//! Quantised matrices as the floats that their codes stand for, in the dtype of the model.
//!
//! Rows are computed a few at a time, by all threads, straight into the memory of the matrix: on a CUDA device through
//! page-locked buffers, so that the host never holds a matrix.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::quant::{LogicalRows, QuantRows};
#[cfg(feature = "cuda")]
use moe_kernels::{Buffer, ViewMut};
use moe_kernels::{Element, Float, with_float};
use moe_quant::{FloatRows, Reader};
use rayon::prelude::*;

use super::quantised::{QuantTensors, Tensors, module_of};
use super::slice::check_ranges;
#[cfg(feature = "cuda")]
use super::slice::{TensorSlice, cat};

/// The number of rows that a thread computes at a time.
const ROWS: usize = 64;

/// A part of a quantised matrix that is read as floats.
struct FloatPart<'a> {
    reader: Reader<'a>,
    tensors: Tensors<'a>,
    /// The columns of `reader` that belong to the part.
    columns: Range<usize>,
}

/// Memory that a thread keeps from rows to rows.
#[derive(Default)]
struct Scratch {
    stored: LogicalRows,
    floats: Vec<f32>,
}

impl FloatPart<'_> {
    fn dims(&self) -> (usize, usize) {
        (self.reader.shape().0, self.columns.len())
    }

    /// Writes these rows of the part, whose floats are `floats`, to `out`.
    fn read<T: Float>(
        &self,
        floats: &FloatRows,
        rows: Range<usize>,
        scratch: &mut Scratch,
        out: &mut [T],
    ) -> Result<()> {
        let width = floats.inputs();
        scratch.floats.resize(rows.len() * width, 0.0);
        floats.read(rows, &mut scratch.stored, &mut scratch.floats)?;
        let stored = scratch.floats.chunks_exact(width.max(1));
        for (out, row) in out.chunks_exact_mut(self.columns.len().max(1)).zip(stored) {
            let columns = &row[self.columns.clone()];
            out.iter_mut().zip(columns).for_each(|(out, weight)| *out = T::narrow(*weight));
        }
        Ok(())
    }

    /// The part [N, K] in host memory.
    fn tensor(&self, dtype: DType) -> Result<Tensor> {
        let (n, k) = self.dims();
        let floats = FloatRows::new(&self.reader);
        with_float!(dtype, "dequantised weights", T => {
            let mut data = <T as Element>::zeros(n * k);
            let chunks = data.par_chunks_mut((ROWS * k).max(1)).enumerate();
            chunks.try_for_each_init(Scratch::default, |scratch, (at, out)| {
                self.read(&floats, at * ROWS..n.min((at + 1) * ROWS), scratch, out)
            })?;
            Tensor::from_vec(data, (n, k), &Device::Cpu)
        })
    }
}

impl QuantTensors {
    /// The part of a quantised matrix in floats; `None` if the file has it in floats.
    pub(super) fn floats(
        &self,
        name: &str,
        ranges: Option<&[Range<usize>]>,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let Some(part) = self.float_part(name, ranges)? else { return Ok(None) };
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let dims = part.dims();
            return self.stream_floats(&[part], dtype, device)?.reshape(dims).map(Some);
        }
        let tensor = part.tensor(dtype)?;
        self.release(&part.tensors);
        self.count(&part.tensors);
        tensor.to_device(device).map(Some)
    }

    fn float_part(&self, name: &str, ranges: Option<&[Range<usize>]>) -> Result<Option<FloatPart<'_>>> {
        let Some(module) = module_of(name) else { return Ok(None) };
        let Some((mut reader, tensors)) = self.reader(module)? else { return Ok(None) };
        let mut columns = 0..reader.inputs();
        if let Some(ranges) = ranges {
            check_ranges(name, ranges, &[reader.shape().0, columns.end])?;
            reader = reader.rows(ranges[0].clone())?;
            if ranges[1] != columns {
                // Columns that cut a group are taken from whole rows.
                (reader, columns) = match reader.clone().columns(ranges[1].clone()) {
                    Ok(part) => (part, 0..ranges[1].len()),
                    Err(_) => (reader, ranges[1].clone()),
                };
            }
        }
        Ok(Some(FloatPart { reader, tensors, columns }))
    }

    /// The parts of a pack, one after the other, as a vector on a CUDA device.
    #[cfg(feature = "cuda")]
    pub(super) fn float_pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        let found = parts.iter().map(|part| self.float_part(&part.stored, Some(&part.ranges)));
        let found = found.collect::<Result<Option<Vec<_>>>>()?;
        found.map_or_else(
            || cat(self, parts, dtype, device),
            |found| self.stream_floats(&found, dtype, device),
        )
    }

    /// Computes parts to a vector on a CUDA device, one after the other.
    #[cfg(feature = "cuda")]
    fn stream_floats(&self, parts: &[FloatPart], dtype: DType, device: &Device) -> Result<Tensor> {
        let staging = self.staging_of(device)?;
        let elements = parts.iter().map(|part| part.dims().0 * part.dims().1).sum();
        let mut out = Buffer::unspecified_on(device, dtype, &[elements])?;
        let floats: Vec<_> = parts.iter().map(|part| FloatRows::new(&part.reader)).collect();
        let mut loads = Vec::new();
        let mut rest = out.view_mut();
        for part in parts.iter().zip(&floats) {
            let (n, k) = part.0.dims();
            let rows = (staging.buffer_len() / (k * dtype.size_in_bytes()).max(1)).clamp(1, ROWS);
            for first in (0..n).step_by(rows) {
                let rows = first..n.min(first + rows);
                let (here, after) = rest.split_at(rows.len() * k)?;
                loads.push((part, rows, here));
                rest = after;
            }
        }
        type Load<'a, 'b> = ((&'a FloatPart<'b>, &'a FloatRows<'a>), Range<usize>, ViewMut<'a>);
        let load = |scratch: &mut Scratch, ((part, floats), rows, here): Load| {
            staging.put(here, |out| {
                with_float!(dtype, "dequantised weights", T => {
                    let mut typed = <T as Element>::zeros(rows.len() * part.columns.len());
                    part.read(floats, rows, scratch, &mut typed)?;
                    out.copy_from_slice(bytemuck::cast_slice(&typed));
                    Ok(())
                })
            })
        };
        staging.read(|| loads.into_par_iter().with_max_len(1).try_for_each_init(Scratch::default, load))?;
        for part in parts {
            self.release(&part.tensors);
            self.count(&part.tensors);
        }
        out.into_tensor()
    }
}
