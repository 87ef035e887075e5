//! CUDA graphs: the launches of a step, recorded once and replayed with one call.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{Result, bail};

use crate::exec::Exec;

/// Recorded launches. They contain the addresses of the buffers with which they were recorded, so the buffers must live
/// as long as the graph. The contents of the buffers may change between replays.
pub struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, one at a time; `launch` takes it exclusively.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the launches of `body` on the context's stream and on its second stream, without running them. The
    /// workspaces are frozen during the recording, so run `body` once before.
    ///
    /// # Errors
    /// A context on the CPU; an error of `body`; an operation that cannot be recorded, such as an
    /// allocation or a wait for the device.
    pub fn capture(ex: &mut Exec, body: impl FnOnce(&mut Exec) -> Result<()>) -> Result<Self> {
        let stream = ex.cuda("graph")?.stream.clone();
        let workspaces = [ex.workspace().clone(), ex.side_workspace().clone()];
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        workspaces.iter().for_each(|workspace| workspace.freeze(true));
        let recorded = body(ex);
        workspaces.iter().for_each(|workspace| workspace.freeze(false));
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).w();
        recorded?;
        match graph? {
            Some(graph) => {
                graph.upload().w()?;
                Ok(Self(graph))
            }
            None => bail!("graph: nothing was recorded"),
        }
    }

    /// Replays the launches, in stream order; returns at once.
    pub fn launch(&mut self) -> Result<()> {
        self.0.launch().w()
    }
}
