//! Where and how a model runs, as plain data. Programs make it from their flags.

use std::str::FromStr;

use candle_core::DType;
use model_runtime::{BlockContext, CpuIsa, Exec, MlaForm, QuantConfig};
use moe_comm::{ParallelConfig, launch_from_env};
use moe_layer::{ChunkedMoe, Fp8Activations, MoePath, SharedExpertsStream};

use crate::device::DeviceChoice;
use crate::engine::host_memory;
use crate::eplb::EplbConfig;
use crate::error::{Result, bail, usage};
use crate::family::LoadOptions;
use crate::placements::PlacementConfig;

/// The largest number of threads. No machine runs more of them well.
const MAX_THREADS: usize = 1024;

/// Where and how a model runs. The default is one rank on all cores, in the checkpoint's dtype.
#[derive(Clone, Debug, Default)]
pub struct RunConfig {
    /// The device, or the kind of device of each rank.
    pub device: DeviceChoice,
    /// Dtype of weights and KV cache; `None`: the checkpoint's.
    pub dtype: Option<DType>,
    /// Threads on the CPU, all ranks together; `None`: all cores.
    pub num_threads: Option<usize>,
    /// Instruction set on the CPU; `None`: the fastest supported.
    pub cpu_isa: Option<CpuIsa>,
    /// Name of the expert backend; `None`: the oracle chooses.
    pub moe_backend: Option<String>,
    /// Expert path; `None`: the family's default.
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention; `None`: absorbed.
    pub mla: Option<MlaForm>,
    /// Where shared experts run on a GPU.
    pub shared_experts_stream: SharedExpertsStream,
    /// Whether a row's bits must not depend on the other rows of its step, even on a GPU.
    pub batch_invariant: bool,
    /// Whether prompts may quantise activations if the weights are FP8, on a GPU.
    pub fp8_activations: Fp8Activations,
    /// Whether quantised weights are loaded as floats of the model's dtype. They then need no kernels of their formats,
    /// and more memory.
    pub dequantise: bool,
    /// Report every weight of a checkpoint that is NaN or infinite as an error.
    pub check_weights: bool,
    /// How the model is spread over ranks.
    pub parallel: ParallelConfig,
    /// Where the ranks run.
    pub executor: ExecutorBackend,
    /// Whether the run goes on when a data-parallel replica in other processes is lost, as long as the first one runs.
    /// On the CPU replicas that share their experts then load them again; on GPUs they end together.
    pub survive_lost_replicas: bool,
    /// Whether a run goes on without a lost rank however little memory is free.
    pub skip_memory_check: bool,
    /// Whether and how MoE layers cut their tokens.
    pub chunked_moe: ChunkedMoe,
    /// Which experts each rank holds.
    pub placements: PlacementConfig,
    /// Moves experts between ranks as their loads change; `None`: never.
    pub eplb: Option<EplbConfig>,
    /// Bytes of experts in host memory for the GPU of each rank, all layers together; `None`: all are on the device.
    pub expert_offload: Option<usize>,
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecutorBackend {
    /// The processes of a launcher, if a launcher started this process. Otherwise threads, or processes if the ranks
    /// run on GPUs.
    #[default]
    Auto,
    /// One process per rank, started by this process or by a launcher.
    Mp,
    /// Threads of this process.
    Threads,
    /// The processes of torchrun, srun, mpirun or a Kubernetes job.
    ExternalLauncher,
}

impl FromStr for ExecutorBackend {
    type Err = crate::error::Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "mp" => Ok(Self::Mp),
            "threads" => Ok(Self::Threads),
            "external_launcher" => Ok(Self::ExternalLauncher),
            _ => bail!("expected auto, mp, threads or external_launcher"),
        }
    }
}

impl RunConfig {
    /// Checks that this build and these ranks support the settings.
    ///
    /// # Errors
    /// A [`UsageError`](crate::UsageError) for the first setting that is not supported.
    pub fn check(&self) -> Result<()> {
        let ranks = self.parallel.geometry(0).map_err(|e| usage(e.to_string()))?.world_size;
        self.device.check(ranks)?;
        self.placements.check(&self.parallel, self.eplb.is_some())?;
        self.eplb.iter().try_for_each(EplbConfig::check)?;
        if let Some(bytes) = self.expert_offload {
            self.check_offload(ranks)?;
            check_host_memory(bytes, ranks_here(ranks), host_memory())?;
        }
        self.device.check_invariant(self.batch_invariant, ranks)
    }

