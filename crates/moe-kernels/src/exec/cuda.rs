//! The additional functions of a context on a CUDA device: its stream, page-locked words, a timeline.

use std::sync::Arc;
use std::time::Instant;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{Result, bail};

use super::Exec;
use crate::buffer::Workspace;
use crate::cuda::{CudaExec, PinnedWords, Timeline};
use crate::view::{View, ViewMut};

impl Exec {
    pub(crate) fn side_workspace(&self) -> &Workspace {
        &self.side_workspace
    }

    /// The CUDA side; an error on the CPU.
    pub(crate) fn cuda(&self, op: &str) -> Result<&CudaExec> {
        match &self.cuda {
            Some(cuda) => Ok(cuda),
            None => bail!("{op}: expected a context on a CUDA device, got one on the CPU"),
        }
    }

    /// Collects [marks](Self::mark) in a timeline.
    #[must_use]
    pub fn with_timeline(self, timeline: Option<Timeline>) -> Self {
        Self { timeline, ..self }
    }

    /// The timeline, if marks are collected.
    pub fn timeline(&self) -> Option<&Timeline> {
        self.timeline.as_ref()
    }

    /// The stream on which all ops of this context run, for libraries that launch their own work.
    ///
    /// # Errors
    /// A context on the CPU.
    pub fn stream(&self) -> Result<&Arc<CudaStream>> {
        Ok(&self.cuda("stream")?.stream)
    }

    /// The address of a view's data on this context's device, for libraries that launch their own work on
    /// [`stream`](Self::stream): memory is freed and lent again in the order of that stream. In errors `op` and `name`
    /// say which call needs which view.
    ///
    /// # Errors
    /// A context on the CPU; a view of host memory or of another device.
    pub fn address(&self, op: &str, name: &str, view: View<'_>) -> Result<u64> {
        self.cuda(op)?.read::<u8>(op, name, view).map(|address| address as u64)
    }

    /// Page-locked words to copy from and to.
    pub fn pinned(&self, len: usize) -> Result<PinnedWords> {
        self.cuda("pinned")?.pinned(len)
    }

    /// Copies the first words of `from` to `to` (u32), in stream order; returns at once.
    pub fn upload(&self, from: &mut PinnedWords, to: ViewMut<'_>) -> Result<()> {
        self.cuda("upload")?.upload(from, to)
    }

    /// Copies `from` (u32) to the first words of `to`, in stream order; returns at once.
    pub fn download(&self, from: View<'_>, to: &mut PinnedWords) -> Result<()> {
        self.cuda("download")?.download(from, to)
    }

    /// Free and total memory of the device, bytes.
    pub fn device_memory(&self) -> Result<(usize, usize)> {
        self.cuda("device_memory")?.memory()
    }
}

impl Timeline {
    /// Measures in microseconds since `origin`. Waits for the stream once.
    ///
    /// # Errors
    /// A context on the CPU.
    pub fn new(origin: Instant, ex: &Exec) -> Result<Self> {
        Self::on(origin, ex.cuda("timeline")?.clone())
    }
}
