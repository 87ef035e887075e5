//! CUDA: memory, streams, graphs and the launches of the kernels in `cuda/`.
//!
//! Each op of this crate checks its arguments once and then either runs on the CPU or calls a
//! launcher (`ffi`). Launchers allocate nothing and never synchronise, so that any sequence of
//! ops on one [`Exec`](crate::Exec) can be captured into a [`Graph`].
//!
//! An op takes the kernel for its dtype and sizes where there is one, and else the one for any (`any`).
//!
//! What could only be checked by reading device memory on the host is a contract of the caller:
//! indices (block tables, positions, rows) are in range. On the CPU they are checked. Kernels hold
//! those to their range where that costs nothing, above all those that they write by: slots of the
//! cache and of samplers.

pub(crate) mod any;
mod args;
pub(crate) mod attention;
mod blas;
mod blas_lt;
mod checksum;
mod counts;
mod expert_slots;
mod experts;
pub(crate) mod ffi;
mod fp8;
mod graph;
pub(crate) mod heads_norm;
pub(crate) mod linear;
mod locked;
mod memory;
mod peer;
pub(crate) mod quant;
mod ranks;
mod router;
mod routing;
pub(crate) mod rows;
mod sampling;
mod scratch;
mod side;
mod staging;
mod step;
mod stream;
mod timeline;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum;
use candle_core::{Device, Error, Result, bail};

use crate::plan::Gpu;
use crate::storage::Data;
use crate::view::View;

pub use any::{Choice, Route, RouteOut, route_into};
pub(crate) use checksum::word_sum;
pub use counts::{DeviceCalls, device_calls};
pub use expert_slots::ExpertSlots;
pub use experts::{
    ExpertLists, FusedExperts, MonolithicExperts, expert_slot_rows, fused_experts_into,
    monolithic_experts_into, slotted_experts_into,
};
pub(crate) use fp8::{leaves_fp8, quantise_rows_into};
pub use graph::Graph;
pub(crate) use memory::{DeviceMemory, storage_slice};
pub use memory::{PinnedWords, mapped_bytes, mapped_bytes_mut};
pub use peer::{MAX_PEERS, PeerBuffers};
pub use ranks::{embed_part_into, fill_random_box_into, join_columns_into};
pub use router::gate_route_into;
pub use routing::balance_ids_into;
pub use sampling::{
    LOGPROB_WORDS, MAX_EDITS, MAX_LOGPROBS, SAMPLE_WORDS, SampleLogprobs, SampleParams, SampleSlots,
    SlotReset, logprobs_into, reset_slots_into, sample_into,
};
pub use staging::Staging;
pub use step::{LastStep, RopeFrequencies, StepTokens, fill_random_into, rope_rows_into, upload_step_into};
pub(crate) use stream::CudaExec;
pub use timeline::{Mark, Section, Timeline};

/// A CUDA device with a stream of its own, on which everything runs: candle's default stream is another
/// one in each thread, and its events, which order several streams, cannot be captured into a graph.
///
/// # Errors
/// A device that does not exist or cannot be opened; one that this build has no kernels for
/// ([`check_kernel_image`](crate::check_kernel_image)).
pub fn device(ordinal: usize) -> Result<Device> {
    let context = CudaContext::new(ordinal).w()?;
    describe(&context)?;
    let device = Device::new_cuda_with_stream(ordinal)?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: tensors of this device are used on its one stream, so no use needs an event to wait for another.
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}

/// CUDA devices that this process sees.
///
/// # Errors
/// No driver.
pub fn device_count() -> Result<usize> {
    Ok(CudaContext::device_count().w()?.max(0) as usize)
}

/// What the choice of kernels depends on of a device; fails on one that this build has no kernels for.
fn describe(context: &CudaContext) -> Result<Gpu> {
    use CUdevice_attribute_enum::{
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    };
    let attribute = |a| context.attribute(a).w().map(|n| n.max(0) as usize);
    let (major, minor) = context.compute_capability().w()?;
    let capability = (major.max(0) as u32, minor.max(0) as u32);
    let shared = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: a function of environment variables.
    let gpu = match unsafe { ffi::moe_ptx_only() } {
        0 => Gpu::new(capability, shared, sms),
        _ => Gpu::ptx_only(capability, shared, sms),
    };
    let name = context.name().unwrap_or_else(|_| "this GPU".to_string());
    gpu.map_err(|why| Error::msg(format!("{name} cannot run this program: {why}")))
}

/// What a device is, without opening it for computing.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The vendor's name.
    pub name: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Bytes that are free.
    pub free: usize,
    /// Bytes in all.
    pub total: usize,
}

impl DeviceInfo {
    /// Asks the driver about a device that this process sees.
    ///
    /// # Errors
    /// A device that does not exist or cannot be opened.
    pub fn of(ordinal: usize) -> Result<Self> {
        let context = CudaContext::new(ordinal).w()?;
        let (major, minor) = context.compute_capability().w()?;
        let (free, total) = context.mem_get_info().w()?;
        let name = context.name().w()?;
        Ok(Self { name, compute_capability: (major.max(0) as u32, minor.max(0) as u32), free, total })
    }
}

/// A size as launchers take it.
fn small(op: &str, n: usize) -> Result<i32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: a size of {n} does not fit 32 bits"),
    }
}

/// Whether all views begin at multiples of 16 bytes, as vector loads want.
fn aligned(views: &[View]) -> bool {
    views.iter().all(|view| matches!(view.data(), Data::Device(s) if s.address().is_multiple_of(16)))
}

/// Fails unless all views begin at multiples of 16 bytes.
fn expect_aligned(op: &str, views: &[View]) -> Result<()> {
    match aligned(views) {
        true => Ok(()),
        false => bail!("{op}: expected views that begin at multiples of 16 bytes; copy the others first"),
    }
}