    /// Checks that experts can be in host memory with this device.
    fn check_offload(&self, ranks: usize) -> Result<()> {
        let refused = match self.device {
            DeviceChoice::Cpu => {
                Some("keeps experts in host memory for a GPU, and on the CPU they are there; drop it, or add `device` cuda".into())
            }
            DeviceChoice::Cuda(_) if ranks > 1 && self.parallel.enable_expert_parallel => Some(
                "keeps a part of every expert in host memory for each GPU, so that each bus carries its part of whatever is popular, and \
                 `enable_expert_parallel` gives whole experts to ranks; drop one of them"
                    .into(),
            ),
            DeviceChoice::Cuda(_) if self.moe_path == Some(MoePath::Legacy) => {
                Some("needs packed experts; drop `moe_path` legacy".into())
            }
            DeviceChoice::Cuda(_) => None,
        };
        refused.map_or(Ok(()), |why: String| Err(usage(format!("`expert_offload` {why}"))))
    }

    /// Whether the run goes on without a replica that is lost, which shares nothing with the others.
    pub(crate) fn survives(&self) -> bool {
        self.survive_lost_replicas && !self.parallel.enable_expert_parallel
    }

    /// Whether the run goes on without a replica whose experts the others load.
    pub(crate) fn regroups(&self) -> bool {
        let ParallelConfig { dp, enable_expert_parallel, .. } = self.parallel;
        self.survive_lost_replicas && enable_expert_parallel && dp > 1 && self.device == DeviceChoice::Cpu
    }

    /// These settings for another number of replicas, of a model with this number of experts. A map of experts is for
    /// the old number, so experts are placed as without one.
    pub(crate) fn with_replicas(&self, dp: usize, experts: usize) -> Result<Self> {
        let parallel = ParallelConfig { dp, ..self.parallel };
        let ranks = parallel.geometry(0)?.world_size;
        let placements = self.placements.on_ranks(ranks, experts, self.eplb.is_some());
        let eplb = self.eplb.clone().filter(|_| ranks > 1);
        Ok(Self { parallel, placements, eplb, ..self.clone() })
    }

    /// The options with which a rank loads the model; `context` has the rank's place.
    pub(crate) fn load_options(&self, context: BlockContext) -> LoadOptions {
        LoadOptions {
            backend: self.moe_backend.clone(),
            moe_path: self.moe_path,
            mla: self.mla,
            expert_offload: self.expert_offload,
            context: BlockContext {
                batch_invariant: self.batch_invariant,
                shared_experts_stream: self.shared_experts_stream,
                ..context
            },
        }
    }

    /// How the weights of a checkpoint with this quantisation are held in memory: as in the file, or as floats.
    ///
    /// # Errors
    /// A [`UsageError`](crate::UsageError) if `dequantise` is set, and no weight is quantised.
    pub fn held(&self, quantisation: Option<QuantConfig>) -> Result<Option<QuantConfig>> {
        if !self.dequantise {
            return Ok(quantisation);
        }
        let quantised = quantisation.filter(QuantConfig::has_quantised);
        let quantised = quantised.ok_or_else(|| {
            usage("`dequantise` is for quantised weights, and all weights of this model are floats; leave it out")
        })?;
        Ok(Some(quantised.dequantised()))
    }

    /// The execution context of the host.
    pub(crate) fn host_exec(&self) -> Result<Exec> {
        let mut ex =
            Exec::cpu().with_batch_invariant(self.batch_invariant).with_fp8_activations(self.fp8_activations);
        if let Some(isa) = self.cpu_isa {
            ex = ex.with_isa(isa)?;
        }
        if let Some(threads) = self.num_threads {
            if !(1..=MAX_THREADS).contains(&threads) {
                return Err(usage(format!("`num_threads` {threads}: expected 1 to {MAX_THREADS}")));
            }
            ex = ex.with_threads(threads).map_err(|e| usage(format!("`num_threads` {threads}: {e}")))?;
        }
        Ok(ex)
    }

