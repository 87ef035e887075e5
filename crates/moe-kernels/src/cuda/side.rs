//! A second stream of a device, for work beside that of the first.
//!
//! It belongs to a candle device of its own on the same GPU. So it has counters, a cuBLAS handle and allocations of its own:
//! launches of both streams share nothing but what the caller gives both.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{Device, Result};

use super::device::device;

/// The second stream, and the marks by which both wait for each other.
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

    /// Lets the second stream begin when everything that is on `main` so far has ended. In a capture of `main` the second
    /// stream is recorded too, until it is joined.
    pub(crate) fn fork(&self, main: &CudaStream) -> Result<()> {
        self.forked.record(main).w()?;
        self.stream.wait(&self.forked).w()
    }

    /// Lets `main` go on when everything that is on the second stream so far has ended.
    pub(crate) fn join(&self, main: &CudaStream) -> Result<()> {
        self.joined.record(&self.stream).w()?;
        main.wait(&self.joined).w()
    }
}
