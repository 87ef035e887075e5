//! CUDA devices: their number, their properties, and how one is opened.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum;
use candle_core::{Device, Error, Result};

use super::ffi;
use crate::plan::Gpu;

/// A CUDA device with its own stream, on which everything runs. candle's default device uses a different stream in each
/// thread, and its events, which order several streams, cannot be captured into a graph.
///
/// # Errors
/// A device that does not exist or cannot be opened; a device for which this build has no kernels
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

/// The properties of a device that determine the choice of kernels; fails on a device for which this build has no
/// kernels.
pub(super) fn describe(context: &CudaContext) -> Result<Gpu> {
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

/// The properties of a device, without opening it for computing.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The vendor's name.
    pub name: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Number of free bytes.
    pub free: usize,
    /// Number of bytes in total.
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