    /// The settings that must be the same on all ranks, as names and values. The instruction set is one of them,
    /// because results depend on it to the bit.
    pub(crate) fn agreed(&self, model: &str, ex: &Exec) -> Vec<(String, String)> {
        let p = &self.parallel;
        let chunks = &self.chunked_moe;
        let all: [(&str, String); 22] = [
            ("the program's version", env!("CARGO_PKG_VERSION").to_string()),
            ("`model`", model.to_string()),
            ("`tp`", p.tp.to_string()),
            ("`dp`", p.dp.to_string()),
            ("`enable_expert_parallel`", p.enable_expert_parallel.to_string()),
            ("`backend`", p.backend.to_string()),
            ("`deepep_mode`", p.deepep_mode.to_string()),
            ("`placement`", p.placement.to_string()),
            ("`survive_lost_replicas`", self.survive_lost_replicas.to_string()),
            ("`enable_chunked_moe`", chunks.enable_chunked_moe.to_string()),
            ("`chunked_moe_size`", chunks.chunked_moe_size.to_string()),
            ("`moe_memory_budget`", format!("{:?}", chunks.moe_memory_budget)),
            ("`device`", self.device.to_string()),
            ("`dtype`", self.dtype.map_or("default", |dtype| dtype.as_str()).to_string()),
            ("`cpu_isa`", ex.isa().name().to_string()),
            ("`moe_backend`", self.moe_backend.clone().unwrap_or_else(|| "default".to_string())),
            ("`moe_path`", format!("{:?}", self.moe_path)),
            ("`mla`", format!("{:?}", self.mla)),
            ("`dequantise`", self.dequantise.to_string()),
            ("`fp8_activations`", self.fp8_activations.to_string()),
            ("`shared_experts_stream`", format!("{:?}", self.shared_experts_stream)),
            ("`expert_offload`", self.expert_offload.map_or("none".to_string(), |bytes| bytes.to_string())),
        ];
        let eplb = ("`eplb`", self.eplb.is_some().to_string());
        all.into_iter()
            .chain(self.placements.agreed())
            .chain([eplb])
            .map(|(name, value)| (name.to_string(), value))
            .collect()
    }
}

/// The largest number of ranks that share this host's memory.
fn ranks_here(ranks: usize) -> usize {
    // If a launcher's environment is wrong, the error is reported later, when ranks are placed.
    let launch = launch_from_env(|name| std::env::var(name).ok()).ok().flatten();
    launch.and_then(|launch| launch.local_world_size).unwrap_or(ranks)
}

/// Checks that the host has enough free memory for the experts. Their memory is page-locked and cannot be swapped, so
/// the system would end the program if it had too little.
fn check_host_memory(bytes: usize, ranks: usize, free: Option<u64>) -> Result<()> {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    match free.map(|free| free / ranks.max(1) as u64) {
        Some(free) if bytes as u64 > free => Err(usage(format!(
            "`expert_offload`: expected at most {:.2} GiB, which this host has free for each of its {ranks} ranks, got {:.2}",
            gib(free),
            gib(bytes as u64)
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_is_refused_where_it_means_nothing() {
        let offload = RunConfig { expert_offload: Some(1 << 30), ..RunConfig::default() };
        let cuda = RunConfig { device: DeviceChoice::Cuda(None), ..offload.clone() };
        let legacy = RunConfig { moe_path: Some(MoePath::Legacy), ..cuda.clone() };
        let parallel = |enable_expert_parallel| ParallelConfig {
            tp: 2,
            enable_expert_parallel,
            ..ParallelConfig::default()
        };
        let cut = RunConfig { parallel: parallel(false), ..cuda.clone() };
        let whole = RunConfig { parallel: parallel(true), ..cuda.clone() };
        assert!(cuda.check_offload(1).is_ok() && cut.check_offload(2).is_ok());
        for (config, ranks, said) in [
            (&offload, 1, "`expert_offload` keeps experts in host memory for a GPU"),
            (&whole, 2, "`enable_expert_parallel` gives whole experts to ranks"),
            (&legacy, 1, "drop `moe_path` legacy"),
        ] {
            let error = config.check_offload(ranks).unwrap_err();
            assert!(
                error.downcast_ref::<crate::UsageError>().is_some() && error.to_string().contains(said),
                "{error}"
            );
        }
        assert!(
            check_host_memory(1 << 30, 2, Some(2 << 30)).is_ok()
                && check_host_memory(1 << 40, 2, None).is_ok()
        );
        let error = check_host_memory(3 << 30, 4, Some(4 << 30)).unwrap_err().to_string();
        assert!(
            error.contains(
                "expected at most 1.00 GiB, which this host has free for each of its 4 ranks, got 3.00"
            ),
            "{error}"
        );
        assert!(offload.check().unwrap_err().to_string().contains("`expert_offload`"));
    }
}
