//! `list-devices`: lists the devices that `--device` can name on this machine, one per line.

use std::fs;

use anyhow::Result;
use indicatif::BinaryBytes;
use model_runtime::CpuIsa;

use crate::output::print;

/// Runs the command.
pub fn run() -> Result<()> {
    let lines = [vec![cpu()], gpus()].concat();
    print(&(lines.join("\n") + "\n"))?;
    Ok(())
}

/// The processor, with its number of hardware threads.
fn cpu() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    format!("cpu: {cores} cores, {}, {}", instruction_sets(), memory(&meminfo))
}

/// The instruction set that is used without `--cpu-isa`, and the others that are available.
fn instruction_sets() -> String {
    let used = CpuIsa::detect();
    let others = CpuIsa::ALL.into_iter().filter(|isa| *isa != used && isa.is_supported());
    let others: Vec<&str> = others.map(CpuIsa::name).collect();
    match others.is_empty() {
        true => format!("instruction set {}", used.name()),
        false => format!("instruction set {} (also {})", used.name(), others.join(", ")),
    }
}

/// The memory as Linux reports it.
fn memory(meminfo: &str) -> String {
    match (bytes_of("MemTotal:", meminfo), bytes_of("MemAvailable:", meminfo)) {
        (Some(total), Some(free)) => {
            format!("{} of memory, {} available", BinaryBytes(total), BinaryBytes(free))
        }
        _ => "memory unknown: this system has no /proc/meminfo".to_string(),
    }
}

fn bytes_of(key: &str, meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Vec<String> {
    vec!["cuda: this program is built without CUDA; build it with --features cuda".to_string()]
}

#[cfg(feature = "cuda")]
fn gpus() -> Vec<String> {
    use crate::error::describe;
    use model_runtime::cuda::{DeviceInfo, device_count};
    match device_count() {
        Ok(0) => vec!["cuda: no device is visible; does CUDA_VISIBLE_DEVICES name one?".to_string()],
        Ok(count) => (0..count)
            .map(|i| match DeviceInfo::of(i) {
                Ok(info) => {
                    format!("cuda:{i}: {}", gpu(&info.name, info.compute_capability, [info.total, info.free]))
                }
                Err(e) => format!("cuda:{i}: cannot be opened: {}", describe(&e.into())),
            })
            .collect(),
        Err(e) => vec![format!("cuda: cannot ask the driver for its devices: {}", describe(&e.into()))],
    }
}

/// Bytes of memory of the smallest visible GPU.
#[cfg(not(feature = "cuda"))]
pub fn smallest_gpu() -> Option<u64> {
    None
}

/// Bytes of memory of the smallest visible GPU.
#[cfg(feature = "cuda")]
pub fn smallest_gpu() -> Option<u64> {
    use model_runtime::cuda::{DeviceInfo, device_count};
    let infos = (0..device_count().ok()?).filter_map(|i| DeviceInfo::of(i).ok());
    infos.map(|info| info.total as u64).min()
}

/// A GPU, and whether this program can run on it.
#[cfg(any(test, feature = "cuda"))]
fn gpu(name: &str, capability: (u32, u32), memory: [usize; 2]) -> String {
    let [total, free] = memory.map(|bytes| BinaryBytes(bytes as u64));
    let runs = match model_runtime::check_kernel_image(capability) {
        Ok(()) if model_runtime::is_portable_only(capability) => {
            "; runs on kernels for any card, which are slow: the others are not built for it".to_string()
        }
        Ok(()) => String::new(),
        Err(why) => format!("; cannot be used: {why}"),
    };
    let (major, minor) = capability;
    format!("{name}, compute capability {major}.{minor}, {total} of memory, {free} available{runs}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_described() {
        let text = cpu();
        assert!(text.starts_with("cpu: ") && text.contains(" cores, instruction set "), "{text}");
        assert!(text.contains(CpuIsa::detect().name()) && !text.contains('\n'), "{text}");
        assert_eq!(
            memory("MemTotal: 4194304 kB\nMemAvailable:   1048576 kB\n"),
            "4.00 GiB of memory, 1.00 GiB available"
        );
        assert!(memory("").contains("unknown"));
    }

    #[test]
    fn a_gpu_without_kernels_is_listed_with_the_reason() {
        let memory = [80 << 30, 79 << 30];
        assert_eq!(
            gpu("H100", (9, 0), memory),
            "H100, compute capability 9.0, 80.00 GiB of memory, 79.00 GiB available"
        );
        let text = gpu("RTX 5090", (12, 0), memory);
        assert!(
            text.ends_with("; runs on kernels for any card, which are slow: the others are not built for it"),
            "{text}"
        );
        let text = gpu("T4", (7, 5), memory);
        assert!(text.contains("; cannot be used: ") && text.contains("built for 8.x and 9.0"), "{text}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_cuda_says_so() {
        assert!(gpus()[0].contains("built without CUDA"));
    }
}
