//! The output of `--version`, which is detailed enough for a bug report.

use model_runtime::CpuIsa;

/// The commit from which the program was built, if its sources are a git checkout or a package.
pub const COMMIT: Option<&str> = option_env!("MOE_COMMIT");

/// One line: version and commit.
pub fn short() -> String {
    let version = env!("CARGO_PKG_VERSION");
    COMMIT.map_or_else(|| version.to_string(), |commit| format!("{version} ({commit})"))
}

/// Version and commit, then features and instruction sets.
pub fn long() -> String {
    let features = [("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl"))];
    let features: Vec<_> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let features = if features.is_empty() { "none".to_string() } else { features.join(", ") };
    let supported: Vec<_> =
        CpuIsa::ALL.iter().filter(|isa| isa.is_supported()).map(|isa| isa.name()).collect();
    format!(
        "{}\nfeatures: {features}\ninstruction sets of this CPU: {}; runs by default: {}",
        short(),
        supported.join(", "),
        CpuIsa::detect().name()
    )
}
