//! `list-devices`: what `--device` can name on this machine, a line for each.

use std::fs;

use anyhow::Result;
use indicatif::BinaryBytes;
use model_runtime::CpuIsa;

use crate::output::print;

/// Runs the command.
pub fn run() -> Result<()> {
    let lines = [vec![cpu()], gpus()].concat();
    print(&(lines.join("\n") + "\n")).map(drop)
}

/// The processor, its cores as threads see them.
fn cpu() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    format!("cpu: {cores} cores, {}, {}", instruction_sets(), memory(&meminfo))
}

/// The instruction set that runs without `--cpu-isa`, and the others that it can name.
fn instruction_sets() -> String {
    let used = CpuIsa::detect();
    let others = CpuIsa::ALL.into_iter().filter(|isa| *isa != used && isa.is_supported());
    let others: Vec<&str> = others.map(CpuIsa::name).collect();
    match others.is_empty() {
        true => format!("instruction set {}", used.name()),
        false => format!("instruction set {} (also {})", used.name(), others.join(", ")),
    }
}

/// Bytes that the processor's memory has left; `None` where the system does not say.
pub fn available_memory() -> Option<u64> {
    bytes_of("MemAvailable:", &fs::read_to_string("/proc/meminfo").ok()?)
}

/// Linux' account of the memory.
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
    match model_runtime::cuda::device_count() {
        Ok(0) => vec!["cuda: no device is visible; does CUDA_VISIBLE_DEVICES name one?".to_string()],
        Ok(count) => (0..count)
            .map(|i| format!("cuda:{i}: {}", gpu(i).unwrap_or_else(|e| format!("cannot be opened: {e}"))))
            .collect(),
        Err(e) => vec![format!("cuda: cannot ask the driver for its devices: {e}")],
    }
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Result<String> {
    let device = model_runtime::cuda::device(ordinal)?;
    let name = match &device {
        candle_core::Device::Cuda(cuda) => cuda.cuda_stream().context().name()?,
        _ => "unknown".to_string(),
    };
    let (free, total) = model_runtime::Exec::on(&device)?.device_memory()?;
    let (major, minor) = model_runtime::compute_capability(&device).unwrap_or_default();
    let [total, free] = [total, free].map(|bytes| BinaryBytes(bytes as u64));
    Ok(format!("{name}, compute capability {major}.{minor}, {total} of memory, {free} available"))
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

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_cuda_says_so() {
        assert!(gpus()[0].contains("built without CUDA"));
    }
}
