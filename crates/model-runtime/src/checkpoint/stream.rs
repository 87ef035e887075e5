//! Tensors from files straight to a CUDA device, through pinned buffers.
//!
//! A tensor there is a list of boxes of stored tensors, one behind the other: one box, or hundreds where a
//! pack of experts comes out of single ones. It is allocated once. All threads read chunks of it, converting
//! where dtypes differ, while the copy engine takes those that are read. The host holds the pinned buffers
//! and, of chunks that are converted or gathered, one per thread.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::cuda::Staging;
use moe_kernels::{Buffer, Exec, ViewMut};
use rayon::prelude::*;

use super::chunks::Part;
use super::decode;
use super::files::{TensorFiles, runs};
use super::slices::{TensorSlice, check_ranges};

/// Most pinned buffers: 128 MiB.
const MAX_STAGES: usize = 32;

/// The pinned buffers of one handle of files: made when it first loads onto a device, and gone with it.
#[derive(Default)]
pub(super) struct Stages(Mutex<Option<Arc<Staging>>>);

/// Another handle has its own.
impl Clone for Stages {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Stages {
    /// Two buffers for each thread: one that it fills and one that is copied.
    fn of(&self, device: &Device) -> Result<Arc<Staging>> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = made.as_ref().filter(|staging| staging.device().same_device(device)) {
            return Ok(staging.clone());
        }
        let most = (2 * rayon::current_num_threads()).clamp(4, MAX_STAGES);
        let staging = Arc::new(Staging::new(most, &Exec::on(device)?)?);
        *made = Some(staging.clone());
        Ok(staging)
    }
}

impl TensorFiles {
    /// The boxes `slices`, one behind the other, as a vector on a CUDA device.
    ///
    /// # Errors
    /// A missing tensor; ranges outside of one; a dtype that does not convert; a file that cannot be read.
    pub(super) fn stream(&self, slices: &[TensorSlice], wanted: DType, device: &Device) -> Result<Tensor> {
        // What headers tell to be wrong is found before memory is taken.
        let parts = slices.iter().map(|slice| self.part(slice, wanted)).collect::<Result<Vec<_>>>()?;
        let mut out = Buffer::zeros_on(device, wanted, &[parts.iter().map(Part::elements).sum()])?;
        let staging = self.stages.of(device)?;
        let mut places = Vec::new();
        let mut rest = out.view_mut();
        for part in &parts {
            let (place, behind) = rest.split_at(part.elements())?;
            places.push((part, place));
            rest = behind;
        }
        places.into_par_iter().try_for_each(|(part, place)| put(part, wanted, place, &staging))?;
        self.count(parts.iter().map(|part| part.elements() * part.size()).sum());
        out.into_tensor()
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

/// Copies a box to its place on the device, with all threads.
fn put(part: &Part, wanted: DType, mut place: ViewMut, staging: &Staging) -> Result<()> {
    let mut chunks = Vec::new();
    for chunk in part.chunks(Staging::BYTES / part.size().max(wanted.size_in_bytes())) {
        let (here, behind) = place.split_at(chunk.iter().map(ExactSizeIterator::len).sum())?;
        chunks.push((chunk, here));
        place = behind;
    }
    chunks.into_par_iter().try_for_each_init(Vec::new, |scratch, (chunk, here)| {
        staging.put(here, |out| Ok(part.read(&chunk, wanted, scratch, out)?))
    })
}
