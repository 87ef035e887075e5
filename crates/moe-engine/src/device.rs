//! The flag `--device`, and which GPU each rank gets.

use anyhow::{Context, Result};
use candle_core::Device;

use crate::cli::RunArgs;
use crate::usage;

/// What `--device` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceFlag {
    /// `cpu`.
    Cpu,
    /// `cuda`, or `cuda:N`.
    Cuda(Option<usize>),
}

impl DeviceFlag {
    /// The flag of a command; what this build cannot do is a mistake in the call.
    pub fn of(args: &RunArgs) -> Result<Self> {
        let flag = Self::parse(&args.device)?;
        let ranks = args.parallel.config()?.world_size()?;
        flag.check(&args.device, ranks)?;
        flag.check_invariant(args.batch_invariant, ranks)?;
        Ok(flag)
    }

    fn parse(name: &str) -> Result<Self> {
        let wrong = || usage(format!("--device {name}: expected cpu, cuda or cuda:N"));
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", ordinal)) => Ok(Self::Cuda(Some(ordinal.parse().map_err(|_| wrong())?))),
            _ => Err(wrong()),
        }
    }

    fn check(self, name: &str, world_size: usize) -> Result<()> {
        let Self::Cuda(ordinal) = self else { return Ok(()) };
        if !cfg!(feature = "cuda") {
            return Err(usage(format!(
                "--device {name}: this program was built without CUDA; build it with --features cuda"
            )));
        }
        if world_size == 1 {
            return Ok(());
        }
        if ordinal.is_some() {
            return Err(usage(format!(
                "--device {name} names one GPU, but --tp and --dp ask for {world_size} ranks of one GPU each; use \
                 --device cuda, by which the n-th rank of a host runs on its n-th GPU (CUDA_VISIBLE_DEVICES chooses them)"
            )));
        }
        if !cfg!(feature = "nccl") {
            return Err(usage(
                "--tp and --dp above 1 on GPUs need NCCL, and this program was built without; build it with \
                 --features cuda,nccl, or use --device cpu",
            ));
        }
        Ok(())
    }

    /// NCCL chooses the order of its sums by their size.
    fn check_invariant(self, asked: bool, world_size: usize) -> Result<()> {
        if asked && world_size > 1 && self != Self::Cpu {
            return Err(usage(
                "--batch-invariant does not hold over several GPUs, whose sums depend on the number of rows; use one \
                 GPU, or --device cpu",
            ));
        }
        Ok(())
    }

    /// Whether this host has a GPU for each of `ranks` ranks that are to be started on it.
    pub fn check_visible(self, ranks: usize) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(_) => match visible()? {
                n if n < ranks => Err(usage(format!(
                    "--tp and --dp ask for {ranks} ranks of one GPU each, but {n} GPUs are visible here"
                ))),
                _ => Ok(()),
            },
        }
    }

    /// Opens the device, of the rank that is the `local_rank`-th of its host.
    pub fn open(self, local_rank: usize) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(Some(ordinal)) => cuda_device(ordinal),
            Self::Cuda(None) => cuda_device(ordinal(local_rank, visible()?)?),
        }
    }
}

/// The GPU of a rank, of `visible` ones. A launcher may show each rank its own GPU alone.
fn ordinal(local_rank: usize, visible: usize) -> Result<usize> {
    match visible {
        0 => {
            anyhow::bail!("no CUDA device is visible; is there a GPU, and does CUDA_VISIBLE_DEVICES name it?")
        }
        1 => Ok(0),
        n if local_rank < n => Ok(local_rank),
        n => anyhow::bail!(
            "rank {local_rank} of this host needs a GPU of its own, but {n} are visible; start at most {n} ranks here"
        ),
    }
}

#[cfg(feature = "cuda")]
fn visible() -> Result<usize> {
    model_runtime::cuda::device_count().context("cannot ask the CUDA driver for its devices")
}

#[cfg(feature = "cuda")]
fn cuda_device(ordinal: usize) -> Result<Device> {
    model_runtime::cuda::device(ordinal).with_context(|| format!("cannot open CUDA device {ordinal}"))
}

#[cfg(not(feature = "cuda"))]
fn visible() -> Result<usize> {
    Ok(0)
}

#[cfg(not(feature = "cuda"))]
fn cuda_device(ordinal: usize) -> Result<Device> {
    Err(candle_core::Error::NotCompiledWithCudaSupport)
        .with_context(|| format!("cannot open CUDA device {ordinal}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!(DeviceFlag::parse("cpu").unwrap(), DeviceFlag::Cpu);
        assert_eq!(DeviceFlag::parse("cuda").unwrap(), DeviceFlag::Cuda(None));
        assert_eq!(DeviceFlag::parse("cuda:3").unwrap(), DeviceFlag::Cuda(Some(3)));
        for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1"] {
            let error = DeviceFlag::parse(wrong).unwrap_err().to_string();
            assert!(error.contains("expected cpu, cuda or cuda:N"), "{wrong}: {error}");
        }
    }

    #[test]
    fn several_ranks_need_a_gpu_each() {
        assert!(DeviceFlag::Cpu.check("cpu", 4).is_ok());
        let error = DeviceFlag::Cuda(Some(1)).check("cuda:1", 2).unwrap_err().to_string();
        let expected = if cfg!(feature = "cuda") { "2 ranks of one GPU each" } else { "built without CUDA" };
        assert!(error.contains(expected), "{error}");
        assert_eq!(DeviceFlag::Cuda(None).check("cuda", 2).is_ok(), cfg!(feature = "nccl"));
        assert_eq!(DeviceFlag::Cuda(None).check("cuda", 1).is_ok(), cfg!(feature = "cuda"));
    }

    #[test]
    fn several_gpus_are_not_batch_invariant() {
        let cuda = DeviceFlag::Cuda(None);
        let error = cuda.check_invariant(true, 2).unwrap_err().to_string();
        assert!(error.contains("--batch-invariant does not hold over several GPUs"), "{error}");
        for (flag, asked, ranks) in [(cuda, true, 1), (cuda, false, 2), (DeviceFlag::Cpu, true, 2)] {
            assert!(flag.check_invariant(asked, ranks).is_ok(), "{flag:?} {asked} {ranks}");
        }
    }

    #[test]
    fn the_gpu_of_a_rank() {
        assert_eq!([ordinal(0, 4).unwrap(), ordinal(3, 4).unwrap(), ordinal(3, 1).unwrap()], [0, 3, 0]);
        assert!(ordinal(2, 2).unwrap_err().to_string().contains("2 are visible"));
        assert!(ordinal(0, 0).unwrap_err().to_string().contains("no CUDA device"));
    }
}
