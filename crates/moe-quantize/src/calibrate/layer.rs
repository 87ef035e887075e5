//! A decoder layer that is being quantised: its weights in f32, and what becomes of each.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use moe_quant::Format;
use safetensors::Dtype;

use super::weights::Weights;
use crate::gptq::{Feedback, Hessian, NoFactor, gptq};
use crate::job::{Job, part};
use crate::plan::{Item, Linear};
use crate::round::{Grid, round_to_nearest};
use crate::settings::Calibration;
use crate::source::to_f32;

/// What GPTQ needs of the inputs that some modules share; else why these modules are rounded to nearest.
type Seen = Result<(Hessian, Feedback), String>;

/// A layer. Modules are named below its prefix, such as `self_attn.q_proj`.
pub struct Layer<'a, 'b> {
    job: &'a mut Job<'b>,
    calibration: &'a Calibration,
    /// The weights; of a module that is quantised already, the floats that its integers mean.
    pub weights: Weights,
    /// What is still to be quantised.
    waiting: BTreeMap<String, (Linear, Dtype)>,
}

impl<'a, 'b> Layer<'a, 'b> {
    /// Loads the tensors of `items`, whose names begin with `prefix`, and writes those that stay in floats.
    ///
    /// # Errors
    /// I/O.
    pub fn load(
        job: &'a mut Job<'b>,
        calibration: &'a Calibration,
        prefix: &str,
        items: Vec<(Item, Dtype)>,
    ) -> Result<Self> {
        let mut weights = Weights::default();
        let mut waiting = BTreeMap::new();
        let below = |name: &str| name.strip_prefix(prefix).unwrap_or(name).to_string();
        for (item, dtype) in items {
            let tensor = job.read(&item)?;
            if item.linears.is_empty() {
                job.copy(&item, dtype, &tensor)?;
                weights.0.insert(below(&item.source.name), tensor.to_dtype(DType::F32)?);
            }
            for linear in item.linears {
                let part = part(&tensor, &linear)?;
                let module = below(&linear.module);
                weights.0.insert(format!("{module}.weight"), part.to_dtype(DType::F32)?);
                match linear.format {
                    Format::Plain => job.keep(&linear, dtype, &part)?,
                    _ => drop(waiting.insert(module, (linear, dtype))),
                }
            }
        }
        Ok(Self { job, calibration, weights, waiting })
    }

    /// Quantises the modules that still wait for it, for the inputs [T, k] f32 that they share.
    ///
    /// # Errors
    /// Weights or inputs that are not finite; damping that is none; I/O. Too few tokens, and inputs without a factor, are no
    /// errors: the report lists these modules.
    pub fn quantise(&mut self, modules: &[&str], inputs: &Tensor) -> Result<()> {
        if !modules.iter().any(|module| self.waiting.contains_key(*module)) {
            return Ok(());
        }
        let seen = self.see(inputs)?;
        modules.iter().try_for_each(|module| self.quantise_one(module, &seen))
    }

    fn see(&self, inputs: &Tensor) -> Result<Seen> {
        let rows = inputs.dims()[0];
        let least = self.calibration.min_tokens;
        if rows < least {
            return Ok(Err(format!("saw {rows} tokens of the calibration text, fewer than {least}")));
        }
        let hessian = Hessian::of(inputs)?;
        match Feedback::new(&hessian, self.job.desc_act(), self.calibration.damping) {
            Ok(feedback) => Ok(Ok((hessian, feedback))),
            Err(error) if error.is::<NoFactor>() => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        }
    }

    fn quantise_one(&mut self, module: &str, seen: &Seen) -> Result<()> {
        let Some((linear, dtype)) = self.waiting.remove(module) else { return Ok(()) };
        let name = format!("{module}.weight");
        let n = linear.n;
        let k = linear.k;
        let weights = to_f32(self.weights.get(&name)?)?;
        let grid = Grid::new(linear.format, self.job.scale_dtype(dtype))?;
        let named = || linear.module.clone();
        let matrix = match seen {
            Ok((hessian, feedback)) => {
                let matrix = gptq(&grid, &weights, (n, k), feedback).with_context(named)?;
                let error = hessian.output_error(&weights, &matrix.weights()).with_context(named)?;
                self.job.report.add_output_error(error);
                matrix
            }
            Err(why) => {
                self.job.report.fallback.push((named(), why.clone()));
                round_to_nearest(&grid, &weights, n, k).with_context(named)?
            }
        };
        self.job.write_linear(&linear, dtype, &weights, &matrix)?;
        self.weights.0.insert(name, Tensor::from_vec(matrix.weights(), (n, k), &Device::Cpu)?);
        Ok(())
    }

    /// Ends the layer.
    ///
    /// # Errors
    /// A module that no inputs were shown for: the model runs it, and calibration does not.
    pub fn finish(self) -> Result<()> {
        match self.waiting.into_keys().next() {
            None => Ok(()),
            Some(module) => {
                bail!("calibration does not know the inputs of {module}; use --method rtn, or --ignore it")
            }
        }
    }
}
