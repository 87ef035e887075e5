//! The device of a run, and which GPU each rank gets.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;

use crate::error::{Context, Result, bail, usage};

/// A device, or the kind of device of each rank.
// This enum is exhaustive: programs must say which settings go with a new kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU, written `cpu`.
    #[default]
    Cpu,
    /// GPUs. With `cuda` the n-th rank of a host uses its n-th GPU; with `cuda:N` it is GPU N.
    Cuda(Option<usize>),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = crate::error::Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.split_once(':').map(|(kind, ordinal)| (kind, ordinal.parse())) {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", Ok(ordinal))) => Ok(Self::Cuda(Some(ordinal))),
            _ => bail!("expected cpu, cuda or cuda:N"),
        }
    }
}

impl DeviceChoice {
    /// Fails unless this build can run `ranks` ranks on this device.
    pub(crate) fn check(self, ranks: usize) -> Result<()> {
        let Self::Cuda(ordinal) = self else { return Ok(()) };
        if !cfg!(feature = "cuda") {
            return Err(usage(format!(
                "`device` {self}: this program was built without CUDA; build it with the feature `cuda`"
            )));
        }
        if ranks == 1 {
            return Ok(());
        }
        if ordinal.is_some() {
            return Err(usage(format!(
                "`device` {self} names one GPU, but `tp` and `dp` ask for {ranks} ranks of one GPU each; use \
                 `device` cuda, by which the n-th rank of a host runs on its n-th GPU (CUDA_VISIBLE_DEVICES chooses them)"
            )));
        }
        if !cfg!(feature = "nccl") {
            return Err(usage(
                "`tp` and `dp` above 1 on GPUs need NCCL, and this program was built without; build it with the \
                 features `cuda` and `nccl`, or use `device` cpu",
            ));
        }
        Ok(())
    }

    /// Batch invariance over several GPUs is refused, because NCCL chooses the order of its sums by their size.
    pub(crate) fn check_invariant(self, asked: bool, ranks: usize) -> Result<()> {
        if asked && ranks > 1 && self != Self::Cpu {
            return Err(usage(
                "`batch_invariant` does not hold over several GPUs, whose sums depend on the number of rows; use one \
                 GPU, or `device` cpu",
            ));
        }
        Ok(())
    }

    /// Fails unless this host has a GPU for each of the `ranks` ranks that will be started on it.
    pub(crate) fn check_visible(self, ranks: usize) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(_) => match visible()? {
                n if n < ranks => Err(usage(format!(
                    "`tp` and `dp` ask for {ranks} ranks of one GPU each, but {n} GPUs are visible here"
                ))),
                _ => Ok(()),
            },
        }
    }

    /// The number of GPUs of this host that a run on this device could use: none on the CPU.
    pub(crate) fn gpus(self) -> usize {
        match self {
            Self::Cpu => 0,
            Self::Cuda(_) => visible().unwrap_or(0),
        }
    }

    /// Opens the device for the rank that is the `local_rank`-th of its host.
    ///
    /// # Errors
    /// The device does not exist, or this program has no kernels for it ([`UsageError`](crate::UsageError)).
    pub(crate) fn open(self, local_rank: usize) -> Result<Device> {
        let opened = match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(Some(ordinal)) => cuda_device(ordinal),
            Self::Cuda(None) => {
                visible().and_then(|visible| ordinal(local_rank, visible)).and_then(cuda_device)
            }
        };
        opened.map_err(|e| usage(format!("`device` {self}: {e:#}")))
    }
}

/// The GPU of a rank, among `visible` ones. A launcher may make only its own GPU visible to each rank.
fn ordinal(local_rank: usize, visible: usize) -> Result<usize> {
    match visible {
        0 => {
            bail!("no CUDA device is visible; is there a GPU, and does CUDA_VISIBLE_DEVICES name it?")
        }
        1 => Ok(0),
        n if local_rank < n => Ok(local_rank),
        n => bail!(
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
        for (name, device) in [
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(None)),
            ("cuda:3", DeviceChoice::Cuda(Some(3))),
        ] {
            assert_eq!(name.parse::<DeviceChoice>().unwrap(), device);
            assert_eq!(device.to_string(), name);
        }
        for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1"] {
            let error = wrong.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(error.contains("expected cpu, cuda or cuda:N"), "{wrong}: {error}");
        }
    }

    #[test]
    fn several_ranks_need_a_gpu_each() {
        assert!(DeviceChoice::Cpu.check(4).is_ok());
        let error = DeviceChoice::Cuda(Some(1)).check(2).unwrap_err().to_string();
        let expected = if cfg!(feature = "cuda") { "2 ranks of one GPU each" } else { "built without CUDA" };
        assert!(error.contains(expected), "{error}");
        assert_eq!(DeviceChoice::Cuda(None).check(2).is_ok(), cfg!(feature = "nccl"));
        assert_eq!(DeviceChoice::Cuda(None).check(1).is_ok(), cfg!(feature = "cuda"));
    }

    #[test]
    fn several_gpus_are_not_batch_invariant() {
        let cuda = DeviceChoice::Cuda(None);
        let error = cuda.check_invariant(true, 2).unwrap_err().to_string();
        assert!(error.contains("`batch_invariant` does not hold over several GPUs"), "{error}");
        for (device, asked, ranks) in [(cuda, true, 1), (cuda, false, 2), (DeviceChoice::Cpu, true, 2)] {
            assert!(device.check_invariant(asked, ranks).is_ok(), "{device} {asked} {ranks}");
        }
    }

    #[test]
    fn the_gpu_of_a_rank() {
        assert_eq!([ordinal(0, 4).unwrap(), ordinal(3, 4).unwrap(), ordinal(3, 1).unwrap()], [0, 3, 0]);
        assert!(ordinal(2, 2).unwrap_err().to_string().contains("2 are visible"));
        assert!(ordinal(0, 0).unwrap_err().to_string().contains("no CUDA device"));
    }
}
