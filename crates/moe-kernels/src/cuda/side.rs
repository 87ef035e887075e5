//! A second stream of a device, for work that runs at the same time as work on the first stream.
//!
//! It belongs to a separate candle device on the same GPU, and so has its own counters, cuBLAS handle and allocations.
//! Launches on the two streams share only the data that the caller passes to both.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{Device, Result};

use super::device::device;

/// The second stream, and the events by which the two streams wait for each other.
pub(crate) struct Side {
    pub(crate) device: Device,
    stream: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
}

impl Side {
    /// A second stream of the device `ordinal`, whose first one is `main`.
    pub(super) fn new(ordinal: usize, main: &CudaStream) -> Result<Self> {
        let device = device(ordinal)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let event = || main.context().new_event(None).w();
        Ok(Self { device, stream, forked: event()?, joined: event()? })
    }

    /// Makes later work on the second stream wait for all earlier work on `main`. While `main` is being captured, the
    /// second stream is recorded too, until it is joined.
    pub(crate) fn fork(&self, main: &CudaStream) -> Result<()> {
        self.forked.record(main).w()?;
        self.stream.wait(&self.forked).w()
    }

    /// Makes later work on `main` wait for all earlier work on the second stream.
    pub(crate) fn join(&self, main: &CudaStream) -> Result<()> {
        self.joined.record(&self.stream).w()?;
        main.wait(&self.joined).w()
    }
}
