//! Flags that have a meaning on one kind of device only. On the other kind they would be accepted without effect.

use anyhow::Result;
use moe_engine::DeviceChoice;

use crate::cli::{EngineArgs, RunArgs};
use crate::error::usage;

/// A flag, and whether the user gave it.
pub type Given = (&'static str, bool);

/// Checks the flags of a run for its device. `more` are further flags of the command that only have an effect on GPUs.
///
/// # Errors
/// The first flag that has no effect on the device ([`UsageError`](moe_engine::UsageError)).
pub fn check_device_flags(args: &RunArgs, engine: Option<&EngineArgs>, more: &[Given]) -> Result<()> {
    let on_gpus = [
        ("--fp8-activations", args.fp8_activations.is_some()),
        ("--shared-experts-stream", args.shared_experts_stream.is_some()),
        ("--enforce-eager", engine.is_some_and(|engine| engine.enforce_eager)),
        ("--gpu-memory", engine.is_some_and(|engine| engine.gpu_memory.is_some())),
        ("--gpu-memory-utilization", engine.is_some_and(|engine| engine.gpu_memory_utilization.is_some())),
    ];
    let on_cpus = [("--cpu-isa", args.cpu_isa.is_some())];
    let first = |flags: &[Given]| flags.iter().find(|(_, given)| *given).map(|(flag, _)| *flag);
    let refused = match args.device {
        DeviceChoice::Cpu => first(&[&on_gpus, more].concat())
            .map(|flag| format!("{flag} is for GPUs, and this run is on the CPU; leave it out, or add --device cuda")),
        device @ DeviceChoice::Cuda(_) => first(&on_cpus).map(|flag| {
            format!("{flag} is for the CPU's kernels, and this run is on {device}; leave it out, or add --device cpu")
        }),
    };
    refused.map_or(Ok(()), |why| Err(usage(why)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};

    /// The error for `generate` with these flags.
    fn said(flags: &[&str]) -> Option<String> {
        let Command::Generate(args) = Cli::command_of([&["moe", "generate"], flags].concat()).unwrap() else {
            panic!("generate is generate")
        };
        check_device_flags(&args.run, Some(&args.engine), &[]).err().map(|e| {
            assert!(crate::error::is_usage(&e));
            e.to_string()
        })
    }

    #[test]
    fn flags_of_gpus_are_refused_on_the_cpu() {
        for flags in [
            &["--fp8-activations", "off"][..],
            &["--fp8-activations", "auto"],
            &["--shared-experts-stream", "on"],
            &["--enforce-eager"],
            &["--gpu-memory", "24GB"],
            &["--gpu-memory-utilization", "0.9"],
        ] {
            let error = said(flags).unwrap();
            assert!(error.starts_with(flags[0]) && error.contains("add --device cuda"), "{error}");
            assert_eq!(said(&[flags, &["--device", "cuda:1"]].concat()), None);
        }
        for flags in [&[][..], &["--batch-invariant"], &["--cpu-isa", "scalar"], &["--num-threads", "1"]] {
            assert_eq!(said(flags), None, "{flags:?}");
        }
    }

    #[test]
    fn flags_of_the_cpu_are_refused_on_gpus() {
        let error = said(&["--device", "cuda", "--cpu-isa", "scalar"]).unwrap();
        assert!(error.starts_with("--cpu-isa") && error.contains("add --device cpu"), "{error}");
        assert_eq!(said(&["--device", "cuda", "--num-threads", "4"]), None);
    }
}
