//! The most memory that this process had at once.

use candle_core::Device;

/// The most memory at once in MiB, where the system tells it: of the process on the CPU, of the tensors on a GPU.
pub fn peak(device: &Device) -> Option<f64> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => on_gpu(gpu),
        _ => on_host(),
    }
}

/// What Linux says of the process.
fn on_host() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

/// What the driver says of the pool from which tensors and workspaces are allocated.
#[cfg(feature = "cuda")]
fn on_gpu(gpu: &candle_core::CudaDevice) -> Option<f64> {
    use candle_core::cuda_backend::cudarc::driver::sys;

    let most = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    let stream = gpu.cuda_stream();
    let device = stream.context().cu_device();
    let mut pool = std::ptr::null_mut();
    let mut bytes = 0u64;
    // SAFETY: the first call writes the handle of the device's own pool, which lives as long as the device. The second
    // one writes the value of this attribute, which is a u64.
    let told = unsafe {
        let found = sys::cuDeviceGetDefaultMemPool(&mut pool, device).result();
        found.and_then(|()| sys::cuMemPoolGetAttribute(pool, most, (&raw mut bytes).cast()).result())
    };
    told.ok().map(|()| bytes as f64 / f64::from(1 << 20))
}
