//! Tensors from files straight to a CUDA device, through page-locked buffers.
//!
//! On the device a tensor is a list of boxes of stored tensors, one after the other: one box, or hundreds if a pack of
//! experts is made of single ones. It is allocated once, and cut into chunks that fill a buffer each. All threads read
//! chunks, and convert them if dtypes differ, while the copy engine copies chunks that have been read. The host holds
//! the buffers and, for chunks that are converted or gathered, one more buffer per thread.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::cuda::Staging;
use moe_kernels::{Buffer, ViewMut};
use rayon::prelude::*;

use super::chunks::{Chunk, Part, chunks};
use super::decode;
use super::files::{TensorFiles, runs};
use super::slice::{TensorSlice, check_ranges};

impl TensorFiles {
    /// Reads the boxes `slices` to a vector on a CUDA device, one after the other.
    ///
    /// # Errors
    /// A missing tensor; ranges outside of one; a dtype that does not convert; a file that cannot be read.
    pub(super) fn stream(&self, slices: &[TensorSlice], wanted: DType, device: &Device) -> Result<Tensor> {
        // Faults that the headers show are found before memory is taken.
        let parts = slices.iter().map(|slice| self.part(slice, wanted)).collect::<Result<Vec<_>>>()?;
        let staging = self.staging(device)?;
        let elements = parts.iter().map(Part::elements).sum();
        let mut out = Buffer::unspecified_on(device, wanted, &[elements])?;
        let mut loads = Vec::new();
        let mut rest = out.view_mut();
        // Neither the stored elements of a chunk nor the converted ones are longer than a buffer.
        let widest = parts.iter().map(Part::size).fold(wanted.size_in_bytes(), usize::max);
        for chunk in chunks(&parts, staging.buffer_len() / widest) {
            let (here, after) = rest.split_at(chunk.elements())?;
            loads.push((chunk, here));
            rest = after;
        }
        let load = |scratch: &mut Vec<u8>, (chunk, here): (Chunk, ViewMut)| {
            staging.put(here, |out| Ok(chunk.read(wanted, scratch, out)?))
        };
        staging.read(|| loads.into_par_iter().with_max_len(1).try_for_each_init(Vec::new, load))?;
        self.count(parts.iter().map(|part| part.elements() * part.size()).sum());
        out.into_tensor()
    }

    /// The buffers through which data from the files reaches a device.
    pub(super) fn staging(&self, device: &Device) -> Result<Arc<Staging>> {
        self.stages.of(device, self.file_bytes())
    }

    fn part(&self, slice: &TensorSlice, wanted: DType) -> Result<Part<'_>> {
        let (file, entry) = self.stored(&slice.stored)?;
        check_ranges(&slice.stored, &slice.ranges, &entry.shape)?;
        if !decode::converts(entry.dtype, wanted) {
            return Err(self.wrong_dtype(&slice.stored, entry, wanted).into());
        }
        Ok(Part { file, entry, runs: runs(&slice.ranges, &entry.shape) })
    }
}
